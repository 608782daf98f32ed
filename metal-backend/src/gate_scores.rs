//! Computes the gates of a layer from a vindex, with one matrix product for all features of the
//! layer. Reads no other weights of the model. `nn/walk.rs` uses features inside a model.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use inference_probe::vindex::{MatrixFile, Numbers, Vindex};
use mlx_rs_core::io::{Floats, MappedFile};
use mlx_rs_core::{Array, Device, Stream};

use crate::error::engine;
use crate::exec::{FeatureNumbers, gate_products};

/// The gate rows of a vindex, mapped into memory. The CPU reads them in place.
#[derive(Debug)]
pub struct GateScores {
    vindex: Vindex,
    path: PathBuf,
    file: MappedFile,
    stream: Stream,
}

impl GateScores {
    /// Maps the gate rows of `vindex`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for a file that cannot be mapped.
    pub fn open(vindex: &Vindex) -> Result<Self> {
        let path = vindex.path(MatrixFile::Gate);
        let file = MappedFile::open(&path).map_err(|e| engine("vindex")(e).with_path(&path))?;
        Ok(Self {
            vindex: vindex.clone(),
            path,
            file,
            stream: Stream::default_of(Device::cpu()).map_err(engine("device"))?,
        })
    }

    /// Returns the gates of all features of a layer for `states`, with bias and before the
    /// activation function: `[states, hidden] -> [states, features]`, row-major. `states` are
    /// inputs of the layer's feed-forward block, after the norm. Checks the layer's bytes against
    /// their hash.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the length of `states` is not a multiple of the hidden size;
    /// [`ErrorKind::InvalidModel`] for an unknown or damaged layer; lack of memory.
    pub fn of(&self, layer: usize, states: &[f32]) -> Result<Vec<f32>> {
        let fault = |e: inference_probe::Error| invalid(&self.path, e.to_string());
        let hidden = self.vindex.about().hidden_size;
        if hidden == 0 || !states.len().is_multiple_of(hidden) {
            let message = format!(
                "{} numbers are not a whole number of states of {hidden} elements",
                states.len()
            );
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        let part = self.vindex.matrix(layer, MatrixFile::Gate).map_err(fault)?;
        let Some(part) = part else {
            return Err(invalid(&self.path, format!("layer {layer} has no gate")));
        };
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let range = at(part.range().start)..at(part.range().end);
        // A file whose size has changed since it was opened counts as damaged.
        let bytes = self.file.bytes().get(range.clone()).unwrap_or_default();
        part.verify(bytes).map_err(fault)?;
        let numbers = match part.numbers() {
            Numbers::Float32 => self.file.floats(range).map(FeatureNumbers::from),
            Numbers::Float16 => self.file.halves(range).map(FeatureNumbers::from),
        };
        let numbers = numbers.map_err(engine("vindex"))?;
        let biases = self.vindex.biases(layer).map_err(fault)?;
        let bias = biases.map(|biases| Floats::from(biases.gate));
        let features = (self.vindex.layers().get(layer)).map_or(0, |layer| layer.num_features);
        let size = |n: usize| i32::try_from(n).unwrap_or(-1);
        let products = || {
            let x = Array::from_slice(states, &[size(states.len() / hidden), size(hidden)])?;
            let shape = [size(features), size(hidden)];
            gate_products(numbers, shape, bias.as_ref(), &x)?.to_vec::<f32>()
        };
        self.stream.scope(products).map_err(engine("vindex"))
    }
}

fn invalid(path: &Path, message: String) -> Error {
    Error::new(ErrorKind::InvalidModel, message)
        .with_path(path)
        .context("vindex")
}

#[cfg(test)]
mod tests {
    use inference_probe::vindex::{
        About, Activation, Biases, Build, Layer, Level, Numbers, Writer,
    };

    use super::*;

    const HIDDEN: usize = 70;

    fn noise(n: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i + seed) * 7919 % 10007) as f32 * 2e-4 - 1.0;
        (0..n).map(value).collect()
    }

    fn written(dir: &Path, numbers: Numbers) -> Vindex {
        let about = About {
            model: "m".into(),
            identity: "i".into(),
            family: "f".into(),
            hidden_size: HIDDEN,
            vocab_size: 9,
        };
        let build = Build {
            down_top_k: 0,
            level: Level::Browse,
            numbers,
            ..Build::default()
        };
        let mut writer = Writer::begin(dir, about, build).unwrap();
        for (features, biased) in [(300, false), (41, true)] {
            let layer = Layer {
                activation: Activation::Silu,
                gate: noise(features * HIDDEN, 1),
                up: None,
                down: noise(features * HIDDEN, 2),
                biases: biased.then(|| Biases {
                    gate: noise(features, 3),
                    up: None,
                    down: noise(HIDDEN, 4),
                }),
                experts: None,
            };
            writer.push(&layer, &vec![Vec::new(); features]).unwrap();
        }
        writer.finish().unwrap();
        Vindex::open(dir).unwrap()
    }

    #[test]
    fn they_are_those_of_float64() {
        let dir = tempfile::tempdir().unwrap();
        for (name, numbers) in [("wide", Numbers::Float32), ("short", Numbers::Float16)] {
            let vindex = written(&dir.path().join(name), numbers);
            let scores = GateScores::open(&vindex).unwrap();
            for (layer, features) in [(0, 300), (1, 41)] {
                let states = noise(3 * HIDDEN, 5);
                let gates = scores.of(layer, &states).unwrap();
                assert_eq!(gates.len(), 3 * features);
                let exact = vindex.nearest(layer, &states, usize::MAX).unwrap();
                for (gates, exact) in gates.chunks_exact(features).zip(&exact) {
                    for hit in exact {
                        let difference = (gates[hit.feature] - hit.gate).abs();
                        assert!(difference < 1e-5, "{name} {layer}: {difference}");
                    }
                }
                let ours = vindex.nearest_of(layer, &gates, 1).unwrap();
                for (ours, exact) in ours.iter().zip(&exact) {
                    assert!((ours[0].gate - exact[0].gate).abs() < 1e-5);
                }
            }
            let wrong = scores.of(0, &[1.0; HIDDEN + 1]).unwrap_err();
            assert_eq!(wrong.kind(), ErrorKind::InvalidOption);
            let none = scores.of(2, &[1.0; HIDDEN]).unwrap_err();
            assert_eq!(none.kind(), ErrorKind::InvalidModel);
            assert!(vindex.nearest_of(0, &[1.0; 7], 1).is_err());
        }
    }

    #[test]
    fn a_changed_byte_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        let vindex = written(&path, Numbers::Float32);
        let file = path.join("gate_vectors.bin");
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[5] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let scores = GateScores::open(&vindex).unwrap();
        let wrong = scores.of(0, &[1.0; HIDDEN]).unwrap_err();
        assert!(wrong.to_string().contains("damaged") || format!("{wrong:#}").contains("damaged"));
        assert!(scores.of(1, &[1.0; HIDDEN]).is_ok());
    }
}
