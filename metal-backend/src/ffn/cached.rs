//! A feed-forward backend that records outputs and returns them for equal inputs.

use std::cell::Cell;
use std::collections::HashMap;

use inference::{Error, ErrorKind, Interrupt, Prompt, TextModel};
use mlx_rs_core::{Array, Dtype, Result};
use parking_lot::{Mutex, MutexGuard};

use crate::nn::adapter;
use crate::nn::feed_forward::{FfnBackend, FfnPart};

thread_local! {
    /// Whether this thread records the outputs of the layers that it computes.
    static RECORDING: Cell<bool> = const { Cell::new(false) };
}

/// Returns recorded outputs for inputs with equal bits, and computes other inputs densely.
///
/// A pass over a [calibrated](Self::calibrate) prompt computes no feed-forward block, and its
/// logits equal those of the recorded pass bit for bit. Each layer copies its inputs to the host to
/// compare them; on a GPU, this copy waits for the device. Layers with an adapter are always
/// computed. Use one backend per model, because two models have different outputs for equal inputs.
///
/// ```no_run
/// use std::sync::Arc;
/// use inference::{LoadOptions, Prompt};
/// use metal_backend::ffn::{self, CachedFfn, FfnRouter};
///
/// # fn main() -> inference::Result<()> {
/// let cached = Arc::new(CachedFfn::new());
/// let router = FfnRouter::uniform(cached.clone());
/// let model = ffn::load_model("model.gguf", &LoadOptions::new(), &router)?;
/// let prompt = Prompt::from("The capital of France is");
/// cached.calibrate(model.as_ref(), &prompt)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct CachedFfn {
    state: Mutex<State>,
}

/// Maps the bits of an input `[hidden]` to its output.
type Outputs = HashMap<Box<[u32]>, Box<[f32]>>;

#[derive(Debug, Default)]
struct State {
    /// Recorded outputs, by layer index.
    outputs: HashMap<usize, Outputs>,
    hits: u64,
    misses: u64,
}

impl CachedFfn {
    /// Creates a backend without recorded outputs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs a prompt through `model`, and records the outputs of its layers. The model must be
    /// loaded with this backend. Returns the total number of recorded rows (positions times
    /// layers).
    ///
    /// Recording uses `8 * hidden` bytes per position and layer.
    ///
    /// # Errors
    /// The errors of [`inference::TokenModel::logits`]; [`ErrorKind::InvalidOption`] for a model in
    /// which no layer has this backend.
    pub fn calibrate(&self, model: &dyn TextModel, prompt: &Prompt) -> inference::Result<usize> {
        let other = || {
            let message = "no layer of this model has this CachedFfn as its backend";
            Error::new(ErrorKind::InvalidOption, message)
        };
        let routed = model.as_routed().ok_or_else(other)?;
        let asked = self.asked();
        self.record(|| routed.routed_logits(prompt, false, &Interrupt::new()))?;
        match self.asked() == asked {
            true => Err(other()),
            false => Ok(self.len()),
        }
    }

    /// Runs `f`, and records the outputs of the layers that this thread computes in `f`.
    pub fn record<R>(&self, f: impl FnOnce() -> R) -> R {
        /// Restores the flag when dropped, even after a panic.
        struct Before(bool);
        impl Drop for Before {
            fn drop(&mut self) {
                RECORDING.set(self.0);
            }
        }
        let _before = Before(RECORDING.replace(true));
        f()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The number of recorded rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state().outputs.values().map(HashMap::len).sum()
    }

    /// Whether no rows are recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of rows whose output was found in the record.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.state().hits
    }

    /// The number of rows whose output was not found and was computed.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.state().misses
    }

    fn asked(&self) -> u64 {
        let state = self.state();
        state.hits.saturating_add(state.misses)
    }

    /// Drops all recorded rows.
    pub fn clear(&self) {
        *self.state() = State::default();
    }

    /// Returns the recorded output for each input `[hidden]` of a layer; `None` for unknown inputs.
    fn known(&self, layer: usize, inputs: &[Box<[u32]>]) -> Vec<Option<Box<[f32]>>> {
        let mut state = self.state();
        let outputs = state.outputs.get(&layer);
        let of = |bits: &[u32]| outputs.and_then(|outputs| outputs.get(bits)).cloned();
        let cached: Vec<_> = inputs.iter().map(|bits| of(bits)).collect();
        let hits = cached.iter().filter(|row| row.is_some()).count() as u64;
        state.hits += hits;
        state.misses += cached.len() as u64 - hits;
        cached
    }
}

impl FfnBackend for CachedFfn {
    fn name(&self) -> &str {
        "cached"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        let hidden = x.dim(-1)?;
        let width = usize::try_from(hidden).unwrap_or(0);
        // A differentiated pass has no values to compare. A layer with an adapter is computed,
        // because recorded outputs do not include the adapter.
        if adapter::differentiated() || part.is_adapted() || x.size() == 0 || width == 0 {
            return part.forward(x);
        }
        let layer = part.place().layer;
        let numbers = x.to_f32_vec()?;
        let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Box<[u32]>>();
        let inputs: Vec<Box<[u32]>> = numbers.chunks_exact(width).map(bits).collect();
        if RECORDING.get() {
            let y = part.forward(x)?;
            let outputs = y.to_f32_vec()?;
            let mut state = self.state();
            state.misses += inputs.len() as u64;
            let recorded = state.outputs.entry(layer).or_default();
            for (input, output) in inputs.into_iter().zip(outputs.chunks_exact(width)) {
                recorded.insert(input, output.into());
            }
            return Ok(y);
        }
        let cached = self.known(layer, &inputs);
        let missing: Vec<u32> = (0u32..)
            .zip(&cached)
            .filter(|(_, row)| row.is_none())
            .map(|(i, _)| i)
            .collect();
        if missing.len() == cached.len() {
            return part.forward(x);
        }
        // One call computes all unknown rows: [.., hidden] -> [1, missing, hidden]
        let computed = match missing.is_empty() {
            true => Vec::new(),
            false => {
                let rows = x.reshape(&[1, -1, hidden])?.take_ids(&missing, 1)?;
                part.forward(&rows)?.to_f32_vec()?
            }
        };
        let mut computed = computed.chunks_exact(width);
        let mut all = Vec::with_capacity(numbers.len());
        for row in &cached {
            match row {
                Some(row) => all.extend_from_slice(row),
                None => all.extend_from_slice(computed.next().unwrap_or_default()),
            }
        }
        // Float32 represents every compute type exactly.
        let y = Array::from_slice(&all, x.shape())?;
        match x.dtype() {
            Dtype::Float32 => Ok(y),
            other => y.astype(other),
        }
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        // The record has no activations, so they are computed.
        Ok((self.forward(part, x)?, part.activations(x)?))
    }
}
