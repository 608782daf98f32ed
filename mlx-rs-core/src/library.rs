//! MLX's own library: whether it can be loaded, and where it came from.

use std::path::PathBuf;

use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// Loads MLX, unless it is loaded. Any other call does so, too: this one is for programs that ask
/// before they begin.
///
/// On Linux a program starts without MLX's library. Where it is looked for,
/// [docs/building.md](https://github.com/rust-mlx/rust-mlx/blob/main/docs/building.md) says. On macOS the
/// program is linked with it.
///
/// ```
/// mlx_rs_core::library::load()?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Unsupported`] with the places that were looked at, the system's reason for each, and
/// what would help.
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
