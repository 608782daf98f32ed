//! MLX's own library: whether it can be loaded, and where it came from.

use std::path::PathBuf;

use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// Loads MLX, unless it is loaded. Any other call does so, too: this one is for programs that ask
/// before they begin.
///
/// On Linux a program starts without MLX's library. Where it is looked for,
/// [docs/building.md](https://github.com/rust-mlx/rust-mlx/blob/main/docs/building.md) says. On
/// macOS the program is linked with it.
///
/// ```
/// mlx_rs_core::library::load()?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Unsupported`] with the reason and a remedy; [`searched`] has the places.
pub fn load() -> Result<()> {
    call::loaded().map_err(|message| Error::new(ErrorKind::Unsupported, "load", message))
}

/// The places in which MLX was looked for in vain, each with the reason. None where [`load`] loads
/// it, and on macOS.
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
    // The lock and the order of `load` first.
    #[cfg(target_os = "linux")]
    if call::loaded().is_err()
        && let Err(e) = mlx_sys::library::load()
    {
        return e.searched();
    }
    &[]
}

/// The file that MLX was loaded from, where that is known: not before [`load`], nor on macOS.
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

/// Why the CUDA build of MLX was not loaded, and the one without CUDA was. `None` before [`load`],
/// where the CUDA build was loaded, and in programs built without feature `cuda`.
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
    /// The directory name that [`load`] looks for, such as `mlx-cpu-0.30.6-573baa804539`.
    pub directory: &'static str,
    /// The Python package; `None` for an MLX of the user's own (`MLX_ROOT`).
    pub pin: Option<Pin>,
    /// NVIDIA's packages that belong to it, each with its directory below `nvidia`.
    pub libraries: Vec<(&'static str, Pin)>,
}

/// The builds of MLX that [`load`] tries, in order, for programs that install them beside
/// themselves: what this was built against and, with feature `cuda`, the build without CUDA. None
/// where programs are linked with MLX.
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

/// A pin as the build writes it.
#[cfg(target_os = "linux")]
fn words(text: &'static str) -> Option<Pin> {
    let mut words = text.split(' ');
    Some([words.next()?, words.next()?, words.next()?])
}

/// A directory and a pin as the build writes them.
#[cfg(target_os = "linux")]
fn library(text: &'static str) -> Option<(&'static str, Pin)> {
    let (directory, pin) = text.split_once(' ')?;
    Some((directory, words(pin)?))
}
