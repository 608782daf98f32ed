//! GGUF files, versions 2 and 3. [`Gguf::open`] reads the header, and checks it against the file.
//! Tensor data are read later, at their exact positions. [`GgufSummary`] reads only the fields that
//! model lists show. [`crate::quantization`] decodes blocks; [`crate::gguf_config`] converts
//! metadata to a configuration.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

pub(crate) mod keys;
mod metadata;
mod reader;
mod summary;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use crate::error::{ErrorKind, Result};

pub use crate::quantization::GgmlType;
pub use metadata::{GgufArray, GgufMetadata, GgufValue};
pub use summary::GgufSummary;

use super::files::{CheckedFile, invalid};
use reader::Reader;

/// The maximum number of metadata keys.
const MAX_KEYS: u64 = 1 << 16;
/// The maximum number of tensors.
const MAX_TENSORS: u64 = 1 << 16;
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// A tensor's header entry has at least a name length, a dimension count, a type and an offset.
const MIN_INFO_BYTES: u64 = 8 + 4 + 4 + 8;
/// A metadata entry has at least a key length, a type and one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;

/// A tensor of a GGUF file: its type, its shape, and the position of its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// How its elements are stored.
    pub kind: GgmlType,
    /// The dimensions, row-major, which is the reverse of GGUF's order. A block covers consecutive
    /// elements of the last dimension.
    pub shape: Vec<usize>,
    /// Size of its data in bytes; 0 if the type's size is unknown.
    pub nbytes: usize,
    /// Position of its first byte in the file.
    offset: u64,
}

/// An open GGUF file, whose header is consistent with its length.
#[derive(Debug)]
pub struct Gguf {
    file: CheckedFile,
    metadata: GgufMetadata,
    tensors: BTreeMap<String, GgufTensor>,
}

impl Gguf {
    /// Opens a file and checks its header against its length.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] unless the file is a complete, consistent, little-endian GGUF file of
    /// version 2 or 3; [`ErrorKind::Unsupported`] for a part of a split file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = CheckedFile::open(path)?;
        let mut reader = Reader::new(&file);
        let (tensor_count, key_count) = read_start(&mut reader)?;

        let mut metadata = GgufMetadata::new(path);
        for _ in 0..key_count {
            let key = reader.key()?;
            let kind = reader.u32("a metadata type")?;
            let value = reader.value(kind, &key)?;
            if metadata.contains(&key) {
                return Err(reader.fault(format!("the metadata key {key} is there twice")));
            }
            metadata.insert(key, value);
        }
        if let Some(parts) = metadata.u32("split.count")?.filter(|n| *n > 1) {
            return Err(crate::error::Error::new(
                ErrorKind::Unsupported,
                format!("the file is one of {parts} parts; merge them with llama-gguf-split"),
            )
            .with_path(path));
        }
        let alignment = alignment(&metadata)?;
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, tensor) = read_info(&mut reader)?;
            if tensors.contains_key(&name) {
                return Err(reader.fault(format!("the tensor {name} is there twice")));
            }
            tensors.insert(name, tensor);
        }
        let header = reader.position();
        let data = header
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| invalid(path, "the header is too long"))?;
        place(&mut tensors, &file, data, alignment)?;
        Ok(Self {
            file,
            metadata,
            tensors,
        })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Key and value pairs.
    pub fn metadata(&self) -> &GgufMetadata {
        &self.metadata
    }

    /// The tensors by name, sorted.
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// A tensor's stored bytes: whole blocks, row after row.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a type that this crate does not decode;
    /// [`ErrorKind::OutOfMemory`] or [`ErrorKind::Io`] if memory is insufficient or reading fails.
    pub fn read(&self, tensor: &GgufTensor) -> Result<Vec<u8>> {
        if tensor.kind.block().is_none() {
            return Err(crate::error::Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a tensor is stored as GGUF {}, which is not supported",
                    tensor.kind.name()
                ),
            )
            .with_path(self.path()));
        }
        self.file.read_vec(tensor.offset, tensor.nbytes)
    }

    /// Fills `buffer` with a tensor's stored bytes, from its byte `first` on.
    ///
    /// # Errors
    /// When the range lies outside the tensor, or reading fails.
    pub fn read_into(&self, tensor: &GgufTensor, first: usize, buffer: &mut [u8]) -> Result<()> {
        self.file
            .read_exact_at(buffer, self.place_of(tensor, first, buffer.len())?)
    }

    /// Returns another handle to the same open file, for example to map the file.
    ///
    /// # Errors
    /// When the system has no handle left.
    pub fn handle(&self) -> Result<File> {
        self.file.handle()
    }

    /// The position of a tensor's first byte in the file.
    pub fn position(&self, tensor: &GgufTensor) -> u64 {
        tensor.offset
    }

    /// `length` bytes of a tensor's stored bytes, from its byte `first` on.
    ///
    /// # Errors
    /// When the range lies outside the tensor, memory is short, or reading fails.
    pub fn read_bytes(&self, tensor: &GgufTensor, first: usize, length: usize) -> Result<Vec<u8>> {
        self.file
            .read_vec(self.place_of(tensor, first, length)?, length)
    }

    /// The position in the file of a range of a tensor's bytes.
    fn place_of(&self, tensor: &GgufTensor, first: usize, length: usize) -> Result<u64> {
        let end = first.checked_add(length);
        if end.is_none_or(|end| end > tensor.nbytes) {
            return Err(invalid(
                self.path(),
                format!(
                    "{length} bytes at {first} of a tensor of {} bytes",
                    tensor.nbytes
                ),
            ));
        }
        Ok(tensor.offset + first as u64)
    }
}

/// Tensor count and key count.
fn read_start(reader: &mut Reader<'_>) -> Result<(u64, u64)> {
    if &reader.magic()? != b"GGUF" {
        return Err(reader.fault("not a GGUF file: it does not start with GGUF"));
    }
    let version = reader.u32("the version")?;
    if !(2..=3).contains(&version) {
        let big_endian = (2..=3).contains(&version.swap_bytes());
        let what = if big_endian {
            String::from("big-endian GGUF files are not supported; convert it")
        } else {
            format!("GGUF version {version} is not supported; 2 and 3 are")
        };
        return Err(reader.fault(what));
    }
    let tensors = reader.u64("the number of tensors")?;
    let keys = reader.u64("the number of metadata keys")?;
    for (what, count, max, least) in [
        ("tensors", tensors, MAX_TENSORS, MIN_INFO_BYTES),
        ("metadata keys", keys, MAX_KEYS, MIN_KEY_BYTES),
    ] {
        let possible = max.min(reader.remaining() / least);
        if count > possible {
            return Err(reader.fault(format!(
                "the header claims {count} {what}; at most {possible} are possible"
            )));
        }
    }
    Ok((tensors, keys))
}

fn alignment(metadata: &GgufMetadata) -> Result<u64> {
    let key = "general.alignment";
    let alignment = metadata.u32(key)?.map_or(DEFAULT_ALIGNMENT, u64::from);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(invalid(
            metadata.path(),
            format!("{key} is {alignment}; it must be a power of two up to {MAX_ALIGNMENT}"),
        ));
    }
    Ok(alignment)
}

/// The header entry of one tensor. The offset is relative to the start of the data.
fn read_info(reader: &mut Reader<'_>) -> Result<(String, GgufTensor)> {
    let name = reader.name()?;
    let dims = reader.u32("a tensor's dimensions")?;
    if dims > MAX_DIMS {
        return Err(reader.fault(format!(
            "the tensor {name} claims {dims} dimensions; at most {MAX_DIMS} are possible"
        )));
    }
    let mut shape = Vec::new();
    let mut elements = 1usize;
    for _ in 0..dims {
        let dim = reader.u64("a tensor's dimensions")?;
        let dim = usize::try_from(dim).ok().filter(|&d| d > 0);
        let product = dim.and_then(|d| elements.checked_mul(d).map(|p| (d, p)));
        let Some((dim, product)) = product else {
            return Err(reader.fault(format!("the tensor {name} has an impossible dimension")));
        };
        shape.push(dim);
        elements = product;
    }
    let kind = GgmlType::from_id(reader.u32("a tensor's type")?);
    let nbytes = match kind.block() {
        None => 0,
        Some((weights, bytes)) => {
            let row = shape.first().copied().unwrap_or(1);
            if !row.is_multiple_of(weights) {
                return Err(reader.fault(format!(
                    "the tensor {name} has rows of {row} elements; {} stores {weights} in a block",
                    kind.name()
                )));
            }
            let size = (elements / weights).checked_mul(bytes);
            size.ok_or_else(|| reader.fault(format!("the tensor {name} is too large")))?
        }
    };
    let offset = reader.u64("a tensor's offset")?;
    shape.reverse();
    Ok((
        name,
        GgufTensor {
            kind,
            shape,
            nbytes,
            offset,
        },
    ))
}

/// Converts relative offsets to file positions. Checks that each tensor is aligned, lies inside the
/// file, and overlaps no other tensor.
fn place(
    tensors: &mut BTreeMap<String, GgufTensor>,
    file: &CheckedFile,
    data: u64,
    alignment: u64,
) -> Result<()> {
    let fault = |message: String| invalid(file.path(), message);
    for (name, tensor) in tensors.iter_mut() {
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(fault(format!(
                "the tensor {name} is at offset {}, which is not a multiple of {alignment}",
                tensor.offset
            )));
        }
        // The size of an unknown type is unknown, but at least its first byte must be in the file.
        let nbytes = (tensor.nbytes as u64).max(1);
        let start = data.checked_add(tensor.offset);
        let end = start.and_then(|s| s.checked_add(nbytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file.len() => tensor.offset = start,
            _ => {
                return Err(fault(format!(
                    "the tensor {name} needs {nbytes} bytes at offset {} of the data; the file has \
                     {} there and is truncated or damaged",
                    tensor.offset,
                    file.len().saturating_sub(data)
                )));
            }
        }
    }
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| t.offset);
    for ((a_name, a), (b_name, b)) in order.iter().zip(order.iter().skip(1)) {
        if a.offset + (a.nbytes as u64).max(1) > b.offset {
            return Err(fault(format!("the tensors {a_name} and {b_name} overlap")));
        }
    }
    Ok(())
}
