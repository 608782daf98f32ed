//! Writes keys and values of a packed projection into a cache, keys through norm and rotation.

use std::borrow::Cow;

use crate::attention::rope::{Rotation, apply_rope, rope_table};
use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::vmath;
use crate::work::{Input, Work};

/// Adjacent tokens of one row in a packed projection.
#[derive(Debug, Clone, Copy)]
pub struct TokenRange {
    /// The first one's place in the projection.
    pub first: i32,
    /// How many.
    pub length: i32,
    /// The first one's position, and place in the cache.
    pub offset: i32,
}

/// Divides a head by the root of its mean square, in place.
pub(crate) fn normalize(isa: Isa, weight: &[f32], eps: f32, head: &mut [f32]) {
    let square = vmath::dot(isa, head, head);
    let factor = 1.0 / (square / head.len() as f32 + eps).sqrt();
    for (v, w) in head.iter_mut().zip(weight) {
        *v *= factor * w;
    }
}

/// The positions of tokens.
pub enum TokenPositions {
    /// So many from the first one on, as is usual, without a list of them.
    From(i32, usize),
    /// Any.
    Any(Vec<i32>),
}

impl TokenPositions {
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

/// Heads out of packed rows, to `[n, room, d]` from `slot` on. Its inputs are float32: a cache,
/// which is the output and is not read; packed rows; and the weight of the norm `[d]`.
pub struct KvWrite {
    /// Heads.
    pub heads: usize,
    /// Positions of the cache.
    pub capacity: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a packed row.
    pub width: usize,
    /// Of the first head in a packed row.
    pub first_column: usize,
    /// The first packed row.
    pub first_row: usize,
    /// The first position of the cache that is written.
    pub slot: usize,
    /// The tokens' positions in the sequence.
    pub positions: TokenPositions,
    /// What the norm adds under the root, where there is one.
    pub eps: Option<f32>,
    /// Rotary positions.
    pub rotation: Option<Rotation>,
    /// The instruction set.
    pub isa: Isa,
}

impl KvWrite {
    pub(crate) fn write(&self, packed: &[f32], norm: Option<&[f32]>, output: &mut [f32]) {
        let out = SharedOutput::new(output);
        let total = self.positions.count();
        let rope_table = self
            .rotation
            .as_ref()
            .map(|r| (r, rope_table(r, &self.positions.list())));
        // Not the counted pointer, which stays on this thread.
        let rope_table = rope_table
            .as_ref()
            .map_or(&[][..], |(_, rope_table)| rope_table);
        let each = rope_table.len() / total.max(1);
        parallel_ranges(
            total,
            total * self.heads * self.head_dim * 32,
            &|from, to| {
                for t in from..to {
                    for h in 0..self.heads {
                        // SAFETY: each token and head has a place of its own.
                        let head = unsafe { out.slice_mut(self.place(t, h), self.head_dim) };
                        let rope_table = &rope_table[t * each..(t + 1) * each];
                        self.write_head(packed, norm, rope_table, (t, h), head);
                    }
                }
            },
        );
    }

    /// Where head `h` of token `t` goes.
    fn place(&self, t: usize, h: usize) -> usize {
        (h * self.capacity + self.slot + t) * self.head_dim
    }

    /// Head `h` of token `t`, through norm and rotation, by the turns of its position.
    fn write_head(
        &self,
        packed: &[f32],
        norm: Option<&[f32]>,
        rope_table: &[f32],
        (t, h): (usize, usize),
        head: &mut [f32],
    ) {
        let start = (self.first_row + t) * self.width + self.first_column + h * self.head_dim;
        head.copy_from_slice(&packed[start..start + self.head_dim]);
        if let (Some(weight), Some(eps)) = (norm, self.eps) {
            normalize(self.isa, weight, eps, head);
        }
        if let Some(rotation) = &self.rotation {
            apply_rope(self.isa, rotation, rope_table, head);
        }
    }
}

/// Keys and values of this step's tokens, and where they go.
pub struct NewKv<'a> {
    /// The writes of each row, one after another.
    pub writes: &'a [(KvWrite, KvWrite)],
    /// The weight of the norm of keys.
    pub norm: Option<&'a [f32]>,
    /// Keys and values of each row.
    pub caches: &'a [Input],
}

// SAFETY: of the caches, only addresses are read, and elements that no other thread uses then, as
// promised to `store` and `write_kv_head`.
unsafe impl Sync for NewKv<'_> {}

impl NewKv<'_> {
    /// Whether no row has more than one token.
    pub(crate) fn is_single_token(&self) -> bool {
        (self.writes.iter()).all(|(keys, _)| keys.positions.count() == 1)
    }

    /// Writes all of them, by the turns of each token's position.
    ///
    /// # Safety
    /// The caches must be of float32, and nothing of them in use.
    pub(crate) unsafe fn write_all(&self, packed: &[f32], rope_table: &[f32]) {
        let Some((last, _)) = self.writes.last() else {
            return;
        };
        let total = last.first_row + last.positions.count();
        let each = rope_table.len() / total.max(1);
        parallel_ranges(
            total,
            total * last.heads * last.head_dim * 64,
            &|from, to| {
                for token in from..to {
                    let row = self
                        .writes
                        .partition_point(|(keys, _)| keys.first_row <= token)
                        - 1;
                    let rope_table = &rope_table[token * each..(token + 1) * each];
                    for h in 0..last.heads {
                        let t = token - self.writes[row].0.first_row;
                        // SAFETY: the caller's promise; each token and head has a place of its own.
                        unsafe { self.write_kv_head(packed, rope_table, (row, t, h)) };
                    }
                }
            },
        );
    }

    /// Writes head `h` of token `t` of a row, by the turns of its position.
    ///
    /// # Safety
    /// The caches must be of float32, and no other thread may use the place of this head and token.
    pub(crate) unsafe fn write_kv_head(
        &self,
        packed: &[f32],
        rope_table: &[f32],
        (row, t, h): (usize, usize, usize),
    ) {
        let (keys, values) = &self.writes[row];
        for (store, i, norm) in [(keys, 0, self.norm), (values, 1, None)] {
            // SAFETY: the caller's promise.
            let head =
                unsafe { self.caches[2 * row + i].slice_mut(store.place(t, h), store.head_dim) };
            store.write_head(packed, norm, rope_table, (t, h), head);
        }
    }
}

impl Work for KvWrite {
    fn outputs(&self) -> usize {
        self.heads * self.capacity * self.head_dim
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // The first one is what the output begins as.
        // SAFETY: `Heads::store` checked that these are of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.write(slice(1).unwrap_or_default(), slice(2), output);
    }
}

/// Keys alone, without a cache. Its inputs are float32: packed rows, and the weight of the norm
/// `[d]`.
pub struct ProjectKeys(pub KvWrite);

impl Work for ProjectKeys {
    fn outputs(&self) -> usize {
        self.0.outputs()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `Heads::keys` gave arrays of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.0.write(slice(0).unwrap_or_default(), slice(1), output);
    }
}
