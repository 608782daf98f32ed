//! The state of a layer for one sequence: keys and values ([`KvCache`]) or a state of fixed size
//! ([`RecurrentState`]). Requests, prefixes and files hold layers by [`LayerState`] alone.

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Result};

use super::{InPlaceCache, KvView, Portable, RecurrentState};

/// The memory of one layer for one row (`B` is 1 everywhere but in tests).
pub trait LayerState: std::fmt::Debug + Send {
    /// Positions seen so far, which is the position of the next token.
    fn offset(&self) -> i32;

    /// Positions that it holds: those seen, and in a bounded cache at most its size.
    fn len(&self) -> usize {
        self.offset().unsigned_abs() as usize
    }

    /// Whether no position was seen.
    fn is_empty(&self) -> bool {
        self.offset() == 0
    }

    /// Forgets everything: the state of a new sequence.
    fn reset(&mut self);

    /// Says how many positions will be held in all, as far as is known: memory is better allocated
    /// at once.
    fn expect(&mut self, _positions: i32) {}

    /// The arrays that hold the state, to be evaluated with each step so that no graph is retained.
    fn arrays(&self) -> Vec<&Array>;

    /// Bytes of memory that it holds.
    fn nbytes(&self) -> usize {
        self.arrays().iter().map(|a| a.nbytes()).sum()
    }

    /// Whether the last `n` positions can be forgotten exactly.
    fn can_trim(&self, n: i32) -> bool;

    /// Forgets the last `n` positions (all, when fewer are stored) and returns true. Where
    /// [`Self::can_trim`] denies it, changes nothing and returns false.
    fn trim(&mut self, n: i32) -> bool;

    /// A copy that goes on by itself; memory is shared until one of them writes, where it can be.
    ///
    /// # Errors
    /// When memory runs out.
    fn copy(&self) -> Result<Box<dyn LayerState>>;

    /// Its kind with its settings: states of one kind can replace each other.
    fn kind(&self) -> String;

    /// Its content, for a file.
    ///
    /// # Errors
    /// When memory runs out.
    fn snapshot(&self) -> Result<Snapshot>;

    /// Takes over what an empty state of the same kind wrote.
    ///
    /// # Errors
    /// What does not fit, in words.
    fn restore(&mut self, snapshot: Snapshot) -> std::result::Result<(), String>;

    /// This, where it holds keys and values.
    fn as_kv(&self) -> Option<&dyn KvCache> {
        None
    }

    /// This, where it holds keys and values.
    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        None
    }

    /// This, where it is a state of fixed size.
    fn as_recurrent(&self) -> Option<&RecurrentState> {
        None
    }

    /// This, where it is a state of fixed size.
    fn as_recurrent_mut(&mut self) -> Option<&mut RecurrentState> {
        None
    }
}

/// The memory of one attention layer for one row.
pub trait KvCache: LayerState {
    /// Adds keys and values `[B, Hkv, L, D]` and returns what their queries may look at.
    ///
    /// # Errors
    /// When shapes do not fit the stored ones, or memory runs out.
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView>;

    /// What it holds, for a file that other programs read; `None` where it holds nothing.
    ///
    /// # Errors
    /// When memory runs out.
    fn portable(&self) -> Result<Option<Portable>> {
        Ok(None)
    }

    /// Takes over what another cache held, also one of another kind where no position is lost that
    /// a query attends to.
    ///
    /// # Errors
    /// What does not fit, in words.
    fn adopt(&mut self, held: Portable) -> std::result::Result<(), String> {
        Err(held.refused("no positions"))
    }

    /// This, where it is of that kind: copies of several layers have memory in common then.
    fn in_place(&self) -> Option<&InPlaceCache> {
        None
    }

    /// This, where our kernels can write keys and values into it.
    fn in_place_mut(&mut self) -> Option<&mut InPlaceCache> {
        None
    }
}

/// The content of a layer's state: its kind with settings, how far it is, and its arrays by name.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// As [`LayerState::kind`] has it, such as `rotating:1024:4`; must be equal to be restored.
    pub kind: String,
    /// Positions seen.
    pub offset: i32,
    /// Empty before the first position.
    pub arrays: BTreeMap<String, Array>,
}
