//! Reads text files that the command line names, up to a size limit. The length that the system
//! reports cannot serve as limit, because it is 0 for devices and pipes.

use std::fs::File;
use std::io::{Error, Read, Result};
use std::path::Path;

/// Maximum size of a prompt on standard input in bytes, far above any model's context.
pub const MAX_INPUT: u64 = 64 << 20;

/// Reads a UTF-8 text of at most `limit` bytes. The file may be a pipe.
///
/// # Errors
/// Errors of the system, and an error if the file exceeds `limit`.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(limit.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(Error::other(format!("it has more than {limit} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::other(format!("it is not UTF-8 text (at byte {at})"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_end_at_the_limit_or_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let why = read_text(&path, 4).unwrap_err().to_string();
        assert_eq!(why, "it has more than 4 bytes");
        std::fs::write(&path, b"ab\xff").unwrap();
        let why = read_text(&path, 9).unwrap_err().to_string();
        assert!(why.contains("at byte 2"), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn a_device_without_end_is_refused() {
        let why = read_text(Path::new("/dev/zero"), 1 << 16).unwrap_err();
        assert!(why.to_string().contains("more than 65536 bytes"), "{why}");
    }
}
