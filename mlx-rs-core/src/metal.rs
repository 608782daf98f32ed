//! Functions that only Metal supports: captures of GPU work for Xcode. On other systems they return
//! an error.

use std::ffi::CString;
use std::path::Path;

use mlx_sys as sys;

use crate::call;
use crate::error::{Error, ErrorKind, Result};

pub use crate::device::metal_is_available as is_available;

/// A running capture. It ends on drop, or with [`Capture::stop`], which returns an error if the
/// capture could not be written.
#[derive(Debug)]
#[must_use = "a capture ends when it is dropped"]
pub struct Capture {
    running: bool,
}

/// Starts to capture the GPU's work to `path`, a new `.gputrace` file. The process must have been
/// started with `MTL_CAPTURE_ENABLED=1`.
///
/// ```
/// use mlx_rs_core::{ErrorKind, metal};
/// match metal::start_capture("trace.txt") {
///     Err(e) if metal::is_available() => assert_eq!(e.kind(), ErrorKind::Value), // not .gputrace
///     Err(e) => assert_eq!(e.kind(), ErrorKind::Unsupported),
///     Ok(_) => unreachable!(),
/// }
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Unsupported`] without Metal; [`ErrorKind::Value`] for a path that is not a new
/// `.gputrace` file; MLX's message when Metal cannot capture.
#[doc(alias = "mlx_metal_start_capture")]
pub fn start_capture(path: impl AsRef<Path>) -> Result<Capture> {
    let op = "start_capture";
    let path = path.as_ref();
    if !is_available() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            op,
            "Metal is not available here",
        ));
    }
    let usable = path.extension().is_some_and(|e| e == "gputrace") && !path.exists();
    let text = path.to_str().and_then(|p| CString::new(p).ok());
    let Some(text) = text.filter(|_| usable) else {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("{} is not the name of a new .gputrace file", path.display()),
        ));
    };
    call::status(op, || {
        // SAFETY: the string is NUL-terminated and lives during the call. Metal is available.
        unsafe { sys::mlx_metal_start_capture(text.as_ptr()) }
    })?;
    Ok(Capture { running: true })
}

impl Capture {
    /// Ends the capture.
    ///
    /// ```no_run
    /// use mlx_rs_core::{array, eval, metal};
    /// let capture = metal::start_capture("trace.gputrace")?;
    /// eval([&array!([1.0])?.exp()?])?;
    /// capture.stop()?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When Metal cannot write the capture.
    #[doc(alias = "mlx_metal_stop_capture")]
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.running) {
            return Ok(());
        }
        // SAFETY: the call has no arguments, and a capture was started.
        call::status("stop_capture", || unsafe { sys::mlx_metal_stop_capture() })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // A drop cannot report an error.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_metal_nothing_is_captured() {
        if is_available() {
            assert_eq!(
                start_capture("%n%s.txt").unwrap_err().kind(),
                ErrorKind::Value
            );
            return;
        }
        let e = start_capture("%n%s.gputrace").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }
}
