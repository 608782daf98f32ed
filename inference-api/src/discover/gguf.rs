//! The little of a GGUF header that discovery shows: architecture and quantization. Bounded: no
//! number in the file is believed before it is compared with what remains of the file, and tensor
//! data is never read. Loading, which checks everything, is a backend's.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use super::{DiscoveredModel, ModelFormat, Quantization};
use crate::error::{Error, ErrorKind, Result};

/// A header beyond this is not one: the largest vocabularies make some tens of megabytes.
const MAX_HEADER: u64 = 256 << 20;
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
const MAX_NAME: u64 = 1 << 16;
const MAX_NESTING: usize = 4;
/// ggml has 4; some room for later.
const MAX_DIMS: u32 = 8;

// Numbers of the format's value types (gguf.md, `gguf_metadata_value_type`).
const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// `general.file_type` numbers and their names (`llama_ftype` in llama.cpp).
const FILE_TYPES: [(u32, &str); 34] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4"),
    (39, "NVFP4"),
];

/// Tensor type numbers and their names (`ggml_type` in ggml).
const TENSOR_TYPES: [(u32, &str); 28] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

fn name_in(table: &[(u32, &'static str)], number: u32) -> Option<&'static str> {
    table
        .iter()
        .find(|(n, _)| *n == number)
        .map(|(_, name)| *name)
}

pub(super) fn describe(path: &Path) -> Result<DiscoveredModel> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidModel, message).with_path(path);
    let metadata =
        std::fs::metadata(path).map_err(|e| super::io_error(path, "cannot be read", e))?;
    // Opening a pipe would wait for its writer.
    if !metadata.is_file() {
        return Err(invalid(String::from("not a regular file")));
    }
    let file = File::open(path).map_err(|e| super::io_error(path, "cannot be opened", e))?;
    let bytes = metadata.len();
    let facts = Header::new(file, bytes).read().map_err(invalid)?;
    let quantization = match facts.quantization {
        Some("Q4_0" | "Q4_1") => Some((4, 32)),
        Some("Q5_0" | "Q5_1") => Some((5, 32)),
        Some("Q8_0") => Some((8, 32)),
        // The others have scales of scales, or mix types: not one pair of numbers.
        _ => None,
    };
    Ok(DiscoveredModel {
        path: path.to_owned(),
        model_type: facts.architecture.unwrap_or_default(),
        format: ModelFormat::Gguf,
        quantization: quantization.map(|(bits, group_size)| Quantization { bits, group_size }),
        quantization_name: facts.quantization.map(str::to_owned),
        num_files: 1,
        bytes,
    })
}

/// What a header says.
#[derive(Debug, Default, PartialEq)]
struct Facts {
    architecture: Option<String>,
    quantization: Option<&'static str>,
}

struct Header<R> {
    reader: BufReader<R>,
    /// Bytes not yet read, of the file or of what is allowed to a header.
    left: u64,
    /// Whether `left` ends before the file does.
    capped: bool,
}

type Fault<T> = std::result::Result<T, String>;

impl<R: Read + Seek> Header<R> {
    fn new(reader: R, bytes: u64) -> Self {
        Self {
            reader: BufReader::new(reader),
            left: bytes.min(MAX_HEADER),
            capped: bytes > MAX_HEADER,
        }
    }

    fn spend(&mut self, n: u64) -> Fault<()> {
        match self.left.checked_sub(n) {
            Some(left) => self.left = left,
            None if self.capped => {
                return Err(format!(
                    "the header is longer than {MAX_HEADER} bytes, which no model needs"
                ));
            }
            None => {
                return Err(format!(
                    "the header asks for {n} bytes where {} remain in the file",
                    self.left
                ));
            }
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Fault<()> {
        self.spend(buffer.len() as u64)?;
        self.reader
            .read_exact(buffer)
            .map_err(|e| format!("the header cannot be read: {e}"))
    }

    fn u32(&mut self) -> Fault<u32> {
        let mut buffer = [0; 4];
        self.fill(&mut buffer)?;
        Ok(u32::from_le_bytes(buffer))
    }

    fn u64(&mut self) -> Fault<u64> {
        let mut buffer = [0; 8];
        self.fill(&mut buffer)?;
        Ok(u64::from_le_bytes(buffer))
    }

    /// Passes over `n` bytes, within the buffer where they are in it.
    fn skip(&mut self, n: u64) -> Fault<()> {
        self.spend(n)?;
        let n = i64::try_from(n).map_err(|_| format!("{n} bytes cannot be passed over"))?;
        self.reader
            .seek_relative(n)
            .map_err(|e| format!("the header cannot be read: {e}"))
    }

    fn string(&mut self, what: &str) -> Fault<String> {
        let n = self.u64()?;
        if n > MAX_NAME {
            return Err(format!(
                "{what} of {n} bytes is longer than {MAX_NAME} bytes"
            ));
        }
        let mut buffer = vec![0; n as usize]; // at most MAX_NAME
        self.fill(&mut buffer)?;
        String::from_utf8(buffer).map_err(|_| format!("{what} is not UTF-8"))
    }

    /// Bytes of one value of a type that has a fixed size.
    fn fixed_size(kind: u32) -> Option<u64> {
        match kind {
            0 | 1 | 7 => Some(1),   // u8, i8, bool
            2 | 3 => Some(2),       // u16, i16
            U32 | 5 | 6 => Some(4), // u32, i32, f32
            10..=12 => Some(8),     // u64, i64, f64
            _ => None,
        }
    }

    fn skip_value(&mut self, kind: u32, nesting: usize) -> Fault<()> {
        if let Some(size) = Self::fixed_size(kind) {
            return self.skip(size);
        }
        match kind {
            STRING => {
                let n = self.u64()?;
                self.skip(n)
            }
            ARRAY if nesting < MAX_NESTING => {
                let kind = self.u32()?;
                let n = self.u64()?;
                if let Some(size) = Self::fixed_size(kind) {
                    let bytes = n.checked_mul(size);
                    return self.skip(
                        bytes.ok_or_else(|| format!("an array of {n} elements is too long"))?,
                    );
                }
                // Each element takes some bytes, so what remains ends this loop.
                (0..n).try_for_each(|_| self.skip_value(kind, nesting + 1))
            }
            ARRAY => Err(format!("arrays are nested more than {MAX_NESTING} deep")),
            _ => Err(format!("a value has the unknown type {kind}")),
        }
    }

    fn read(&mut self) -> Fault<Facts> {
        let mut magic = [0; 4];
        self.fill(&mut magic)?;
        if &magic != b"GGUF" {
            return Err(String::from(
                "not a GGUF file: it does not begin with `GGUF`",
            ));
        }
        let version = self.u32()?;
        if (2..=3).contains(&version.swap_bytes()) {
            return Err(String::from(
                "a big-endian GGUF file; only little-endian ones are supported",
            ));
        }
        if !(2..=3).contains(&version) {
            return Err(format!(
                "GGUF version {version} is not supported; 2 and 3 are"
            ));
        }
        let tensors = self.u64()?;
        let keys = self.u64()?;
        if keys > MAX_KEYS {
            return Err(format!("{keys} metadata keys are more than {MAX_KEYS}"));
        }
        if tensors > MAX_TENSORS {
            return Err(format!("{tensors} tensors are more than {MAX_TENSORS}"));
        }
        let mut facts = Facts::default();
        for _ in 0..keys {
            let key = self.string("a metadata key")?;
            let kind = self.u32()?;
            match (key.as_str(), kind) {
                ("general.architecture", STRING) => {
                    facts.architecture = Some(self.string("general.architecture")?);
                }
                ("general.file_type", U32) => {
                    facts.quantization = name_in(&FILE_TYPES, self.u32()?);
                }
                _ => self.skip_value(kind, 0)?,
            }
            // Vocabularies mostly come later, and are long.
            if facts.architecture.is_some() && facts.quantization.is_some() {
                return Ok(facts);
            }
        }
        if facts.quantization.is_none() {
            facts.quantization = self.dominant_type(tensors)?;
        }
        Ok(facts)
    }

    /// The type that most weights have.
    fn dominant_type(&mut self, tensors: u64) -> Fault<Option<&'static str>> {
        let mut elements = [0u64; TENSOR_TYPES.len()];
        for _ in 0..tensors {
            let name = self.string("a tensor's name")?;
            let dims = self.u32()?;
            if dims > MAX_DIMS {
                return Err(format!(
                    "tensor `{name}` has {dims} dimensions; {MAX_DIMS} are the most"
                ));
            }
            let mut size = 1u64;
            for _ in 0..dims {
                size = size.saturating_mul(self.u64()?);
            }
            let kind = self.u32()?;
            let _offset = self.u64()?;
            if let Some(at) = TENSOR_TYPES.iter().position(|(n, _)| *n == kind) {
                elements[at] = elements[at].saturating_add(size);
            }
        }
        let most = elements.iter().copied().max().filter(|n| *n > 0);
        Ok(most
            .and_then(|most| elements.iter().position(|n| *n == most))
            .map(|at| TENSOR_TYPES[at].1))
    }
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
pub(super) mod tests;
