//! Hooks of a forward pass, which receive hidden states or queries of attention. Layers call them;
//! the caller decides what to do with the arrays.

use inference::{Hook, StepPart};
use mlx_rs_core::{Array, Result};

use crate::cache::{Row, offset};

/// Receives a layer index and an array.
type Watcher<'a> = dyn FnMut(usize, &Array) -> Result<()> + 'a;

/// The tokens of one row in a pass: the position of the first, and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The position of its first token.
    pub offset: usize,
    /// The number of tokens.
    pub length: usize,
}

/// Reads and may change the states at the places that [`Hook`] names.
pub trait StateHook {
    /// Whether the hook wants the states of this place.
    fn wants(&self, layer: usize, hook: Hook) -> bool;

    /// The replacement of `x`, `[1, T or rows, width]`; `places` are the rows of the pass. In a
    /// pass that keeps only last positions, `x` has one position per row in the last block.
    fn at(&mut self, layer: usize, hook: Hook, x: &Array, places: &[Place]) -> Result<Array>;
}

/// Measures the parts of a pass.
pub trait Stopwatch {
    /// Everything computed since the last call, up to `arrays`, is a part of `layer`, or of no
    /// layer.
    ///
    /// # Errors
    /// When the arrays cannot be evaluated.
    fn lap(&mut self, layer: Option<usize>, part: StepPart, arrays: &[&Array]) -> Result<()>;
}

/// The observers of a decoder's pass, and whether logits are computed at all.
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
    /// No observer.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// `f` gets the hidden states, `[1, T or rows, hidden]`: 0 is the input of the first block, `i
    /// + 1` the output of block `i`.
    pub fn states(f: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(f),
            ..Self::default()
        }
    }

    /// Like [`Self::states`]; `mixed` gets the residual stream between the mixer and the
    /// feed-forward part of each block.
    pub fn parts(states: &'a mut Watcher<'a>, mixed: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(states),
            mixed: Some(mixed),
            ..Self::default()
        }
    }

    /// `f` gets the attention weights of each layer for the last query of a row, `[H, n]`, one per
    /// key.
    pub fn weights(f: &'a mut Watcher<'a>) -> Self {
        Self {
            weights: Some(f),
            ..Self::default()
        }
    }

    /// `f` gets the input of each layer's feed-forward part, `[1, T or rows, hidden]`.
    pub fn feed_forward_inputs(f: &'a mut Watcher<'a>) -> Self {
        Self {
            inputs: Some(f),
            ..Self::default()
        }
    }

    /// `f` gets the input of each layer's down matrix, `[1, T or rows, features]`.
    pub fn activations(f: &'a mut Watcher<'a>) -> Self {
        Self {
            activations: Some(f),
            ..Self::default()
        }
    }

    /// `f` gets the queries of each layer with positions applied, `[1, H, L, D]`, row by row.
    pub fn queries(f: &'a mut Watcher<'a>) -> Self {
        Self {
            queries: Some(f),
            ..Self::default()
        }
    }

    /// `hook` gets and may change states.
    pub fn hooked(hook: &'a mut dyn StateHook) -> Self {
        Self {
            hook: Some(hook),
            ..Self::default()
        }
    }

    /// `hook`, if given, also gets and may change states.
    #[must_use]
    pub fn edited(mut self, hook: Option<&'a mut dyn StateHook>) -> Self {
        self.hook = hook;
        self
    }

    /// `stopwatch` measures the parts of the pass.
    pub fn measured(stopwatch: &'a mut dyn Stopwatch) -> Self {
        Self {
            stopwatch: Some(stopwatch),
            ..Self::default()
        }
    }

    /// Whether parts are measured; parts must then not be fused.
    pub fn measures(&self) -> bool {
        self.stopwatch.is_some()
    }

    /// Called after a part of block `layer`, or after one outside the blocks.
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

    /// Called before a pass over `rows`, whose caches do not yet hold its tokens.
    pub fn begin(&mut self, rows: &[Row<'_>]) {
        if self.hook.is_some() {
            let place = |row: &Row<'_>| Place {
                offset: offset(row.caches).unsigned_abs() as usize,
                length: row.length.unsigned_abs() as usize,
            };
            self.places = rows.iter().map(place).collect();
        }
    }

    /// Whether an observer wants the states at a place.
    pub fn wants(&self, layer: usize, hook: Hook) -> bool {
        (self.hook.as_ref()).is_some_and(|attached| attached.wants(layer, hook))
    }

    /// The states `x` at a place after edits.
    pub fn states_at(&mut self, layer: usize, hook: Hook, x: Array) -> Result<Array> {
        match &mut self.hook {
            Some(attached) if attached.wants(layer, hook) => {
                attached.at(layer, hook, &x, &self.places)
            }
            _ => Ok(x),
        }
    }

    /// Whether an observer wants states from within a block.
    pub fn wants_within(&self, layer: usize) -> bool {
        let within = |hook: &Hook| !matches!(hook, Hook::ResidPre | Hook::ResidPost);
        (Hook::ALL.iter().filter(|hook| within(hook))).any(|hook| self.wants(layer, *hook))
    }

    /// Returns the last hidden state, after its norm, instead of logits.
    #[must_use]
    pub fn instead_of_logits(mut self) -> Self {
        self.hidden = true;
        self
    }

    /// Called before the first block.
    pub fn saw_embedding(&mut self, x: &Array) -> Result<()> {
        match &mut self.states {
            Some(f) => f(0, x),
            None => Ok(()),
        }
    }

    /// Called after block `i`.
    pub fn saw_block(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.states {
            Some(f) => f(i + 1, x),
            None => Ok(()),
        }
    }

    /// Called after the mixer of block `i` was added.
    pub fn saw_mixed(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.mixed {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Called with the input of block `i`'s feed-forward part.
    pub fn saw_input(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.inputs {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Called with the input of block `i`'s down matrix.
    pub fn saw_activations(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.activations {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Called with the attention weights of layer `i`.
    pub fn saw_weights(&mut self, i: usize, weights: &Array) -> Result<()> {
        match &mut self.weights {
            Some(f) => f(i, weights),
            None => Ok(()),
        }
    }

    /// Called with the queries of layer `i`.
    pub fn saw_queries(&mut self, i: usize, q: &Array) -> Result<()> {
        match &mut self.queries {
            Some(f) => f(i, q),
            None => Ok(()),
        }
    }

    /// Whether an observer wants the outputs of blocks.
    pub fn wants_blocks(&self) -> bool {
        self.states.is_some()
    }

    /// Whether an observer wants states inside blocks.
    pub fn wants_mixed(&self) -> bool {
        self.mixed.is_some() || self.wants_inputs() || self.wants_activations()
    }

    /// Whether an observer wants inputs of feed-forward parts.
    pub fn wants_inputs(&self) -> bool {
        self.inputs.is_some()
    }

    /// Whether an observer wants inputs of down matrices.
    pub fn wants_activations(&self) -> bool {
        self.activations.is_some()
    }

    /// Whether an observer wants queries or attention weights.
    pub fn wants_attention(&self) -> bool {
        self.queries.is_some() || self.wants_weights()
    }

    /// Whether an observer wants attention weights.
    pub fn wants_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Whether the pass returns the hidden state.
    pub fn wants_hidden(&self) -> bool {
        self.hidden
    }
}
