//! Presents a GGUF file as a directory: tensors with their usual names, metadata as `config.json`,
//! and the tokenizer as `tokenizer.json` and `tokenizer_config.json`.

use inference::{Error, ErrorKind, Result};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::slice::Slice;
use super::tensor::{Stored, Tensor, Values};
use crate::checkpoint::config::llama3_stretch;
use crate::checkpoint::family::{GgufChange, GgufFamily};
use crate::checkpoint::files::invalid;
use crate::checkpoint::gguf::{GgmlType, Gguf};
use crate::checkpoint::gguf_config::{self, GgufNames};
use crate::checkpoint::quantization;
use crate::checkpoint::{Family, ModelConfig};
use crate::text::Tokenizer;

/// Tensors with rotary wavelength factors. A `config.json` contains these factors or their
/// parameters.
const ROPE_FACTORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];
const OUTPUT: &str = "output.weight";

/// The stack of joined gate and up matrices of experts. Directories store two stacks.
const JOINED: &str = "switch_mlp.gate_up_proj.weight";

/// Returns the family of a configuration that [`config`] returned.
fn family(config: &Map<String, Value>) -> Option<(&'static Family, &'static GgufFamily)> {
    let family = Family::of(config.get("model_type")?.as_str()?)?;
    let gguf = family.gguf.as_ref()?;
    (!gguf.runs_only).then_some((family, gguf))
}

/// Returns the tensors of the file, with their usual names.
pub(super) fn tensors(file: &Gguf, config: &Map<String, Value>) -> Result<Vec<Tensor>> {
    let number = |key: &str| {
        config
            .get(key)
            .and_then(Value::as_u64)
            .and_then(|n| usize::try_from(n).ok())
    };
    let (family, gguf) = family(config).ok_or_else(|| no_family(file, config))?;
    let names = GgufNames::new(family.model_type);
    let mut tensors = Vec::new();
    for (stored, tensor) in file.tensors() {
        if ROPE_FACTORS.contains(&stored.as_str()) {
            continue; // the configuration has these factors
        }
        if gguf_config::predicts_further(config, stored) {
            continue;
        }
        if family.always_tied && stored == OUTPUT {
            continue; // a copy of the embedding; `config.json` marks the output as tied
        }
        let bad = |why: String| invalid(file.path(), format!("tensor `{stored}`: {why}"));
        let mut name = names
            .usual(stored)
            .ok_or_else(|| bad("has no name in a model directory".to_owned()))?;
        let changed = gguf.changes.iter().find(|(part, _)| name.contains(part));
        let (part_of_name, change) = match changed {
            Some((_, GgufChange::Absent)) => continue,
            Some((part, change)) => (*part, Some(*change)),
            None => ("", None),
        };
        let mut values = Values::Same;
        if let Some(GgufChange::NegatedExponentials(own)) = change {
            name = name.replacen(part_of_name, own, 1);
            values = Values::NegatedExponentials;
        }
        name = match change {
            Some(GgufChange::Named(own)) => name.replacen(part_of_name, own, 1),
            _ => published(family, name),
        };
        name.insert_str(0, family.mlx_lm.added);
        if gguf.norm_plus_one && !gguf.keeps_plus_one && name.ends_with("norm.weight") {
            values = Values::PlusOne;
        }
        let dtype = match tensor.kind {
            _ if values != Values::Same => Dtype::F32,
            GgmlType::F16 => Dtype::F16,
            GgmlType::BF16 => Dtype::BF16,
            kind if quantization::dequantize(kind, &[]).is_some() => Dtype::F32,
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "tensor `{stored}` is stored as {}, which is not read",
                        other.name()
                    ),
                )
                .with_path(file.path()));
            }
        };
        let heads = match stored.rsplit('.').nth(1).filter(|_| names.permuted()) {
            Some("attn_q") => number("num_attention_heads"),
            Some("attn_k") => number("num_key_value_heads"),
            _ => None,
        };
        if let (Some(heads), Some(rows)) = (heads, tensor.shape.first())
            && (heads == 0 || !rows.is_multiple_of(2 * heads))
        {
            return Err(bad(format!(
                "has {rows} rows, which do not divide into {heads} heads"
            )));
        }
        // In transformers, the weight of a short convolution has an additional middle axis of
        // length 1.
        let mut shape = tensor.shape.clone();
        if name.ends_with(".conv.weight") && shape.len() == 2 {
            shape.insert(1, 1);
        }
        match change {
            Some(GgufChange::Convolution) => {
                let width = shape.pop().unwrap_or(1);
                shape = vec![shape.iter().product(), 1, width];
            }
            Some(GgufChange::Rows(field)) => {
                let all: usize = shape.iter().product();
                match number(field) {
                    Some(width) if width > 0 && all.is_multiple_of(width) => {
                        shape = vec![all / width, width];
                    }
                    _ => return Err(bad(format!("has {all} elements, and {field} no divisor"))),
                }
            }
            _ => {}
        }
        let part = |name: String, shape: Vec<usize>, (first_row, slice)| Tensor {
            name,
            dtype,
            shape,
            stored: Stored::Gguf {
                name: stored.clone(),
                kind: tensor.kind,
                permuted: heads,
                values,
                first_row,
                slice,
            },
        };
        if let Some(GgufChange::Entries(names)) = change {
            match shape.split_first() {
                Some((count, rest)) if *count == names.len() && !rest.is_empty() => {
                    let rows: usize = rest.iter().rev().skip(1).product();
                    for (i, own) in names.iter().enumerate() {
                        let name = name.replacen(part_of_name, own, 1);
                        tensors.push(part(name, rest.to_vec(), (i * rows, None)));
                    }
                }
                _ => return Err(bad(format!("has no {} entries", names.len()))),
            }
            continue;
        }
        match (name.strip_suffix(JOINED), shape.as_slice()) {
            (Some(stem), &[experts, rows, cols]) => {
                if !rows.is_multiple_of(2) {
                    return Err(bad(format!(
                        "has {rows} rows; gate and up need as many each"
                    )));
                }
                for (second, part_name) in [(false, "gate_proj"), (true, "up_proj")] {
                    let name = format!("{stem}switch_mlp.{part_name}.weight");
                    let slice = Slice::half(rows, cols, second);
                    tensors.push(part(name, vec![experts, rows / 2, cols], (0, Some(slice))));
                }
            }
            _ => tensors.push(part(name, shape, (0, None))),
        }
    }
    Ok(tensors)
}

/// Converts the usual name of a tensor to its name in the family's own directories.
fn published(family: &Family, usual: String) -> String {
    let mut names = family.names.to_vec();
    // A longer pattern may contain a shorter one, so longer patterns are replaced first.
    names.sort_by_key(|(_, usual)| std::cmp::Reverse(usual.len()));
    let renamed = |name: String, (own, usual): &(&str, &str)| name.replacen(usual, own, 1);
    names.iter().fold(usual, renamed)
}

/// Returns the `config.json` that corresponds to the metadata.
pub(super) fn config(file: &Gguf) -> Result<Map<String, Value>> {
    let mut config = gguf_config::fields(file)?;
    config.retain(|_, value| !value.is_null());
    let metadata = file.metadata();
    let architecture = metadata.str("general.architecture")?.unwrap_or_default();
    let (family, gguf) = family(&config).ok_or_else(|| no_family(file, &config))?;
    // If a family has separate rotary settings per layer kind, its configuration already contains
    // the factors.
    if !config.contains_key("rope_parameters")
        && let Some(scaling) = rope_scaling(file, architecture, None)?
    {
        config.insert("rope_scaling".into(), scaling);
    }
    let head_dim = config.get("head_dim").and_then(Value::as_f64);
    if gguf.full_layers_scale
        && let Some(Value::Object(full)) = config
            .get_mut("rope_parameters")
            .and_then(|kinds| kinds.get_mut("full_attention"))
        // Only the rotated share of each head has factors.
        && let share = full.get("partial_rotary_factor").and_then(Value::as_f64)
        && let pairs = head_dim.map(|dim| (dim * share.unwrap_or(1.0) / 2.0) as usize)
        && let Some(Value::Object(scaling)) = rope_scaling(file, architecture, pairs)?
    {
        full.extend(scaling);
    }
    if let Some(Value::Object(scaling)) = config.get_mut("rope_scaling") {
        scaling.retain(|_, value| !value.is_null());
        // The field has two names, `rope_type` and `type`. Older readers know only `type`.
        if let Some(kind) = scaling.get("rope_type").cloned() {
            scaling.insert("type".into(), kind);
        }
        if let Some(original) = scaling.get("original_max_position_embeddings").cloned() {
            config.insert("original_max_position_embeddings".into(), original);
        }
    }
    // The field is removed if readers assume by default that complete heads rotate.
    let mut without = config.clone();
    if without.remove("partial_rotary_factor") == Some(json!(1.0))
        && ModelConfig::from_map(without.clone()).is_ok_and(|read| read.rope.partial == 1.0)
    {
        config = without;
    }
    if !gguf.optional_biases {
        config.remove("attention_bias");
        config.remove("mlp_bias");
    }
    config
        .entry("max_position_embeddings")
        .or_insert(json!(2048));
    for (name, key) in [
        ("bos_token_id", "tokenizer.ggml.bos_token_id"),
        ("eos_token_id", "tokenizer.ggml.eos_token_id"),
    ] {
        if let Some(id) = metadata.u32(key).ok().flatten() {
            config.insert(name.into(), json!(id));
        }
    }
    config.insert(gguf.activation_field.into(), json!(gguf.activation));
    config.insert("architectures".into(), json!([family.class]));
    (gguf.write)(&mut config);
    config.values_mut().for_each(shorten);
    Ok(config)
}

fn no_family(file: &Gguf, config: &Map<String, Value>) -> Error {
    let model_type = config.get("model_type").and_then(Value::as_str);
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "a GGUF file of {:?} runs without a conversion, which is not supported yet",
            model_type.unwrap_or_default()
        ),
    )
    .with_path(file.path())
}

/// Replaces each float that an `f32` represents exactly by its shortest decimal form.
fn shorten(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(shorten),
        Value::Object(map) => map.values_mut().for_each(shorten),
        Value::Number(n) if n.is_f64() => {
            let Some(x) = n.as_f64() else { return };
            if f64::from(x as f32) == x {
                *value = shortest(x as f32);
            }
        }
        _ => {}
    }
}

/// The shortest decimal form of a number.
fn shortest(x: f32) -> Value {
    x.to_string()
        .parse::<f64>()
        .map_or_else(|_| json!(x), |x| json!(x))
}

/// Returns the parameters of Llama 3's scaling, for which GGUF files store factors. Uses only the
/// first `pairs` factors.
fn rope_scaling(file: &Gguf, architecture: &str, pairs: Option<usize>) -> Result<Option<Value>> {
    let [name, ..] = ROPE_FACTORS;
    let Some(tensor) = file.tensors().get(name) else {
        return Ok(None);
    };
    let factors = quantization::dequantize(tensor.kind, &file.read(tensor)?).unwrap_or_default();
    let theta = file
        .metadata()
        .f32(&format!("{architecture}.rope.freq_base"))?
        .unwrap_or(10_000.0);
    let used = factors.get(..pairs.unwrap_or(factors.len()));
    llama3_scaling(used.unwrap_or(&factors), theta)
        .map(Some)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{name} has factors that are not Llama 3's; a config.json cannot describe them"
                ),
            )
            .with_path(file.path())
        })
}

/// Finds parameters of Llama 3's scaling that give these wavelength factors; `None` if no usual
/// parameters do. This scaling multiplies long wavelengths by `factor`, keeps short wavelengths,
/// and interpolates between them. Only ratios of the other three parameters matter, so one of them
/// is set to 1.
pub(super) fn llama3_scaling(factors: &[f32], theta: f32) -> Option<Value> {
    /// The candidates for `high_freq_factor`. Llama 3's usual value is first, as in `CONTEXTS`.
    const HIGH: [f64; 6] = [4.0, 2.0, 8.0, 16.0, 32.0, 64.0];
    const CONTEXTS: [f64; 18] = [
        8192.0,
        131_072.0,
        16.0,
        32.0,
        64.0,
        128.0,
        256.0,
        512.0,
        1024.0,
        2048.0,
        4096.0,
        16_384.0,
        32_768.0,
        65_536.0,
        262_144.0,
        524_288.0,
        1_048_576.0,
        2_097_152.0,
    ];
    let low = 1.0f64;
    let factor = f64::from(factors.iter().copied().fold(f32::NAN, f32::max));
    if !(1.0..=1024.0).contains(&factor) {
        return None;
    }
    let dim = factors.len() * 2;
    let error = |high: f64, context: f64| {
        let errors = factors.iter().enumerate().map(|(i, actual)| {
            let turn = f64::from(theta).powf(2.0 * i as f64 / dim as f64);
            let wave = 2.0 * std::f64::consts::PI * turn;
            let expected = llama3_stretch(wave, factor, [low, high], context);
            (expected - f64::from(*actual)).abs() / expected
        });
        errors.fold(0.0, f64::max)
    };
    // The error must be far below the differences between parameters. If several parameters have
    // the same error, the first of them is the most usual.
    let all = CONTEXTS
        .iter()
        .flat_map(|context| HIGH.map(|high| (high, *context)));
    let (high, context, error) = all
        .map(|(high, context)| (high, context, error(high, context)))
        .reduce(|best, next| if next.2 < best.2 { next } else { best })?;
    if error > 1e-3 {
        return None;
    }
    Some(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context as u64,
    }))
}

/// Returns the vocabulary file, for a tokenizer that has one instead of `tokenizer.json`.
pub(super) fn greedy_vocabulary(file: &Gguf) -> Result<Option<String>> {
    let parts = gguf_config::tokenizer_parts(file)?;
    Tokenizer::greedy_file(&parts).map_err(|e| e.with_path(file.path()))
}

/// Returns the tokenizer's files with their names, except the vocabulary of [`greedy_vocabulary`].
pub(crate) fn tokenizer_files(
    file: &Gguf,
    config: &Map<String, Value>,
) -> Result<Vec<(&'static str, Value)>> {
    let parts = gguf_config::tokenizer_parts(file)?;
    let tokenizer = Tokenizer::from_gguf(&parts).map_err(|e| e.with_path(file.path()))?;
    let mut json = tokenizer.to_json()?;
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
    let (bos, eos) = (tokenizer.bos_id(), tokenizer.eos_ids().first().copied());
    let (begins, ends) = tokenizer.affixes();
    let begin = bos.filter(|_| begins).zip(text(bos));
    let end = eos.filter(|_| ends).zip(text(eos));
    if begin.is_some() || end.is_some() {
        json["post_processor"] = around(begin, end);
    }
    let mut settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "add_bos_token": begins,
        "add_eos_token": ends,
        "model_max_length": config.get("max_position_embeddings"),
    });
    for (name, id) in [
        ("bos_token", bos),
        ("eos_token", eos),
        ("unk_token", tokenizer.unk_id()),
        ("pad_token", tokenizer.pad_id()),
    ] {
        if let Some(token) = text(id) {
            settings[name] = token.into();
        }
    }
    match (&parts.chat_template, &parts.tool_use_template) {
        (Some(template), Some(tools)) => {
            settings["chat_template"] = json!([
                {"name": "default", "template": template},
                {"name": "tool_use", "template": tools},
            ]);
        }
        (Some(template), None) => settings["chat_template"] = template.as_str().into(),
        (None, _) => {}
    }
    let mut generation = json!({"eos_token_id": tokenizer.eos_ids()});
    if let Some(bos) = bos {
        generation["bos_token_id"] = bos.into();
    }
    let mut files = vec![
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ];
    if Tokenizer::greedy_file(&parts)?.is_none() {
        files.push(("tokenizer.json", json));
    }
    Ok(files)
}

/// Returns a post-processor that adds the token `begin` before a text and the token `end` after it.
fn around(begin: Option<(u32, String)>, end: Option<(u32, String)>) -> Value {
    let token =
        |t: &(u32, String), kind: u32| json!({"SpecialToken": {"id": t.1, "type_id": kind}});
    let wrap = |sequence: &str, kind: u32| {
        let mut all: Vec<Value> = begin.iter().map(|t| token(t, kind)).collect();
        all.push(json!({"Sequence": {"id": sequence, "type_id": kind}}));
        all.extend(end.iter().map(|t| token(t, kind)));
        all
    };
    let single = wrap("A", 0);
    let mut pair = single.clone();
    pair.extend(wrap("B", 1));
    let mut tokens = Map::new();
    for (id, text) in begin.iter().chain(&end) {
        tokens.insert(
            text.clone(),
            json!({"id": text, "ids": [id], "tokens": [text]}),
        );
    }
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
}
