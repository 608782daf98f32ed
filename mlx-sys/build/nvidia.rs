//! Provides NVIDIA's libraries for the CUDA build of MLX. They are pinned Python packages, which
//! are linked into MLX's package, where libmlx and NVRTC search.

use std::fs;
use std::path::{Path, PathBuf};

use crate::env::Env;
use crate::pins::Pins;
use crate::pip::Pip;

/// One of NVIDIA's packages.
pub struct Library {
    /// The directory below `nvidia` in MLX's package.
    pub directory: String,
    /// Name, version and SHA-256.
    pub pin: [String; 3],
}

/// Provisions the packages for a version of MLX and of CUDA, and links them into `mlx`, the
/// directory of MLX's package. With `MLX_CUDA_LIBRARIES=system` there are none.
pub fn provision(
    env: &Env,
    pip: &Pip<'_>,
    pins: &Pins,
    (version, cuda): (&str, &str),
    mlx: &Path,
) -> Result<Vec<Library>, String> {
    match env.cuda_libraries.as_deref() {
        None => {}
        Some("system") => return Ok(Vec::new()),
        Some(other) => {
            return Err(format!(
                "MLX_CUDA_LIBRARIES is `{other}`; it can be `system`, or unset for the pinned packages"
            ));
        }
    }
    let mut libraries = Vec::new();
    for (directory, package) in pins.cuda_libraries(version, cuda)? {
        let wheel = pins.wheel(&package, None, &env.target)?;
        let root = pip.wheel(&package, None)?;
        link(&own_directory(&root)?, &mlx.join("nvidia").join(&directory))?;
        libraries.push(Library {
            directory,
            pin: [wheel.package, wheel.version, wheel.sha256],
        });
    }
    Ok(libraries)
}

/// The only directory below `nvidia` in a package: named after the library, or `cu13`.
fn own_directory(root: &Path) -> Result<PathBuf, String> {
    let nvidia = root.join("nvidia");
    let entries = fs::read_dir(&nvidia)
        .map_err(|e| format!("cannot list {}: {e}", nvidia.display()))?
        .flatten();
    let mut directories = entries
        .map(|entry| entry.path())
        .filter(|path| path.join("lib").is_dir() || path.join("include").is_dir());
    match (directories.next(), directories.next()) {
        (Some(path), None) => Ok(path),
        _ => Err(format!("{} does not hold one library", nvidia.display())),
    }
}

/// Creates `link` as a relative link to `target`, because users may move the cache.
fn link(target: &Path, link: &Path) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("cannot link {}: {e}", link.display());
    // CACHE/MLX/nvidia/NAME -> CACHE/PACKAGE/nvidia/OWN
    let mut parts = target.iter().rev();
    let names = parts.next().zip(parts.next()).zip(parts.next());
    let ((directory, nvidia), package) =
        names.ok_or_else(|| format!("{} is no package", target.display()))?;
    let relative = Path::new("../..")
        .join(package)
        .join(nvidia)
        .join(directory);
    if fs::read_link(link).is_ok_and(|old| old == relative) {
        return Ok(());
    }
    if let Some(parent) = link.parent() {
        fs::create_dir_all(parent).map_err(fail)?;
    }
    if fs::symlink_metadata(link).is_ok() {
        fs::remove_file(link).map_err(fail)?;
    }
    #[cfg(unix)]
    return std::os::unix::fs::symlink(&relative, link).map_err(fail);
    #[cfg(not(unix))]
    return Err(String::from("MLX has no CUDA build for this platform"));
}
