//! Safetensors, Hugging Face's format for named tensors. The `safetensors` crate parses headers,
//! and this file reads the values. Crates that depend on this one handle sharded models.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use safetensors::Dtype as Stored;
use safetensors::tensor::{Metadata, TensorInfo};

use super::values::{self, Layout};
use super::{format_error, in_file, io_error, open, replace};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The size in bytes of the field before the header. The field contains the header's length.
const LENGTH_BYTES: u64 = 8;

/// The maximum header size.
const MAX_HEADER: u64 = 64 << 20;

/// Values start at a multiple of this number of bytes.
const ALIGNMENT: usize = 8;

/// The arrays of a safetensors file and its metadata.
#[derive(Debug, Clone, Default)]
pub struct Safetensors {
    /// The arrays by name.
    pub arrays: BTreeMap<String, Array>,
    /// Free text, such as `format`: `mlx`.
    pub metadata: BTreeMap<String, String>,
}

/// An open safetensors file whose arrays are read one at a time, on demand.
///
/// ```
/// use mlx_rs_core::{array, io};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("a.safetensors");
/// io::save_safetensors(&path, [("a", &array!([1, 2])?), ("b", &array!(0.5)?)], &[])?;
/// let file = io::SafetensorsFile::open(&path)?;
/// assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b"]);
/// assert_eq!(file.load("a")?.to_vec::<i32>()?, [1, 2]);
/// assert!(file.load("c").is_err());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    /// All readers share the file's position, so access is locked.
    file: Mutex<File>,
    /// The start of the values in the file.
    start: u64,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header. Every tensor must have exactly the bytes of its shape.
    /// There must be no gaps, and the last tensor must end at the end of the file.
    ///
    /// ```
    /// use mlx_rs_core::{array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert!(file.names().eq(["a"]));
    /// std::fs::write(&path, b"something else").unwrap();
    /// assert!(io::SafetensorsFile::open(&path).is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the file cannot be read; [`ErrorKind::Format`] when it is truncated,
    /// has extra bytes or an invalid header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        in_file(path, Self::read_header(path))
    }

    fn read_header(path: &Path) -> Result<Self> {
        let op = "load_safetensors";
        let (mut file, length) = open(op, path)?;
        let mut size = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut size).map_err(|e| io_error(op, &e))?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER.min(length.saturating_sub(LENGTH_BYTES)) {
            return Err(format_error(
                op,
                format!(
                    "the header claims {size} bytes; the file has {length} and at most {MAX_HEADER} \
                     are accepted"
                ),
            ));
        }
        // The size is at most MAX_HEADER, which fits a usize.
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header).map_err(|e| io_error(op, &e))?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|e| format_error(op, format!("the header is wrong: {e}")))?;
        let start = LENGTH_BYTES + size;
        if start.checked_add(header.data_len() as u64) != Some(length) {
            return Err(format_error(
                op,
                format!(
                    "the header describes {} bytes of values, but {} follow it",
                    header.data_len(),
                    length - start
                ),
            ));
        }
        let tensors = header.tensors();
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(file),
            start,
            tensors: tensors.into_iter().map(|(k, v)| (k, v.clone())).collect(),
            metadata: header.metadata().clone().into_iter().flatten().collect(),
        })
    }

    /// The names of all arrays, in alphabetical order.
    ///
    /// ```
    /// use mlx_rs_core::{array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert!(file.names().eq(["a"]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of the array `name`; `None` if it does not exist.
    ///
    /// ```
    /// use mlx_rs_core::{array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert_eq!(file.shape("a"), Some(&[2][..]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|t| &t.shape[..])
    }

    /// The type of the array `name`; `None` if it does not exist, or MLX lacks its type.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert_eq!((file.dtype("a"), file.dtype("b")), (Some(Dtype::Float32), None));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.get(name).and_then(|t| dtype(t.dtype))
    }

    /// The file's metadata: free text by key.
    ///
    /// ```
    /// use mlx_rs_core::{array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert_eq!(file.metadata()["format"], "mlx");
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads the array `name`.
    ///
    /// ```
    /// use mlx_rs_core::{array, io};
    /// let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("a.safetensors");
    /// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[("format", "mlx")])?;
    /// let file = io::SafetensorsFile::open(&path)?;
    /// assert_eq!(file.load("a")?.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the array does not exist; [`ErrorKind::Unsupported`] for floats of
    /// 8 bits and fewer, which MLX lacks; [`ErrorKind::OutOfMemory`] beyond the memory budget;
    /// [`ErrorKind::Io`] when reading fails.
    pub fn load(&self, name: &str) -> Result<Array> {
        in_file(&self.path, self.read(name).map_err(|e| e.context(name)))
    }

    fn read(&self, name: &str) -> Result<Array> {
        let op = "load_safetensors";
        let Some(info) = self.tensors.get(name) else {
            let message = format!("there is no such array among the {}", self.tensors.len());
            return Err(Error::new(ErrorKind::Value, op, message));
        };
        let Some(dtype) = dtype(info.dtype) else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                op,
                format!("MLX has no type for {}", info.dtype),
            ));
        };
        let shape = values::shape(op, &info.shape)?;
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(self.start + info.data_offsets.0 as u64))
            .map_err(|e| io_error(op, &e))?;
        let layout = Layout::little_endian(dtype);
        values::read(op, layout, &shape, &mut *file, true)
    }
}

/// Loads all arrays of a safetensors file, and its metadata.
///
/// ```
/// use mlx_rs_core::{array, io};
/// let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("a.safetensors");
/// io::save_safetensors(&path, [("a", &array!([1.0, 2.0])?)], &[])?;
/// let io::Safetensors { arrays, metadata } = io::load_safetensors(&path)?;
/// assert_eq!((arrays["a"].shape(), metadata.len()), (&[2][..], 0));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`SafetensorsFile::open`] and [`SafetensorsFile::load`].
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<Safetensors> {
    let file = SafetensorsFile::open(path)?;
    let arrays = file
        .names()
        .map(|name| Ok((name.to_owned(), file.load(name)?)))
        .collect::<Result<_>>()?;
    Ok(Safetensors {
        arrays,
        metadata: file.metadata,
    })
}

/// Saves named arrays and metadata as a safetensors file, atomically. Arrays are sorted by
/// decreasing size of their type, then by name. So each array is aligned, and equal arrays produce
/// equal files. Python MLX (0.30) can read every type except `float64`.
///
/// ```
/// use mlx_rs_core::{array, io};
/// let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("a.safetensors");
/// let (w, b) = (array!([[1.0]])?, array!([0.0])?);
/// io::save_safetensors(&path, [("w", &w), ("b", &b)], &[("format", "mlx")])?;
/// assert!(io::save_safetensors(&path, [("w", &w), ("w", &b)], &[]).is_err());
/// assert_eq!(io::load_safetensors(&path)?.arrays.len(), 2);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Io`] when the file cannot be written, [`ErrorKind::Value`] when a name is repeated
/// or is the reserved `__metadata__`; MLX's message when evaluation fails.
pub fn save_safetensors<'a, S: AsRef<str>>(
    path: impl AsRef<Path>,
    arrays: impl IntoIterator<Item = (S, &'a Array)>,
    metadata: &[(&str, &str)],
) -> Result<()> {
    let (op, path) = ("save_safetensors", path.as_ref());
    let mut named = BTreeMap::new();
    for (name, array) in arrays {
        let name = name.as_ref();
        if name == "__metadata__" || named.insert(name.to_owned(), array).is_some() {
            let message = format!("{name:?} is reserved or the name of two arrays");
            return Err(Error::new(ErrorKind::Value, op, message));
        }
    }
    crate::eval(named.values().copied())?;
    let mut ordered: Vec<(String, &Array)> = named.into_iter().collect();
    // A stable sort keeps equal types sorted by name.
    ordered.sort_by_key(|(_, array)| std::cmp::Reverse(array.dtype().size()));

    let mut offset = 0;
    let mut infos = Vec::with_capacity(ordered.len());
    for (name, array) in &ordered {
        let start = offset;
        offset += array.nbytes();
        let info = TensorInfo {
            dtype: stored(array.dtype()),
            // A dimension is never negative.
            shape: array.shape().iter().map(|&d| d as usize).collect(),
            data_offsets: (start, offset),
        };
        infos.push((name.clone(), info));
    }
    let free: HashMap<String, String> = metadata
        .iter()
        .map(|&(k, v)| (k.to_owned(), v.to_owned()))
        .collect();
    let free = (!free.is_empty()).then_some(free);
    // The header is built as a `Value`, so that the order of keys does not depend on a hash map.
    let header = Metadata::new(free, infos)
        .map_err(|e| e.to_string())
        .and_then(|m| serde_json::to_value(&m).map_err(|e| e.to_string()))
        .map_err(|e| Error::new(ErrorKind::Value, op, e))?;
    let mut header = sorted_metadata(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');

    let written = replace(op, path, |file| {
        let mut out = BufWriter::new(file);
        let fault = |e: std::io::Error| Error::new(ErrorKind::Io, op, e.to_string());
        out.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(&header))
            .map_err(fault)?;
        for (name, array) in &ordered {
            values::write(op, array, &mut out).map_err(|e| e.context(name))?;
        }
        out.flush().map_err(fault)
    });
    in_file(path, written)
}

/// The header with its metadata sorted by key.
fn sorted_metadata(mut header: serde_json::Value) -> serde_json::Value {
    if let Some(serde_json::Value::Object(free)) = header.get_mut("__metadata__") {
        let entries: BTreeMap<String, serde_json::Value> =
            std::mem::take(free).into_iter().collect();
        *free = entries.into_iter().collect();
    }
    header
}

/// The array type for a stored type.
fn dtype(stored: Stored) -> Option<Dtype> {
    Some(match stored {
        Stored::BOOL => Dtype::Bool,
        Stored::U8 => Dtype::Uint8,
        Stored::U16 => Dtype::Uint16,
        Stored::U32 => Dtype::Uint32,
        Stored::U64 => Dtype::Uint64,
        Stored::I8 => Dtype::Int8,
        Stored::I16 => Dtype::Int16,
        Stored::I32 => Dtype::Int32,
        Stored::I64 => Dtype::Int64,
        Stored::F16 => Dtype::Float16,
        Stored::BF16 => Dtype::Bfloat16,
        Stored::F32 => Dtype::Float32,
        Stored::F64 => Dtype::Float64,
        Stored::C64 => Dtype::Complex64,
        _ => return None,
    })
}

fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::Bool => Stored::BOOL,
        Dtype::Uint8 => Stored::U8,
        Dtype::Uint16 => Stored::U16,
        Dtype::Uint32 => Stored::U32,
        Dtype::Uint64 => Stored::U64,
        Dtype::Int8 => Stored::I8,
        Dtype::Int16 => Stored::I16,
        Dtype::Int32 => Stored::I32,
        Dtype::Int64 => Stored::I64,
        Dtype::Float16 => Stored::F16,
        Dtype::Bfloat16 => Stored::BF16,
        Dtype::Float32 => Stored::F32,
        Dtype::Float64 => Stored::F64,
        Dtype::Complex64 => Stored::C64,
    }
}
