//! SHA-256 digests of files and streams, in lower-case hexadecimal.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use sha2::{Digest, Sha256};

use super::progress::Progress;

/// A SHA-256 computation in progress.
#[derive(Default)]
pub(super) struct Hasher(Sha256);

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far: 64 lower-case hexadecimal digits.
    pub(super) fn finish(self) -> String {
        use std::fmt::Write as _;
        let mut text = String::with_capacity(64);
        for byte in self.0.finalize() {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

/// Hashes the rest of a reader, and reports the number of hashed bytes to `progress`.
pub(super) fn of_reader(mut reader: impl Read, progress: &mut dyn Progress) -> io::Result<String> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0u8; 1 << 20];
    let mut done = 0u64;
    loop {
        let n = match reader.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finish()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        hasher.update(&buffer[..n]);
        done += n as u64;
        progress.advance(done);
    }
}

/// Hashes a file.
///
/// # Errors
/// [`ErrorKind::Io`] with the file's name, if it cannot be read.
pub(super) fn of_file(path: &Path, progress: &mut dyn Progress) -> Result<String> {
    File::open(path)
        .and_then(|file| of_reader(file, progress))
        .map_err(|e| {
            Error::new(ErrorKind::Io, "cannot read the file to check it")
                .with_path(path)
                .with_source(e)
        })
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;

    #[test]
    fn digests_are_the_published_ones() {
        // FIPS 180-4 example vectors.
        let empty = of_reader(&b""[..], &mut Silent).unwrap();
        assert_eq!(
            empty,
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
        let abc = of_reader(&b"abc"[..], &mut Silent).unwrap();
        assert_eq!(
            abc,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = of_file(Path::new("no/such/file"), &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("no/such/file"), "{error}");
    }
}
