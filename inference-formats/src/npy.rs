//! The `.npy` format, versions 1 to 3, as numpy's `numpy.lib.format` documents it: headers of every
//! type, and arrays of float32 and float64 in C order.
//!
//! The header is a Python literal of a fixed form. The parser here is strict and does not recurse.
//! General parsers of Python literals overflow the stack on deep nesting, or depend on a grammar
//! compiler and a library for big integers.

use std::fmt;
use std::io::{self, Read};

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The maximum header size; numpy's own limit is 10,000 bytes.
pub const MAX_HEADER: usize = 1 << 16;

/// Maximum number of axes, above numpy's own limit.
const MAX_DIMS: usize = 64;

/// Why a header cannot be read or written.
#[derive(Debug)]
#[non_exhaustive]
pub enum HeaderError {
    /// Reading from the source failed, or the source ended.
    Io(io::Error),
    /// The file does not start with NPY's magic bytes.
    NotNpy,
    /// An unknown version of the format.
    Version(u8),
    /// An array of records, which is not supported. The string is the start of the header.
    Records(String),
    /// Another fault, as a message.
    Malformed(String),
    /// The number of axes is too large for a header of version 1.
    TooManyAxes(usize),
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the file ends within its header")
            }
            Self::Io(e) => write!(f, "cannot read the header: {e}"),
            Self::NotNpy => {
                f.write_str("this is not an .npy file: it does not begin with \\x93NUMPY")
            }
            Self::Version(version) => write!(
                f,
                "version {version} of the NPY format is unknown; 1 to 3 are"
            ),
            Self::Records(header) => write!(f, "arrays of records cannot be loaded: {header:?}"),
            Self::Malformed(message) => f.write_str(message),
            Self::TooManyAxes(n) => write!(f, "an NPY header cannot hold {n} axes"),
        }
    }
}

impl std::error::Error for HeaderError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(e) => Some(e),
            _ => None,
        }
    }
}

/// The header of a file.
///
/// ```
/// use inference_formats::npy::{Header, header};
/// let file = header("<i4", &[2, 3])?;
/// let read = Header::read(&mut &file[..])?;
/// assert_eq!((read.descr.as_str(), read.shape), ("<i4", vec![2, 3]));
/// assert_eq!(read.len, file.len());
/// # Ok::<(), inference_formats::npy::HeaderError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The type of the values with its byte order, such as `<f4`.
    pub descr: String,
    /// Whether the first axis varies fastest.
    pub fortran_order: bool,
    /// The length of each axis.
    pub shape: Vec<usize>,
    /// Size of the header in bytes. The values follow it.
    pub len: usize,
}

impl Header {
    /// Reads a header, and no further byte.
    ///
    /// # Errors
    /// [`HeaderError`] for each header that numpy does not write.
    pub fn read(source: &mut impl Read) -> Result<Self, HeaderError> {
        let mut exact = |buffer: &mut [u8]| source.read_exact(buffer).map_err(HeaderError::Io);
        let mut start = [0; 8];
        exact(&mut start[..6])?;
        if &start[..6] != MAGIC {
            return Err(HeaderError::NotNpy);
        }
        exact(&mut start[6..])?;
        let (length, prefix) = match start[6] {
            1 => {
                let mut length = [0; 2];
                exact(&mut length)?;
                (usize::from(u16::from_le_bytes(length)), 10)
            }
            2 | 3 => {
                let mut length = [0; 4];
                exact(&mut length)?;
                let length = usize::try_from(u32::from_le_bytes(length));
                (length.unwrap_or(usize::MAX), 12)
            }
            version => return Err(HeaderError::Version(version)),
        };
        if length > MAX_HEADER {
            return Err(HeaderError::Malformed(format!(
                "the header claims {length} bytes; at most {MAX_HEADER} are accepted"
            )));
        }
        let mut text = vec![0; length];
        exact(&mut text)?;
        // Versions 1 and 2 use Latin-1, and version 3 uses UTF-8. Supported headers are ASCII,
        // which is a subset of both.
        let text = std::str::from_utf8(&text)
            .map_err(|_| HeaderError::Malformed(String::from("the header is not ASCII text")))?;
        let fields = Parser::new(text).dict().ok_or_else(|| malformed(text))?;
        Ok(Self {
            descr: fields.descr.to_owned(),
            fortran_order: fields.fortran_order,
            shape: fields.shape,
            len: prefix + length,
        })
    }
}

fn malformed(text: &str) -> HeaderError {
    let shown: String = text.trim_end().chars().take(80).collect();
    if text.contains("'descr': [") {
        return HeaderError::Records(shown);
    }
    HeaderError::Malformed(format!("the header is malformed: {shown:?}"))
}

/// A header of version 1 for values in C order. `descr` is their type with its byte order.
///
/// # Errors
/// [`HeaderError::TooManyAxes`].
pub fn header(descr: &str, shape: &[usize]) -> Result<Vec<u8>, HeaderError> {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let tuple = match &dims[..] {
        [one] => format!("({one},)"),
        _ => format!("({})", dims.join(", ")),
    };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple}, }}");
    // The prefix has magic bytes, version and a 2-byte length. The values must start at a multiple
    // of 64, and the header must end with a newline.
    let prefix = MAGIC.len() + 4;
    let padded = (prefix + text.len() + 1).next_multiple_of(64) - prefix;
    text.extend(std::iter::repeat_n(' ', padded - 1 - text.len()));
    text.push('\n');
    let length = u16::try_from(text.len()).map_err(|_| HeaderError::TooManyAxes(shape.len()))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend(length.to_le_bytes());
    bytes.extend(text.as_bytes());
    Ok(bytes)
}

/// Parses a file of float32 or float64 values in C order. Returns the shape and the values.
///
/// ```
/// use inference_formats::npy;
/// let mut file = npy::header("<f4", &[2, 1])?;
/// file.extend([0.5f32, -1.0].iter().flat_map(|v| v.to_le_bytes()));
/// assert_eq!(npy::parse(&file), Ok((vec![2, 1], vec![0.5, -1.0])));
/// # Ok::<(), npy::HeaderError>(())
/// ```
///
/// # Errors
/// A message without the path.
pub fn parse(file: &[u8]) -> Result<(Vec<usize>, Vec<f32>), String> {
    let mut data = file;
    let header = Header::read(&mut data).map_err(|e| e.to_string())?;
    if header.fortran_order {
        return Err(String::from(
            "the array is in Fortran order; save it in C order",
        ));
    }
    let (shape, descr) = (header.shape, header.descr);
    let width = match descr.as_str() {
        "<f4" => 4,
        "<f8" => 8,
        _ => {
            return Err(format!(
                "numbers of type `{descr}`; float32 (`<f4`) or float64 (`<f8`) were expected"
            ));
        }
    };
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    if count.and_then(|n| n.checked_mul(width)) != Some(data.len()) {
        return Err(format!(
            "the numbers have {} bytes, which does not fit shape {shape:?} with {width} bytes each",
            data.len()
        ));
    }
    let values = if width == 4 {
        let (chunks, _) = data.as_chunks::<4>();
        chunks.iter().map(|c| f32::from_le_bytes(*c)).collect()
    } else {
        let (chunks, _) = data.as_chunks::<8>();
        chunks
            .iter()
            .map(|c| f64::from_le_bytes(*c) as f32)
            .collect()
    };
    Ok((shape, values))
}

/// The three fields of a parsed header.
struct Fields<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`. Fields may have any order,
/// quotes may be single or double, and spaces are free. Other texts give `None`.
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

    /// Consumes `token` if it comes next. Returns whether it did.
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
        // Python 2 wrote an `L` after long integers.
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
        // In Python `(3)` is a number, so a tuple with one element needs a comma.
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

    /// A file of version 1.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([1, 0]);
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.bytes());
        file.extend(data);
        file
    }

    #[test]
    fn a_header_is_read_again_and_aligned() {
        for shape in [vec![], vec![3], vec![2, 1], vec![1, 2, 3], vec![100_000, 0]] {
            let bytes = header("<f8", &shape).unwrap();
            assert_eq!((bytes.len() % 64, bytes.last()), (0, Some(&b'\n')));
            let mut rest = &[&bytes[..], b"values"].concat()[..];
            let read = Header::read(&mut rest).unwrap();
            assert_eq!(read.len, bytes.len());
            assert_eq!((read.descr.as_str(), read.fortran_order), ("<f8", false));
            assert_eq!((read.shape, rest), (shape, &b"values"[..]));
        }
        let e = header("<f4", &vec![1; 30_000]).unwrap_err();
        assert_eq!(e.to_string(), "an NPY header cannot hold 30000 axes");
    }

    #[test]
    fn float64_and_other_spacing_are_read() {
        let header = "{\"descr\":\"<f8\",\"fortran_order\":False,\"shape\":(1,)}";
        let (shape, values) = parse(&file(header, &2.5f64.to_le_bytes())).unwrap();
        assert_eq!((shape, values), (vec![1], vec![2.5]));
    }

    #[test]
    fn the_error_says_what_is_wrong() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
        let mut long = MAGIC.to_vec();
        long.extend([2, 0, 0, 0, 2, 0]);
        for (file, expected) in [
            (b"PK, and what follows".to_vec(), "not an .npy"),
            (b"\x93NUMPY\x09\x00".to_vec(), "version 9"),
            (b"\x93NUMPY\x01".to_vec(), "within its header"),
            (long, "claims 131072 bytes"),
            (file(&good.replace("False", "True"), &[0; 4]), "Fortran"),
            (file(&good.replace("<f4", ">f4"), &[0; 4]), "`>f4`"),
            (
                file(&good.replace("'<f4'", "[('x', '<f4')]"), &[0; 4]),
                "records",
            ),
            (file(&good.replace("(1,)", "(-1,)"), &[0; 4]), "malformed"),
            (
                file(&good.replace("(1,)", "(99999999999, 99999999999)"), &[0; 4]),
                "4 bytes",
            ),
            (file(good, &[0; 3]), "3 bytes"),
        ] {
            let e = parse(&file).unwrap_err();
            assert!(e.contains(expected), "{e}");
        }
    }

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
