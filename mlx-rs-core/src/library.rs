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
/// [`ErrorKind::Unsupported`] with the places that were searched, the system's reason for each, and
/// a remedy.
pub fn load() -> Result<()> {
    call::loaded().map_err(|message| Error::new(ErrorKind::Unsupported, "load", message))
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

/// The package of MLX that this was built against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Package {
    /// The directory name that [`load`] looks for, such as `mlx-cpu-0.30.6-573baa804539`.
    pub directory: &'static str,
    /// Name, version and SHA-256 of the Python package; `None` for an MLX of the user's own
    /// (`MLX_ROOT`).
    pub pin: Option<[&'static str; 3]>,
}

/// The package of MLX that this was built against, for programs that install it beside themselves.
/// `None` where programs are linked with MLX.
///
/// ```
/// if let Some(package) = mlx_rs_core::library::package() {
///     println!("../lib/rust-mlx/{}/mlx/lib", package.directory);
/// }
/// ```
#[must_use]
pub fn package() -> Option<Package> {
    #[cfg(target_os = "linux")]
    return (!mlx_sys::library::PACKAGE.is_empty()).then(|| {
        let mut words = mlx_sys::library::PIN.split(' ');
        let pin = (|| Some([words.next()?, words.next()?, words.next()?]))();
        Package {
            directory: mlx_sys::library::PACKAGE,
            pin,
        }
    });
    #[cfg(not(target_os = "linux"))]
    None
}
