//! `mlx self install` and `mlx self bundle DIR`: MLX's library beside the program. It then needs
//! nothing of the machine or the cache where it was built.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mlx_rs_core::library::{self, Package};
use rust_mlx::hub;

use super::console::Console;
use super::failure::Failure;
use super::progress::HubProgress;

/// Make this program stand alone: MLX's library beside it
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Action {
    /// Put MLX's library into ../lib/rust-mlx from this program, and print the directory
    Install {
        /// Into lib/rust-mlx of this directory instead; programs in its bin find it
        #[arg(long, value_name = "DIR")]
        prefix: Option<PathBuf>,
    },
    /// Make a directory that can be moved to other machines: DIR/bin with this program, DIR/lib
    Bundle {
        /// The directory, which is made if it is not there
        dir: PathBuf,
    },
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let package = library::package().ok_or_else(|| {
        Failure::failed(
            "on this system programs are linked with MLX: copy libmlx and its metallib beside the \
             program (docs/building.md)",
        )
    })?;
    let program = std::env::current_exe()
        .and_then(|path| path.canonicalize())
        .map_err(|e| Failure::failed(format!("cannot find this program's file: {e}")))?;
    match &args.action {
        Action::Install { prefix } => {
            let own = || program.parent()?.parent();
            let prefix = prefix.as_deref().or_else(own).ok_or_else(|| {
                Failure::failed(format!("{} has no ../lib; use --prefix", program.display()))
            })?;
            let dir = install(package, prefix, console)?;
            console.line(&dir.to_string_lossy())
        }
        Action::Bundle { dir } => {
            install(package, dir, console)?;
            let name = program.file_name().unwrap_or("mlx".as_ref());
            let to = dir.join("bin").join(name);
            copy_program(&program, &to).map_err(|e| cannot("write", &to, &e))?;
            console.line(&to.to_string_lossy())
        }
    }
}

/// The way out where MLX's library is missing.
pub fn hint() -> Option<&'static str> {
    library::load()
        .is_err()
        .then_some("`mlx self install` fetches MLX's library and puts it beside this program")
}

fn cannot(verb: &str, path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("cannot {verb} {}: {error}", path.display()))
}

/// The package's files that a program needs: the library, its own libraries, and the licenses.
fn is_needed(path: &Path) -> bool {
    let mut parts = path.iter().map(|part| part.to_string_lossy());
    let Some(first) = parts.next() else {
        return false;
    };
    let rest: Vec<_> = parts.collect();
    first.ends_with(".libs")
        || first == "nvidia"
        || (first == "mlx" && rest.first().is_some_and(|dir| dir == "lib"))
        || (first.ends_with(".dist-info") && rest.iter().any(|name| name.starts_with("LICENSE")))
}

/// Puts the library into `prefix/lib/rust-mlx`, whole or not at all.
fn install(package: Package, prefix: &Path, console: &mut Console<'_>) -> Result<PathBuf, Failure> {
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
    match (loaded, package.pin) {
        (Ok(Some(file)), _) => copy_loaded(package, &file, &files)
            .map_err(|e| cannot("copy the library of", &file, &e))?,
        // It is gone, or the system's loader has it: a fresh one is the same by its hash.
        (_, Some(pin)) => {
            let mut progress = HubProgress::new(console);
            hub::fetch_package(pin, &files, is_needed, &mut progress)?;
        }
        (Ok(None), None) => {
            return Err(Failure::failed(
                "MLX is installed in the system; its library needs no copy",
            ));
        }
        (Err(e), None) => return Err(Failure::failed(e.to_string())),
    }
    share(&files).map_err(|e| cannot("open to other users", &files, &e))?;
    match fs::rename(&files, &done) {
        // Another process was quicker.
        Err(_) if done.join("mlx/lib").is_dir() => Ok(done),
        Err(e) => Err(cannot("make", &done, &e)),
        Ok(()) => Ok(done),
    }
}

/// Copies the package that MLX was loaded from, or the library alone where it is in no package.
fn copy_loaded(package: Package, file: &Path, to: &Path) -> io::Result<()> {
    // PACKAGE/mlx/lib/libmlx.so
    let root = file.ancestors().nth(3);
    if let Some(root) = root.filter(|root| root.ends_with(package.directory)) {
        return copy_tree(root, Path::new(""), to);
    }
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

/// Lets every user read it, whatever the umask.
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
    // A program that runs cannot be written over, but replaced.
    let temporary = tempfile::NamedTempFile::new_in(dir)?;
    fs::copy(from, temporary.path())?;
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(temporary.path(), fs::Permissions::from_mode(0o755))?;
    temporary.persist(to)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_python_code_are_left_out() {
        for needed in [
            "mlx/lib/libmlx.so",
            "mlx_cpu.libs/libblas.so.3",
            "nvidia/cublas/lib/libcublas.so.13",
            "mlx_cpu-0.30.6.dist-info/licenses/LICENSE",
        ] {
            assert!(is_needed(Path::new(needed)), "{needed}");
        }
        for other in [
            "mlx/include/mlx/mlx.h",
            "mlx/core.so",
            "mlx_cpu-0.30.6.dist-info/RECORD",
        ] {
            assert!(!is_needed(Path::new(other)), "{other}");
        }
    }
}
