//! Stores prompt caches in files: safetensors with the arrays of the caches, their tokens, and the
//! model's identity. A file is written completely or not at all.
//!
//! Keys and values use mlx-lm's format (`mlx_lm.rs`). That format does not support recurrent
//! states, so models with recurrent layers use this module's own format.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use safetensors::tensor::Dtype as FileDtype;
use serde::{Deserialize, Serialize};

pub use super::file_tensors::Kept;
use super::file_tensors::{Additions, Tensor, array, tensor, write};
use super::{Caches, Snapshot, mlx_lm};
use crate::checkpoint::files::invalid;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;

/// The name of the tensor that stores the description of the file.
const ABOUT: &str = "about";
/// The required value of [`About::format`].
const FORMAT: &str = "rust-mlx prompt cache 1";
/// The description of a file, stored as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    format: String,
    /// The identity of the model.
    identity: String,
    tokens: Vec<u32>,
    /// The value of [`Caches::stretch`]. Older files lack this field. Their keys may have the first
    /// rotation, or several different rotations.
    #[serde(default)]
    stretch: usize,
    layers: Vec<Layer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Layer {
    kind: String,
    offset: i32,
}

/// Writes `caches`, which were computed from `tokens`. `names` are the identity of the model that
/// computed them, and its name for mlx-lm.
///
/// # Errors
/// If the caches cannot be read or the file cannot be written.
pub fn save(path: &Path, names: (&str, &str), tokens: &[u32], caches: &Caches) -> Result<()> {
    save_with(path, names, tokens, caches, &Additions::NONE)
}

/// Writes as [`save`], with additions.
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

/// Writes this module's own format.
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

/// Returns the number of positions in a file, from its headers.
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

/// Reads a file of the model `identity`. Returns its tokens, and the `empty` caches filled with its
/// contents. `one` computes caches of one token, whose shapes are compared with mlx-lm files.
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

/// Reads the description of a file in this module's format.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::file_tensors::WORK_PREFIX;
    use crate::cache::{CacheOptions, LayerState, Packing, Switch};
    use crate::cache::{RecurrentState, StateLayout, StatePart};
    use mlx_rs_core::{Array, Dtype, zeros};

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

    /// Caches with keys and values in one layer and a recurrent state in another layer.
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

    /// Loads a file of our own format. `one` returns a cache of zeros, which this format does not
    /// use.
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

    /// A process that is killed leaves its hidden directory behind. The next process must remove
    /// it.
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
                // Plain and packed caches are compatible: the packed cache packs plain positions
                // later, as its options require.
                if other != options && (options, other) != (plain, packed) {
                    assert!(load(&path, "me", empty(other)).is_err());
                }
            }
            let more = (0..3).map(|_| options.cache(None)).collect();
            assert!(load(&path, "me", more).is_err());
            // An older file. At that time, the length of the prompt did not determine the rotation
            // of all its keys.
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
