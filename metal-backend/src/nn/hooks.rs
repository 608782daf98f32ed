//! Hooks of a forward pass: who looks on sees the hidden states or the queries of attention.
//! Layers call them; what is done with the arrays is for the caller.

use mlx_rs_core::{Array, Result};

/// Sees a layer's number and an array.
type Watcher<'a> = dyn FnMut(usize, &Array) -> Result<()> + 'a;

/// What looks on while a decoder runs, and whether logits are wanted at all.
#[derive(Default)]
pub struct Watch<'a> {
    states: Option<&'a mut Watcher<'a>>,
    queries: Option<&'a mut Watcher<'a>>,
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

    /// `f` sees the queries of each layer with their positions applied, `[1, H, L, D]`, row by row.
    pub fn queries(f: &'a mut Watcher<'a>) -> Self {
        Self {
            queries: Some(f),
            ..Self::default()
        }
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

    /// Whether somebody looks at queries.
    pub fn wants_queries(&self) -> bool {
        self.queries.is_some()
    }

    /// Whether the hidden state is what is wanted.
    pub fn wants_hidden(&self) -> bool {
        self.hidden
    }
}
