//! Adapters that requests select. The rows of one forward pass may have different adapters: a layer
//! multiplies all rows by its weight at once, and adds each adapter's term only to its rows.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use mlx_rs_core::{Error, ErrorKind, Result};

use super::{Delta, ParamSlot, SlotKind, without_dropout};

/// The changes of one adapter, by slot.
#[derive(Debug, Default)]
pub struct Deltas(BTreeMap<usize, (Arc<ParamSlot>, Arc<Delta>)>);

/// Returns the address of a slot. [`Deltas`] keeps its slots alive, so an address is never reused.
fn address(slot: &ParamSlot) -> usize {
    std::ptr::from_ref(slot).addr()
}

impl Deltas {
    /// The change at `slot`, if there is one.
    pub fn at(&self, slot: &ParamSlot) -> Option<&Arc<Delta>> {
        self.0.get(&address(slot)).map(|(_, delta)| delta)
    }

    /// Whether rows with this adapter and rows with other adapters can share a pass. True if all
    /// changes are low-rank terms of matrices. A change of a vector or an expert cannot be limited
    /// to some rows.
    pub fn is_divisible(&self) -> bool {
        self.0.values().all(|(slot, delta)| {
            let is_matrix = slot.shape().len() == 2;
            let is_low = matches!(**delta, Delta::LowRank(_));
            is_matrix && is_low && matches!(slot.kind(), SlotKind::Matrix | SlotKind::Table)
        })
    }

    /// Whether both adapters change the same layers.
    pub fn has_layers_of(&self, other: &Self) -> bool {
        self.0.keys().eq(other.0.keys())
    }
}

impl FromIterator<(Arc<ParamSlot>, Delta)> for Deltas {
    fn from_iter<I: IntoIterator<Item = (Arc<ParamSlot>, Delta)>>(deltas: I) -> Self {
        let of = |(slot, delta): (Arc<ParamSlot>, Delta)| {
            (address(&slot), (slot, Arc::new(without_dropout(delta))))
        };
        Self(deltas.into_iter().map(of).collect())
    }
}

/// Consecutive rows of a pass with the same adapter.
#[derive(Debug)]
struct Part {
    deltas: Arc<Deltas>,
    tokens: i32,
    rows: i32,
}

/// The adapters of the rows of one forward pass, in the order of the rows.
#[derive(Debug, Default)]
pub struct Pass(Vec<Part>);

/// An adapter, and the range of positions that use it.
pub(super) type Portion<'a> = (&'a Deltas, Range<i32>);

impl Pass {
    /// Creates a pass in which all rows have this adapter.
    #[must_use]
    pub fn of(deltas: Arc<Deltas>) -> Self {
        let mut pass = Self::default();
        pass.push(deltas, 0);
        pass
    }

    /// Adds a row with `tokens` tokens.
    pub fn push(&mut self, deltas: Arc<Deltas>, tokens: i32) {
        match self.0.last_mut() {
            Some(last) if Arc::ptr_eq(&last.deltas, &deltas) => {
                last.tokens += tokens;
                last.rows += 1;
            }
            _ => self.0.push(Part {
                deltas,
                tokens,
                rows: 1,
            }),
        }
    }

    /// Runs `f` on this thread with these adapters instead of the model's own. Restores the
    /// previous adapters afterwards, even if `f` panics.
    pub fn run<R>(self: &Arc<Self>, f: impl FnOnce() -> R) -> R {
        struct Back(Option<Arc<Pass>>);
        impl Drop for Back {
            fn drop(&mut self) {
                PASS.set(self.0.take());
            }
        }
        let _back = Back(PASS.replace(Some(Arc::clone(self))));
        f()
    }

    /// Whether no row has an adapter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an adapter of the pass changes `slot`.
    pub(super) fn changes(&self, slot: &ParamSlot) -> bool {
        self.0.iter().any(|part| part.deltas.at(slot).is_some())
    }

    /// Whether the rows have more than one adapter.
    pub(super) fn is_divided(&self) -> bool {
        self.0.len() > 1
    }

    /// Returns the change at `slot`, which applies to all rows.
    ///
    /// # Errors
    /// If the rows have more than one adapter, and one of them changes the slot.
    pub(super) fn change(&self, slot: &ParamSlot) -> Result<Option<Arc<Delta>>> {
        match self.0.as_slice() {
            [part] => Ok(part.deltas.at(slot).cloned()),
            _ if !self.changes(slot) => Ok(None),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                "adapter",
                format!("`{}` cannot differ between the rows of a pass", slot.name()),
            )),
        }
    }

    /// Returns the range of each part in an array with `positions` positions. The array has one
    /// position per token, or one per row.
    ///
    /// # Errors
    /// If `positions` is neither the number of tokens nor the number of rows.
    pub(super) fn portions(&self, positions: i32) -> Result<Vec<Portion<'_>>> {
        let sum = |length: fn(&Part) -> i32| self.0.iter().map(length).sum::<i32>();
        let length: fn(&Part) -> i32 = if positions == sum(|part| part.tokens) {
            |part| part.tokens
        } else if positions == sum(|part| part.rows) {
            |part| part.rows
        } else {
            let message = format!("{positions} positions cannot be assigned to adapters");
            return Err(Error::new(ErrorKind::Shape, "adapter", message));
        };
        let mut at = 0;
        let portion = |part| {
            let from = at;
            at += length(part);
            (part.deltas.as_ref(), from..at)
        };
        Ok(self.0.iter().map(portion).collect())
    }
}

thread_local! {
    static PASS: RefCell<Option<Arc<Pass>>> = const { RefCell::new(None) };
}

/// Returns the adapters of this thread's pass; `None` if it uses the model's own adapter or none.
pub(super) fn current() -> Option<Arc<Pass>> {
    PASS.with_borrow(Clone::clone)
}
