//! Writes a model directory as one GGUF file (version 3).

use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::AtomicFile;
use inference_formats::gguf_config::GgufNames;
use inference_formats::safetensors::{SafetensorsCheckpoint, TensorInfo};
use serde_json::{Map, Value};

use super::blocks::GgufType;
use super::metadata::{Config, Metadata, text};
use super::vocabulary;

/// The alignment of data in bytes.
const ALIGNMENT: u64 = 32;
/// The suffix of tensors that GGUF files do not contain.
const LEFT_OUT: &str = ".rotary_emb.inv_freq";

/// The result of an export.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The number of tensors.
    pub tensors: usize,
    /// The bytes of the file.
    pub bytes: u64,
}

/// A tensor to export.
struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    kind: GgufType,
    offset: u64,
    source: Source<'a>,
}

enum Source<'a> {
    /// A tensor of the directory. With `heads`, its rows are reordered.
    Stored {
        info: &'a TensorInfo,
        heads: Option<u32>,
    },
    /// A computed tensor.
    Numbers(Vec<f32>),
}

fn failed(path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write the file: {e}"))
        .with_path(path)
        .with_source(e)
}

/// Writes the dense model in the directory `model` to the GGUF file `output`. Matrices get the type
/// `kind`. The file appears completely or not at all.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a quantized model, or if the architecture, the tokenizer or the
/// position scaling cannot be exported; [`ErrorKind::InvalidModel`] for a damaged model;
/// [`ErrorKind::InvalidOption`] if `output` exists, or if a value is out of the range of `kind`.
pub fn export_gguf(model: &Path, output: &Path, kind: GgufType) -> Result<Exported> {
    if std::fs::symlink_metadata(output).is_ok() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the file is there already; name another one",
        )
        .with_path(output));
    }
    let path = model.join("config.json");
    let config =
        inference_formats::files::read_text(&path, inference_formats::files::MAX_TEXT_FILE)?;
    let fields: Map<String, Value> = inference_formats::python_json::from_slice(config.as_bytes())
        .and_then(serde_json::from_value)
        .map_err(|e| {
            Error::new(ErrorKind::InvalidModel, format!("not a JSON object: {e}")).with_path(&path)
        })?;
    let config = Config::new(&fields).map_err(|e| e.with_path(&path))?;
    let checkpoint = SafetensorsCheckpoint::open(model)?;
    let mut metadata = Metadata::default();
    metadata.text("general.architecture", config.architecture);
    let name = model.file_name().and_then(|name| name.to_str());
    metadata.text("general.name", name.unwrap_or("model"));
    if let Some(file_type) = kind.file_type() {
        metadata.u32("general.file_type", file_type);
    }
    metadata.u32("general.quantization_version", 2);
    metadata.u32("general.alignment", ALIGNMENT as u32);
    let factors = config
        .write(&mut metadata)
        .map_err(|e| e.with_path(&path))?;
    let tensors = tensors(&checkpoint, &config, factors, kind)?;
    let rows = tensors
        .iter()
        .find(|tensor| tensor.name == "token_embd.weight")
        .and_then(|tensor| tensor.shape.first());
    let rows = rows.copied().ok_or_else(|| {
        Error::new(ErrorKind::InvalidModel, "the model has no embedding").with_path(model)
    })?;
    vocabulary::write(model, rows, &mut metadata)?;

    let file = AtomicFile::create(output).map_err(|e| failed(output, e))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut written = header(&metadata, &tensors)?;
    pad(&mut written, ALIGNMENT);
    let start = written.len() as u64;
    out.write_all(&written).map_err(|e| failed(output, e))?;
    let mut at = 0;
    for tensor in &tensors {
        let gap = vec![0; (tensor.offset - at) as usize];
        let bytes = encoded(&checkpoint, tensor, config.head_dim()?)?;
        out.write_all(&gap)
            .and_then(|()| out.write_all(&bytes))
            .map_err(|e| failed(output, e))?;
        at = tensor.offset + bytes.len() as u64;
    }
    let end = vec![0; (at.next_multiple_of(ALIGNMENT) - at) as usize];
    out.write_all(&end)
        .and_then(|()| {
            out.into_inner()
                .map_err(std::io::IntoInnerError::into_error)
        })
        .and_then(AtomicFile::commit_new)
        .map_err(|e| failed(output, e))?;
    Ok(Exported {
        tensors: tensors.len(),
        bytes: start + at.next_multiple_of(ALIGNMENT),
    })
}

fn pad(bytes: &mut Vec<u8>, to: u64) {
    bytes.resize(bytes.len().next_multiple_of(to as usize), 0);
}

/// The tensors, sorted by name, with their offsets.
fn tensors<'a>(
    checkpoint: &'a SafetensorsCheckpoint,
    config: &Config<'_>,
    factors: Option<Vec<f32>>,
    kind: GgufType,
) -> Result<Vec<Tensor<'a>>> {
    let names = GgufNames::new(config.family.model_type);
    let tied = config.fields.get("tie_word_embeddings") == Some(&Value::Bool(true));
    let mut tensors = Vec::new();
    for stored in checkpoint.names() {
        if stored.ends_with(LEFT_OUT) || (tied && stored == "lm_head.weight") {
            continue;
        }
        let Some(info) = checkpoint.info(stored) else {
            continue;
        };
        let name = names.tensor(stored).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("tensor `{stored}` has no name in GGUF"),
            )
        })?;
        let part = name.rsplit('.').nth(1).unwrap_or_default();
        let heads = match part {
            "attn_q" => Some(config.required("num_attention_heads")?),
            "attn_k" => Some(config.kv_heads()?),
            _ => None,
        };
        tensors.push(Tensor {
            name,
            kind: kind.of(&info.shape),
            shape: info.shape.clone(),
            offset: 0,
            source: Source::Stored {
                info,
                heads: heads.filter(|_| names.permuted()),
            },
        });
    }
    if let Some(factors) = factors {
        tensors.push(Tensor {
            name: String::from("rope_freqs.weight"),
            kind: GgufType::F32,
            shape: vec![factors.len()],
            offset: 0,
            source: Source::Numbers(factors),
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut offset = 0;
    for tensor in &mut tensors {
        tensor.offset = offset;
        let numbers: u64 = tensor.shape.iter().map(|n| *n as u64).product();
        offset = (offset + tensor.kind.bytes(numbers)).next_multiple_of(ALIGNMENT);
    }
    Ok(tensors)
}

fn header(metadata: &Metadata, tensors: &[Tensor<'_>]) -> Result<Vec<u8>> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    bytes.extend(metadata.bytes());
    for tensor in tensors {
        bytes.extend(text(&tensor.name));
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        // GGUF lists the fastest dimension first.
        for n in tensor.shape.iter().rev() {
            bytes.extend((*n as u64).to_le_bytes());
        }
        bytes.extend(tensor.kind.id().to_le_bytes());
        bytes.extend(tensor.offset.to_le_bytes());
    }
    Ok(bytes)
}

/// The encoded data of a tensor.
fn encoded(
    checkpoint: &SafetensorsCheckpoint,
    tensor: &Tensor<'_>,
    head_dim: u32,
) -> Result<Vec<u8>> {
    let numbers = match &tensor.source {
        Source::Numbers(numbers) => numbers.clone(),
        Source::Stored { info, heads } => {
            let numbers = match info.dtype.to_string().as_str() {
                "F32" => checkpoint.read::<f32>(info)?,
                "F16" => checkpoint
                    .read::<u16>(info)?
                    .into_iter()
                    .map(|bits| f16::from_bits(bits).to_f32())
                    .collect(),
                "BF16" => checkpoint
                    .read::<u16>(info)?
                    .into_iter()
                    .map(|bits| bf16::from_bits(bits).to_f32())
                    .collect(),
                other => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!(
                            "tensor `{}` is of type {other}; floats are exported",
                            tensor.name
                        ),
                    ));
                }
            };
            match heads {
                Some(heads) => interleaved(numbers, &tensor.shape, *heads, head_dim)?,
                None => numbers,
            }
        }
    };
    tensor.kind.encode(&numbers).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            format!(
                "tensor `{}` has numbers beyond 16-bit floats; export it as bf16 or f32",
                tensor.name
            ),
        )
    })
}

/// Reorders rows for rotary embeddings of adjacent pairs: rows of the first and the second half of
/// each head alternate.
fn interleaved(numbers: Vec<f32>, shape: &[usize], heads: u32, head_dim: u32) -> Result<Vec<f32>> {
    let rows = shape.first().copied().unwrap_or(0);
    let (heads, head_dim) = (heads as usize, head_dim as usize);
    if rows != heads * head_dim || !head_dim.is_multiple_of(2) {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!("{rows} rows are not {heads} heads of {head_dim}"),
        ));
    }
    let row = numbers.len() / rows.max(1);
    let mut ordered = Vec::with_capacity(numbers.len());
    for head in 0..heads {
        for pair in 0..head_dim / 2 {
            for half in 0..2 {
                let from = (head * head_dim + half * head_dim / 2 + pair) * row;
                ordered.extend_from_slice(&numbers[from..from + row]);
            }
        }
    }
    Ok(ordered)
}
