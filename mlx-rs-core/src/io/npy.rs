//! NPY, numpy's format of one array:
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.
//!
//! The header is a Python literal of a fixed form. It is parsed here, strictly and without
//! recursion. General parsers of Python literals overflow the stack on deep nesting.

use std::io::{BufReader, Read, Write};
use std::path::Path;

use super::values::{self, Layout};
use super::{format_error, in_file, io_error, open, replace};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The maximum header size; numpy's own limit is 10,000 bytes.
const MAX_HEADER: usize = 1 << 16;

/// More axes than numpy ever allowed.
const MAX_DIMS: usize = 64;

/// The header before the values.
#[derive(Debug)]
struct Header {
    layout: Layout,
    shape: Vec<i32>,
    /// Bytes of the header itself.
    length: u64,
}

/// Loads one array from an NPY file.
///
/// Every type of MLX is read, in either byte order and either layout (a column-major array becomes
/// a lazy transpose). `V2` is read too, because MLX stores `bfloat16` that way.
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
/// [`ErrorKind::Io`] when the file cannot be read, [`ErrorKind::Format`] when it is truncated, has
/// extra bytes or is no NPY file, [`ErrorKind::Unsupported`] for types that MLX lacks (strings,
/// records, Python objects), [`ErrorKind::OutOfMemory`] beyond the memory budget.
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

/// Reads one array in NPY format from any reader, and no byte more.
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
/// As [`load_npy`], but following bytes are left to the caller.
pub fn read_npy(mut source: impl Read) -> Result<Array> {
    let op = "read_npy";
    let header = header(op, &mut source)?;
    values::read(op, header.layout, &header.shape, &mut source, false)
}

/// Saves one array as an NPY file, atomically.
///
/// The bytes are those that numpy writes. `bfloat16`, which numpy lacks, is stored as in MLX, as
/// the raw type `V2`.
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

/// As `read_npy`, without bytes after the values; `length` is the claimed total size.
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
    // Reading to the end also makes an archive reader check its checksum.
    values::expect_end(op, source)?;
    Ok(array)
}

pub(super) fn write(op: &'static str, mut out: impl Write, array: &Array) -> Result<()> {
    // Evaluated before anything is written, so that a failure leaves no file.
    array.eval()?;
    let mut text = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}",
        descr(array.dtype()),
        tuple(array.shape())
    );
    // Version 1.0: magic, version and a length of two bytes. The values start at a multiple of 64,
    // and a newline ends the header.
    let prefix = MAGIC.len() + 4;
    let padded = (prefix + text.len() + 1).next_multiple_of(64) - prefix;
    text.extend(std::iter::repeat_n(' ', padded - 1 - text.len()));
    text.push('\n');
    let length = u16::try_from(text.len()).map_err(|_| {
        Error::new(
            ErrorKind::Shape,
            op,
            format!("an NPY header cannot hold {} axes", array.ndim()),
        )
    })?;
    let mut head = MAGIC.to_vec();
    head.extend([1, 0]);
    head.extend(length.to_le_bytes());
    head.extend(text.as_bytes());
    out.write_all(&head)
        .map_err(|e| Error::new(ErrorKind::Io, op, e.to_string()))?;
    values::write(op, array, &mut out)
}

/// The size that [`write`] writes, except for the exact header size.
pub(super) fn bytes_about(array: &Array) -> u64 {
    array.nbytes() as u64 + MAX_HEADER as u64
}

fn tuple(shape: &[i32]) -> String {
    let list: Vec<String> = shape.iter().map(ToString::to_string).collect();
    match &list[..] {
        [one] => format!("({one},)"),
        _ => format!("({})", list.join(", ")),
    }
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

/// A type from its name without the byte order.
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

fn header(op: &'static str, source: &mut impl Read) -> Result<Header> {
    let mut exact = |buffer: &mut [u8]| source.read_exact(buffer).map_err(|e| io_error(op, &e));
    let mut start = [0; 8];
    exact(&mut start)?;
    if &start[..6] != MAGIC {
        return Err(format_error(op, "not an NPY file: it starts otherwise"));
    }
    let (length, prefix) = match start[6] {
        1 => {
            let mut length = [0; 2];
            exact(&mut length)?;
            (usize::from(u16::from_le_bytes(length)), 10)
        }
        2 | 3 => {
            let mut length = [0; 4];
            exact(&mut length)?;
            (
                usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX),
                12,
            )
        }
        version => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                op,
                format!("version {version} of the NPY format is unknown; 1 to 3 are"),
            ));
        }
    };
    if length > MAX_HEADER {
        return Err(format_error(
            op,
            format!("the header claims {length} bytes; at most {MAX_HEADER} are accepted"),
        ));
    }
    let mut text = vec![0; length];
    exact(&mut text)?;
    // Versions 1 and 2 are Latin-1, 3 is UTF-8; supported headers are ASCII.
    let text = std::str::from_utf8(&text)
        .map_err(|_| format_error(op, "the header is not text that can be understood"))?;
    let Some(fields) = Parser::new(text).dict() else {
        return Err(malformed(op, text));
    };
    let (big_endian, name) = match (fields.descr.as_bytes().first(), fields.descr.get(1..)) {
        (Some(b'<' | b'|'), Some(name)) => (false, name),
        (Some(b'>'), Some(name)) => (true, name),
        (Some(b'='), Some(name)) => (cfg!(target_endian = "big"), name),
        _ => (false, fields.descr),
    };
    Ok(Header {
        layout: Layout {
            dtype: dtype(op, name)?,
            big_endian,
            column_major: fields.fortran_order,
        },
        shape: values::shape(op, &fields.shape)?,
        length: (prefix + length) as u64,
    })
}

fn malformed(op: &'static str, text: &str) -> Error {
    let shown: String = text.trim_end().chars().take(80).collect();
    if text.contains("'descr': [") {
        return Error::new(
            ErrorKind::Unsupported,
            op,
            format!("arrays of records cannot be loaded: {shown:?}"),
        );
    }
    format_error(op, format!("the header is malformed: {shown:?}"))
}

/// The three fields of a header.
struct Fields<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }` with any order of the
/// fields, either kind of quotes and any spaces. `None` for everything else.
struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn new(rest: &'a str) -> Self {
        Self { rest }
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    /// Whether `token` comes next; consumes it.
    fn take(&mut self, token: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn string(&mut self) -> Option<&'a str> {
        self.skip();
        let quote = self.rest.chars().next().filter(|c| "'\"".contains(*c))?;
        let (text, rest) = self.rest[1..].split_once(quote)?;
        if text.contains('\\') {
            return None;
        }
        self.rest = rest;
        Some(text)
    }

    fn number(&mut self) -> Option<usize> {
        self.skip();
        let digits = self
            .rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(self.rest.len());
        let (number, rest) = self.rest.split_at(digits);
        // Python 2 marked long integers.
        self.rest = rest.strip_prefix('L').unwrap_or(rest);
        number.parse().ok()
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        let mut dims = Vec::new();
        if !self.take("(") {
            return None;
        }
        let mut commas = 0;
        while !self.take(")") {
            if dims.len() > commas || dims.len() == MAX_DIMS {
                return None;
            }
            dims.push(self.number()?);
            commas += usize::from(self.take(","));
        }
        // `(3)` is a number in Python.
        (dims.len() != 1 || commas == 1).then_some(dims)
    }

    fn dict(mut self) -> Option<Fields<'a>> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        if !self.take("{") {
            return None;
        }
        let mut ended = false;
        while !self.take("}") {
            if ended {
                return None;
            }
            let key = self.string()?;
            if !self.take(":") {
                return None;
            }
            let doubled = match key {
                "descr" => descr.replace(self.string()?).is_some(),
                "fortran_order" => {
                    let value = match (self.take("True"), self.take("False")) {
                        (true, false) => true,
                        (false, true) => false,
                        _ => return None,
                    };
                    fortran_order.replace(value).is_some()
                }
                "shape" => shape.replace(self.tuple()?).is_some(),
                _ => true,
            };
            if doubled {
                return None;
            }
            ended = !self.take(",");
        }
        self.skip();
        if !self.rest.is_empty() {
            return None;
        }
        Some(Fields {
            descr: descr?,
            fortran_order: fortran_order?,
            shape: shape?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_what_numpy_writes_and_nothing_else() {
        let parse = |text: &str| {
            let f = Parser::new(text).dict()?;
            Some((f.descr.to_owned(), f.fortran_order, f.shape))
        };
        let want = Some((String::from("<f4"), false, vec![2, 3]));
        for text in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
            "{'shape':(2,3,),\"descr\":\"<f4\",'fortran_order':False}",
            "{ 'fortran_order' : False , 'shape' : ( 2L , 3L ) , 'descr' : '<f4' }",
        ] {
            assert_eq!(parse(text), want, "{text}");
        }
        let one = "{'descr': '|b1', 'fortran_order': True, 'shape': (7,), }";
        assert_eq!(parse(one).map(|f| f.2), Some(vec![7]));
        let none = "{'descr': '|b1', 'fortran_order': True, 'shape': (), }";
        assert_eq!(parse(none).map(|f| f.2), Some(vec![]));
        let deep = "(".repeat(60_000);
        for bad in [
            "",
            "{",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3 4)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4' 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': ''}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x",
            "{'descr': '\\x3cf4', 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4\", 'fortran_order': False, 'shape': ()}",
            &deep,
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let many = format!(
            "{{'descr': '<f4', 'fortran_order': False, 'shape': ({})}}",
            "1,".repeat(65)
        );
        assert_eq!(parse(&many), None);
    }
}
