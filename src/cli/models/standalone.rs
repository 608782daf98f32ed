//! `mlx self install` and `mlx self bundle DIR`: put MLX's library beside the program. The program
//! then needs neither the cache nor the machine of its build.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use inference_formats::atomic::AtomicFile;
use mlx_rs_core::library::{self, Package, Pin};
use rust_mlx::hub;

use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::HubProgress;

/// Make this program independent of its build machine: put MLX's library beside it
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Action {
    /// Put MLX's library into ../lib/rust-mlx, seen from this program's directory, and print the
    /// directory
    Install {
        /// Put the library into lib/rust-mlx of this directory instead; programs in its bin find it
        #[arg(long, value_name = "DIR")]
        prefix: Option<PathBuf>,
    },
    /// Create a directory that can be moved to other machines: DIR/bin with this program, DIR/lib
    /// with MLX's library
    Bundle {
        /// The directory; it is created if it is missing
        dir: PathBuf,
    },
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let program = std::env::current_exe()
        .and_then(|path| path.canonicalize())
        .map_err(|e| Failure::failed(format!("cannot find this program's file: {e}")))?;
    match &args.action {
        Action::Install { prefix } => {
            let default_prefix = || program.parent()?.parent();
            let prefix = prefix.as_deref().or_else(default_prefix).ok_or_else(|| {
                Failure::failed(format!("{} has no ../lib; use --prefix", program.display()))
            })?;
            for dir in install_all(prefix, console)? {
                console.line(&dir.to_string_lossy())?;
            }
            Ok(())
        }
        Action::Bundle { dir } => {
            install_all(dir, console)?;
            let name = program.file_name().unwrap_or("mlx".as_ref());
            let to = dir.join("bin").join(name);
            copy_program(&program, &to).map_err(|e| cannot("write", &to, &e))?;
            console.line(&to.to_string_lossy())
        }
    }
}

/// Puts MLX's library below `prefix/lib`, and returns the directories that have it.
fn install_all(prefix: &Path, console: &mut Console<'_>) -> Result<Vec<PathBuf>, Failure> {
    let packages = library::packages();
    if packages.is_empty() {
        // On macOS, programs are linked with MLX and search `../lib` first.
        let built = option_env!("RUST_MLX_LINKED_LIBRARY").ok_or_else(|| {
            Failure::failed("this program was built without MLX, and needs no library of it")
        })?;
        return Ok(vec![install_linked(Path::new(built), prefix)?]);
    }
    let is_only = packages.len() == 1;
    let each = packages.iter();
    each.map(|package| install(package, is_only, prefix, console))
        .collect()
}

/// Copies the library that a program was linked with, and its GPU kernels, from `built` to
/// `prefix/lib`. libmlx loads the kernels from its own directory, so they are copied first.
fn install_linked(built: &Path, prefix: &Path) -> Result<PathBuf, Failure> {
    let to = prefix.join("lib");
    fs::create_dir_all(&to).map_err(|e| cannot("make", &to, &e))?;
    for (name, is_library) in [("mlx.metallib", false), ("libmlx.dylib", true)] {
        let (from, target) = (built.join(name), to.join(name));
        if !from.is_file() {
            // A library that is already at the target needs no copy, and kernels are optional.
            if target.is_file() || !is_library {
                continue;
            }
            return Err(Failure::failed(format!(
                "{} is gone: build the program again, which fetches it",
                from.display()
            )));
        }
        let copy = || {
            let file = AtomicFile::create(&target)?;
            fs::copy(&from, file.unfinished())?;
            share(file.unfinished())?;
            file.commit()
        };
        copy().map_err(|e| cannot("write", &target, &e))?;
    }
    Ok(to)
}

/// The advice for a program whose MLX library is missing.
pub fn hint() -> Option<&'static str> {
    library::load().is_err().then_some(
        "`mlx self install` fetches MLX's library and puts it beside this program; `-v` shows where \
         it was looked for",
    )
}

fn cannot(verb: &str, path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("cannot {verb} {}: {error}", path.display()))
}

/// Whether a program needs this file of the package: the library, its own libraries, and the
/// licenses.
fn is_needed(path: &Path) -> bool {
    let mut parts = path.iter().map(|part| part.to_string_lossy());
    let Some(first) = parts.next() else {
        return false;
    };
    let rest: Vec<_> = parts.collect();
    first.ends_with(".libs")
        || (first == "nvidia" && is_needed_of_nvidia(&rest))
        || (first == "mlx" && rest.first().is_some_and(|dir| dir == "lib"))
        || (first.ends_with(".dist-info") && rest.iter().any(|name| name.starts_with("LICENSE")))
}

/// Whether this file of NVIDIA's packages is needed: shared libraries, and the headers with which
/// NVRTC compiles kernels.
fn is_needed_of_nvidia(rest: &[impl AsRef<str>]) -> bool {
    match rest {
        [_, kind, .., name] if kind.as_ref() == "lib" => name.as_ref().contains(".so"),
        [library, kind, ..] => library.as_ref() == "cuda_runtime" && kind.as_ref() == "include",
        _ => false,
    }
}

/// Puts the library into `prefix/lib/rust-mlx`, completely or not at all. If the program has only
/// one package (`is_only`), the library that it has loaded is copied, wherever that library is.
fn install(
    package: &Package,
    is_only: bool,
    prefix: &Path,
    console: &mut Console<'_>,
) -> Result<PathBuf, Failure> {
    let root = prefix.join("lib/rust-mlx");
    let done = root.join(package.directory);
    if done.join("mlx/lib").is_dir() {
        return Ok(done);
    }
    fs::create_dir_all(&root).map_err(|e| cannot("make", &root, &e))?;
    let work = tempfile::Builder::new()
        .prefix(".partial-")
        .tempdir_in(&root)
        .map_err(|e| cannot("write in", &root, &e))?;
    let files = work.path().join("files");
    fs::create_dir(&files).map_err(|e| cannot("make", &files, &e))?;
    let loaded = library::load().map(|()| library::file());
    let file = loaded.as_ref().ok().cloned().flatten();
    if let Some(root) = file.as_deref().and_then(|file| beside(file, package)) {
        copy_tree(&root, Path::new(""), &files).map_err(|e| cannot("copy", &root, &e))?;
    } else if let Some(file) = file.filter(|_| is_only) {
        copy_library(&file, &files).map_err(|e| cannot("copy the library of", &file, &e))?;
    } else if let Some(pin) = package.pin {
        // The package was removed or moved, so it is fetched again. Its pinned hash guarantees the
        // same content.
        fetch(pin, package, &files, console)?;
    } else {
        loaded.map_err(|e| Failure::failed(e.to_string()))?;
        return Err(Failure::failed(
            "MLX is installed in the system; its library needs no copy",
        ));
    }
    share(&files).map_err(|e| cannot("open to other users", &files, &e))?;
    match fs::rename(&files, &done) {
        // Another process installed it first.
        Err(_) if done.join("mlx/lib").is_dir() => Ok(done),
        Err(e) => Err(cannot("make", &done, &e)),
        Ok(()) => Ok(done),
    }
}

/// The package's directory, if MLX was loaded from it or from another package beside it.
fn beside(file: &Path, package: &Package) -> Option<PathBuf> {
    // PACKAGE/mlx/lib/libmlx.so
    let root = file.ancestors().nth(4)?.join(package.directory);
    // The package does not work without NVIDIA's libraries, which an older build may have left out.
    let is_whole = |root: &Path| {
        let mut libraries = package.libraries.iter();
        libraries.all(|(directory, _)| root.join("nvidia").join(directory).is_dir())
    };
    (root.join("mlx/lib").is_dir() && is_whole(&root)).then_some(root)
}

/// Fetches the package and the NVIDIA packages that it needs.
fn fetch(
    pin: Pin,
    package: &Package,
    files: &Path,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let mut progress = HubProgress::new(console);
    hub::fetch_package(pin, files, is_needed, &mut progress)?;
    for (directory, pin) in &package.libraries {
        let part = tempfile::tempdir_in(files).map_err(|e| cannot("write in", files, &e))?;
        // The package's directory has the library's name, or that of a CUDA version.
        let wanted = |path: &Path| {
            let rest = path.iter().skip(2).map(|part| part.to_string_lossy());
            let named: Vec<_> = std::iter::once((*directory).into()).chain(rest).collect();
            path.starts_with("nvidia") && is_needed_of_nvidia(&named)
        };
        hub::fetch_package(*pin, part.path(), wanted, &mut progress)?;
        let to = files.join("nvidia").join(directory);
        move_only(&part.path().join("nvidia"), &to).map_err(|e| cannot("write", &to, &e))?;
    }
    Ok(())
}

/// Renames the only directory in `from`.
fn move_only(from: &Path, to: &Path) -> io::Result<()> {
    let entry = fs::read_dir(from)?
        .next()
        .ok_or(io::ErrorKind::NotFound)??;
    fs::create_dir_all(to.parent().unwrap_or(to))?;
    fs::rename(entry.path(), to)
}

/// Copies the library without a package.
fn copy_library(file: &Path, to: &Path) -> io::Result<()> {
    let dir = to.join("mlx/lib");
    fs::create_dir_all(&dir)?;
    for entry in fs::read_dir(file.parent().unwrap_or(file))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() && name.starts_with("libmlx") {
            fs::copy(&path, dir.join(&*name))?;
        }
    }
    Ok(())
}

fn copy_tree(root: &Path, below: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(root, &path, to)?;
        } else if is_needed(&path) {
            let target = to.join(&path);
            fs::create_dir_all(target.parent().unwrap_or(to))?;
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Lets every user read the file, independent of the umask.
fn share(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            share(&entry?.path())?;
        }
    }
    Ok(())
}

fn copy_program(from: &Path, to: &Path) -> io::Result<()> {
    let dir = to.parent().unwrap_or(to);
    fs::create_dir_all(dir)?;
    // A running program's file cannot be overwritten, but it can be replaced.
    let file = AtomicFile::create(to)?;
    fs::copy(from, file.unfinished())?;
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file.unfinished(), fs::Permissions::from_mode(0o755))?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linked_library_lies_beside_its_kernels() {
        let dir = tempfile::tempdir().unwrap();
        let (built, prefix) = (dir.path().join("built"), dir.path().join("prefix"));
        fs::create_dir(&built).unwrap();
        let error = install_linked(&built, &prefix)
            .unwrap_err()
            .report()
            .unwrap();
        assert!(error.contains("libmlx.dylib is gone"), "{error}");

        fs::write(built.join("libmlx.dylib"), "library").unwrap();
        fs::write(built.join("mlx.metallib"), "kernels").unwrap();
        let to = install_linked(&built, &prefix).unwrap();
        assert_eq!(to, prefix.join("lib"));
        let read = |name: &str| fs::read_to_string(to.join(name)).unwrap();
        assert_eq!(read("libmlx.dylib"), "library");
        assert_eq!(read("mlx.metallib"), "kernels");
        let names = fs::read_dir(&to).unwrap();
        assert_eq!(names.count(), 2, "no temporary file is left");

        // A newer library replaces the installed one. Without a source, the installed one stays.
        fs::write(built.join("libmlx.dylib"), "newer").unwrap();
        install_linked(&built, &prefix).unwrap();
        assert_eq!(read("libmlx.dylib"), "newer");
        fs::remove_dir_all(&built).unwrap();
        install_linked(&built, &prefix).unwrap();
        assert_eq!(read("libmlx.dylib"), "newer");
    }

    #[test]
    fn headers_and_python_code_are_left_out() {
        for needed in [
            "mlx/lib/libmlx.so",
            "mlx_cpu.libs/libblas.so.3",
            "nvidia/cublas/lib/libcublas.so.13",
            "nvidia/cuda_runtime/include/crt/host_defines.h",
            "mlx_cpu-0.30.6.dist-info/licenses/LICENSE",
        ] {
            assert!(is_needed(Path::new(needed)), "{needed}");
        }
        for other in [
            "mlx/include/mlx/mlx.h",
            "mlx/core.so",
            "nvidia/cublas/include/cublas.h",
            "nvidia/cuda_runtime/lib/libcudart_static.a",
            "nvidia/__init__.py",
            "mlx_cpu-0.30.6.dist-info/RECORD",
        ] {
            assert!(!is_needed(Path::new(other)), "{other}");
        }
    }
}
