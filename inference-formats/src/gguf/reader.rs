//! Sequential reading of a GGUF header within limits. Each length is compared with the remaining
//! file before memory is allocated. One limit applies to all metadata together.

use crate::error::{Error, Result};

use super::metadata::{GgufArray, GgufValue};
use crate::files::{CheckedFile, invalid};

/// Number of bytes that are read from the file at once.
const CHUNK: u64 = 256 << 10;
/// Maximum header size in bytes. The largest vocabularies need some tens of megabytes.
const MAX_HEADER: u64 = 256 << 20;
/// Maximum length of a key or tensor name in bytes.
const MAX_KEY: u64 = 1 << 10;
/// Maximum length of a string value in bytes. The longest strings in use are chat templates.
const MAX_STRING: u64 = 4 << 20;
/// The maximum depth of nested arrays.
const MAX_DEPTH: usize = 3;
/// Maximum number of strings and nested arrays in all metadata. Vocabularies have about 500,000
/// strings.
const MAX_STRINGS: u64 = 4 << 20;
/// Maximum number of array elements that are numbers, in all metadata.
const MAX_NUMBERS: u64 = 32 << 20;

pub(super) struct Reader<'a> {
    file: &'a CheckedFile,
    /// Position in the file of the next read.
    position: u64,
    /// The latest possible end of the header: the end of the file, or the maximum header size.
    end: u64,
    chunk: Vec<u8>,
    /// Position in the file of the chunk's first byte.
    chunk_start: u64,
    strings_left: u64,
    numbers_left: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a CheckedFile) -> Self {
        Self {
            file,
            position: 0,
            end: file.len().min(MAX_HEADER),
            chunk: Vec::new(),
            chunk_start: 0,
            strings_left: MAX_STRINGS,
            numbers_left: MAX_NUMBERS,
        }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn remaining(&self) -> u64 {
        self.end.saturating_sub(self.position)
    }

    pub(super) fn fault(&self, message: impl Into<String>) -> Error {
        invalid(self.file.path(), message)
    }

    /// Checks that at least `wanted` bytes remain in the file. `what` names them in the error.
    fn check(&self, wanted: u64, what: &str) -> Result<()> {
        if wanted <= self.remaining() {
            return Ok(());
        }
        if self.end < self.file.len() {
            return Err(self.fault(format!(
                "the header is longer than {MAX_HEADER} bytes, the most that is read"
            )));
        }
        Err(self.fault(format!(
            "the file ends inside {what}: {wanted} bytes at byte {}, {} remain",
            self.position,
            self.remaining()
        )))
    }

    /// Fills `out` from the current position.
    fn fill(&mut self, out: &mut [u8], what: &str) -> Result<()> {
        let wanted = out.len() as u64;
        self.check(wanted, what)?;
        if wanted >= CHUNK {
            self.file.read_exact_at(out, self.position)?;
        } else {
            let from = self.position.wrapping_sub(self.chunk_start);
            let buffered = self.chunk.len() as u64;
            let from = if from.checked_add(wanted).is_some_and(|end| end <= buffered) {
                from
            } else {
                let len = CHUNK.min(self.remaining());
                self.chunk.resize(len as usize, 0);
                self.chunk_start = self.position;
                if let Err(e) = self.file.read_exact_at(&mut self.chunk, self.position) {
                    self.chunk.clear();
                    return Err(e);
                }
                0
            } as usize;
            match self.chunk.get(from..from + out.len()) {
                Some(bytes) => out.copy_from_slice(bytes),
                None => return Err(self.fault(format!("cannot read {what}"))),
            }
        }
        self.position += wanted;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(&mut out, what)?;
        Ok(out)
    }

    pub(super) fn magic(&mut self) -> Result<[u8; 4]> {
        self.bytes("the magic number")
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    /// A metadata key.
    pub(super) fn key(&mut self) -> Result<String> {
        self.string(MAX_KEY, "a metadata key")
    }

    /// A tensor's name.
    pub(super) fn name(&mut self) -> Result<String> {
        self.string(MAX_KEY, "a tensor's name")
    }

    /// The length of a string in bytes, which is checked against the file.
    fn string_length(&mut self, max: u64, what: &str) -> Result<u64> {
        let len = self.u64(what)?;
        let allowed = max.min(self.remaining());
        if len > allowed {
            return Err(self.fault(format!(
                "{what} claims {len} bytes at byte {}; at most {allowed} are possible",
                self.position
            )));
        }
        Ok(len)
    }

    fn string(&mut self, max: u64, what: &str) -> Result<String> {
        let len = self.string_length(max, what)?;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.fault(format!("{what} is not UTF-8 text")))
    }

    /// The value of the key `key`, whose type number has been read.
    pub(super) fn value(&mut self, kind: u32, key: &str) -> Result<GgufValue> {
        let what = key;
        Ok(match kind {
            0 => GgufValue::U8(self.bytes::<1>(what)?[0]),
            1 => GgufValue::I8(i8::from_le_bytes(self.bytes(what)?)),
            2 => GgufValue::U16(u16::from_le_bytes(self.bytes(what)?)),
            3 => GgufValue::I16(i16::from_le_bytes(self.bytes(what)?)),
            4 => GgufValue::U32(self.u32(what)?),
            5 => GgufValue::I32(i32::from_le_bytes(self.bytes(what)?)),
            6 => GgufValue::F32(f32::from_le_bytes(self.bytes(what)?)),
            7 => GgufValue::Bool(self.bool(what)?),
            8 => GgufValue::String(self.string(MAX_STRING, what)?),
            9 => GgufValue::Array(self.array(what, 1)?),
            10 => GgufValue::U64(self.u64(what)?),
            11 => GgufValue::I64(i64::from_le_bytes(self.bytes(what)?)),
            12 => GgufValue::F64(f64::from_le_bytes(self.bytes(what)?)),
            _ => return Err(self.fault(format!("{key} has the unknown value type {kind}"))),
        })
    }

    /// Moves the position forward by `bytes` bytes.
    fn advance(&mut self, bytes: u64, what: &str) -> Result<()> {
        self.check(bytes, what)?;
        self.position += bytes;
        Ok(())
    }

    /// Skips the value of the key `key`, whose type number has been read. Counts and lengths are
    /// checked as in [`Self::value`], but nothing is stored.
    pub(super) fn skip(&mut self, kind: u32, key: &str) -> Result<()> {
        match (kind, fixed_size(kind)) {
            (_, Some(size)) => self.advance(size, key),
            (8, _) => self.skip_string(key),
            (9, _) => self.skip_array(key, 1),
            _ => Err(self.fault(format!("{key} has the unknown value type {kind}"))),
        }
    }

    fn skip_string(&mut self, what: &str) -> Result<()> {
        let len = self.string_length(MAX_STRING, what)?;
        self.advance(len, what)
    }

    fn skip_array(&mut self, what: &str, depth: usize) -> Result<()> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        match (kind, fixed_size(kind)) {
            (_, Some(size)) => {
                self.spend_numbers(count, size, what)?;
                self.advance(count * size, what)
            }
            (8, _) => {
                self.spend_strings(count, 8, what)?;
                (0..count).try_for_each(|_| self.skip_string(what))
            }
            (9, _) if depth < MAX_DEPTH => {
                self.spend_strings(count, 12, what)?;
                (0..count).try_for_each(|_| self.skip_array(what, depth + 1))
            }
            (9, _) => Err(self.too_deep(what)),
            _ => Err(self.fault(format!("{what} has the unknown element type {kind}"))),
        }
    }

    fn too_deep(&self, what: &str) -> Error {
        self.fault(format!("{what} nests arrays deeper than {MAX_DEPTH}"))
    }

    fn bool(&mut self, what: &str) -> Result<bool> {
        match self.bytes::<1>(what)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.fault(format!("{what} is the byte {other}; a bool is 0 or 1"))),
        }
    }

    fn array(&mut self, what: &str, depth: usize) -> Result<GgufArray> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        Ok(match kind {
            0 => GgufArray::U8(self.numbers(count, u8::from_le_bytes, what)?),
            1 => GgufArray::I8(self.numbers(count, i8::from_le_bytes, what)?),
            2 => GgufArray::U16(self.numbers(count, u16::from_le_bytes, what)?),
            3 => GgufArray::I16(self.numbers(count, i16::from_le_bytes, what)?),
            4 => GgufArray::U32(self.numbers(count, u32::from_le_bytes, what)?),
            5 => GgufArray::I32(self.numbers(count, i32::from_le_bytes, what)?),
            6 => GgufArray::F32(self.numbers(count, f32::from_le_bytes, what)?),
            7 => {
                let bytes = self.numbers(count, u8::from_le_bytes, what)?;
                if bytes.iter().any(|&b| b > 1) {
                    return Err(self.fault(format!("{what} holds a bool that is not 0 or 1")));
                }
                GgufArray::Bool(bytes.into_iter().map(|b| b == 1).collect())
            }
            10 => GgufArray::U64(self.numbers(count, u64::from_le_bytes, what)?),
            11 => GgufArray::I64(self.numbers(count, i64::from_le_bytes, what)?),
            12 => GgufArray::F64(self.numbers(count, f64::from_le_bytes, what)?),
            8 => {
                self.spend_strings(count, 8, what)?;
                let mut out = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    out.push(self.string(MAX_STRING, what)?);
                }
                GgufArray::String(out)
            }
            9 if depth < MAX_DEPTH => {
                self.spend_strings(count, 12, what)?;
                let mut out = Vec::new();
                for _ in 0..count {
                    out.push(self.array(what, depth + 1)?);
                }
                GgufArray::Array(out)
            }
            9 => return Err(self.too_deep(what)),
            _ => return Err(self.fault(format!("{what} has the unknown element type {kind}"))),
        })
    }

    /// Checks that the remaining file has space for `count` elements of at least `size` bytes, and
    /// that `left` is not exceeded.
    fn check_count(&self, count: u64, size: u64, left: u64, what: &str) -> Result<()> {
        let possible = (self.remaining() / size).min(left);
        if count > possible {
            return Err(self.fault(format!(
                "{what} claims {count} elements at byte {}; at most {possible} are possible",
                self.position
            )));
        }
        Ok(())
    }

    fn spend_strings(&mut self, count: u64, size: u64, what: &str) -> Result<()> {
        self.check_count(count, size, self.strings_left, what)?;
        self.strings_left -= count;
        Ok(())
    }

    fn spend_numbers(&mut self, count: u64, size: u64, what: &str) -> Result<()> {
        self.check_count(count, size, self.numbers_left, what)?;
        self.numbers_left -= count;
        Ok(())
    }

    fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        decode: fn([u8; N]) -> T,
        what: &str,
    ) -> Result<Vec<T>> {
        self.spend_numbers(count, N as u64, what)?;
        let mut out = Vec::with_capacity(count as usize);
        for _ in 0..count {
            out.push(decode(self.bytes(what)?));
        }
        Ok(out)
    }
}

/// Bytes of one value of a type of fixed size (gguf.md, `gguf_metadata_value_type`).
fn fixed_size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1), // u8, i8, bool
        2 | 3 => Some(2),     // u16, i16
        4..=6 => Some(4),     // u32, i32, f32
        10..=12 => Some(8),   // u64, i64, f64
        _ => None,
    }
}
