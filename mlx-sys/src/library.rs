//! Loads MLX at the first call on Linux. A program is not linked with MLX. So it starts even
//! without the library, and can report the reason and a remedy.
//!
//! This crate embeds a shared library with mlx-c and the shim. The embedded library needs libmlx,
//! which is loaded first, from the first of these places that has it:
//!
//! 1. only the directory in the environment variable `MLX_LIBRARY_DIR`, if it is set;
//! 2. the directory of the program, and `../lib` from there;
//! 3. `../lib/rust-mlx/PACKAGE/mlx/lib` from the program, where PACKAGE is the name of the Python
//!    package with its version and hash, such as `mlx-cpu-0.30.6-573baa804539`;
//! 4. if this code is in a shared library: the library's directory, and `rust-mlx/PACKAGE/mlx/lib`
//!    in the directories above it and in their `lib`;
//! 5. the directory that the program was built against;
//! 6. the cache directory of the user, `rust-mlx/mlx-sys/PACKAGE/mlx/lib`;
//! 7. the places that the system's loader searches.
//!
//! With feature `cuda`, the package is the CUDA build of MLX. NVIDIA's libraries are in `nvidia/`
//! beside `mlx/`, where libmlx searches for them. The CUDA build needs NVIDIA's driver. If it
//! cannot be loaded, the same places are searched for the build without CUDA.

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::own_file;

/// The shared library with mlx-c and the shim. Empty in builds without the native library.
static EMBEDDED: &[u8] = include_bytes!(env!("MLX_SYS_EMBEDDED"));

/// The version of MLX that this crate was built against.
const MLX_VERSION: &str = env!("MLX_SYS_MLX_VERSION");

/// A build of MLX that this program can load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Package {
    /// The directory name.
    pub directory: &'static str,
    /// Name, version and SHA-256 of the Python package, separated by spaces; empty for a
    /// user-provided MLX (`MLX_ROOT`).
    pub pin: &'static str,
    /// The NVIDIA packages that the build needs, separated by `;`. Each has its directory below
    /// `nvidia`, then name, version and SHA-256.
    pub libraries: &'static str,
    /// The directory of the build at compile time, with `include`, `lib` and `share`.
    built: &'static str,
}

impl Package {
    /// The major version of CUDA; `None` for a build without CUDA.
    fn cuda(&self) -> Option<i32> {
        let (cuda, _) = self.pin.strip_prefix("mlx-cuda-")?.split_once(' ')?;
        cuda.parse().ok()
    }
}

/// The build that this crate was compiled against, and the build without CUDA.
static PACKAGES: [Package; 2] = [
    Package {
        directory: env!("MLX_SYS_PACKAGE"),
        pin: env!("MLX_SYS_PIN"),
        libraries: env!("MLX_SYS_LIBRARIES"),
        built: env!("MLX_SYS_PACKAGE_DIR"),
    },
    Package {
        directory: env!("MLX_SYS_PACKAGE_SPARE"),
        pin: env!("MLX_SYS_PIN_SPARE"),
        libraries: env!("MLX_SYS_LIBRARIES_SPARE"),
        built: env!("MLX_SYS_PACKAGE_DIR_SPARE"),
    },
];

/// The builds of MLX that [`load`] tries, in order: one build, or with feature `cuda` also the
/// build without CUDA. Empty in builds without the native library.
pub fn packages() -> impl Iterator<Item = &'static Package> {
    PACKAGES.iter().filter(|p| !p.directory.is_empty())
}

/// The name of MLX's library.
const LIBMLX: &str = "libmlx.so";

/// The name of NVIDIA's driver.
const LIBCUDA: &str = "libcuda.so.1";

/// The variable that names the directory of libmlx.
const VARIABLE: &str = "MLX_LIBRARY_DIR";

/// The reason why MLX cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    message: String,
    searched: Vec<String>,
}

impl LoadError {
    fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            searched: Vec::new(),
        }
    }

    /// The places that were searched, each with the reason why MLX was not loaded from it. The
    /// message lists only the unexpected ones.
    #[must_use]
    pub fn searched(&self) -> &[String] {
        &self.searched
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for LoadError {}

/// The loaded libraries. They are never unloaded, because MLX has threads and static objects.
struct Loaded {
    bindings: Library,
    _mlx: Library,
    file: Option<PathBuf>,
    /// The reason why the preferred build was not loaded.
    set_aside: Option<String>,
}

static LOADED: OnceLock<Result<Loaded, LoadError>> = OnceLock::new();

/// Loads MLX, unless it is already loaded.
///
/// # Errors
/// When MLX's library is not found or cannot be loaded. The result never changes within a process.
pub fn load() -> Result<(), &'static LoadError> {
    match LOADED.get_or_init(try_load) {
        Ok(_) => Ok(()),
        Err(e) => Err(e),
    }
}

/// The file that MLX was loaded from. `None` before [`load`], and if the system's loader found the
/// library.
pub fn file() -> Option<&'static Path> {
    LOADED.get()?.as_ref().ok()?.file.as_deref()
}

/// The reason why the build without CUDA was loaded instead of the CUDA build; `None` before
/// [`load`].
pub fn set_aside() -> Option<&'static str> {
    LOADED.get()?.as_ref().ok()?.set_aside.as_deref()
}

/// The directories to search, in order. `None` means the places that the system's loader searches.
fn places(package: &Package) -> Vec<Option<PathBuf>> {
    if let Some(dir) = env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
        return vec![Some(PathBuf::from(dir))];
    }
    let mut places = Vec::new();
    let program = env::current_exe().and_then(|exe| exe.canonicalize());
    if let Some(dir) = program.ok().as_deref().and_then(Path::parent) {
        places.push(dir.to_owned());
        if let Some(prefix) = dir.parent() {
            places.push(prefix.join("lib"));
            places.push(
                prefix
                    .join("lib/rust-mlx")
                    .join(package.directory)
                    .join("mlx/lib"),
            );
        }
    }
    if let Some(file) = own_file::shared_library() {
        places.extend(own_file::places(&file, package.directory));
    }
    places.push(Path::new(package.built).join("lib"));
    places.extend(user_cache().map(|cache| {
        cache
            .join("rust-mlx/mlx-sys")
            .join(package.directory)
            .join("mlx/lib")
    }));
    let mut places: Vec<_> = places.into_iter().map(Some).collect();
    places.push(None);
    places
}

fn user_cache() -> Option<PathBuf> {
    let absolute = |name: &str| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))
}

fn try_load() -> Result<Loaded, LoadError> {
    if EMBEDDED.is_empty() {
        return Err(LoadError::new(
            "this program was built without MLX (MLX_SYS_PREGENERATED or DOCS_RS was set)",
        ));
    }
    let (mlx, file, set_aside) = find_any(packages().map(|package| {
        package
            .cuda()
            .map_or(Ok(()), |cuda| check_driver(LIBCUDA, cuda))?;
        Ok(places(package))
    }))?;
    let bindings = open_embedded()?;
    Ok(Loaded {
        bindings,
        _mlx: mlx,
        file,
        set_aside,
    })
}

/// The places to search for a build of MLX, or the reason why it cannot be used here.
type Candidate = Result<Vec<Option<PathBuf>>, String>;

/// Loads the first libmlx of the first build that has one. Returns the library, its place, and the
/// reason why an earlier build was not used.
fn find_any(
    builds: impl Iterator<Item = Candidate>,
) -> Result<(Library, Option<PathBuf>, Option<String>), LoadError> {
    let mut faults: Vec<LoadError> = Vec::new();
    for places in builds {
        let loaded = places
            .map_err(LoadError::new)
            .and_then(|places| find(&places));
        match loaded {
            Ok((library, file)) => {
                let set_aside = faults.into_iter().next().map(|e| e.message);
                return Ok((library, file, set_aside));
            }
            // With `MLX_LIBRARY_DIR` every build searches the same directory, so the error repeats.
            Err(e) if faults.contains(&e) => {}
            Err(e) => faults.push(e),
        }
    }
    let messages: Vec<&str> = faults.iter().map(|e| e.message.as_str()).collect();
    Err(LoadError {
        message: messages.join("; without CUDA: "),
        searched: faults.iter().flat_map(|e| e.searched.clone()).collect(),
    })
}

/// Checks that NVIDIA's driver exists, supports this version of CUDA, and has a GPU. MLX reports
/// CUDA as available wherever its CUDA build is loaded, and fails at the first use.
fn check_driver(name: &str, cuda: i32) -> Result<(), String> {
    // The driver stays loaded, because closing an initialized driver is not supported.
    let driver = ManuallyDrop::new(
        open(name.as_ref()).map_err(|e| format!("this machine has no NVIDIA driver: {e}"))?,
    );
    let missing = |e: libloading::Error| format!("{name} is no NVIDIA driver: {e}");
    // SAFETY: `CUresult cuInit(unsigned int)`, in every version of the driver.
    let init = unsafe { driver.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit\0") };
    // SAFETY: `CUresult cuDriverGetVersion(int*)`, in every version of the driver.
    let version = unsafe { driver.get::<Query>(b"cuDriverGetVersion\0") };
    // SAFETY: `CUresult cuDeviceGetCount(int*)`, in every version of the driver.
    let devices = unsafe { driver.get::<Query>(b"cuDeviceGetCount\0") };
    let (init, version, devices) = (
        init.map_err(missing)?,
        version.map_err(missing)?,
        devices.map_err(missing)?,
    );
    // SAFETY: the flags must be zero, as documented. The function may be called more than once.
    let status = unsafe { init(0) };
    if status != 0 {
        return Err(format!("NVIDIA's driver finds no GPU (cuInit: {status})"));
    }
    let ask = |query: &Query| {
        let mut answer = 0;
        // SAFETY: the function writes one integer, and the driver is initialized.
        let status = unsafe { query(&mut answer) };
        (status == 0).then_some(answer)
    };
    // The version is 1000 times the major version plus 10 times the minor version.
    let supported = ask(&version).unwrap_or(0);
    if supported / 1000 < cuda {
        return Err(format!(
            "NVIDIA's driver supports CUDA {}.{}, and this program needs CUDA {cuda}: a newer driver \
             helps",
            supported / 1000,
            supported % 1000 / 10
        ));
    }
    match ask(&devices) {
        Some(1..) => Ok(()),
        _ => Err(String::from("NVIDIA's driver finds no GPU")),
    }
}

/// A function of the driver that writes an integer.
type Query = unsafe extern "C" fn(*mut c_int) -> c_int;

/// Loads the first existing libmlx.
fn find(places: &[Option<PathBuf>]) -> Result<(Library, Option<PathBuf>), LoadError> {
    let mut searched = Vec::new();
    // Unexpected cases: the library exists, but cannot be read or is not a library.
    let mut unusual = Vec::new();
    for place in places {
        let path = match place {
            Some(dir) => dir.join(LIBMLX),
            None => PathBuf::from(LIBMLX),
        };
        if let Some(dir) = place
            && let Err(e) = std::fs::metadata(&path)
        {
            searched.push(format!("{}: {e}", dir.display()));
            if e.kind() != std::io::ErrorKind::NotFound {
                unusual.extend(searched.last().cloned());
            }
            continue;
        }
        match open(path.as_os_str()) {
            Ok(library) => {
                check_version(&library, &path)?;
                return Ok((library, place.is_some().then_some(path)));
            }
            Err(e) => {
                // The system's loader searches its own places, usually without success.
                if place.is_some() {
                    unusual.push(e.clone());
                }
                searched.push(e);
            }
        }
    }
    let why = match (searched.as_slice(), unusual.as_slice()) {
        ([only], _) => only.clone(),
        (all, []) => format!("it is in none of the {} places searched", all.len()),
        (_, unusual) => unusual.join("; "),
    };
    let message = format!(
        "MLX's library {LIBMLX} (MLX {MLX_VERSION}) cannot be loaded: {why}. Set {VARIABLE} to its \
         directory, or build this program again"
    );
    Err(LoadError { message, searched })
}

/// Checks the version, because other versions have different types under the same names.
fn check_version(library: &Library, path: &Path) -> Result<(), LoadError> {
    // SAFETY: `const char* mlx::core::version()`, in every version of MLX that has this symbol.
    let version = unsafe {
        library.get::<unsafe extern "C" fn() -> *const c_char>(b"_ZN3mlx4core7versionEv\0")
    };
    let actual = version.ok().map(|version| {
        // SAFETY: the function has no arguments and returns a static string.
        unsafe { CStr::from_ptr(version()) }.to_string_lossy()
    });
    // MLX's own builds may append to the version, such as `.dev1` or `+abc`.
    match actual {
        Some(actual) if actual.starts_with(MLX_VERSION) => Ok(()),
        actual => Err(LoadError::new(format!(
            "{} is MLX {}, and this program was built against MLX {MLX_VERSION}. \
             Set {VARIABLE} to the directory of that version, or build this program again",
            path.display(),
            actual.as_deref().unwrap_or("of an unknown version")
        ))),
    }
}

fn open(file: &OsStr) -> Result<Library, String> {
    // SAFETY: MLX's constructors only create static objects. The embedded library has only
    // constructors of C++.
    unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| {
        use std::error::Error as _;
        let text = e
            .source()
            .map_or_else(|| e.to_string(), ToString::to_string);
        match file.to_str() {
            Some(file) if !text.contains(file) => format!("{file}: {text}"),
            _ => text,
        }
    })
}

/// Loads the embedded library from memory. The loaded libmlx resolves its dependencies.
fn open_embedded() -> Result<Library, LoadError> {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    let fail = |what: &str, e: &dyn fmt::Display| {
        LoadError::new(format!("the bindings to MLX cannot be {what}: {e}"))
    };
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = rustix::fs::memfd_create("librust_mlx_c.so", flags)
        .map_err(|e| fail("put into memory", &e))?;
    let mut memory = std::fs::File::from(memory);
    memory
        .write_all(EMBEDDED)
        .map_err(|e| fail("put into memory", &e))?;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    open(path.as_ref()).map_err(|e| fail("loaded", &e))
}

/// A function of the embedded library, looked up at its first call.
pub(crate) struct Function {
    name: &'static str,
    address: AtomicPtr<c_void>,
}

impl Function {
    /// The function with this name, which must end with a zero byte.
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            address: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// The address.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        let address = self.address.load(Ordering::Acquire);
        if address.is_null() {
            self.look_up()
        } else {
            address
        }
    }

    /// Looks up the address. Aborts the process if the function does not exist, because [`load`]
    /// was not called or failed.
    #[cold]
    fn look_up(&self) -> *mut c_void {
        let address = match LOADED.get_or_init(try_load) {
            // SAFETY: the address is only stored, and not used as any type here.
            Ok(loaded) => match unsafe { loaded.bindings.get::<*mut c_void>(self.name.as_bytes()) }
            {
                Ok(symbol) => symbol.into_raw(),
                Err(e) => give_up(self.name, &e),
            },
            Err(e) => give_up(self.name, e),
        };
        self.address.store(address, Ordering::Release);
        address
    }
}

/// Aborts, because C functions cannot report that they do not exist.
#[cold]
fn give_up(name: &str, why: &dyn fmt::Display) -> ! {
    eprintln!("{} cannot be called: {why}", name.trim_end_matches('\0'));
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(places: &[Option<PathBuf>]) -> String {
        match find(places) {
            Ok(_) => panic!("found in {places:?}"),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn what_is_missing_is_named_with_the_way_out() {
        let dir = env::temp_dir().join(format!("rust-mlx-library-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let nowhere = dir.join("nowhere");
        let message = fault(&[Some(nowhere.clone())]);
        assert!(message.contains(&*nowhere.to_string_lossy()), "{message}");
        assert!(message.contains("No such file"), "{message}");
        assert!(message.contains(VARIABLE), "{message}");

        // For a file that is not a library, the message is the loader's own reason, with the path.
        std::fs::write(dir.join(LIBMLX), "no library").unwrap();
        let message = fault(&[Some(dir.clone())]);
        let path = dir.join(LIBMLX);
        assert!(message.contains(&*path.to_string_lossy()), "{message}");

        // The message lists only unexpected places, but `searched` keeps all.
        let many = [
            Some(nowhere.clone()),
            Some(nowhere.join("a")),
            Some(dir.clone()),
        ];
        let error = find(&many).err().unwrap();
        let message = error.to_string();
        assert!(message.contains(&*path.to_string_lossy()), "{message}");
        assert!(!message.contains("nowhere"), "{message}");
        assert_eq!(error.searched().len(), 3);
        let error = find(&many[..2]).err().unwrap();
        let message = error.to_string();
        assert!(message.contains("none of the 2 places"), "{message}");
        assert!(message.len() < 250, "{message}");
        assert!(error.searched()[1].contains("nowhere/a"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_library_of_another_version_is_refused() {
        // The C library is not MLX, so it has no MLX version.
        let libc = open("libc.so.6".as_ref()).unwrap();
        let message = check_version(&libc, Path::new("libc.so.6"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("unknown version"), "{message}");
        assert!(message.contains(MLX_VERSION), "{message}");
    }

    #[test]
    fn the_library_that_was_built_against_loads_and_names_its_file() {
        load().unwrap();
        let file = file().expect("a file in the recorded directory");
        assert!(file.ends_with(LIBMLX), "{}", file.display());
    }

    #[test]
    fn where_the_first_build_does_not_load_the_next_is_and_the_reason_stays() {
        let nowhere = env::temp_dir().join(format!("rust-mlx-no-cuda-{}", std::process::id()));
        // Uses the build that loads on every machine. The places of the system's loader are
        // excluded, because they include libraries of other tests.
        let mut here = places(packages().last().unwrap());
        here.retain(Option::is_some);
        let tried = [Ok(vec![Some(nowhere.clone())]), Ok(here.clone())];
        let (_, file, set_aside) = find_any(tried.into_iter()).unwrap();
        assert!(file.unwrap().ends_with(LIBMLX));
        let reason = set_aside.unwrap();
        assert!(reason.contains(&*nowhere.to_string_lossy()), "{reason}");

        let (_, _, set_aside) = find_any([Ok(here.clone())].into_iter()).unwrap();
        assert_eq!(set_aside, None);

        let unfit = [Err(String::from("no GPU")), Ok(here)];
        let (_, _, set_aside) = find_any(unfit.into_iter()).unwrap();
        assert_eq!(set_aside.as_deref(), Some("no GPU"));

        // If two builds fail in the same place, as with `MLX_LIBRARY_DIR`, the failure is reported
        // once.
        let twice = [(); 2].map(|()| Ok(vec![Some(nowhere.clone())]));
        let message = find_any(twice.into_iter()).err().unwrap().to_string();
        assert!(!message.contains("without CUDA"), "{message}");
        let other = nowhere.join("other");
        let both = [Ok(vec![Some(nowhere)]), Ok(vec![Some(other.clone())])];
        let message = find_any(both.into_iter()).err().unwrap().to_string();
        assert!(message.contains("without CUDA"), "{message}");
        assert!(message.contains(&*other.to_string_lossy()), "{message}");
    }

    /// Makes a fake driver library. It reports `version` and `devices`, and returns `init` from
    /// `cuInit`.
    fn driver(dir: &Path, name: &str, init: i32, version: i32, devices: i32) -> String {
        let (source, library) = (dir.join(format!("{name}.c")), dir.join(name));
        let text = format!(
            "int cuInit(unsigned flags) {{ return {init}; }}\n\
             int cuDriverGetVersion(int *out) {{ *out = {version}; return 0; }}\n\
             int cuDeviceGetCount(int *out) {{ *out = {devices}; return 0; }}\n"
        );
        std::fs::write(&source, text).unwrap();
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
        assert!(compiler.arg(&source).status().unwrap().success());
        library.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_driver_that_is_of_no_use_is_named_with_the_reason() {
        let dir = env::temp_dir().join(format!("rust-mlx-driver-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let fine = driver(&dir, "fine.so", 0, 13000, 1);
        assert_eq!(check_driver(&fine, 13), Ok(()));
        assert_eq!(check_driver(&fine, 12), Ok(()));
        for (name, init, version, devices, reason) in [
            ("none.so", 100, 13000, 0, "no GPU (cuInit: 100)"),
            ("old.so", 0, 12040, 1, "supports CUDA 12.4"),
            ("empty.so", 0, 13000, 0, "finds no GPU"),
        ] {
            let message = check_driver(&driver(&dir, name, init, version, devices), 13);
            let message = message.unwrap_err();
            assert!(message.contains(reason), "{message}");
        }
        let message = check_driver("libcuda-is-not-here.so.1", 13).unwrap_err();
        assert!(message.contains("no NVIDIA driver"), "{message}");
        assert!(message.contains("libcuda-is-not-here"), "{message}");
        let message = check_driver("libc.so.6", 13).unwrap_err();
        assert!(message.contains("is no NVIDIA driver"), "{message}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
