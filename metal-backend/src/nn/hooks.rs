//! Hooks of a forward pass: who looks on sees the hidden states or the queries of attention.
//! Layers call them; what is done with the arrays is for the caller.

use inference::{Hook, StepPart};
use mlx_rs_core::{Array, Result};

use crate::cache::{Row, offset};

/// Sees a layer's number and an array.
type Watcher<'a> = dyn FnMut(usize, &Array) -> Result<()> + 'a;

/// The tokens of one row in a pass: the position of the first, and how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The position of its first token.
    pub offset: usize,
    /// How many tokens.
    pub length: usize,
}

/// Sees and may change the states at the places that [`Hook`] names.
pub trait StateHook {
    /// Whether it wants the states of this place.
    fn wants(&self, layer: usize, hook: Hook) -> bool;

    /// What stands in the place of `x`, `[1, T or rows, width]`; `places` are the rows of the pass.
    /// Of a pass that keeps the last positions only, `x` has one position a row in the last block.
    ///
    /// # Errors
    /// When shapes do not fit.
    fn at(&mut self, layer: usize, hook: Hook, x: &Array, places: &[Place]) -> Result<Array>;
}

/// Measures the parts of a pass.
pub trait Stopwatch {
    /// What was computed since the last call, up to `arrays`, is a part of `layer`, or of all
    /// layers together.
    ///
    /// # Errors
    /// When it cannot be evaluated.
    fn lap(&mut self, layer: Option<usize>, part: StepPart, arrays: &[&Array]) -> Result<()>;
}

/// What looks on while a decoder runs, and whether logits are wanted at all.
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
    /// Nobody looks on.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// `f` sees the hidden states, `[1, T or rows, hidden]`: 0 is what the first block reads, `i +
    /// 1` the output of block `i`.
    pub fn states(f: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(f),
            ..Self::default()
        }
    }

    /// As [`Self::states`], and `mixed` sees the residual stream between the mixer and the
    /// feed-forward part of each block.
    pub fn parts(states: &'a mut Watcher<'a>, mixed: &'a mut Watcher<'a>) -> Self {
        Self {
            states: Some(states),
            mixed: Some(mixed),
            ..Self::default()
        }
    }

    /// `f` sees the attention weights of each layer for the last query of a row, `[H, n]`, one for
    /// each of its keys.
    pub fn weights(f: &'a mut Watcher<'a>) -> Self {
        Self {
            weights: Some(f),
            ..Self::default()
        }
    }

    /// `f` sees what the feed-forward part of each layer reads, `[1, T or rows, hidden]`.
    pub fn feed_forward_inputs(f: &'a mut Watcher<'a>) -> Self {
        Self {
            inputs: Some(f),
            ..Self::default()
        }
    }

    /// `f` sees what the down matrix of each feed-forward part reads, `[1, T or rows, features]`.
    pub fn activations(f: &'a mut Watcher<'a>) -> Self {
        Self {
            activations: Some(f),
            ..Self::default()
        }
    }

    /// `f` sees the queries of each layer with their positions applied, `[1, H, L, D]`, row by row.
    pub fn queries(f: &'a mut Watcher<'a>) -> Self {
        Self {
            queries: Some(f),
            ..Self::default()
        }
    }

    /// `hook` sees and may change states.
    pub fn hooked(hook: &'a mut dyn StateHook) -> Self {
        Self {
            hook: Some(hook),
            ..Self::default()
        }
    }

    /// `hook`, if there is one, also sees and may change states.
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

    /// Whether parts are measured: then none computes what belongs to another.
    pub fn measures(&self) -> bool {
        self.stopwatch.is_some()
    }

    /// Called after a part of block `layer`, or of what all blocks share.
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

    /// Called before a pass over `rows`, whose caches do not hold its tokens yet.
    pub fn begin(&mut self, rows: &[Row<'_>]) {
        if self.hook.is_some() {
            let place = |row: &Row<'_>| Place {
                offset: offset(row.caches).unsigned_abs() as usize,
                length: row.length.unsigned_abs() as usize,
            };
            self.places = rows.iter().map(place).collect();
        }
    }

    /// Whether somebody wants the states at a place.
    pub fn wants(&self, layer: usize, hook: Hook) -> bool {
        (self.hook.as_ref()).is_some_and(|own| own.wants(layer, hook))
    }

    /// What stands in the place of the states `x` at a place.
    pub fn states_at(&mut self, layer: usize, hook: Hook, x: Array) -> Result<Array> {
        match &mut self.hook {
            Some(own) if own.wants(layer, hook) => own.at(layer, hook, &x, &self.places),
            _ => Ok(x),
        }
    }

    /// Whether somebody wants states from within a block.
    pub fn wants_within(&self, layer: usize) -> bool {
        let within = |hook: &Hook| !matches!(hook, Hook::ResidPre | Hook::ResidPost);
        (Hook::ALL.iter().filter(|hook| within(hook))).any(|hook| self.wants(layer, *hook))
    }

    /// The decoder returns the last hidden state, after its norm, instead of logits.
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

    /// Called with what the feed-forward part of block `i` reads.
    pub fn saw_input(&mut self, i: usize, x: &Array) -> Result<()> {
        match &mut self.inputs {
            Some(f) => f(i, x),
            None => Ok(()),
        }
    }

    /// Called with what the down matrix of block `i` reads.
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

    /// Whether somebody looks at the outputs of blocks.
    pub fn wants_blocks(&self) -> bool {
        self.states.is_some()
    }

    /// Whether somebody looks inside blocks.
    pub fn wants_mixed(&self) -> bool {
        self.mixed.is_some() || self.wants_inputs() || self.wants_activations()
    }

    /// Whether somebody looks at what feed-forward parts read.
    pub fn wants_inputs(&self) -> bool {
        self.inputs.is_some()
    }

    /// Whether somebody looks at what down matrices read.
    pub fn wants_activations(&self) -> bool {
        self.activations.is_some()
    }

    /// Whether somebody looks at queries or attention weights.
    pub fn wants_attention(&self) -> bool {
        self.queries.is_some() || self.wants_weights()
    }

    /// Whether somebody looks at attention weights.
    pub fn wants_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Whether the hidden state is what is wanted.
    pub fn wants_hidden(&self) -> bool {
        self.hidden
    }
}
