//! Finds cmake, ninja, the C++ compiler and libclang. The system's tools are used if they are
//! installed; otherwise they are pinned Python packages in the cache.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::env::Env;
use crate::pip::Pip;

/// The tools of one build.
pub struct Tools {
    pub cmake: OsString,
    pub ninja: OsString,
    /// The directory of libclang; `None` if bindgen finds libclang itself.
    pub libclang: Option<PathBuf>,
    /// The compiler's own headers, which the packaged libclang lacks.
    pub compiler_headers: Option<String>,
}

fn works(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success())
}

/// Makes a wheel's file executable, which pip would do but unzipping does not.
fn executable(path: PathBuf) -> Result<OsString, String> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .map_err(|e| format!("cannot make {} executable: {e}", path.display()))?;
    }
    Ok(path.into_os_string())
}

/// The path of the file with this name below `dir`.
fn below(dir: &Path, name: &str) -> Option<PathBuf> {
    let mut entries: Vec<_> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .map(|e| e.path())
        .collect();
    entries.sort();
    entries
        .iter()
        .find(|p| p.is_file() && p.file_name().is_some_and(|n| n == name))
        .cloned()
        .or_else(|| {
            entries
                .iter()
                .filter(|p| p.is_dir())
                .find_map(|p| below(p, name))
        })
}

impl Tools {
    pub fn find(env: &Env, pip: &Pip<'_>) -> Result<Self, String> {
        if !Command::new(&env.cxx)
            .arg("--version")
            .output()
            .is_ok_and(|o| o.status.success())
        {
            return Err(format!(
                "no C++ compiler: `{}` cannot be run.\nInstall one (Debian: apt install g++; macOS: \
                 xcode-select --install) or set CXX.",
                env.cxx.to_string_lossy()
            ));
        }
        let from_wheel = |package: &str, relative: &str| -> Result<OsString, String> {
            let dir = pip.wheel(package, None)?;
            let file = Some(dir.join(relative)).filter(|p| p.is_file());
            let file = file
                .or_else(|| below(&dir, package))
                .ok_or_else(|| format!("the Python package {package} holds no program"))?;
            executable(file)
        };
        let cmake = if works("cmake") {
            "cmake".into()
        } else {
            from_wheel("cmake", "cmake/data/bin/cmake")?
        };
        let ninja = if works("ninja") {
            "ninja".into()
        } else {
            from_wheel("ninja", "ninja-1.13.0.data/scripts/ninja")?
        };
        let (mut libclang, mut compiler_headers) = (env.libclang_path.clone(), None);
        if libclang.is_none() && !system_has_libclang() {
            let dir = pip.wheel("libclang", None)?;
            let name = if env.macos() {
                "libclang.dylib"
            } else {
                "libclang.so"
            };
            let file = below(&dir, name).ok_or("the Python package libclang holds no library")?;
            libclang = file.parent().map(Path::to_owned);
            compiler_headers = gcc_headers(env);
        }
        Ok(Self {
            cmake,
            ninja,
            libclang,
            compiler_headers,
        })
    }
}

/// Whether bindgen finds libclang itself. This is checked first, because bindgen panics if it does
/// not.
fn system_has_libclang() -> bool {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let loads = std::panic::catch_unwind(bindgen::clang_version).is_ok();
    std::panic::set_hook(hook);
    loads
}

/// The directory of GCC's own headers, such as stddef.h.
fn gcc_headers(env: &Env) -> Option<String> {
    let out = Command::new(&env.cxx)
        .arg("-print-file-name=include")
        .output()
        .ok()?;
    let path = String::from_utf8(out.stdout).ok()?.trim().to_owned();
    Path::new(&path).join("stddef.h").is_file().then_some(path)
}
