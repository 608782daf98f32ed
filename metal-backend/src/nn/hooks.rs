//! Hooks of a forward pass. Layers call them with hidden states, activations, queries or attention
//! weights; the caller determines how these arrays are used.

use inference::{Hook, StepPart};
use mlx_rs_core::{Array, Result};

use crate::cache::{Row, offset};

/// A callback with a layer index and an array.
type Watcher<'a> = dyn FnMut(usize, &Array) -> Result<()> + 'a;

/// The position of a row's tokens in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The position of the row's first token in this pass.
    pub offset: usize,
    /// The number of tokens.
    pub length: usize,
}

/// Reads the hidden states at the points that [`Hook`] lists, and may change them.
pub trait StateHook {
    /// Whether the hook needs the states at `hook` in `layer`.
    fn wants(&self, layer: usize, hook: Hook) -> bool;

    /// Returns the replacement of `x`, `[1, T or rows, width]`. `places` has one entry per row of
    /// the pass. If the pass computes only last positions, `x` of the last block has one position
    /// per row.
    fn at(&mut self, layer: usize, hook: Hook, x: &Array, places: &[Place]) -> Result<Array>;
}

/// Measures the times of the steps of a pass.
pub trait Stopwatch {
    /// Adds the time since the last call to `part` of `layer`, or to a part outside the blocks if
    /// `layer` is `None`. Evaluates `arrays` first, so that the time of their computation is
    /// included.
    ///
    /// # Errors
    /// If the arrays cannot be evaluated.
    fn lap(&mut self, layer: Option<usize>, part: StepPart, arrays: &[&Array]) -> Result<()>;
}

/// The observers of a decoder's pass, and whether the pass computes logits.
#[derive(Default)]
pub struct Watch<'a> {
    states: Option<&'a mut Watcher<'a>>,
    mixed: Option<&'a mut Watcher<'a>>,
    queries: Option<&'a mut Watcher<'a>>,
    weights: Option<&'a mut Watcher<'a>>,
    inputs: Option<&'a mut Watcher<'a>>,
    activations: Option<&'a mut Watcher<'a>>,
    hook: Option<&'a mut dyn StateHook>,
    stopwatch: Option<&'a mut dyn Stopwatch>,
    places: Vec<Place>,
    hidden: bool,
}

impl<'a> Watch<'a> {
    /// Creates a watch that observes and changes nothing.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// Makes `f` receive the hidden states, `[1, T or rows, hidden]`. Index 0 is the input of the
    /// first block; index `i + 1` is the output of block `i`.
    pub fn states(f: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(f),
            ..Self::default()
        }
    }

    /// Sets `states` as [`Self::states`]. Also makes `mixed` receive the residual stream between
    /// the mixer and the feed-forward part of each block.
    pub fn parts(states: &'a mut Watcher<'a>, mixed: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(states),
            mixed: Some(mixed),
            ..Self::default()
        }
    }

    /// Makes `f` receive each layer's attention weights for a row's last query: `[H, n]`, one
    /// weight per key.
    pub fn weights(f: &'a mut Watcher<'a>) -> Self {
        Self {
            weights: Some(f),
            ..Self::default()
        }
    }

    /// Makes `f` receive the input of each layer's feed-forward part, `[1, T or rows, hidden]`.
    pub fn feed_forward_inputs(f: &'a mut Watcher<'a>) -> Self {
        Self {
            inputs: Some(f),
            ..Self::default()
        }
    }

    /// Makes `f` receive the input of each layer's down matrix, `[1, T or rows, features]`.
    pub fn activations(f: &'a mut Watcher<'a>) -> Self {
        Self {
            activations: Some(f),
            ..Self::default()
        }
    }

    /// Makes `f` receive each layer's queries after rotation, `[1, H, L, D]`, one row at a time.
    pub fn queries(f: &'a mut Watcher<'a>) -> Self {
        Self {
            queries: Some(f),
            ..Self::default()
        }
    }

    /// Makes `hook` receive states, which it may change.
    pub fn hooked(hook: &'a mut dyn StateHook) -> Self {
        Self {
            hook: Some(hook),
            ..Self::default()
        }
    }

    /// Adds `hook`, if given, to the observers. It receives states and may change them.
    #[must_use]
    pub fn edited(mut self, hook: Option<&'a mut dyn StateHook>) -> Self {
        self.hook = hook;
        self
    }

    /// Makes `stopwatch` measure the times of the parts of the pass.
    pub fn measured(stopwatch: &'a mut dyn Stopwatch) -> Self {
        Self {
            stopwatch: Some(stopwatch),
            ..Self::default()
        }
    }

    /// Whether a stopwatch measures the parts of blocks. If so, blocks must not be fused.
    pub fn measures(&self) -> bool {
        self.stopwatch.is_some()
    }

    /// Reports the end of a part of block `layer`, or of a part outside the blocks if `layer` is
    /// `None`. Layers call it.
    pub fn lap(
        &mut self,
        layer: impl Into<Option<usize>>,
        part: StepPart,
        arrays: &[&Array],
    ) -> Result<()> {
        match &mut self.stopwatch {
            Some(stopwatch) => stopwatch.lap(layer.into(), part, arrays),
            None => Ok(()),
        }
    }

    /// Announces a pass over `rows`. Call it before the caches contain the tokens of this pass.
    pub fn begin(&mut self, rows: &[Row<'_>]) {
        if self.hook.is_some() {
            let place = |row: &Row<'_>| Place {
                offset: offset(row.caches).unsigned_abs() as usize,
                length: row.length.unsigned_abs() as usize,
            };
            self.places = rows.iter().map(place).collect();
        }
    }

    /// Whether an observer needs the states at `hook` in `layer`.
    pub fn wants(&self, layer: usize, hook: Hook) -> bool {
        (self.hook.as_ref()).is_some_and(|attached| attached.wants(layer, hook))
    }

    /// Passes the states `x` at `hook` in `layer` to the hook, and returns the edited states.
    pub fn states_at(&mut self, layer: usize, hook: Hook, x: Array) -> Result<Array> {
        match &mut self.hook {
            Some(attached) if attached.wants(layer, hook) => {
                attached.at(layer, hook, &x, &self.places)
            }
            _ => Ok(x),
        }
    }

    /// Whether an observer needs states inside block `layer`.
    pub fn wants_within(&self, layer: usize) -> bool {
        let within = |hook: &Hook| !matches!(hook, Hook::ResidPre | Hook::ResidPost);
        (Hook::ALL.iter().filter(|hook| within(hook))).any(|hook| self.wants(layer, *hook))
    }

    /// Makes the pass return the last hidden state after the final norm, instead of logits.
    #[must_use]
    pub fn instead_of_logits(mut self) -> Self {
        self.hidden = true;
        self
    }

    /// Reports the embedding, before the first block.
    pub fn saw_embedding(&mut self, x: &Array) -> Result<()> {
        match &mut self.states {
            Some(f) => f(0, x),
            None => Ok(()),
        }
    }

    /// Reports the output of block `i`.
    pub fn saw_block(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.states {
            Some(f) => f(i + 1, x),
            None => Ok(()),
        }
    }

    /// Reports the residual stream of block `i`, after its mixer's output was added.
    pub fn saw_mixed(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.mixed {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Reports the input of block `i`'s feed-forward part.
    pub fn saw_input(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.inputs {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Reports the input of block `i`'s down matrix.
    pub fn saw_activations(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.activations {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Reports the attention weights of layer `i`.
    pub fn saw_weights(&mut self, i: usize, weights: &Array) -> Result<()> {
        match &mut self.weights {
            Some(f) => f(i, weights),
            None => Ok(()),
        }
    }

    /// Reports the queries of layer `i`.
    pub fn saw_queries(&mut self, i: usize, q: &Array) -> Result<()> {
        match &mut self.queries {
            Some(f) => f(i, q),
            None => Ok(()),
        }
    }

    /// Whether an observer needs the outputs of blocks.
    pub fn wants_blocks(&self) -> bool {
        self.states.is_some()
    }

    /// Whether an observer needs states inside blocks.
    pub fn wants_mixed(&self) -> bool {
        self.mixed.is_some() || self.wants_inputs() || self.wants_activations()
    }

    /// Whether an observer needs inputs of feed-forward parts.
    pub fn wants_inputs(&self) -> bool {
        self.inputs.is_some()
    }

    /// Whether an observer needs inputs of down matrices.
    pub fn wants_activations(&self) -> bool {
        self.activations.is_some()
    }

    /// Whether an observer needs queries or attention weights.
    pub fn wants_attention(&self) -> bool {
        self.queries.is_some() || self.wants_weights()
    }

    /// Whether an observer needs attention weights.
    pub fn wants_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Whether the pass returns the hidden state instead of logits.
    pub fn wants_hidden(&self) -> bool {
        self.hidden
    }
}
