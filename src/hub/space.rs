//! Checks whether a download fits on its file system.

use std::path::Path;

use inference::{Error, ErrorKind, Result};

/// Number of bytes that must stay free for other programs.
const RESERVE: u64 = 64 << 20;

/// Refuses to write `bytes` more bytes to `path`, if its file system has too little free space.
///
/// # Errors
/// [`ErrorKind::Io`] with the needed and the free size.
pub(super) fn check(path: &Path, bytes: u64) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    match free(dir) {
        Some(free) => enough(free, bytes).map_err(|e| e.with_path(dir)),
        // Some network file systems do not report free space.
        None => Ok(()),
    }
}

fn enough(free: u64, bytes: u64) -> Result<()> {
    if bytes == 0 || bytes.saturating_add(RESERVE) <= free {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "the download needs {bytes} bytes and leaves {RESERVE} free, of which there are \
             {free}; make room, or choose another file system (MLX_CACHE_DIR, HF_HUB_CACHE)"
        ),
    ))
}

#[cfg(unix)]
fn free(dir: &Path) -> Option<u64> {
    let stats = rustix::fs::statvfs(dir).ok()?;
    stats.f_bavail.checked_mul(stats.f_frsize)
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_that_do_not_fit_are_refused() {
        enough(RESERVE + 5, 5).unwrap();
        enough(0, 0).unwrap();
        let why = enough(RESERVE + 4, 5).unwrap_err().to_string();
        assert!(why.contains("needs 5 bytes"), "{why}");
        assert!(enough(u64::MAX - 1, u64::MAX).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn the_file_system_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model");
        check(&file, 1).unwrap();
        let why = check(&file, u64::MAX / 2).unwrap_err().to_string();
        assert!(why.contains(&dir.path().display().to_string()), "{why}");
    }
}
