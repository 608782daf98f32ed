//! NPY, numpy's format for one array:
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.
//! `inference_formats::npy` parses and writes the headers.

use std::io::{BufReader, Read, Write};
use std::path::Path;

use inference_formats::npy::{self, HeaderError};

use super::values::{self, Layout};
use super::{format_error, in_file, io_error, open, replace};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The information in the header.
#[derive(Debug)]
struct Header {
    layout: Layout,
    shape: Vec<i32>,
    /// The number of bytes of the header.
    length: u64,
}

/// Loads one array from an NPY file.
///
/// All types of MLX are supported, in either byte order and either layout (a column-major array
/// becomes a lazy transpose). `V2` is read as `bfloat16`, because MLX stores it so.
///
/// ```
/// use mlx_rs_core::{array, io};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("a.npy");
/// io::save_npy(&path, &array!([[1, 2], [3, 4]])?)?;
/// assert_eq!(io::load_npy(&path)?.to_vec::<i32>()?, [1, 2, 3, 4]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Io`] when the file cannot be read; [`ErrorKind::Format`] when it is truncated, has
/// extra bytes or is not an NPY file; [`ErrorKind::Unsupported`] for types that MLX lacks (strings,
/// records, Python objects); [`ErrorKind::OutOfMemory`] beyond the memory budget.
pub fn load_npy(path: impl AsRef<Path>) -> Result<Array> {
    let (op, path) = ("load_npy", path.as_ref());
    in_file(
        path,
        open(op, path).and_then(|(file, length)| {
            let mut source = BufReader::new(file);
            let header = header(op, &mut source)?;
            let bytes = values::size(op, &header.shape, header.layout.dtype)?;
            if header.length.checked_add(bytes) != Some(length) {
                return Err(format_error(
                    op,
                    format!(
                        "the header describes {bytes} bytes of values after byte {}, but the file \
                         has {}",
                        header.length,
                        length.saturating_sub(header.length)
                    ),
                ));
            }
            values::read(op, header.layout, &header.shape, &mut source, true)
        }),
    )
}

/// Reads one array in NPY format from any reader. It reads no byte beyond the array.
///
/// ```
/// use mlx_rs_core::{array, io};
/// let mut bytes = Vec::new();
/// io::write_npy(&mut bytes, &array!([1, 2])?)?;
/// io::write_npy(&mut bytes, &array!(true)?)?;
/// let mut source = &bytes[..];
/// assert_eq!(io::read_npy(&mut source)?.to_vec::<i32>()?, [1, 2]);
/// assert!(io::read_npy(&mut source)?.item::<bool>()?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`load_npy`], except that extra bytes are not an error.
pub fn read_npy(mut source: impl Read) -> Result<Array> {
    let op = "read_npy";
    let header = header(op, &mut source)?;
    values::read(op, header.layout, &header.shape, &mut source, false)
}

/// Saves one array as an NPY file, atomically.
///
/// The bytes are those that numpy writes. numpy lacks `bfloat16`, which is stored as the raw type
/// `V2`, as in MLX.
///
/// ```
/// use mlx_rs_core::{Dtype, io, ones};
/// let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("a.npy");
/// io::save_npy(&path, &ones(&[2, 3], Dtype::Bfloat16)?)?;
/// assert_eq!(io::load_npy(&path)?.dtype(), Dtype::Bfloat16);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Io`] when the file cannot be written; MLX's message when evaluation fails.
pub fn save_npy(path: impl AsRef<Path>, array: &Array) -> Result<()> {
    let (op, path) = ("save_npy", path.as_ref());
    in_file(path, replace(op, path, |file| write(op, file, array)))
}

/// Writes one array in NPY format to any writer.
///
/// ```
/// use mlx_rs_core::{array, io};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let mut bytes = Vec::new();
/// io::write_npy(&mut bytes, &array!([1.5, 2.5])?)?;
/// assert_eq!(io::read_npy(&bytes[..])?.to_vec::<f32>()?, [1.5, 2.5]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`save_npy`].
pub fn write_npy(out: impl Write, array: &Array) -> Result<()> {
    write("write_npy", out, array)
}

/// Like `read_npy`, but bytes after the values are an error. `length` is the claimed total size.
pub(super) fn read_whole(op: &'static str, source: &mut impl Read, length: u64) -> Result<Array> {
    let header = header(op, source)?;
    let bytes = values::size(op, &header.shape, header.layout.dtype)?;
    if header.length.checked_add(bytes) != Some(length) {
        return Err(format_error(
            op,
            format!("a header describes {bytes} bytes of values, but another number follows it"),
        ));
    }
    let array = values::read(op, header.layout, &header.shape, source, false)?;
    // Reading to the end also makes an archive reader verify the checksum.
    values::expect_end(op, source)?;
    Ok(array)
}

pub(super) fn write(op: &'static str, mut out: impl Write, array: &Array) -> Result<()> {
    // The array is evaluated before anything is written, so a failure leaves no file.
    array.eval()?;
    let shape: Vec<usize> = array.shape().iter().map(|&d| d as usize).collect();
    let head = npy::header(descr(array.dtype()), &shape).map_err(|e| header_error(op, e))?;
    out.write_all(&head)
        .map_err(|e| Error::new(ErrorKind::Io, op, e.to_string()))?;
    values::write(op, array, &mut out)
}

/// The number of bytes that [`write`] writes. The size of the header is approximate.
pub(super) fn bytes_about(array: &Array) -> u64 {
    array.nbytes() as u64 + npy::MAX_HEADER as u64
}

fn descr(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bool => "|b1",
        Dtype::Uint8 => "|u1",
        Dtype::Uint16 => "<u2",
        Dtype::Uint32 => "<u4",
        Dtype::Uint64 => "<u8",
        Dtype::Int8 => "|i1",
        Dtype::Int16 => "<i2",
        Dtype::Int32 => "<i4",
        Dtype::Int64 => "<i8",
        Dtype::Float16 => "<f2",
        Dtype::Float32 => "<f4",
        Dtype::Float64 => "<f8",
        Dtype::Bfloat16 => "<V2",
        Dtype::Complex64 => "<c8",
    }
}

/// The type for a name without the byte order.
fn dtype(op: &'static str, name: &str) -> Result<Dtype> {
    Dtype::ALL
        .into_iter()
        .find(|&d| &descr(d)[1..] == name)
        .ok_or_else(|| {
            let hint = match name.as_bytes().first() {
                Some(b'O') => "Python objects are pickles, which are never executed",
                Some(b'c' | b'f') => "MLX has float16 to float64 and complex64; convert it first",
                _ => "MLX has booleans, integers, floats and complex64",
            };
            Error::new(
                ErrorKind::Unsupported,
                op,
                format!("values of numpy's type {name:?} cannot be loaded: {hint}"),
            )
        })
}

/// Reads a header, and no byte beyond it.
fn header(op: &'static str, source: &mut impl Read) -> Result<Header> {
    let header = npy::Header::read(source).map_err(|e| header_error(op, e))?;
    let descr = header.descr.as_str();
    let (big_endian, name) = match (descr.as_bytes().first(), descr.get(1..)) {
        (Some(b'<' | b'|'), Some(name)) => (false, name),
        (Some(b'>'), Some(name)) => (true, name),
        (Some(b'='), Some(name)) => (cfg!(target_endian = "big"), name),
        _ => (false, descr),
    };
    Ok(Header {
        layout: Layout {
            dtype: dtype(op, name)?,
            big_endian,
            column_major: header.fortran_order,
        },
        shape: values::shape(op, &header.shape)?,
        length: header.len as u64,
    })
}

fn header_error(op: &'static str, e: HeaderError) -> Error {
    let kind = match &e {
        HeaderError::Io(e) => return io_error(op, e),
        HeaderError::Version(_) | HeaderError::Records(_) => ErrorKind::Unsupported,
        HeaderError::TooManyAxes(_) => ErrorKind::Shape,
        _ => ErrorKind::Format,
    };
    Error::new(kind, op, e.to_string())
}
