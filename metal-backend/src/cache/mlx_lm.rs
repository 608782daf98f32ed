//! Prompt caches in the format of Python's mlx-lm (`save_prompt_cache` in `models/cache.py`):
//! safetensors whose tensor names are paths into nested lists. `0.1` is the values of the first
//! layer, and `0.1.2` the biases of its packed values. The file's metadata contain the class of
//! each layer and the model's name. The format has two [forms](Form). This module reads both, and
//! writes the form of mlx-lm 0.32.
//!
//! mlx-lm does not store the prompt's tokens. Our files store the tokens and the model's identity
//! under [`OURS`], a key that mlx-lm ignores.

use std::collections::BTreeMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized};
use safetensors::tensor::Dtype as FileDtype;
use serde::{Deserialize, Serialize};

use super::file_tensors::{Additions, Kept, Tensor, array, tensor, write};
use super::{Caches, Portable};
use crate::checkpoint::files::invalid;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;

/// The metadata key of the model that mlx-lm loads if `--model` is missing.
const MODEL: &str = "0.model";
/// The metadata key of the tokenizer's settings as JSON. mlx-lm's `generate` requires it.
const TOKENIZER: &str = "0.tokenizer_config";

/// How a file describes its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// mlx-lm before 0.32: metadata keys `2.N` are classes, and keys `0.N.K` are the settings of
    /// layer N.
    Texts,
    /// mlx-lm since 0.32: metadata keys `1.N` are classes. The settings of a layer are one-element
    /// tensors after its keys and values. Metadata keys `2.K` list these tensors.
    Tensors,
}

impl Form {
    fn from_metadata(metadata: &BTreeMap<String, String>) -> Option<Self> {
        // In the other form, this key may hold an empty string, which begins the list of tensors.
        let is_class = |class: &String| !class.is_empty();
        if metadata.contains_key("1.0") {
            Some(Self::Tensors)
        } else {
            (metadata.get("2.0").is_some_and(is_class)).then_some(Self::Texts)
        }
    }

    /// Returns the metadata key for the class of layer `i`.
    fn class(self, i: usize) -> String {
        match self {
            Self::Texts => format!("2.{i}"),
            Self::Tensors => format!("1.{i}"),
        }
    }

    /// Returns the metadata key for our own data as JSON.
    fn ours(self) -> &'static str {
        match self {
            Self::Texts => "1.rust_mlx",
            Self::Tensors => "0.rust_mlx",
        }
    }
}

// Class names in mlx-lm.
const GROWING: &str = "KVCache";
const CONCATENATED: &str = "ConcatenateKVCache";
const ROTATING: &str = "RotatingKVCache";
const QUANTIZED: &str = "QuantizedKVCache";

/// Our own data, which mlx-lm's format does not contain.
#[derive(Debug, Serialize, Deserialize)]
struct Ours {
    /// The identity of the model.
    identity: String,
    tokens: Vec<u32>,
    /// The value of [`Caches::stretch`].
    stretch: usize,
}

/// A layer's class and settings in mlx-lm.
struct Layer {
    class: &'static str,
    /// The settings in the order of [`Form::Tensors`].
    settings: Vec<i32>,
}

/// Whether the metadata of a file follow mlx-lm's format.
pub fn is_mlx_lm(metadata: &BTreeMap<String, String>) -> bool {
    Form::from_metadata(metadata).is_some()
}

/// Writes `caches` if mlx-lm has a class for each layer. Otherwise writes nothing and returns
/// false. `model` is the name of the model that mlx-lm loads with the caches.
///
/// # Errors
/// If the caches cannot be read or the file cannot be written.
pub fn save(
    path: &Path,
    (identity, model): (&str, &str),
    tokens: &[u32],
    caches: &Caches,
    additions: &Additions<'_>,
) -> Result<bool> {
    let form = Form::Tensors;
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut metadata = BTreeMap::from([("2.0".to_owned(), String::new())]);
    let mut numbers = 0;
    for (i, cache) in caches.iter().enumerate() {
        let portable = match cache.as_kv() {
            Some(_) if cache.as_recurrent().is_some() => None,
            Some(cache) => cache.portable().map_err(engine("prompt cache"))?,
            None => None,
        };
        let Some(portable) = portable else {
            return Ok(false);
        };
        let (layer, arrays) = describe(&portable);
        for (name, array) in arrays {
            tensors.push(tensor(format!("{i}.{name}"), array)?);
        }
        metadata.insert(form.class(i), layer.class.to_owned());
        for (k, setting) in layer.settings.iter().enumerate() {
            let name = format!("{i}.{}", k + 2);
            let number = Array::scalar(*setting).map_err(engine("prompt cache"))?;
            tensors.push(tensor(name.clone(), &number)?);
            numbers += 1;
            metadata.insert(format!("2.{numbers}.0"), name);
            metadata.insert(format!("2.{numbers}.1"), "scalar".to_owned());
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
    metadata.insert(form.ours().to_owned(), ours);
    write(path, &tensors, metadata.into_iter().collect(), additions)?;
    Ok(true)
}

/// Returns the class and settings of a layer, and the layer's arrays with their names.
fn describe(portable: &Portable) -> (Layer, Vec<(String, &Array)>) {
    match portable {
        Portable::All { keys, values } => (
            Layer {
                class: GROWING,
                settings: vec![keys.shape().get(2).copied().unwrap_or_default()],
            },
            vec![("0".to_owned(), keys), ("1".to_owned(), values)],
        ),
        Portable::Recent {
            keys,
            values,
            offset,
            size,
            keep,
        } => (
            Layer {
                class: ROTATING,
                // The last setting is the ring's slot for the next position. The positions are
                // written in order, so this slot is after the last position.
                settings: vec![*offset, *keep, *size, (*offset).min(*size)],
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

/// Returns the arrays of a packed matrix, each with its index in mlx-lm's files.
fn parts(q: &Quantized) -> impl Iterator<Item = (usize, &Array)> {
    [Some(&q.weight), Some(&q.scales), q.biases.as_ref()]
        .into_iter()
        .flatten()
        .enumerate()
}

/// Returns the number of positions in a file, from its headers.
///
/// # Errors
/// The errors of [`load`].
pub fn positions(path: &Path, metadata: &BTreeMap<String, String>) -> Result<usize> {
    let fault = || {
        invalid(
            path,
            "not a prompt cache: its number of positions is missing",
        )
    };
    let form = Form::from_metadata(metadata).ok_or_else(fault)?;
    let file = SafetensorsCheckpoint::open_file(path)?;
    let first = Described {
        file: &file,
        path,
        metadata,
        form,
        i: 0,
    };
    let positions = match (first.class(), form) {
        (ROTATING | QUANTIZED, _) | (GROWING, Form::Tensors) => {
            usize::try_from(first.setting(0)?).ok()
        }
        _ => file.info("0.0").and_then(|info| info.shape.get(2).copied()),
    };
    positions.filter(|n| *n > 0).ok_or_else(fault)
}

/// The description of a layer in a file.
struct Described<'a> {
    file: &'a SafetensorsCheckpoint,
    path: &'a Path,
    metadata: &'a BTreeMap<String, String>,
    form: Form,
    i: usize,
}

impl Described<'_> {
    fn fault(&self, message: String) -> Error {
        invalid(self.path, format!("layer {}: {message}", self.i))
    }

    fn class(&self) -> &str {
        let class = self.metadata.get(&self.form.class(self.i));
        class.map(String::as_str).unwrap_or_default()
    }

    fn tensor(&self, name: String) -> Result<Array> {
        let info = self.file.info(&name);
        let info = info.ok_or_else(|| self.fault(format!("it has no tensor `{name}`")))?;
        array(self.file, info)
    }

    /// Returns setting `k` in the order of [`Form::Tensors`]; setting 0 is the number of positions.
    fn setting(&self, k: usize) -> Result<i32> {
        let (name, number) = match self.form {
            Form::Texts => {
                let k = match self.class() {
                    ROTATING => [2, 0, 1, 3].get(k).copied().unwrap_or(k),
                    _ => k,
                };
                let key = format!("0.{}.{k}", self.i);
                let number = self.metadata.get(&key).and_then(|text| text.parse().ok());
                (key, number)
            }
            Form::Tensors => {
                let name = format!("{}.{}", self.i, k + 2);
                let number = self.tensor(name.clone())?;
                let number = match number.size() {
                    1 => (number.astype(Dtype::Int32))
                        .and_then(|n| n.reshape(&[])?.item::<i32>())
                        .ok(),
                    _ => None,
                };
                (name, number)
            }
        };
        let number = number.filter(|n: &i32| *n >= 0);
        number.ok_or_else(|| self.fault(format!("its setting `{name}` is missing or not a number")))
    }
}

/// Reads a file of the model `identity` into the `empty` caches. `one` computes caches of one
/// token, whose shapes and types the file's layers must match.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for a damaged file, a file of another model, or other kinds of
/// caches.
pub fn load(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    identity: &str,
    mut empty: Caches,
    one: &mut dyn FnMut() -> Result<Caches>,
) -> Result<Kept> {
    let fault = |message: String| invalid(path, message);
    let form = Form::from_metadata(metadata)
        .ok_or_else(|| fault("not a prompt cache: it names no classes".to_owned()))?;
    let key = form.ours();
    let ours = metadata.get(key).map(|text| {
        serde_json::from_str::<Ours>(text)
            .map_err(|e| fault(format!("its metadata `{key}` is damaged")).with_source(e))
    });
    let ours = ours.transpose()?;
    if ours.as_ref().is_some_and(|ours| ours.identity != identity) {
        return Err(fault(
            "it was computed by another model; make it again with this one".to_owned(),
        ));
    }
    let positions = positions(path, metadata)?;
    // If mlx-lm continues a file, it copies our data, but adds tokens. So our data are valid only
    // if the number of tokens matches.
    let ours = ours.filter(|ours| ours.tokens.len() == positions);
    let file = SafetensorsCheckpoint::open_file(path)?;
    let layers = (0..).take_while(|i| metadata.contains_key(&form.class(*i)));
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
                "the keys of this model are rotated by the length of the prompt, which the file does not contain"
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
                "this model has a recurrent state, which is not read from mlx-lm's files"
                    .to_owned(),
            ));
        };
        let portable = layer(&Described {
            file: &file,
            path,
            metadata,
            form,
            i,
        })?;
        let words = |e: mlx_rs_core::Error| of_layer(e.to_string());
        let (layout, offset) = (
            portable.layout().map_err(words)?,
            portable.offset().map_err(words)?,
        );
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
        let portable = portable.cast(dtype).map_err(engine("prompt cache"))?;
        cache.adopt(portable).map_err(of_layer)?;
    }
    Ok(Kept {
        tokens: ours.map(|ours| ours.tokens),
        caches: empty,
    })
}

/// Reads the contents of a layer.
fn layer(of: &Described<'_>) -> Result<Portable> {
    let i = of.i;
    let fault = |message: String| of.fault(message);
    let get = |name: String| of.tensor(name);
    let setting = |k: usize| of.setting(k);
    let words = |e: mlx_rs_core::Error| fault(e.to_string());
    let begun = |array: Array, offset: i32| match array.dim(2) {
        Ok(n) if n == offset => Ok(array),
        Ok(n) if n > offset => array.slice_axis(2, 0, offset).map_err(words),
        _ => Err(fault(format!("it has fewer than {offset} positions"))),
    };
    match of.class() {
        // The stored buffers may be longer than their valid part, so they are truncated.
        GROWING if of.form == Form::Tensors => {
            let offset = setting(0)?;
            Ok(Portable::All {
                keys: begun(get(format!("{i}.0"))?, offset)?,
                values: begun(get(format!("{i}.1"))?, offset)?,
            })
        }
        GROWING | CONCATENATED => Ok(Portable::All {
            keys: get(format!("{i}.0"))?,
            values: get(format!("{i}.1"))?,
        }),
        ROTATING => {
            let [offset, keep, size, next] = [setting(0)?, setting(1)?, setting(2)?, setting(3)?];
            if size < 1 || keep >= size {
                return Err(fault(format!(
                    "its ring of {size} positions cannot keep the first {keep}"
                )));
            }
            let ring = Ring {
                keep,
                size,
                offset,
                next,
            };
            Ok(Portable::Recent {
                keys: ring.ordered(&get(format!("{i}.0"))?).map_err(words)?,
                values: ring.ordered(&get(format!("{i}.1"))?).map_err(words)?,
                offset,
                size,
                keep,
            })
        }
        QUANTIZED => {
            let [offset, group_size, bits] = [setting(0)?, setting(1)?, setting(2)?];
            let packed = |which: usize| -> Result<Quantized> {
                let part = |k: usize| -> Result<Array> {
                    let name = format!("{i}.{which}.{k}");
                    let info = of.file.info(&name);
                    let kind = info.map(|info| info.dtype);
                    if k == 0 && kind.is_some_and(|kind| kind != FileDtype::U32) {
                        return Err(fault(format!("`{name}` is not of uint32")));
                    }
                    begun(get(name)?, offset)
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

/// A ring buffer of mlx-lm. `next` is the slot of the next position. After a prompt in several
/// steps, the buffer contains more than `size` positions, in order.
struct Ring {
    keep: i32,
    size: i32,
    offset: i32,
    next: i32,
}

impl Ring {
    /// Returns keys or values in order, as many positions as [`Portable::Recent`] stores.
    fn ordered(&self, buffer: &Array) -> mlx_rs_core::Result<Array> {
        let Self { keep, size, .. } = *self;
        let stored = buffer.dim(2)?;
        let used = self.offset.min(size);
        let next = self.next.clamp(0, stored);
        let parts = if next < stored && next < self.offset && next >= keep {
            // The buffer is full, so slot `next` contains the oldest position.
            let older = buffer.slice_axis(2, next, stored)?;
            vec![older, buffer.slice_axis(2, keep, next)?]
        } else {
            let end = if next > 0 { next } else { stored };
            vec![buffer.slice_axis(2, keep.min(end), end)?]
        };
        let rest = mlx_rs_core::concatenate(&parts.iter().collect::<Vec<_>>(), 2)?;
        let n = rest.dim(2)?;
        let prefix = buffer.slice_axis(2, 0, keep.min(used))?;
        let wanted = (used - prefix.dim(2)?).clamp(0, n);
        let rest = rest.slice_axis(2, n - wanted, n)?;
        mlx_rs_core::concatenate(&[&prefix, &rest], 2)
    }
}
