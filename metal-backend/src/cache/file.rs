//! Prompt caches in files: safetensors with the arrays of the caches, their tokens, and the
//! identity of the model. A file is written completely or not at all.
//!
//! Keys and values use mlx-lm's format (`mlx_lm.rs`). That format does not support recurrent
//! states, so models with recurrent layers use this module's own format.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use half::{bf16, f16};
use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::AtomicFile;
use mlx_rs_core::{Array, Dtype};
use safetensors::tensor::{Dtype as FileDtype, TensorView};
use serde::{Deserialize, Serialize};

use super::{Caches, Snapshot, mlx_lm};
use crate::checkpoint::files::invalid;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;
use crate::workdir::{WorkDir, parent_of, unwritten};

/// The name of the tensor that stores the description of the file.
const ABOUT: &str = "about";
/// The required value of [`About::format`].
const FORMAT: &str = "rust-mlx prompt cache 1";
/// The prefix of the hidden directories in which files are created before they are moved.
const WORK_PREFIX: &str = ".prompt-cache-";

/// The description of a file, stored as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    format: String,
    /// The identity of the model.
    identity: String,
    tokens: Vec<u32>,
    /// [`Caches::stretch`]. Older files lack this field: their keys may have the first rotation, or
    /// several different rotations.
    #[serde(default)]
    stretch: usize,
    layers: Vec<Layer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Layer {
    kind: String,
    offset: i32,
}

/// The contents of a file.
#[derive(Debug)]
pub struct Kept {
    /// The prompt; `None` if mlx-lm wrote the file without it.
    pub tokens: Option<Vec<u32>>,
    /// The caches after the prompt.
    pub caches: Caches,
}

/// What the tier on disk adds to a file.
pub(super) struct Additions<'a> {
    /// Texts for the header.
    pub texts: &'a [(String, String)],
    /// Runs on the complete file before it gets its name.
    pub finish: &'a dyn Fn(&Path) -> std::io::Result<()>,
}

impl Additions<'_> {
    /// Without any.
    const NONE: Self = Self {
        texts: &[],
        finish: &|_| Ok(()),
    };
}

/// A tensor of a file: its name, type, shape and bytes.
pub(super) type Tensor = (String, FileDtype, Vec<usize>, Vec<u8>);

/// Writes `caches` with the computed state of `tokens`. `names` are the identity of the model that
/// computed them, and its name for mlx-lm.
///
/// # Errors
/// When the caches cannot be read or the file cannot be written.
pub fn save(path: &Path, names: (&str, &str), tokens: &[u32], caches: &Caches) -> Result<()> {
    save_with(path, names, tokens, caches, &Additions::NONE)
}

/// As [`save`], with additions.
pub(super) fn save_with(
    path: &Path,
    names: (&str, &str),
    tokens: &[u32],
    caches: &Caches,
    additions: &Additions<'_>,
) -> Result<()> {
    match mlx_lm::save(path, names, tokens, caches, additions)? {
        true => Ok(()),
        false => save_own(path, names.0, tokens, caches, additions),
    }
}

/// Writes the format of this module.
fn save_own(
    path: &Path,
    identity: &str,
    tokens: &[u32],
    caches: &Caches,
    additions: &Additions<'_>,
) -> Result<()> {
    let mut layers = Vec::new();
    let mut tensors: Vec<Tensor> = Vec::new();
    for (i, cache) in caches.iter().enumerate() {
        let snapshot = cache.snapshot().map_err(engine("prompt cache"))?;
        for (name, array) in &snapshot.arrays {
            tensors.push(tensor(format!("layers.{i}.{name}"), array)?);
        }
        layers.push(Layer {
            kind: snapshot.kind,
            offset: snapshot.offset,
        });
    }
    let about = About {
        format: FORMAT.to_owned(),
        identity: identity.to_owned(),
        tokens: tokens.to_vec(),
        stretch: caches.stretch(),
        layers,
    };
    let about = serde_json::to_vec(&about).map_err(|e| {
        Error::new(ErrorKind::Engine, "the prompt cache cannot be described").with_source(e)
    })?;
    tensors.push((ABOUT.to_owned(), FileDtype::U8, vec![about.len()], about));
    write(path, &tensors, HashMap::new(), additions)
}

/// An array as a named tensor of a file.
pub(super) fn tensor(name: String, array: &Array) -> Result<Tensor> {
    let shape = array.shape().iter();
    let shape = shape.map(|&d| d.unsigned_abs() as usize).collect();
    let (dtype, bytes) = bytes(array)?;
    Ok((name, dtype, shape, bytes))
}

/// Writes a file completely or not at all.
pub(super) fn write(
    path: &Path,
    tensors: &[Tensor],
    mut metadata: HashMap<String, String>,
    additions: &Additions<'_>,
) -> Result<()> {
    metadata.extend(additions.texts.iter().cloned());
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes)
                .map(|view| (name.as_str(), view))
                .map_err(|e| {
                    let message = format!("the prompt cache has no place for {name}");
                    Error::new(ErrorKind::Engine, message).with_source(e)
                })
        })
        .collect::<Result<Vec<_>>>()?;
    let dir = parent_of(path);
    let work = WorkDir::new(dir, WORK_PREFIX).map_err(|e| {
        Error::new(ErrorKind::Io, "the file cannot be written")
            .with_path(path)
            .with_source(e)
    })?;
    // The file contains conversations, so only its owner may read it.
    let write = || {
        let file = AtomicFile::create_private_in(work.path(), path)?;
        safetensors::serialize_to_file(views, metadata, file.unfinished())
            .map_err(std::io::Error::other)?;
        (additions.finish)(file.unfinished())?;
        file.commit()
    };
    write().map_err(|e| unwritten(path, e))
}

/// The number of positions in a file, from its headers.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for a file that is not a prompt cache.
pub fn positions(path: &Path) -> Result<usize> {
    let metadata = SafetensorsCheckpoint::metadata(path)?;
    if mlx_lm::is_mlx_lm(&metadata) {
        return mlx_lm::positions(path, &metadata);
    }
    Ok(about(&SafetensorsCheckpoint::open_file(path)?, path)?
        .tokens
        .len())
}

/// Reads a file of the model `identity`. Returns the tokens, and the `empty` caches filled with the
/// file's contents. `one` computes caches of one token; the caches of mlx-lm files are checked
/// against their shapes.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for a damaged file, a file of another model, or other kinds of
/// caches.
pub fn load(
    path: &Path,
    identity: &str,
    empty: Caches,
    one: &mut dyn FnMut() -> Result<Caches>,
) -> Result<Kept> {
    let metadata = SafetensorsCheckpoint::metadata(path)?;
    if mlx_lm::is_mlx_lm(&metadata) {
        return mlx_lm::load(path, &metadata, identity, empty, one);
    }
    let (tokens, caches) = load_own(path, identity, empty)?;
    Ok(Kept {
        tokens: Some(tokens),
        caches,
    })
}

/// The description of a file in this module's format.
fn about(file: &SafetensorsCheckpoint, path: &Path) -> Result<About> {
    let fault = |message: String| invalid(path, message);
    let info = file
        .info(ABOUT)
        .ok_or_else(|| fault(format!("not a prompt cache: it has no tensor `{ABOUT}`")))?;
    let about: About = serde_json::from_slice(&file.read::<u8>(info)?)
        .map_err(|e| fault("not a prompt cache".into()).with_source(e))?;
    if about.format != FORMAT {
        return Err(fault(format!(
            "it is of format `{}`; `{FORMAT}` is needed",
            about.format
        )));
    }
    Ok(about)
}

fn load_own(path: &Path, identity: &str, empty: Caches) -> Result<(Vec<u32>, Caches)> {
    let file = SafetensorsCheckpoint::open_file(path)?;
    let fault = |message: String| invalid(path, message);
    let about = about(&file, path)?;
    if about.identity != identity {
        return Err(fault(
            "it was computed by another model; make it again with this one".to_owned(),
        ));
    }
    if about.layers.len() != empty.len() {
        return Err(fault(format!(
            "it has {} layers, the model {}",
            about.layers.len(),
            empty.len()
        )));
    }
    let mut caches = empty.for_sequence(about.tokens.len());
    if about.stretch != caches.stretch() {
        return Err(fault(
            "its keys are rotated for a prompt of another length; make it again".to_owned(),
        ));
    }
    let n = i32::try_from(about.tokens.len()).unwrap_or(-1);
    for (i, (layer, cache)) in about.layers.into_iter().zip(caches.iter_mut()).enumerate() {
        if layer.offset != n {
            return Err(fault(format!(
                "layer {i} holds {} positions for {n} tokens",
                layer.offset
            )));
        }
        let prefix = format!("layers.{i}.");
        let mut arrays = BTreeMap::new();
        for name in file.names() {
            if let (Some(part), Some(info)) = (name.strip_prefix(&prefix), file.info(name)) {
                arrays.insert(part.to_owned(), array(&file, info)?);
            }
        }
        let snapshot = Snapshot {
            kind: layer.kind,
            offset: layer.offset,
            arrays,
        };
        cache
            .restore(snapshot)
            .map_err(|message| fault(format!("layer {i}: {message}")))?;
    }
    Ok((about.tokens, caches))
}

/// The elements of an array as bytes, row-major.
fn bytes(array: &Array) -> Result<(FileDtype, Vec<u8>)> {
    fn raw<T: mlx_rs_core::Element + bytemuck::Pod>(array: &Array) -> Result<Vec<u8>> {
        let data = array.data::<T>().map_err(engine("prompt cache"))?;
        Ok(bytemuck::cast_slice(&data).to_vec())
    }
    match array.dtype() {
        Dtype::Float32 => Ok((FileDtype::F32, raw::<f32>(array)?)),
        Dtype::Float16 => Ok((FileDtype::F16, raw::<f16>(array)?)),
        Dtype::Bfloat16 => Ok((FileDtype::BF16, raw::<bf16>(array)?)),
        Dtype::Uint32 => Ok((FileDtype::U32, raw::<u32>(array)?)),
        Dtype::Int32 => Ok((FileDtype::I32, raw::<i32>(array)?)),
        other => Err(Error::new(
            ErrorKind::Engine,
            format!("a cache holds {other}, which prompt caches do not store"),
        )),
    }
}

/// Converts a tensor to an array.
pub(super) fn array(
    file: &SafetensorsCheckpoint,
    info: &crate::checkpoint::safetensors::TensorInfo,
) -> Result<Array> {
    let path = file.file_of(info);
    let shape = info
        .shape
        .iter()
        .map(|&d| i32::try_from(d))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| invalid(path, format!("a tensor has shape {:?}", info.shape)))?;
    match info.dtype {
        FileDtype::F32 => Array::from_slice(&file.read::<f32>(info)?, &shape),
        FileDtype::F16 => Array::from_slice(&file.read::<f16>(info)?, &shape),
        FileDtype::BF16 => Array::from_slice(&file.read::<bf16>(info)?, &shape),
        FileDtype::U32 => Array::from_slice(&file.read::<u32>(info)?, &shape),
        FileDtype::I32 => Array::from_slice(&file.read::<i32>(info)?, &shape),
        other => {
            return Err(invalid(
                path,
                format!("a tensor has type {other}, which prompt caches do not have"),
            ));
        }
    }
    .map_err(engine("prompt cache"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheOptions, LayerState, Packing, Switch};
    use crate::cache::{RecurrentState, StateLayout, StatePart};
    use mlx_rs_core::zeros;

    fn filled(options: CacheOptions) -> Caches {
        (0..2)
            .map(|_| {
                let mut cache = options.cache(None);
                let part = zeros(&[1, 2, 5, 32], Dtype::Float32).unwrap();
                cache.update(&part, &part).unwrap();
                cache
            })
            .collect()
    }

    fn empty(options: CacheOptions) -> Caches {
        (0..2).map(|_| options.cache(None)).collect()
    }

    /// Caches with keys and values in one layer and a recurrent state in the other layer.
    fn mixed(filled: bool) -> Caches {
        let layout = StateLayout::new(
            "toy",
            vec![
                StatePart::new("sum", &[2, 3]),
                StatePart::new("last", &[3]).with_dtype(Dtype::Bfloat16),
            ],
        );
        let mut state = RecurrentState::new(&layout);
        let mut cache = CacheOptions::default().cache(None);
        if filled {
            let sum = Array::from_slice(&[0.1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[1, 2, 3]).unwrap();
            let last = zeros(&[1, 3], Dtype::Bfloat16).unwrap();
            state.advance(vec![sum, last], 5).unwrap();
            let part = zeros(&[1, 2, 5, 32], Dtype::Float32).unwrap();
            cache.update(&part, &part).unwrap();
        }
        Caches::from_iter([cache as Box<dyn LayerState>, Box::new(state)])
    }

    /// Loads a file of our own format, which needs no caches of one token.
    fn load(path: &Path, identity: &str, empty: Caches) -> Result<(Vec<u32>, Caches)> {
        let one = &mut || {
            let part = zeros(&[1, 2, 1, 32], Dtype::Float32).map_err(engine("test"))?;
            let mut cache = CacheOptions::default().cache(None);
            cache.update(&part, &part).map_err(engine("test"))?;
            Ok((0..2).map(|_| cache.copy().unwrap()).collect())
        };
        let loaded = super::load(path, identity, empty, one)?;
        Ok((loaded.tokens.unwrap(), loaded.caches))
    }

    fn save(path: &Path, identity: &str, tokens: &[u32], caches: &Caches) -> Result<()> {
        super::save(path, (identity, "models/toy"), tokens, caches)?;
        assert_eq!(positions(path).unwrap(), tokens.len());
        Ok(())
    }

    #[test]
    fn recurrent_states_survive_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache.safetensors");
        let (tokens, saved) = ([5, 6, 7, 8, 9], mixed(true));
        save(&path, "me", &tokens, &saved).unwrap();
        let (loaded, caches) = load(&path, "me", mixed(false)).unwrap();
        assert_eq!(loaded, tokens);
        assert_eq!((caches[0].len(), caches[1].len()), (5, 5));
        let sum = |caches: &Caches| caches[1].arrays()[0].to_vec::<f32>().unwrap();
        assert_eq!(sum(&caches), sum(&saved));
        let keys_only = empty(CacheOptions::default());
        let error = load(&path, "me", keys_only).unwrap_err();
        assert!(error.to_string().contains("layer 1"), "{error}");
    }

    /// A killed process leaves its hidden directory behind. The next process must remove it.
    #[cfg(unix)]
    #[test]
    fn what_a_killed_process_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dead = dir.path().join(format!("{WORK_PREFIX}dead"));
        std::fs::create_dir(&dead).unwrap();
        std::fs::write(dead.join("cache.safetensors"), "half").unwrap();
        let path = dir.path().join("cache.safetensors");
        let options = CacheOptions::default();
        save(&path, "me", &[5, 6, 7, 8, 9], &filled(options)).unwrap();
        let names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["cache.safetensors"]);
    }

    #[test]
    fn every_kind_survives_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache.safetensors");
        let plain = CacheOptions::default();
        let mut bounded = plain;
        bounded.bound = Some(32);
        let mut packed = plain;
        packed.packing = Some(Packing {
            bits: 4,
            group_size: 32,
            start: 2,
        });
        let tokens = [5, 6, 7, 8, 9];
        for options in [plain, bounded, packed] {
            save(&path, "me", &tokens, &filled(options)).unwrap();
            let (loaded, caches) = load(&path, "me", empty(options)).unwrap();
            assert_eq!(loaded, tokens);
            assert_eq!(crate::cache::offset(&caches), 5);
            let error = load(&path, "you", empty(options)).unwrap_err();
            assert!(error.to_string().contains("another model"), "{error}");
            for other in [plain, bounded, packed] {
                // Plain and packed caches are compatible: plain positions are packed later, as the
                // options require.
                if other != options && (options, other) != (plain, packed) {
                    assert!(load(&path, "me", empty(other)).is_err());
                }
            }
            let more = (0..3).map(|_| options.cache(None)).collect();
            assert!(load(&path, "me", more).is_err());
            // An old file, written when the length of the prompt did not determine the rotation of
            // all its keys.
            let switching = empty(options).with_switches([Switch::Once(3)]);
            let error = load(&path, "me", switching).unwrap_err();
            assert!(error.to_string().contains("another length"), "{error}");
            let long = filled(options)
                .with_switches([Switch::Once(3)])
                .for_sequence(5);
            save(&path, "me", &tokens, &long).unwrap();
            let (_, caches) =
                load(&path, "me", empty(options).with_switches([Switch::Once(3)])).unwrap();
            assert_eq!(caches.stretch(), 1);
        }
        let bytes = std::fs::read(&path).unwrap();
        for cut in [0, 7, 20, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            assert!(load(&path, "me", empty(packed)).is_err(), "{cut}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
