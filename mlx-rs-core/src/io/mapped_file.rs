//! Files that are mapped into memory, so that they are read without a copy.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::io_error;
#[cfg(unix)]
use super::shrinking::{MAX, Watch};
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "MappedFile";

/// A memory-mapped file. The system reads a page from disk when it is first used, keeps it while
/// there is free memory, and shares it between processes. A clone is another handle.
///
/// The file must not change while it is mapped. It may be deleted, or replaced by a rename. If it
/// is modified, reads return other values. If it is truncated, reads of the missing bytes return
/// zeros, and [`Self::check`] reports it. So map only files that are written once.
///
/// The system signals a read of missing bytes with SIGBUS. The first mapping installs a handler of
/// this signal for the process. The handler passes all other causes of the signal to the handler
/// that was installed before. A handler that is installed later must do the same.
///
/// ```
/// use mlx_rs_core::io::MappedFile;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("numbers");
/// std::fs::write(&path, [0u8, 0, 128, 63, 0, 0, 0, 64])?;
/// let file = MappedFile::open(&path)?;
/// assert_eq!(file.bytes().len(), 8);
/// assert_eq!(file.floats(4..8)?.as_ref(), [2.0]);
/// assert!(file.floats(4..12).is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct MappedFile(Arc<Mapping>);

#[derive(Debug)]
struct Mapping {
    // Fields are dropped in this order, and the watch must end before the mapping.
    #[cfg(unix)]
    watch: Watch,
    map: Mmap,
    file: File,
    path: PathBuf,
}

impl MappedFile {
    /// Maps a regular file for reading.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the file cannot be opened or mapped; [`ErrorKind::Value`] if it is
    /// not a regular file, or if 1,024 files are already mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = File::open(&path).map_err(|e| io_error(OP, &e))?;
        Self::of(file, path)
    }

    /// Maps an open file. `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    /// ```
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("text");
    /// std::fs::write(&path, "abc").unwrap();
    /// let file = std::fs::File::open(&path).unwrap();
    /// std::fs::remove_file(&path).unwrap();
    /// # #[cfg(unix)]
    /// assert_eq!(mlx_rs_core::io::MappedFile::of(file, &path)?.bytes(), b"abc");
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn of(file: File, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let about = file.metadata().map_err(|e| io_error(OP, &e))?;
        if !about.is_file() {
            let message = "only a regular file can be mapped";
            return Err(Error::new(ErrorKind::Value, OP, message));
        }
        // SAFETY: the mapping is read-only, and no code here writes to it. As documented, the
        // caller must ensure that nothing writes to the file; no type can express that. If the file
        // is truncated, reads return zeros.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| io_error(OP, &e))?;
        // SAFETY: these are all bytes of the mapping, which is only read. The fields of `Mapping`
        // keep both together, and the watch ends before the mapping.
        #[cfg(unix)]
        let watch = unsafe { Watch::new(&map) }.ok_or_else(|| {
            let message = format!("{MAX} files are mapped; more are not supported");
            Error::new(ErrorKind::Value, OP, message)
        })?;
        Ok(Self(Arc::new(Mapping {
            #[cfg(unix)]
            watch,
            map,
            file,
            path,
        })))
    }

    /// Whether a read found that bytes are missing.
    #[cfg(unix)]
    pub(crate) fn lost(&self) -> bool {
        self.0.watch.lost()
    }

    /// Returns `false`, because other systems do not allow truncating a mapped file.
    #[cfg(not(unix))]
    pub(crate) fn lost(&self) -> bool {
        false
    }

    /// Checks that the file still has all mapped bytes. Call it after reading: on an error, the
    /// values that were read are not valid.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the file was truncated.
    /// ```
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("text");
    /// std::fs::write(&path, "abc").unwrap();
    /// let file = mlx_rs_core::io::MappedFile::open(&path)?;
    /// assert!(file.check().is_ok());
    /// std::fs::write(&path, "a").unwrap();
    /// assert!(file.check().is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        let Mapping {
            map, file, path, ..
        } = &*self.0;
        let length = file.metadata().map_err(|e| io_error(OP, &e))?.len();
        if !self.lost() && length >= map.len() as u64 {
            return Ok(());
        }
        let message = format!(
            "{} was truncated while it was mapped: it had {} bytes, and has {length}",
            path.display(),
            map.len()
        );
        Err(Error::new(ErrorKind::Io, OP, message))
    }

    /// All bytes of the file.
    /// ```
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("text");
    /// std::fs::write(&path, "abc").unwrap();
    /// assert_eq!(mlx_rs_core::io::MappedFile::open(&path)?.bytes(), b"abc");
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0.map
    }

    /// The little-endian float32 values in a range of bytes, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the range is not within the file, or not aligned to its elements;
    /// always on big-endian machines.
    pub fn floats(&self, bytes: Range<usize>) -> Result<Floats> {
        self.check_range::<f32>(&bytes, "float32")?;
        Ok(Floats(Source::File(self.clone(), bytes)))
    }

    /// The little-endian float16 values in a range of bytes, without a copy.
    ///
    /// # Errors
    /// As [`Self::floats`].
    /// ```
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("halves");
    /// std::fs::write(&path, [0u8, 60, 0, 192]).unwrap(); // 1 and -2
    /// let file = mlx_rs_core::io::MappedFile::open(&path)?;
    /// assert_eq!(file.halves(0..4)?.as_ref(), [0x3c00, 0xc000]);
    /// assert!(file.halves(1..3).is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn halves(&self, bytes: Range<usize>) -> Result<Halves> {
        self.check_range::<u16>(&bytes, "float16")?;
        Ok(Halves(self.clone(), bytes))
    }

    /// Checks that a range is within the file and consists of whole, aligned elements.
    fn check_range<T: bytemuck::Pod>(&self, bytes: &Range<usize>, kind: &str) -> Result<()> {
        let fault = |message: String| Error::new(ErrorKind::Value, OP, message);
        if cfg!(target_endian = "big") {
            return Err(fault("this machine has another byte order".into()));
        }
        let slice = self.0.map.get(bytes.clone());
        match slice.is_some_and(|slice| bytemuck::try_cast_slice::<u8, T>(slice).is_ok()) {
            true => Ok(()),
            false => Err(fault(format!(
                "bytes {} to {} are not numbers of {kind} in a file of {} bytes",
                bytes.start,
                bytes.end,
                self.0.map.len()
            ))),
        }
    }
}

/// Float16 values in a mapped file, as raw bits. A clone is another handle.
#[derive(Clone)]
pub struct Halves(MappedFile, Range<usize>);

impl AsRef<[u16]> for Halves {
    fn as_ref(&self) -> &[u16] {
        bytemuck::cast_slice(&self.0.bytes()[self.1.clone()])
    }
}

impl Halves {
    /// Checks that the file still has all its bytes ([`MappedFile::check`]).
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the file was truncated.
    /// ```
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("halves");
    /// std::fs::write(&path, [0u8, 60]).unwrap();
    /// let halves = mlx_rs_core::io::MappedFile::open(&path)?.halves(0..2)?;
    /// assert!(halves.check().is_ok());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        self.0.check()
    }
}

impl fmt::Debug for Halves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} float16, mapped", self.as_ref().len())
    }
}

/// Float32 values in a mapped file, or in separate memory. A clone is another handle.
/// ```
/// use mlx_rs_core::io::Floats;
/// let floats = Floats::from(vec![1.0, 2.0]);
/// assert_eq!(floats.clone().as_ref(), [1.0, 2.0]);
/// ```
#[derive(Clone)]
pub struct Floats(Source);

#[derive(Clone)]
enum Source {
    /// A validated range of bytes.
    File(MappedFile, Range<usize>),
    Memory(Arc<[f32]>),
}

impl AsRef<[f32]> for Floats {
    fn as_ref(&self) -> &[f32] {
        match &self.0 {
            Source::File(file, bytes) => bytemuck::cast_slice(&file.bytes()[bytes.clone()]),
            Source::Memory(all) => all,
        }
    }
}

impl Floats {
    /// Checks that the file, if the values are mapped, still has all its bytes
    /// ([`MappedFile::check`]).
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the file was truncated.
    /// ```
    /// use mlx_rs_core::io::Floats;
    /// assert!(Floats::from(vec![1.0]).check().is_ok());
    /// ```
    pub fn check(&self) -> Result<()> {
        match &self.0 {
            Source::File(file, _) => file.check(),
            Source::Memory(_) => Ok(()),
        }
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Self {
        Self(Source::Memory(values.into()))
    }
}

impl fmt::Debug for Floats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.0 {
            Source::File(..) => "mapped",
            Source::Memory(_) => "in memory",
        };
        write!(f, "{} float32, {place}", self.as_ref().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_within_the_file_and_between_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("numbers");
        let values: Vec<f32> = (0..9).map(|i| i as f32 - 4.5).collect();
        let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        bytes.push(7);
        std::fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert_eq!(file.bytes(), bytes);
        let actual = file.floats(4..20).unwrap();
        assert_eq!(actual.as_ref(), &values[1..5]);
        assert_eq!(format!("{actual:?}"), "4 float32, mapped");
        assert!(file.floats(0..0).unwrap().as_ref().is_empty());
        for wrong in [0..37, 1..5, 0..3, 36..40, 40..44, 4..usize::MAX] {
            let error = file.floats(wrong.clone()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Value, "{wrong:?}");
        }
        let halves = file.halves(2..6).unwrap();
        let bits = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        assert_eq!(halves.as_ref(), [bits(2), bits(4)]);
        assert_eq!(format!("{halves:?}"), "2 float16, mapped");
        for wrong in [0..37, 1..5, 36..40, 40..42] {
            assert!(file.halves(wrong).is_err());
        }
        // The mapping must stay valid after the file's name is removed.
        std::fs::remove_file(&path).unwrap();
        drop(file);
        assert_eq!(actual.as_ref(), &values[1..5]);
    }

    /// Reads of missing bytes must return zeros, and the check must report it. Other files must not
    /// be affected.
    #[cfg(unix)]
    #[test]
    fn a_truncated_file_is_an_error_and_no_signal() {
        let dir = tempfile::tempdir().unwrap();
        let size = 1 << 18;
        let write = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![7u8; size]).unwrap();
            (MappedFile::open(&path).unwrap(), path)
        };
        let ((file, path), (other, _)) = (write("shrinks"), write("stays"));
        let floats = file.floats(0..size).unwrap();
        let read = |file: &MappedFile, at: usize| std::hint::black_box(file.bytes())[at];
        assert_eq!(read(&file, size - 1), 7);
        assert!(file.check().is_ok() && floats.check().is_ok());
        let shrunk = File::options().write(true).open(&path).unwrap();
        // For the rest of the last page, the system returns zeros without a signal.
        shrunk.set_len(100).unwrap();
        let error = file.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        let said = error.to_string();
        assert!(
            said.contains("shrinks was truncated") && said.contains("has 100"),
            "{said}"
        );
        // Many threads reach the end of the file at the same time.
        std::thread::scope(|scope| {
            for first in 0..8 {
                let (file, read) = (&file, &read);
                scope.spawn(move || {
                    let all = (first..size).rev().step_by(977);
                    let zeros = all.filter(|at| *at >= 100).all(|at| read(file, at) == 0);
                    assert!(zeros);
                });
            }
        });
        assert_eq!(read(&file, 99), 7);
        // Extending the file again does not restore its bytes.
        shrunk.set_len(size as u64).unwrap();
        assert!(file.check().is_err() && floats.check().is_err());
        assert!(other.check().is_ok());
        assert_eq!(read(&other, size - 1), 7);
        drop((file, floats));
        // The slot of the dropped mapping must be free again.
        let (again, _) = write("again");
        assert!(again.check().is_ok());
    }

    #[test]
    fn what_is_no_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = MappedFile::open(dir.path().join("none")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(MappedFile::open(dir.path()).is_err());
        let empty = dir.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        assert!(MappedFile::open(&empty).is_ok_and(|file| file.bytes().is_empty()));
    }
}
