//! MLX's library: loads it, and reports where it came from.

use std::path::PathBuf;

use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// Loads MLX, unless it is already loaded. Any other call loads it, too. This function is for
/// programs that check first.
///
/// On Linux, a program starts even without MLX's library.
/// [docs/building.md](https://github.com/rust-mlx/rust-mlx/blob/main/docs/building.md) lists the
/// places that are searched. On macOS, the program is linked with the library.
///
/// ```
/// mlx_rs_core::library::load()?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Unsupported`] with the reason and a remedy; [`searched`] lists the places.
pub fn load() -> Result<()> {
    call::loaded().map_err(|message| Error::new(ErrorKind::Unsupported, "load", message))
}

/// The places that were searched without success, each with the reason. Empty if [`load`] succeeds,
/// and on macOS.
///
/// ```
/// if mlx_rs_core::library::load().is_err() {
///     for place in mlx_rs_core::library::searched() {
///         println!("{place}");
///     }
/// }
/// ```
#[must_use]
pub fn searched() -> &'static [String] {
    // `call::loaded` comes first, because it takes the lock before it loads.
    #[cfg(target_os = "linux")]
    if call::loaded().is_err()
        && let Err(e) = mlx_sys::library::load()
    {
        return e.searched();
    }
    &[]
}

/// The file from which MLX was loaded, if known; `None` before [`load`], and on macOS.
///
/// ```
/// mlx_rs_core::library::load()?;
/// if let Some(file) = mlx_rs_core::library::file() {
///     println!("MLX is in {}", file.display());
/// }
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[must_use]
pub fn file() -> Option<PathBuf> {
    #[cfg(target_os = "linux")]
    return mlx_sys::library::file().map(PathBuf::from);
    #[cfg(not(target_os = "linux"))]
    None
}

/// The reason why the build without CUDA was loaded instead of the CUDA build. `None` before
/// [`load`], if the CUDA build was loaded, or without the feature `cuda`.
///
/// ```
/// mlx_rs_core::library::load()?;
/// if let Some(reason) = mlx_rs_core::library::set_aside() {
///     println!("no CUDA here: {reason}");
/// }
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[must_use]
pub fn set_aside() -> Option<&'static str> {
    #[cfg(target_os = "linux")]
    return mlx_sys::library::set_aside();
    #[cfg(not(target_os = "linux"))]
    None
}

/// Name, version and SHA-256 of a Python package.
pub type Pin = [&'static str; 3];

/// A build of MLX that a program can load.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Package {
    /// The directory that [`load`] searches for, such as `mlx-cpu-0.30.6-573baa804539`.
    pub directory: &'static str,
    /// The Python package; `None` for a user-provided MLX (`MLX_ROOT`).
    pub pin: Option<Pin>,
    /// The NVIDIA packages that the build needs, each with its directory below `nvidia`.
    pub libraries: Vec<(&'static str, Pin)>,
}

/// The builds of MLX that [`load`] tries, in order, for programs that install them. The first is
/// the build that this crate was compiled against. With feature `cuda`, the build without CUDA
/// follows. Empty if programs are linked with MLX.
///
/// ```
/// for package in mlx_rs_core::library::packages() {
///     println!("../lib/rust-mlx/{}/mlx/lib", package.directory);
/// }
/// ```
#[must_use]
pub fn packages() -> Vec<Package> {
    #[cfg(target_os = "linux")]
    return mlx_sys::library::packages()
        .map(|package| Package {
            directory: package.directory,
            pin: words(package.pin),
            libraries: package.libraries.split(';').filter_map(library).collect(),
        })
        .collect();
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}

/// Parses a pin from the build script's format.
#[cfg(target_os = "linux")]
fn words(text: &'static str) -> Option<Pin> {
    let mut words = text.split(' ');
    Some([words.next()?, words.next()?, words.next()?])
}

/// Parses a directory and a pin from the build script's format.
#[cfg(target_os = "linux")]
fn library(text: &'static str) -> Option<(&'static str, Pin)> {
    let (directory, pin) = text.split_once(' ')?;
    Some((directory, words(pin)?))
}
