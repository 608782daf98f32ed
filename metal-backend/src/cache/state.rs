//! The state of a layer for one sequence: keys and values ([`KvCache`]), or a state of fixed size
//! ([`RecurrentState`]). Requests, prefixes and files access the state only through [`LayerState`].

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Result};

use super::{InPlaceCache, KvView, Portable, RecurrentState};

/// The state of one layer for one row (`B` is 1 except in tests).
pub trait LayerState: std::fmt::Debug + Send {
    /// Returns the number of positions that the layer has processed, which is the position of the
    /// next token.
    fn offset(&self) -> i32;

    /// Returns the number of stored positions: all processed positions, or at most the size of a
    /// bounded cache.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "tests count what bounded caches hold")
    )]
    fn len(&self) -> usize {
        self.offset().unsigned_abs() as usize
    }

    /// Whether no position has been processed.
    fn is_empty(&self) -> bool {
        self.offset() == 0
    }

    /// Resets to the state of a new sequence.
    fn reset(&mut self);

    /// Announces the expected total number of positions, so that memory can be allocated once.
    fn expect(&mut self, _positions: i32) {}

    /// Returns the arrays of the state. Each step evaluates them, so that no graph is retained.
    fn arrays(&self) -> Vec<&Array>;

    /// Returns the bytes of memory in use.
    fn nbytes(&self) -> usize {
        self.arrays().iter().map(|a| a.nbytes()).sum()
    }

    /// Whether the last `n` positions can be removed without loss.
    fn can_trim(&self, n: i32) -> bool;

    /// Removes the last `n` positions (all positions, if fewer are stored) and returns true. If
    /// [`Self::can_trim`] is false, changes nothing and returns false.
    fn trim(&mut self, n: i32) -> bool;

    /// Whether the state of a sequence of `positions` positions can be trimmed to any length.
    fn keeps_all(&self, positions: i32) -> bool;

    /// Returns an independent copy. If possible, both share memory until one of them writes.
    fn copy(&self) -> Result<Box<dyn LayerState>>;

    /// Returns a copy of the state if trimming cannot restore it, for a sequence that is expected
    /// to reach `positions` positions; `None` if trimming suffices.
    fn checkpoint(&self, positions: i32) -> Result<Option<Box<dyn LayerState>>> {
        match self.keeps_all(positions) {
            true => Ok(None),
            false => self.copy().map(Some),
        }
    }

    /// Whether [`Self::copy_to`] is possible.
    fn can_copy_to(&self, n: i32, part: Option<&dyn LayerState>) -> bool {
        let surplus = self.offset().saturating_sub(n);
        surplus >= 0 && (self.can_trim(surplus) || part.is_some_and(|part| part.offset() == n))
    }

    /// Returns an independent copy of the first `n` positions. If the state cannot be trimmed,
    /// copies `part`, which [`Self::checkpoint`] returned at position `n`. Returns `None` if
    /// neither is possible.
    fn copy_to(
        &self,
        n: i32,
        part: Option<&dyn LayerState>,
    ) -> Result<Option<Box<dyn LayerState>>> {
        if !self.can_copy_to(n, part) {
            return Ok(None);
        }
        let surplus = self.offset().saturating_sub(n);
        if let (false, Some(part)) = (self.can_trim(surplus), part) {
            return part.copy().map(Some);
        }
        let mut copy = self.copy()?;
        Ok(copy.trim(surplus).then_some(copy))
    }

    /// Returns the kind with its settings. States of equal kind are interchangeable.
    fn kind(&self) -> String;

    /// Returns the content as stored in files.
    fn snapshot(&self) -> Result<Snapshot>;

    /// Restores a snapshot into an empty state of the same kind.
    ///
    /// # Errors
    /// A message that describes the mismatch.
    fn restore(&mut self, snapshot: Snapshot) -> std::result::Result<(), String>;

    /// Returns this state as a KV cache; `None` for other kinds.
    fn as_kv(&self) -> Option<&dyn KvCache> {
        None
    }

    /// Returns this state as a KV cache; `None` for other kinds.
    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        None
    }

    /// Returns this state as a recurrent state of fixed size; `None` for other kinds.
    fn as_recurrent(&self) -> Option<&RecurrentState> {
        None
    }

    /// Returns this state as a recurrent state of fixed size; `None` for other kinds.
    fn as_recurrent_mut(&mut self) -> Option<&mut RecurrentState> {
        None
    }
}

/// The keys and values of one attention layer for one row.
pub trait KvCache: LayerState {
    /// Appends keys and values `[B, Hkv, L, D]` and returns the view that their queries attend to.
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView>;

    /// Returns the content in the form of other programs' files; `None` if empty.
    fn portable(&self) -> Result<Option<Portable>> {
        Ok(None)
    }

    /// Replaces the content by another cache's content. The kinds of the caches may differ, if
    /// every position to which a query may attend is preserved.
    ///
    /// # Errors
    /// A message that describes the mismatch.
    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        Err(portable.refused("no positions"))
    }

    /// Returns this cache as an in-place cache, if it is one. Copies of several such layers share
    /// an allocation.
    fn in_place(&self) -> Option<&InPlaceCache> {
        None
    }

    /// Returns this cache as an in-place cache, if our kernels can write to it.
    fn in_place_mut(&mut self) -> Option<&mut InPlaceCache> {
        None
    }
}

/// The content of a layer's state: kind with settings, offset, and named arrays.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The value of [`LayerState::kind`], such as `rotating:1024:4`; restoring requires an equal
    /// kind.
    pub kind: String,
    /// The number of positions that the layer had processed.
    pub offset: i32,
    /// The arrays by name. Empty before the first position.
    pub arrays: BTreeMap<String, Array>,
}
