//! Loads MLX at the first call on Linux. A program links nothing of MLX. It starts without the
//! library, and can say what is missing and what would help.
//!
//! mlx-c and our shim are in a shared library that is embedded here. It needs libmlx, which is
//! loaded first, from the first of these that has it:
//!
//! 1. the directory that the environment variable `MLX_LIBRARY_DIR` names, and no other;
//! 2. the directory of the program, and `../lib` from there;
//! 3. `../lib/rust-mlx/PACKAGE/mlx/lib` from the program, where PACKAGE is the name of the Python
//!    package with its version and hash, such as `mlx-cpu-0.30.6-573baa804539`;
//! 4. the directory that the program was built against;
//! 5. the cache directory of the user, `rust-mlx/mlx-sys/PACKAGE/mlx/lib`;
//! 6. wherever the system's loader looks.

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// mlx-c and the shim. Empty in builds without the native library.
static EMBEDDED: &[u8] = include_bytes!(env!("MLX_SYS_EMBEDDED"));

/// The version of MLX that this was built against.
const MLX_VERSION: &str = env!("MLX_SYS_MLX_VERSION");

/// The directory name of the package of MLX that this was built against.
pub const PACKAGE: &str = env!("MLX_SYS_PACKAGE");

/// Name, version and SHA-256 of that package, with spaces between them; empty for an MLX of the
/// user's own (`MLX_ROOT`).
pub const PIN: &str = env!("MLX_SYS_PIN");

/// Where that package was at build time: it holds `include`, `lib` and `share`.
pub const PACKAGE_DIR: &str = env!("MLX_SYS_PACKAGE_DIR");

/// The name of MLX's library.
const LIBMLX: &str = "libmlx.so";

/// The variable that names the directory of libmlx.
const VARIABLE: &str = "MLX_LIBRARY_DIR";

/// Why MLX cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    message: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for LoadError {}

/// The libraries, which are never unloaded: MLX has threads and static objects.
struct Loaded {
    bindings: Library,
    _mlx: Library,
    file: Option<PathBuf>,
}

static LOADED: OnceLock<Result<Loaded, LoadError>> = OnceLock::new();

/// Loads MLX, unless it is loaded.
///
/// # Errors
/// When MLX's library is not found or cannot be loaded. The answer stays the same in a process.
pub fn load() -> Result<(), &'static LoadError> {
    match LOADED.get_or_init(try_load) {
        Ok(_) => Ok(()),
        Err(e) => Err(e),
    }
}

/// The file that MLX was loaded from; `None` before [`load`], and where the system's loader found
/// it.
pub fn file() -> Option<&'static Path> {
    LOADED.get()?.as_ref().ok()?.file.as_deref()
}

/// The directories to look into, in order. `None` is wherever the system's loader looks.
fn places() -> Vec<Option<PathBuf>> {
    if let Some(dir) = env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
        return vec![Some(PathBuf::from(dir))];
    }
    let mut places = Vec::new();
    let program = env::current_exe().and_then(|exe| exe.canonicalize());
    if let Some(dir) = program.ok().as_deref().and_then(Path::parent) {
        places.push(dir.to_owned());
        if let Some(prefix) = dir.parent() {
            places.push(prefix.join("lib"));
            places.push(prefix.join("lib/rust-mlx").join(PACKAGE).join("mlx/lib"));
        }
    }
    places.push(Path::new(PACKAGE_DIR).join("lib"));
    places.extend(
        user_cache().map(|cache| cache.join("rust-mlx/mlx-sys").join(PACKAGE).join("mlx/lib")),
    );
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
        return Err(LoadError {
            message: String::from(
                "this program was built without MLX (MLX_SYS_PREGENERATED or DOCS_RS was set)",
            ),
        });
    }
    let (mlx, file) = find(&places())?;
    let bindings = open_embedded()?;
    Ok(Loaded {
        bindings,
        _mlx: mlx,
        file,
    })
}

/// Loads the first libmlx there is.
fn find(places: &[Option<PathBuf>]) -> Result<(Library, Option<PathBuf>), LoadError> {
    let mut faults = Vec::new();
    for place in places {
        let path = match place {
            Some(dir) => dir.join(LIBMLX),
            None => PathBuf::from(LIBMLX),
        };
        if let Some(dir) = place
            && let Err(e) = std::fs::metadata(&path)
        {
            faults.push(format!("{}: {e}", dir.display()));
            continue;
        }
        match open(path.as_os_str()) {
            Ok(library) => {
                check_version(&library, &path)?;
                return Ok((library, place.is_some().then_some(path)));
            }
            Err(e) => faults.push(e),
        }
    }
    Err(LoadError {
        message: format!(
            "MLX's library {LIBMLX} (MLX {MLX_VERSION}) cannot be loaded: {}. Set {VARIABLE} to its \
             directory, or build this program again",
            faults.join("; ")
        ),
    })
}

/// Another version has other types under the same names.
fn check_version(library: &Library, path: &Path) -> Result<(), LoadError> {
    // SAFETY: `const char* mlx::core::version()`, in every version of MLX that has this symbol.
    let version = unsafe {
        library.get::<unsafe extern "C" fn() -> *const c_char>(b"_ZN3mlx4core7versionEv\0")
    };
    let found = version.ok().map(|version| {
        // SAFETY: it takes nothing and returns a static string.
        unsafe { CStr::from_ptr(version()) }.to_string_lossy()
    });
    // A build of MLX's own may append to the version, such as `.dev1` or `+abc`.
    match found {
        Some(found) if found.starts_with(MLX_VERSION) => Ok(()),
        found => Err(LoadError {
            message: format!(
                "{} is MLX {}, and this program was built against MLX {MLX_VERSION}. \
                 Set {VARIABLE} to the directory of that version, or build this program again",
                path.display(),
                found.as_deref().unwrap_or("of an unknown version")
            ),
        }),
    }
}

fn open(file: &OsStr) -> Result<Library, String> {
    // SAFETY: MLX's constructors make static objects only; the embedded library has those of C++.
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

/// Loads the embedded library from memory; its needs are met by the libmlx that is loaded.
fn open_embedded() -> Result<Library, LoadError> {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    let fail = |what: &str, e: &dyn fmt::Display| LoadError {
        message: format!("the bindings to MLX cannot be {what}: {e}"),
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
    /// The function of this name, which ends with a zero byte.
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            address: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Its address.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        let address = self.address.load(Ordering::Acquire);
        if address.is_null() {
            self.look_up()
        } else {
            address
        }
    }

    /// Ends the process where there is no such function: [`load`] was not called, or failed.
    #[cold]
    fn look_up(&self) -> *mut c_void {
        let address = match LOADED.get_or_init(try_load) {
            // SAFETY: the address is not used as any type here.
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

/// C functions have no way to report that they do not exist.
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

        // A file that is no library: the loader's own reason, with the path.
        std::fs::write(dir.join(LIBMLX), "no library").unwrap();
        let message = fault(&[Some(dir.clone())]);
        let path = dir.join(LIBMLX);
        assert!(message.contains(&*path.to_string_lossy()), "{message}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_library_of_another_version_is_refused() {
        // The C library has no version of MLX.
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
}
