//! Writes keys and values of a packed projection into a KV cache. Keys are normalized and rotated
//! first.

use std::borrow::Cow;

use crate::attention::kv_type::{KvElement, KvType};
use crate::attention::rope::{Rotation, apply_rope, rope_table};
use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::vmath;
use crate::work::{Input, Work};

/// Adjacent tokens of one row in a packed projection.
#[derive(Debug, Clone, Copy)]
pub struct TokenRange {
    /// The first token's row in the projection.
    pub first: i32,
    /// The number of tokens.
    pub length: i32,
    /// The first token's position, and its index in the cache.
    pub offset: i32,
}

/// Applies an RMS norm to a head, in place.
pub(crate) fn normalize(isa: Isa, weight: &[f32], eps: f32, head: &mut [f32]) {
    let square = vmath::dot(isa, head, head);
    let factor = 1.0 / (square / head.len() as f32 + eps).sqrt();
    for (v, w) in head.iter_mut().zip(weight) {
        *v *= factor * w;
    }
}

/// The positions of tokens in their sequence.
pub enum TokenPositions {
    /// Consecutive positions: the first one and their number. This is the usual case.
    From(i32, usize),
    /// Arbitrary positions.
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

/// Copies heads of packed rows to a cache `[n, capacity, d]`, from position `slot` on. The inputs:
/// the cache, which is also the output and is not read; the packed rows, float32; and the weight of
/// the norm `[d]`, float32. The cache is float32, float16 as `u16`, or packed words, `[n, capacity,
/// words]`.
pub struct KvWrite {
    /// The number of heads.
    pub heads: usize,
    /// The number of positions in the cache.
    pub capacity: usize,
    /// The number of elements of a head.
    pub head_dim: usize,
    /// The number of elements of a packed row.
    pub width: usize,
    /// The column of the first head in a packed row.
    pub first_column: usize,
    /// The first packed row.
    pub first_row: usize,
    /// The first position of the cache to write.
    pub slot: usize,
    /// The tokens' positions in the sequence.
    pub positions: TokenPositions,
    /// Epsilon of the norm, if there is one.
    pub eps: Option<f32>,
    /// The rotary embedding.
    pub rotation: Option<Rotation>,
    /// The type of the cache.
    pub kv_type: KvType,
    /// The instruction set.
    pub isa: Isa,
}

impl KvWrite {
    pub(crate) fn write<T: KvElement>(
        &self,
        packed: &[f32],
        norm: Option<&[f32]>,
        output: &mut [T],
    ) {
        assert!(T::stores(self.kv_type));
        let out = SharedOutput::new(output);
        let total = self.positions.count();
        let rope_table = self
            .rotation
            .as_ref()
            .map(|r| (r, rope_table(r, &self.positions.list())));
        // Threads share the slice, because the `Rc` must stay on this thread.
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
                        // SAFETY: the elements of different tokens and heads are disjoint.
                        let head = unsafe { out.slice_mut(self.place(t, h), self.row()) };
                        let rope_table = &rope_table[t * each..(t + 1) * each];
                        T::fill(self.kv_type, head, self.head_dim, |head| {
                            self.write_head(packed, norm, rope_table, (t, h), head);
                        });
                    }
                }
            },
        );
    }

    /// The index in the cache at which head `h` of token `t` begins.
    fn place(&self, t: usize, h: usize) -> usize {
        (h * self.capacity + self.slot + t) * self.row()
    }

    /// The number of stored items of a head.
    fn row(&self) -> usize {
        self.kv_type.row(self.head_dim)
    }

    /// Writes head `h` of token `t`, after norm and rotation by the token's position.
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

/// New keys and values of a step, and their destinations.
pub struct NewKv<'a> {
    /// For each row, the write of keys and the write of values.
    pub writes: &'a [(KvWrite, KvWrite)],
    /// The weight of the key norm.
    pub norm: Option<&'a [f32]>,
    /// The caches of keys and of values, alternating, row by row.
    pub caches: &'a [Input],
}

// SAFETY: threads read only the addresses of the caches, and access only elements that no other
// thread uses. Callers of `write_all` and `write_kv_head` guarantee it.
unsafe impl Sync for NewKv<'_> {}

impl NewKv<'_> {
    /// Whether every row has at most one token.
    pub(crate) fn is_single_token(&self) -> bool {
        (self.writes.iter()).all(|(keys, _)| keys.positions.count() == 1)
    }

    /// Writes all tokens. `rope_table` has the rotation of each position.
    ///
    /// # Safety
    /// The caches must have the types of their writes, and nothing else may use them.
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
                        // SAFETY: the caller guarantees the caches. The elements of different
                        // tokens and heads are disjoint.
                        unsafe { self.write_kv_head(packed, rope_table, (row, t, h)) };
                    }
                }
            },
        );
    }

    /// Writes head `h` of token `t` of a row. `rope_table` has the rotation of the token's
    /// position.
    ///
    /// # Safety
    /// The caches must have the types of their writes, and no other thread may use the elements of
    /// this head and token.
    pub(crate) unsafe fn write_kv_head(
        &self,
        packed: &[f32],
        rope_table: &[f32],
        (row, t, h): (usize, usize, usize),
    ) {
        let (keys, values) = &self.writes[row];
        for (store, i, norm) in [(keys, 0, self.norm), (values, 1, None)] {
            let cache = self.caches[2 * row + i];
            let (place, n) = (store.place(t, h), store.row());
            let (kv_type, d) = (store.kv_type, store.head_dim);
            let write = |head: &mut [f32]| store.write_head(packed, norm, rope_table, (t, h), head);
            // SAFETY: the caller guarantees the type of the caches, and that no other thread uses
            // these elements.
            unsafe {
                match kv_type {
                    KvType::Float32 => f32::fill(kv_type, cache.slice_mut(place, n), d, write),
                    KvType::Float16 => u16::fill(kv_type, cache.slice_mut(place, n), d, write),
                    KvType::Packed(_) => u32::fill(kv_type, cache.slice_mut(place, n), d, write),
                }
            }
        }
    }
}

impl KvWrite {
    /// The number of stored items of the cache.
    fn elements(&self) -> usize {
        self.heads * self.capacity * self.row()
    }

    /// Writes into the cache `output`. The first input is its initial content.
    ///
    /// # Safety
    /// The other inputs must be float32.
    unsafe fn write_from<T: KvElement>(&self, inputs: &[Input], output: &mut [T]) {
        // SAFETY: the caller guarantees float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.write(slice(1).unwrap_or_default(), slice(2), output);
    }
}

impl Work for KvWrite {
    fn outputs(&self) -> usize {
        self.elements()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: the caller passes the documented inputs.
        unsafe { self.write_from(inputs, output) };
    }
}

/// Writes into a cache of float16.
impl Work<u16> for KvWrite {
    fn outputs(&self) -> usize {
        self.elements()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [u16]) {
        // SAFETY: the caller passes the documented inputs.
        unsafe { self.write_from(inputs, output) };
    }
}

/// Writes into a packed cache.
impl Work<u32> for KvWrite {
    fn outputs(&self) -> usize {
        self.elements()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [u32]) {
        // SAFETY: the caller passes the documented inputs.
        unsafe { self.write_from(inputs, output) };
    }
}

/// Keys after norm and rotation, without a cache. The inputs are float32: packed rows, and the
/// weight of the norm `[d]`.
pub struct ProjectKeys(pub KvWrite);

impl Work for ProjectKeys {
    fn outputs(&self) -> usize {
        self.0.elements()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `Heads::keys` passes float32 arrays.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.0.write(slice(0).unwrap_or_default(), slice(1), output);
    }
}
