//! Writes a model directory as one GGUF file (version 3).

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::AtomicFile;
use inference_formats::gguf::Gguf;
use inference_formats::gguf_config::{self, GgufNames};
use inference_formats::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};

use super::blocks::GgufType;
use super::metadata::{Config, Factors, Metadata, text};
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
    /// One tensor of the directory, or one for each expert.
    Stored {
        parts: Vec<&'a TensorInfo>,
        change: Change,
    },
    /// A computed tensor.
    Numbers(Vec<f32>),
}

/// How the values of a tensor change.
#[derive(Clone, Copy)]
enum Change {
    None,
    /// The rows are reordered, in this number of heads.
    Heads(usize),
    /// 1 is added.
    PlusOne,
}

fn failed(path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write the file: {e}"))
        .with_path(path)
        .with_source(e)
}

/// Refuses a file that exists.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] if there is a file at `output`.
pub fn check_output(output: &Path) -> Result<()> {
    match std::fs::symlink_metadata(output) {
        Ok(_) => {
            let message = "the file is there already; name another one";
            Err(Error::new(ErrorKind::InvalidOption, message).with_path(output))
        }
        Err(_) => Ok(()),
    }
}

/// Writes the unquantized model in the directory `model` to the GGUF file `output`. Matrices get the
/// type `kind`. The file appears completely or not at all.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a quantized model, if the architecture, the tokenizer or the
/// position scaling cannot be exported, or if readers of the file would take it for another network;
/// [`ErrorKind::InvalidModel`] for a damaged model;
/// [`ErrorKind::InvalidOption`] if `output` exists, or if a value is out of the range of `kind`.
pub fn export_gguf(model: &Path, output: &Path, kind: GgufType) -> Result<Exported> {
    check_output(output)?;
    let path = model.join("config.json");
    let config = Config::read(&path)?;
    let checkpoint = SafetensorsCheckpoint::open(model)?;
    let mut metadata = Metadata::default();
    metadata.text("general.architecture", config.gguf.architecture);
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
        out.write_all(&vec![0; (tensor.offset - at) as usize])
            .map_err(|e| failed(output, e))?;
        at = tensor.offset;
        for part in 0..tensor.parts() {
            let bytes = encoded(&checkpoint, tensor, part, config.model.head_size())?;
            out.write_all(&bytes).map_err(|e| failed(output, e))?;
            at += bytes.len() as u64;
        }
    }
    let end = vec![0; (at.next_multiple_of(ALIGNMENT) - at) as usize];
    let file = out
        .write_all(&end)
        .and_then(|()| {
            out.into_inner()
                .map_err(std::io::IntoInnerError::into_error)
        })
        .map_err(|e| failed(output, e))?;
    // Reads the file again, because the metadata of a family cannot express every configuration.
    let written = Gguf::open(file.unfinished())?;
    if let Some(what) = gguf_config::difference(&written, &config.model)? {
        let message = format!("a GGUF file of this architecture cannot express it: {what}");
        return Err(Error::new(ErrorKind::Unsupported, message).with_path(path));
    }
    drop(written);
    file.commit_new().map_err(|e| failed(output, e))?;
    Ok(Exported {
        tensors: tensors.len(),
        bytes: start + at.next_multiple_of(ALIGNMENT),
    })
}

fn pad(bytes: &mut Vec<u8>, to: u64) {
    bytes.resize(bytes.len().next_multiple_of(to as usize), 0);
}

impl Tensor<'_> {
    /// The number of parts that are encoded one after another.
    fn parts(&self) -> usize {
        match &self.source {
            Source::Stored { parts, .. } => parts.len(),
            Source::Numbers(_) => 1,
        }
    }
}

/// Mixtral's names of the matrices of an expert.
const MIXTRAL: [(&str, &str); 3] = [
    ("w1.weight", "gate_proj.weight"),
    ("w2.weight", "down_proj.weight"),
    ("w3.weight", "up_proj.weight"),
];

/// The name of the stack to which the matrix of an expert belongs, and the expert's number. `None`
/// for other tensors.
fn in_stack(name: &str) -> Option<(String, usize)> {
    let (mixture, rest) = name.split_once(".experts.")?;
    let (expert, part) = rest.split_once('.')?;
    let usual = MIXTRAL.iter().find(|(own, _)| *own == part);
    let part = usual.map_or(part, |(_, usual)| usual);
    Some((format!("{mixture}.switch_mlp.{part}"), expert.parse().ok()?))
}

/// The tensors, sorted by name, with their offsets.
fn tensors<'a>(
    checkpoint: &'a SafetensorsCheckpoint,
    config: &Config,
    factors: Vec<Factors>,
    kind: GgufType,
) -> Result<Vec<Tensor<'a>>> {
    let model_type = config.model.model_type.as_deref().unwrap_or_default();
    let names = GgufNames::new(model_type);
    let usual = TensorNames::new(checkpoint.names(), model_type);
    let tied = config.model.tie_word_embeddings == Some(true);
    // The parts of each tensor, in order of experts.
    let mut parts: BTreeMap<String, BTreeMap<usize, &TensorInfo>> = BTreeMap::new();
    let mut stacks = BTreeMap::new();
    for name in usual.all() {
        if name.ends_with(LEFT_OUT) || (tied && name == "lm_head.weight") {
            continue;
        }
        let Some(info) = usual.stored(name).and_then(|name| checkpoint.info(name)) else {
            continue;
        };
        let stack = in_stack(name);
        let (whole, expert) = match &stack {
            Some((stack, expert)) => (stack.as_str(), *expert),
            None => (name, 0),
        };
        let written = names.tensor(whole).ok_or_else(|| {
            let hint = match name.contains("experts.") {
                true => "; `mlx convert` gives experts that share a tensor tensors of their own",
                false => "",
            };
            let message = format!("tensor `{name}` has no name in GGUF{hint}");
            Error::new(ErrorKind::Unsupported, message)
        })?;
        if stack.is_some() {
            stacks.insert(written.clone(), name);
        }
        parts.entry(written).or_default().insert(expert, info);
    }
    let mut tensors = Vec::new();
    for (name, parts) in parts {
        let count = parts.len();
        let infos: Vec<&TensorInfo> = parts.values().copied().collect();
        let Some(first) = infos.first() else { continue };
        let mut shape = first.shape.clone();
        if let Some(stored) = stacks.get(&name) {
            let alike = infos.iter().all(|info| info.shape == shape);
            if !alike || count != config.model.num_experts || parts.keys().copied().ne(0..count) {
                let message = format!(
                    "the experts of `{stored}` have different shapes, or are not {} in number",
                    config.model.num_experts
                );
                return Err(Error::new(ErrorKind::InvalidModel, message));
            }
            shape.insert(0, count);
        }
        let part = name.rsplit('.').nth(1).unwrap_or_default();
        let change = match part {
            "attn_q" if names.permuted() => Change::Heads(config.model.num_attention_heads),
            "attn_k" if names.permuted() => Change::Heads(config.model.num_key_value_heads),
            _ if config.gguf.norm_plus_one && name.ends_with("norm.weight") => Change::PlusOne,
            _ => Change::None,
        };
        // As in other converters: small differences change which experts are chosen.
        let kind = match part {
            "ffn_gate_inp" | "ffn_gate_inp_shexp" => GgufType::F32,
            norm if norm.ends_with("_norm") => GgufType::F32,
            _ => kind.of(&shape),
        };
        tensors.push(Tensor {
            name,
            kind,
            shape,
            offset: 0,
            source: Source::Stored {
                parts: infos,
                change,
            },
        });
    }
    tensors.extend(factors.into_iter().map(|(name, factors)| Tensor {
        name: String::from(name),
        kind: GgufType::F32,
        shape: vec![factors.len()],
        offset: 0,
        source: Source::Numbers(factors),
    }));
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

/// The encoded data of a part of a tensor.
fn encoded(
    checkpoint: &SafetensorsCheckpoint,
    tensor: &Tensor<'_>,
    part: usize,
    head_dim: usize,
) -> Result<Vec<u8>> {
    let numbers = match &tensor.source {
        Source::Numbers(numbers) => numbers.clone(),
        Source::Stored { parts, change } => {
            let mut numbers = floats(checkpoint, parts[part], &tensor.name)?;
            match *change {
                Change::None => numbers,
                Change::Heads(heads) => interleaved(numbers, &tensor.shape, heads, head_dim)?,
                Change::PlusOne => {
                    for number in &mut numbers {
                        *number += 1.0;
                    }
                    numbers
                }
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

/// The values of a stored tensor, which is written as `name`.
fn floats(checkpoint: &SafetensorsCheckpoint, info: &TensorInfo, name: &str) -> Result<Vec<f32>> {
    let halves = |float: fn(u16) -> f32| -> Result<Vec<f32>> {
        Ok(checkpoint
            .read::<u16>(info)?
            .into_iter()
            .map(float)
            .collect())
    };
    match info.dtype.to_string().as_str() {
        "F32" => Ok(checkpoint.read::<f32>(info)?),
        "F16" => halves(|bits| f16::from_bits(bits).to_f32()),
        "BF16" => halves(|bits| bf16::from_bits(bits).to_f32()),
        other => Err(Error::new(
            ErrorKind::Unsupported,
            format!("tensor `{name}` is of type {other}; floats are exported"),
        )),
    }
}

/// Reorders rows for rotary embeddings of adjacent pairs: rows of the first and the second half of
/// each head alternate.
fn interleaved(
    numbers: Vec<f32>,
    shape: &[usize],
    heads: usize,
    head_dim: usize,
) -> Result<Vec<f32>> {
    let rows = shape.first().copied().unwrap_or(0);
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
