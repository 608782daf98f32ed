//! Computed prompts in the format of Python's mlx-lm (`save_prompt_cache` of its
//! `models/cache.py`): safetensors whose names are paths into lists. `0.1` are the values of the
//! first layer, `0.1.2` the biases of its packed values. The file's metadata say which class each
//! layer has (`2.N`), its settings (`0.N`) and the model (`1.model`).
//!
//! mlx-lm does not keep the prompt's tokens. Files of ours have them and the model's identity under
//! [`OURS`], which mlx-lm reads past.

use std::collections::BTreeMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, QuantMode, Quantized};
use safetensors::tensor::Dtype as FileDtype;
use serde::{Deserialize, Serialize};

use super::file::{Kept, Tensor, array, tensor, write};
use super::{Caches, Portable};
use crate::checkpoint::files::invalid;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;

/// The class of the first layer, which every file has.
const FIRST_CLASS: &str = "2.0";
/// What mlx-lm loads where no `--model` is given.
const MODEL: &str = "1.model";
/// Settings of the tokenizer as JSON, which mlx-lm's `generate` asks for.
const TOKENIZER: &str = "1.tokenizer_config";
/// What only our files have, as JSON.
const OURS: &str = "1.rust_mlx";

// Classes of mlx-lm.
const GROWING: &str = "KVCache";
const CONCATENATED: &str = "ConcatenateKVCache";
const ROTATING: &str = "RotatingKVCache";
const QUANTIZED: &str = "QuantizedKVCache";

/// What mlx-lm has no place for.
#[derive(Debug, Serialize, Deserialize)]
struct Ours {
    /// Of the model.
    identity: String,
    tokens: Vec<u32>,
    /// [`Caches::stretch`].
    stretch: usize,
}

/// A layer as mlx-lm describes it.
struct Layer {
    class: &'static str,
    settings: Vec<i32>,
}

/// Whether the texts of a file are those of mlx-lm.
pub fn is_mlx_lm(metadata: &BTreeMap<String, String>) -> bool {
    metadata.contains_key(FIRST_CLASS)
}

/// Writes `caches` where mlx-lm has a class for each layer. Otherwise writes nothing and returns
/// false. `model` is what mlx-lm would load them with.
///
/// # Errors
/// When the caches cannot be read or the file cannot be written.
pub fn save(
    path: &Path,
    (identity, model): (&str, &str),
    tokens: &[u32],
    caches: &Caches,
) -> Result<bool> {
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut metadata = BTreeMap::new();
    for (i, cache) in caches.iter().enumerate() {
        let held = match cache.as_kv() {
            Some(_) if cache.as_recurrent().is_some() => None,
            Some(cache) => cache.portable().map_err(engine("prompt cache"))?,
            None => None,
        };
        let Some(held) = held else {
            return Ok(false);
        };
        let (layer, arrays) = describe(&held);
        for (name, held) in arrays {
            tensors.push(tensor(format!("{i}.{name}"), held)?);
        }
        metadata.insert(format!("2.{i}"), layer.class.to_owned());
        if layer.settings.is_empty() {
            metadata.insert(format!("0.{i}"), String::new());
        }
        for (k, setting) in layer.settings.iter().enumerate() {
            metadata.insert(format!("0.{i}.{k}"), setting.to_string());
        }
    }
    if tensors.is_empty() {
        return Ok(false);
    }
    let ours = Ours {
        identity: identity.to_owned(),
        tokens: tokens.to_vec(),
        stretch: caches.stretch(),
    };
    let ours = serde_json::to_string(&ours).map_err(|e| {
        Error::new(ErrorKind::Engine, "the prompt cache cannot be described").with_source(e)
    })?;
    metadata.insert(MODEL.to_owned(), model.to_owned());
    metadata.insert(TOKENIZER.to_owned(), "{}".to_owned());
    metadata.insert(OURS.to_owned(), ours);
    write(path, &tensors, Some(metadata.into_iter().collect()))?;
    Ok(true)
}

/// The class and settings of a layer, and its arrays by their names in it.
fn describe(held: &Portable) -> (Layer, Vec<(String, &Array)>) {
    match held {
        Portable::All { keys, values } => (
            Layer {
                class: GROWING,
                settings: Vec::new(),
            },
            vec![("0".to_owned(), keys), ("1".to_owned(), values)],
        ),
        Portable::Recent {
            keys,
            values,
            offset,
            size,
            kept,
        } => (
            Layer {
                class: ROTATING,
                // The last is where the next position goes: behind all, which are in their order.
                settings: vec![*kept, *size, *offset, (*offset).min(*size)],
            },
            vec![("0".to_owned(), keys), ("1".to_owned(), values)],
        ),
        Portable::Packed { keys, values } => {
            let parts = |of: usize, q| parts(q).map(move |(k, a)| (format!("{of}.{k}"), a));
            let offset = keys.weight.shape().get(2).copied().unwrap_or_default();
            (
                Layer {
                    class: QUANTIZED,
                    settings: vec![offset, keys.group_size, keys.bits],
                },
                parts(0, keys).chain(parts(1, values)).collect(),
            )
        }
    }
}

/// The arrays of a packed one, by their number in mlx-lm's files.
fn parts(q: &Quantized) -> impl Iterator<Item = (usize, &Array)> {
    [Some(&q.weight), Some(&q.scales), q.biases.as_ref()]
        .into_iter()
        .flatten()
        .enumerate()
}

/// The number of positions that a file holds, by its headers.
///
/// # Errors
/// As [`load`].
pub fn positions(path: &Path, metadata: &BTreeMap<String, String>) -> Result<usize> {
    let fault = || invalid(path, "not a prompt cache: it does not say how long it is");
    let number = |key: &str| metadata.get(key)?.parse::<usize>().ok();
    let found = match metadata.get(FIRST_CLASS).map(String::as_str) {
        Some(ROTATING) => number("0.0.2"),
        Some(QUANTIZED) => number("0.0.0"),
        _ => {
            let file = SafetensorsCheckpoint::open_file(path)?;
            file.info("0.0").and_then(|info| info.shape.get(2).copied())
        }
    };
    found.filter(|n| *n > 0).ok_or_else(fault)
}

/// Reads a file for the model `identity` into `empty` caches. `one` computes caches of one token,
/// which tell the layers' shapes and types.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for a damaged file, one of another model, or one with other caches.
pub fn load(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    identity: &str,
    mut empty: Caches,
    one: &mut dyn FnMut() -> Result<Caches>,
) -> Result<Kept> {
    let fault = |message: String| invalid(path, message);
    let ours = metadata.get(OURS).map(|text| {
        serde_json::from_str::<Ours>(text)
            .map_err(|e| fault(format!("its text `{OURS}` is damaged")).with_source(e))
    });
    let ours = ours.transpose()?;
    if ours.as_ref().is_some_and(|ours| ours.identity != identity) {
        return Err(fault(
            "it was computed by another model; make it again with this one".to_owned(),
        ));
    }
    let positions = positions(path, metadata)?;
    // mlx-lm keeps the texts of a file that it goes on from, whose tokens are more then.
    let ours = ours.filter(|ours| ours.tokens.len() == positions);
    let file = SafetensorsCheckpoint::open_file(path)?;
    let layers = (0..).take_while(|i| metadata.contains_key(&format!("2.{i}")));
    let layers = layers.count();
    if layers != empty.len() {
        return Err(fault(format!(
            "it has {layers} layers, the model {}",
            empty.len()
        )));
    }
    let known = one()?;
    empty = empty.for_sequence(positions);
    match &ours {
        None if empty.may_switch() => {
            return Err(fault(
                "the keys of this model are rotated by the length of the prompt, which the file does not tell"
                    .to_owned(),
            ));
        }
        Some(ours) if ours.stretch != empty.stretch() => {
            return Err(fault(
                "its keys are rotated for a prompt of another length; make it again".to_owned(),
            ));
        }
        _ => {}
    }
    for (i, (cache, known)) in empty.iter_mut().zip(known.iter()).enumerate() {
        let of_layer = |message: String| fault(format!("layer {i}: {message}"));
        let recurrent = cache.as_recurrent().is_some();
        let (Some(cache), Some(known), false) = (cache.as_kv_mut(), known.as_kv(), recurrent)
        else {
            return Err(of_layer(
                "this model's is a recurrent state, of which mlx-lm's files are not read"
                    .to_owned(),
            ));
        };
        let held = layer(&file, path, metadata, i)?;
        let words = |e: mlx_rs_core::Error| of_layer(e.to_string());
        let (layout, offset) = (held.layout().map_err(words)?, held.offset().map_err(words)?);
        let known = known.portable().map_err(engine("prompt cache"))?;
        let known = known.map(|known| known.layout()).transpose();
        let known = known.map_err(engine("prompt cache"))?;
        if let Some(known) = known.filter(|known| !layout.fits(known)) {
            return Err(of_layer(format!(
                "it holds {layout}, the model has {known}; it was computed by another model"
            )));
        }
        if usize::try_from(offset) != Ok(positions) {
            return Err(of_layer(format!(
                "it holds {offset} positions, the first layer {positions}"
            )));
        }
        let dtype = known.map_or(layout.dtype, |known| known.dtype);
        let held = held.cast(dtype).map_err(engine("prompt cache"))?;
        cache.adopt(held).map_err(of_layer)?;
    }
    Ok(Kept {
        tokens: ours.map(|ours| ours.tokens),
        caches: empty,
    })
}

/// What layer `i` of a file holds.
fn layer(
    file: &SafetensorsCheckpoint,
    path: &Path,
    metadata: &BTreeMap<String, String>,
    i: usize,
) -> Result<Portable> {
    let fault = |message: String| invalid(path, format!("layer {i}: {message}"));
    let get = |name: String| -> Result<Array> {
        let info = (file.info(&name)).ok_or_else(|| fault(format!("it has no tensor `{name}`")))?;
        array(file, info)
    };
    let setting = |k: usize| -> Result<i32> {
        let key = format!("0.{i}.{k}");
        let number = metadata.get(&key).and_then(|text| text.parse().ok());
        let number = number.filter(|n: &i32| *n >= 0);
        number.ok_or_else(|| fault(format!("its setting `{key}` is missing or no number")))
    };
    let class = metadata.get(&format!("2.{i}"));
    let class = class.map(String::as_str).unwrap_or_default();
    let words = |e: mlx_rs_core::Error| fault(e.to_string());
    match class {
        GROWING | CONCATENATED => Ok(Portable::All {
            keys: get(format!("{i}.0"))?,
            values: get(format!("{i}.1"))?,
        }),
        ROTATING => {
            let [kept, size, offset, next] = [setting(0)?, setting(1)?, setting(2)?, setting(3)?];
            if size < 1 || kept >= size {
                return Err(fault(format!("it has a ring of {size} with {kept} kept")));
            }
            let ring = Ring {
                kept,
                size,
                offset,
                next,
            };
            Ok(Portable::Recent {
                keys: ring.ordered(&get(format!("{i}.0"))?).map_err(words)?,
                values: ring.ordered(&get(format!("{i}.1"))?).map_err(words)?,
                offset,
                size,
                kept,
            })
        }
        QUANTIZED => {
            let [offset, group_size, bits] = [setting(0)?, setting(1)?, setting(2)?];
            let packed = |of: usize| -> Result<Quantized> {
                let part = |k: usize| -> Result<Array> {
                    let name = format!("{i}.{of}.{k}");
                    let info = file.info(&name);
                    let kind = info.map(|info| info.dtype);
                    if k == 0 && kind.is_some_and(|kind| kind != FileDtype::U32) {
                        return Err(fault(format!("`{name}` is not of uint32")));
                    }
                    let whole = get(name)?;
                    match whole.dim(2) {
                        Ok(n) if n >= offset => whole.slice_axis(2, 0, offset).map_err(words),
                        _ => Err(fault(format!("it has fewer than {offset} positions"))),
                    }
                };
                let q = Quantized {
                    weight: part(0)?,
                    scales: part(1)?,
                    biases: Some(part(2)?),
                    group_size,
                    bits,
                    mode: QuantMode::Affine,
                };
                q.validate("cache").map_err(words)?;
                Ok(q)
            };
            Ok(Portable::Packed {
                keys: packed(0)?,
                values: packed(1)?,
            })
        }
        other => Err(fault(format!(
            "it is a `{other}`; {GROWING}, {ROTATING} and {QUANTIZED} are read"
        ))),
    }
}

/// A ring of mlx-lm: `next` is the slot of the next position. A prompt in several steps leaves more
/// than `size` positions, in their order.
struct Ring {
    kept: i32,
    size: i32,
    offset: i32,
    next: i32,
}

impl Ring {
    /// Keys or values in their order, as many as [`Portable::Recent`] has.
    fn ordered(&self, buffer: &Array) -> mlx_rs_core::Result<Array> {
        let Self { kept, size, .. } = *self;
        let held = buffer.dim(2)?;
        let used = self.offset.min(size);
        let next = self.next.clamp(0, held);
        let parts = if next < held && next < self.offset && next >= kept {
            // Full: the oldest stands where the next one goes.
            let older = buffer.slice_axis(2, next, held)?;
            vec![older, buffer.slice_axis(2, kept, next)?]
        } else {
            let end = if next > 0 { next } else { held };
            vec![buffer.slice_axis(2, kept.min(end), end)?]
        };
        let rest = mlx_rs_core::concatenate(&parts.iter().collect::<Vec<_>>(), 2)?;
        let n = rest.dim(2)?;
        let kept = buffer.slice_axis(2, 0, kept.min(used))?;
        let wanted = (used - kept.dim(2)?).clamp(0, n);
        let rest = rest.slice_axis(2, n - wanted, n)?;
        mlx_rs_core::concatenate(&[&kept, &rest], 2)
    }
}
