//! The header of one safetensors file. The `safetensors` crate checks offsets, sizes and types.
//! This module limits time and memory, rejects repeated names, and checks that the data ends at the
//! end of the file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::error::Result;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::files::{CheckedFile, invalid};

/// The largest accepted header, in bytes.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The maximum number of tensors in a model.
pub(super) const MAX_TENSORS: usize = 1 << 18;
/// The maximum number of dimensions of a tensor.
pub(super) const MAX_DIMS: usize = 8;
/// The maximum length of a name, in bytes.
const MAX_NAME: usize = 1024;
/// Number of bytes for the header's length, at the start of a file.
const LENGTH_BYTES: u64 = 8;

/// A tensor of one file.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub nbytes: usize,
    /// Position of its first byte in the file.
    pub offset: u64,
}

/// The bytes of the header: JSON of limited length.
fn bytes(file: &CheckedFile) -> Result<Vec<u8>> {
    let fault = |message: String| invalid(file.path(), message);
    if file.len() < LENGTH_BYTES {
        return Err(fault(format!(
            "not a safetensors file: it has {} bytes, less than a header's length",
            file.len()
        )));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    let room = (file.len() - LENGTH_BYTES).min(MAX_HEADER_BYTES);
    if length > room {
        return Err(fault(format!(
            "the header claims {length} bytes; the file has {} and at most {MAX_HEADER_BYTES} are \
             accepted",
            file.len()
        )));
    }
    file.read_vec(LENGTH_BYTES, length as usize)
}

fn parsed<'de, T: Deserialize<'de>>(file: &CheckedFile, header: &'de [u8]) -> Result<T> {
    serde_json::from_slice(header)
        .map_err(|e| invalid(file.path(), "the safetensors header is malformed").with_source(e))
}

/// The strings in the header's metadata, by name.
pub(super) fn metadata(file: &CheckedFile) -> Result<BTreeMap<String, String>> {
    /// Repeated names are accepted here; reading tensors rejects them.
    #[derive(Deserialize)]
    struct Texts {
        #[serde(rename = "__metadata__")]
        metadata: Option<BTreeMap<String, String>>,
    }
    let texts: Texts = parsed(file, &bytes(file)?)?;
    Ok(texts.metadata.unwrap_or_default())
}

/// The tensors of `file`, in the order of their data.
pub(super) fn read(file: &CheckedFile) -> Result<Vec<Entry>> {
    let fault = |message: String| invalid(file.path(), message);
    let header = bytes(file)?;
    let length = header.len() as u64;
    let header: Header = parsed(file, &header)?;

    let mut tensors = header.tensors;
    tensors.sort_by_key(|(_, t)| t.data_offsets);
    let infos = tensors.clone();
    // The crate checks that the data has no gaps and that sizes fit shapes.
    let metadata = Metadata::new(None, tensors)
        .map_err(|e| fault("the safetensors header is wrong".into()).with_source(e))?;
    let start = LENGTH_BYTES + length;
    let end = start.checked_add(metadata.data_len() as u64);
    if end != Some(file.len()) {
        return Err(fault(format!(
            "the header describes {} bytes of data after byte {start}, but the file has {}; it is \
             truncated or damaged",
            metadata.data_len(),
            file.len() - start
        )));
    }
    Ok(infos
        .into_iter()
        .map(|(name, info)| Entry {
            name,
            dtype: info.dtype,
            nbytes: info.data_offsets.1 - info.data_offsets.0,
            offset: start + info.data_offsets.0 as u64,
            shape: info.shape,
        })
        .collect())
}

/// The JSON object of a header. Limits are enforced during parsing.
struct Header {
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = Vec::new();
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if name.len() > MAX_NAME {
                return Err(A::Error::custom(format!("a name has {} bytes", name.len())));
            }
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format!("the name {name:?} occurs twice")));
            }
            if name == "__metadata__" {
                // Free text for people. Its form is checked, and its content is ignored. MLX writes
                // null if there is no text.
                map.next_value::<Option<HashMap<String, IgnoredText>>>()?;
                continue;
            }
            if tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!(
                    "there are more than {MAX_TENSORS} tensors"
                )));
            }
            let Raw {
                dtype,
                shape: Shape(shape),
                data_offsets,
            } = map.next_value::<Raw>()?;
            tensors.push((
                name,
                TensorInfo {
                    dtype,
                    shape,
                    data_offsets,
                },
            ));
        }
        Ok(Header { tensors })
    }
}

#[derive(Deserialize)]
struct Raw {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// At most [`MAX_DIMS`] dimensions.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        // Stops immediately, because the rest may be long.
                        return Err(A::Error::custom(format!(
                            "a tensor has more than {MAX_DIMS} dimensions"
                        )));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// A string that is checked and dropped.
struct IgnoredText;

impl<'de> Deserialize<'de> for IgnoredText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}
