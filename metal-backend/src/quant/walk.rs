//! Runs calibration sequences through a decoder block by block. Keeps only the hidden states
//! between two blocks, so memory does not depend on the number of blocks.
//!
//! MLX computes only the inputs of evaluated results. So a pass whose states are replaced before
//! block `n` and read after it computes only block `n`.

use std::sync::Arc;

use inference::{CancelToken, Error, ErrorKind, Hook, Result};
use mlx_rs_core::{Array, eval};

use crate::arch::Decoder;
use crate::cache::{CacheOptions, passing};
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Observer, Scope, within};
use crate::nn::attention::Positions;
use crate::nn::hooks::{Place, StateHook, Watch};

/// Sequences that are computed in one pass, concatenated.
pub(super) struct Batch {
    pub ids: Array,
    pub lengths: Vec<i32>,
}

impl Batch {
    pub fn new(sequences: &[Vec<u32>]) -> mlx_rs_core::Result<Self> {
        let ids = sequences.concat();
        let lengths = sequences
            .iter()
            .map(|s| i32::try_from(s.len()).unwrap_or(i32::MAX))
            .collect();
        Ok(Self {
            ids: Array::vector(&ids)?.expand_dims(0)?,
            lengths,
        })
    }

    /// Runs one pass of the decoder, completely or up to the point where `watch` ends it.
    pub fn forward(
        &self,
        decoder: &dyn Decoder,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        let layers = decoder.new_caches(&CacheOptions::default()).len();
        let mut caches = passing::caches(self.lengths.len(), layers);
        let mut rows = passing::rows(&self.lengths, &mut caches);
        decoder.forward(&self.ids, &mut rows, Positions::All, watch)
    }
}

/// Runs a single block: replaces its input, stores its output, and then ends the pass.
struct Cut {
    layer: usize,
    input: Option<Array>,
    output: Option<Array>,
}

impl StateHook for Cut {
    fn wants(&self, layer: usize, hook: Hook) -> bool {
        layer == self.layer && matches!(hook, Hook::ResidPre | Hook::ResidPost)
    }

    fn at(&mut self, _: usize, hook: Hook, x: &Array, _: &[Place]) -> mlx_rs_core::Result<Array> {
        if hook == Hook::ResidPre {
            return Ok(self.input.as_ref().unwrap_or(x).clone());
        }
        self.output = Some(x.clone());
        // The later blocks are not needed. An error is the only way to end a pass.
        let message = "the pass ends after a block";
        Err(mlx_rs_core::Error::new(
            mlx_rs_core::ErrorKind::Value,
            "calibration",
            message,
        ))
    }
}

/// Calibration sequences and their hidden states before a block.
pub(super) struct Walk<'a> {
    engine: &'a Engine,
    decoder: Arc<dyn Decoder>,
    batches: Vec<Batch>,
    /// The states before block `layer`, one array for each batch; empty before the first block.
    states: Vec<Array>,
    layer: usize,
    pub layers: usize,
    cancel: &'a CancelToken,
}

impl<'a> Walk<'a> {
    /// Divides the calibration sequences into batches. The walk begins before the first block.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the decoder's blocks cannot be run one by one.
    pub fn new(
        engine: &'a Engine,
        sequences: &[Vec<u32>],
        batch_size: usize,
        cancel: &'a CancelToken,
    ) -> Result<Self> {
        let decoder = engine.decoder()?;
        let Some(hooks) = decoder.hooks() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the blocks of {} cannot be run one by one, which this method needs; use plain \
                     rounding or the method dynamic",
                    engine.info().architecture
                ),
            ));
        };
        let batches: mlx_rs_core::Result<Vec<Batch>> = engine.scope(|| {
            sequences
                .chunks(batch_size.max(1))
                .map(Batch::new)
                .collect()
        });
        let batches = batches.map_err(crate::error::engine("calibration"))?;
        Ok(Self {
            engine,
            decoder,
            batches,
            states: Vec::new(),
            layer: 0,
            layers: hooks.len(),
            cancel,
        })
    }

    /// The number of batches.
    pub fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Returns the output of the current block for a batch, not evaluated. `observer` receives the
    /// inputs of linear layers; in the first pass also those of earlier layers.
    fn run(&self, batch: usize, observer: Option<Observer>) -> Result<Array> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(
                ErrorKind::Cancelled,
                "the quantization was interrupted",
            ));
        }
        let Some(tokens) = self.batches.get(batch) else {
            return Err(Error::new(ErrorKind::Engine, "there is no such batch"));
        };
        let mut cut = Cut {
            layer: self.layer,
            input: self.states.get(batch).cloned(),
            output: None,
        };
        let scope = Scope {
            observer,
            constant: true,
            ..Scope::default()
        };
        let done = within(Arc::new(scope), || {
            tokens.forward(self.decoder.as_ref(), &mut Watch::hooked(&mut cut))
        });
        match (cut.output, done) {
            (Some(output), _) => Ok(output),
            (None, Err(e)) => Err(engine("calibration")(e)),
            (None, Ok(_)) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "block {} of {} has no output that can be read; use plain rounding or the method \
                     dynamic",
                    self.layer,
                    self.engine.info().architecture
                ),
            )),
        }
    }

    /// Runs the current block on a batch. `observer` receives the inputs of linear layers, and
    /// `finish` evaluates the results of `observer`.
    pub fn observe(
        &self,
        batch: usize,
        observer: Observer,
        finish: impl FnOnce() -> mlx_rs_core::Result<()>,
    ) -> Result<()> {
        self.engine.scope(|| {
            self.run(batch, Some(observer))?;
            finish().map_err(engine("calibration"))
        })
    }

    /// Returns the evaluated output of the current block for a batch, with the current weights.
    pub fn output(&self, batch: usize) -> Result<Array> {
        self.engine.scope(|| {
            let output = self.run(batch, None)?;
            eval([&output]).map_err(engine("calibration"))?;
            Ok(output)
        })
    }

    /// Computes the states after the current block with its current weights, and moves to the next
    /// block.
    pub fn advance(&mut self) -> Result<()> {
        let states: Result<Vec<Array>> = (0..self.batches()).map(|b| self.output(b)).collect();
        self.states = states?;
        self.layer += 1;
        Ok(())
    }
}
