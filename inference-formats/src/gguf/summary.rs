//! Properties of a GGUF file for model lists: architecture and quantization. The vocabulary is
//! skipped. The file may be a part of a split model, or contain tensors that this crate cannot
//! read.

use std::path::Path;

use super::metadata::GgufMetadata;
use super::reader::Reader;
use super::{read_info, read_start};
use crate::error::Result;
use crate::files::CheckedFile;
use crate::quantization::file_type_name;

const ARCHITECTURE: &str = "general.architecture";
const FILE_TYPE: &str = "general.file_type";

/// Architecture and quantization of a GGUF file, from its header alone.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufSummary {
    /// `general.architecture`; `None` if the key is missing.
    pub architecture: Option<String>,
    /// The quantization's name, such as `Q4_K_M`, from `general.file_type`. Without this key, the
    /// type of most weights. `None` if neither is known.
    pub quantization: Option<String>,
    /// Bytes of the file.
    pub bytes: u64,
}

impl GgufSummary {
    /// Reads the header of the file at `path` as far as necessary. Lengths and counts are checked
    /// as in [`super::Gguf::open`]; tensor positions are not.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] for anything that is not a GGUF header of version 2 or 3,
    /// [`crate::ErrorKind::NotFound`] and [`crate::ErrorKind::Io`] for a file that cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let file = CheckedFile::open(path)?;
        let mut reader = Reader::new(&file);
        let (tensors, keys) = read_start(&mut reader)?;
        let mut metadata = GgufMetadata::new(path);
        for _ in 0..keys {
            let key = reader.key()?;
            let kind = reader.u32("a metadata type")?;
            if !matches!(key.as_str(), ARCHITECTURE | FILE_TYPE) {
                reader.skip(kind, &key)?;
                continue;
            }
            let value = reader.value(kind, &key)?;
            metadata.insert(key, value);
            // The vocabulary is long and usually follows these keys, so reading stops here.
            if metadata.contains(ARCHITECTURE) && file_type(&metadata).is_some() {
                break;
            }
        }
        let quantization = match file_type(&metadata) {
            Some(name) => Some(name.to_owned()),
            None => most_common_type(&mut reader, tensors)?,
        };
        Ok(Self {
            architecture: metadata.str(ARCHITECTURE)?.map(str::to_owned),
            quantization,
            bytes: file.len(),
        })
    }
}

fn file_type(metadata: &GgufMetadata) -> Option<&'static str> {
    file_type_name(metadata.u32(FILE_TYPE).ok().flatten()?)
}

/// The type of most weights. If two types have equal shares, the lower type number wins.
fn most_common_type(reader: &mut Reader<'_>, tensors: u64) -> Result<Option<String>> {
    let mut weights = std::collections::BTreeMap::new();
    for _ in 0..tensors {
        let (_, tensor) = read_info(reader)?;
        let elements = tensor
            .shape
            .iter()
            .fold(1u64, |n, &d| n.saturating_mul(d as u64));
        let sum = weights
            .entry(tensor.kind.id())
            .or_insert((0u64, tensor.kind));
        sum.0 = sum.0.saturating_add(elements);
    }
    // A type number without a known name does not help a reader, so it is omitted.
    let named = weights.values().filter(|(_, kind)| kind.is_named());
    let most = named.rev().max_by_key(|(elements, _)| *elements);
    Ok(most.map(|(_, kind)| kind.name()))
}
