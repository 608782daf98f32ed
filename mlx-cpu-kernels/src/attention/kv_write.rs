//! Keys and values out of packed projections: keys with norm and rotation, into a cache in place or alone.

use std::borrow::Cow;

use crate::attention::rope::{Rotation, rotate, turns};
use crate::isa::Isa;
use crate::partition::{Output, share};
use crate::simd::vmath;
use crate::work::{Input, Work};

/// Neighboring tokens of one row in a packed projection.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// The first one's place in the projection.
    pub first: i32,
    /// How many.
    pub length: i32,
    /// The first one's position, and place in the cache.
    pub offset: i32,
}

/// Divides a head by the root of its mean square, in place.
pub(crate) fn normalize(isa: Isa, weight: &[f32], eps: f32, head: &mut [f32]) {
    let square = vmath::inner(isa, head, head);
    let factor = 1.0 / (square / head.len() as f32 + eps).sqrt();
    for (v, w) in head.iter_mut().zip(weight) {
        *v *= factor * w;
    }
}

/// The positions of tokens.
pub enum Positions {
    /// So many from the first one on, as is usual, without a list of them.
    From(i32, usize),
    /// Any.
    Any(Vec<i32>),
}

impl Positions {
    fn count(&self) -> usize {
        match self {
            Self::From(_, count) => *count,
            Self::Any(all) => all.len(),
        }
    }

    fn list(&self) -> Cow<'_, [i32]> {
        match self {
            Self::From(first, count) => (*first..).take(*count).collect(),
            Self::Any(all) => Cow::Borrowed(all),
        }
    }
}

/// Heads out of packed rows, to `[n, room, d]` from `slot` on. Its inputs are float32: a cache, which the
/// output begins as and which is not read, packed rows, and the weight of the norm `[d]`.
pub struct Store {
    /// Heads.
    pub n: usize,
    /// Positions of the cache.
    pub room: usize,
    /// Elements of a head.
    pub d: usize,
    /// Elements of a packed row.
    pub width: usize,
    /// Of the first head in a packed row.
    pub first: usize,
    /// The first packed row.
    pub from: usize,
    /// The first position of the cache that is written.
    pub slot: usize,
    /// The tokens' positions in the sequence.
    pub positions: Positions,
    /// What the norm adds under the root, where there is one.
    pub eps: Option<f32>,
    /// Rotary positions.
    pub rotation: Option<Rotation>,
    /// The instruction set.
    pub isa: Isa,
}

impl Store {
    pub(crate) fn write(&self, packed: &[f32], norm: Option<&[f32]>, output: &mut [f32]) {
        let out = Output::new(output);
        let total = self.positions.count();
        let turns = self
            .rotation
            .as_ref()
            .map(|r| (r, turns(r, &self.positions.list())));
        // Not the counted pointer, which stays on this thread.
        let turns = turns.as_ref().map_or(&[][..], |(_, turns)| turns);
        let each = turns.len() / total.max(1);
        share(total, total * self.n * self.d * 32, &|from, to| {
            for t in from..to {
                for h in 0..self.n {
                    // SAFETY: each token and head has a place of its own.
                    let head = unsafe { out.part(self.place(t, h), self.d) };
                    let turns = &turns[t * each..(t + 1) * each];
                    self.write_head(packed, norm, turns, (t, h), head);
                }
            }
        });
    }

    /// Where head `h` of token `t` goes.
    fn place(&self, t: usize, h: usize) -> usize {
        (h * self.room + self.slot + t) * self.d
    }

    /// Head `h` of token `t`, through norm and rotation, by the turns of its position.
    fn write_head(
        &self,
        packed: &[f32],
        norm: Option<&[f32]>,
        turns: &[f32],
        (t, h): (usize, usize),
        head: &mut [f32],
    ) {
        let start = (self.from + t) * self.width + self.first + h * self.d;
        head.copy_from_slice(&packed[start..start + self.d]);
        if let (Some(weight), Some(eps)) = (norm, self.eps) {
            normalize(self.isa, weight, eps, head);
        }
        if let Some(rotation) = &self.rotation {
            rotate(self.isa, rotation, turns, head);
        }
    }
}

/// Keys and values of this step's tokens, and where they go.
pub struct Fresh<'a> {
    /// Of each row, one after another.
    pub stores: &'a [(Store, Store)],
    /// The weight of the norm of keys.
    pub norm: Option<&'a [f32]>,
    /// Keys and values of each row.
    pub caches: &'a [Input],
}

// SAFETY: of the caches their addresses are looked at, and elements that nobody else uses then, as promised to `store` and `store_head`.
unsafe impl Sync for Fresh<'_> {}

impl Fresh<'_> {
    /// Whether no row has more than one token.
    pub(crate) fn single(&self) -> bool {
        (self.stores.iter()).all(|(keys, _)| keys.positions.count() == 1)
    }

    /// Writes all of them, by the turns of each token's position.
    ///
    /// # Safety
    /// The caches must be of float32, and nothing of them in use.
    pub(crate) unsafe fn store(&self, packed: &[f32], turns: &[f32]) {
        let Some((last, _)) = self.stores.last() else {
            return;
        };
        let total = last.from + last.positions.count();
        let each = turns.len() / total.max(1);
        share(total, total * last.n * last.d * 64, &|from, to| {
            for token in from..to {
                let row = self.stores.partition_point(|(keys, _)| keys.from <= token) - 1;
                let turns = &turns[token * each..(token + 1) * each];
                for h in 0..last.n {
                    let t = token - self.stores[row].0.from;
                    // SAFETY: the caller's promise; each token and head has a place of its own.
                    unsafe { self.store_head(packed, turns, (row, t, h)) };
                }
            }
        });
    }

    /// Writes head `h` of token `t` of a row, by the turns of its position.
    ///
    /// # Safety
    /// The caches must be of float32, and nobody else may use the place of this head and token.
    pub(crate) unsafe fn store_head(
        &self,
        packed: &[f32],
        turns: &[f32],
        (row, t, h): (usize, usize, usize),
    ) {
        let (keys, values) = &self.stores[row];
        for (store, i, norm) in [(keys, 0, self.norm), (values, 1, None)] {
            // SAFETY: the caller's promise.
            let head = unsafe { self.caches[2 * row + i].part_mut(store.place(t, h), store.d) };
            store.write_head(packed, norm, turns, (t, h), head);
        }
    }
}

impl Work for Store {
    fn outputs(&self) -> usize {
        self.n * self.room * self.d
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // The first one is what the output begins as.
        // SAFETY: `Heads::store` checked that these are of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.write(slice(1).unwrap_or_default(), slice(2), output);
    }
}

/// Keys alone, without a cache. Its inputs are float32: packed rows, and the weight of the norm `[d]`.
pub struct Keys(pub Store);

impl Work for Keys {
    fn outputs(&self) -> usize {
        self.0.outputs()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `Heads::keys` gave arrays of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.0.write(slice(0).unwrap_or_default(), slice(1), output);
    }
}
