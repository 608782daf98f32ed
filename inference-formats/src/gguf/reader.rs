//! Sequential, bounded reading of a GGUF header: no length is believed before it is compared with
//! what remains of the file, and no array costs more memory than its share of the budget.

use inference::{Error, Result};

use super::metadata::{GgufArray, GgufValue};
use crate::checkpoint::files::{CheckedFile, invalid};

/// Bytes fetched from the file at a time.
const CHUNK: u64 = 256 << 10;
/// The longest string value, in bytes; a chat template is the longest in use.
const MAX_STRING: u64 = 4 << 20;
/// Arrays in arrays.
const MAX_DEPTH: usize = 3;
/// Strings and nested arrays of all metadata together; vocabularies have some 500,000.
const MAX_STRINGS: u64 = 4 << 20;
/// Numbers in arrays of all metadata together.
const MAX_NUMBERS: u64 = 32 << 20;

pub(super) struct Reader<'a> {
    file: &'a CheckedFile,
    /// Position in the file of what is read next.
    position: u64,
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
        self.file.len().saturating_sub(self.position)
    }

    pub(super) fn fault(&self, message: impl Into<String>) -> Error {
        invalid(self.file.path(), message)
    }

    /// Fills `out` from where reading stands.
    fn fill(&mut self, out: &mut [u8], what: &str) -> Result<()> {
        let wanted = out.len() as u64;
        if wanted > self.remaining() {
            return Err(self.fault(format!(
                "the file ends inside {what}: {wanted} bytes at byte {}, {} remain",
                self.position,
                self.remaining()
            )));
        }
        if wanted >= CHUNK {
            self.file.read_exact_at(out, self.position)?;
        } else {
            let from = self.position.wrapping_sub(self.chunk_start);
            let held = self.chunk.len() as u64;
            let from = if from.checked_add(wanted).is_some_and(|end| end <= held) {
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

    pub(super) fn string(&mut self, max: u64, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let allowed = max.min(self.remaining());
        if len > allowed {
            return Err(self.fault(format!(
                "{what} claims {len} bytes at byte {}; at most {allowed} are possible",
                self.position
            )));
        }
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
            9 => return Err(self.fault(format!("{what} nests arrays deeper than {MAX_DEPTH}"))),
            _ => return Err(self.fault(format!("{what} has the unknown element type {kind}"))),
        })
    }

    /// Whether `count` elements of at least `size` bytes can be there and are within the budget.
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

    fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        decode: fn([u8; N]) -> T,
        what: &str,
    ) -> Result<Vec<T>> {
        self.check_count(count, N as u64, self.numbers_left, what)?;
        self.numbers_left -= count;
        let mut out = Vec::with_capacity(count as usize);
        for _ in 0..count {
            out.push(decode(self.bytes(what)?));
        }
        Ok(out)
    }
}
