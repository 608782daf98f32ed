//! The inputs of an attention operation, and data that its units of work share. `run.rs` has the
//! computation.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::key_blocks::VisibleKeys;
use crate::attention::kv_type::{KvElement, KvType, widen};
use crate::attention::kv_write::normalize;
use crate::attention::rope::{Rotation, apply_rope};
use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::{LANES, ScaledRow};
use crate::partition::SharedOutput;
use crate::work::{Input, dim};

/// One query: its sequence, its row of the packed projection, and its position.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// The index of the sequence in the batch.
    pub sequence: usize,
    /// The row in the packed projection.
    pub row: usize,
    /// The position in the sequence.
    pub position: i32,
}

/// The keys that the queries of a sequence attend to.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMask {
    /// The number of keys.
    pub len: usize,
    /// The type of keys and values.
    pub kv_type: KvType,
    /// `(kept, start)`: the first `kept` keys have the positions `0..kept`. The next key has the
    /// position `start`, and further keys follow in order. `None` means that the query is the last
    /// of its sequence and attends to all keys. With `None` and a `window`, the last `window` keys
    /// are a ring buffer: position `p` is in its slot `(p - kept) % window`.
    pub order: Option<(usize, i32)>,
    /// The size of the sliding window. A query attends to the kept keys, and to the last `window`
    /// of the other keys.
    pub window: Option<i32>,
    /// Attention to keys before and after the query, without a causal mask. It overrides the other
    /// fields.
    pub around: Option<Around>,
}

/// Bidirectional attention in an array of packed sequences: a query attends to keys of its own
/// sequence on both sides.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    /// The key index of the sequence's first position.
    pub first: usize,
    /// The maximum distance between a query and its visible keys.
    pub reach: Option<i32>,
}

impl AttentionMask {
    /// The keys that a query attends to.
    pub(crate) fn visible_keys(&self, position: i32) -> VisibleKeys {
        if let Some(Around { first, reach }) = self.around {
            let at = dim(position);
            let begin = reach.map_or(0, |n| at.saturating_sub(dim(n))).min(self.len);
            let end = reach.map_or(self.len, |n| at.saturating_add(dim(n) + 1).min(self.len));
            return VisibleKeys::run(first + begin..first + end, begin);
        }
        let Some((sink_tokens, start)) = self.order else {
            return self.ring(dim(position));
        };
        let kept = sink_tokens.min(dim(position.saturating_add(1)));
        // The key with index `sink_tokens + i` has position `start + i`.
        let after = |p: i32| sink_tokens + dim(p.saturating_sub(start)).min(self.len - sink_tokens);
        let end = after(position.saturating_add(1));
        let begin = match self.window {
            Some(window) => after(position.saturating_add(1).saturating_sub(window)),
            None => sink_tokens,
        };
        let begin = begin.min(end);
        VisibleKeys {
            kept,
            ranges: [begin..end, 0..0],
            position: dim(start) + begin - sink_tokens,
        }
    }

    /// Returns all keys of a cache whose last `window` slots are a ring buffer. The query must be
    /// the last of its sequence.
    fn ring(&self, position: usize) -> VisibleKeys {
        let window = self.window.map_or(0, dim);
        if window == 0 || window > self.len || position + 1 < self.len {
            return VisibleKeys::run(0..self.len, 0);
        }
        let kept = self.len - window;
        // The slot after the query's has the oldest key.
        let oldest = kept + (position + 1 - kept) % window;
        VisibleKeys {
            kept,
            ranges: [oldest..self.len, kept..oldest],
            position: position + 1 - window,
        }
    }
}

/// Attention of packed queries over KV caches. The inputs are float32: packed rows `[rows, width]`,
/// the weight of the query norm `[d]`, and the sinks `[heads]`. Then keys and values `[1, Hkv, n,
/// d]` follow: a pair of arrays for each sequence, or one pair shared by all sequences. If they are
/// packed, the last axis has the words of a head instead of `d` elements.
pub struct Attention {
    /// The number of query heads.
    pub heads: usize,
    /// The number of query heads that share a key head.
    pub queries_per_kv: usize,
    /// The number of elements of a head.
    pub head_dim: usize,
    /// The number of elements of a packed row.
    pub width: usize,
    /// The factor by which scores are multiplied.
    pub scale: f32,
    /// The limit `cap` of scores, which become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Epsilon of the query norm, if there is one.
    pub eps: Option<f32>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// For each head the factor of the distance between query and key, which is subtracted from
    /// the capped score (`ALiBi`; Press et al. 2021, arXiv:2108.12409). Empty without such a bias.
    pub slopes: Vec<f32>,
    /// The rotary embedding of queries.
    pub rotation: Option<Rotation>,
    /// The queries. Each has one output row.
    pub queries: Vec<Query>,
    /// The mask of each sequence.
    pub plans: Vec<AttentionMask>,
    /// The instruction set.
    pub isa: Isa,
}

impl Attention {
    /// The keys that query `q` attends to, as in [`AttentionMask::visible_keys`].
    pub(crate) fn visible_keys(&self, q: usize) -> VisibleKeys {
        let Query {
            sequence, position, ..
        } = self.queries[q];
        self.plans[sequence].visible_keys(position)
    }

    /// The first key that query `q` attends to.
    pub(crate) fn first_visible(&self, q: usize) -> usize {
        match self.visible_keys(q) {
            VisibleKeys {
                kept: 0, ranges, ..
            } => ranges[0].start,
            _ => 0,
        }
    }

    /// The number of keys that query `q` attends to.
    pub(crate) fn visible_count(&self, q: usize) -> usize {
        self.visible_keys(q).len()
    }
}

/// Keys or values of one row of a batch.
#[derive(Clone, Copy)]
pub(crate) struct KvRows<'a> {
    data: *const c_void,
    /// The number of elements from `data` to the last one that an index can reach.
    len: usize,
    /// The type of the elements.
    pub kv_type: KvType,
    /// The stride between heads, in elements.
    head: usize,
    /// The stride between positions, in elements.
    pub position: usize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: the caller of `KvRows::from_input` guarantees that no thread writes elements while
// another thread reads them.
unsafe impl Sync for KvRows<'_> {}

impl<'a> KvRows<'a> {
    /// # Safety
    /// The array must have elements of this type. Elements read through [`Self::span`] must not be
    /// written afterwards.
    pub(crate) unsafe fn from_input(input: &'a Input, kv_type: KvType) -> Self {
        let strides = input.strides();
        // SAFETY: the caller guarantees the type. Shape and strides determine the span.
        let (data, len) = unsafe {
            match kv_type {
                KvType::Float32 => {
                    let span = input.span::<f32>();
                    (span.cast(), span.len())
                }
                KvType::Float16 => {
                    let span = input.span::<u16>();
                    (span.cast(), span.len())
                }
                KvType::Packed(_) => {
                    let span = input.span::<u32>();
                    (span.cast(), span.len())
                }
            }
        };
        Self {
            data,
            len,
            kv_type,
            head: strides[1],
            position: strides[2],
            memory: PhantomData,
        }
    }

    /// A view of positions `from..to` of head `h`. In the view, this head and position `from` have
    /// the index 0.
    pub(crate) fn of_head(&self, h: usize, (from, to): (usize, usize), d: usize) -> Self {
        let (data, len) = match self.kv_type {
            _ if from >= to => (self.data, 0),
            KvType::Float32 => {
                let span = self.span::<f32>(h, (from, to), d);
                (span.as_ptr().cast(), span.len())
            }
            KvType::Float16 => {
                let span = self.span::<u16>(h, (from, to), d);
                (span.as_ptr().cast(), span.len())
            }
            KvType::Packed(_) => {
                let span = self.span::<u32>(h, (from, to), d);
                (span.as_ptr().cast(), span.len())
            }
        };
        Self {
            data,
            len,
            head: 0,
            ..*self
        }
    }

    /// Like [`Self::of_head`], but as contiguous rows of float32. If this needs a copy, the copy is
    /// in `packed`, and `scratch` holds converted elements.
    pub(crate) fn contiguous_head<'p>(
        &self,
        isa: Isa,
        (h, from, to): (usize, usize, usize),
        d: usize,
        (packed, scratch): (&'p mut AlignedVec, &mut Vec<f32>),
    ) -> KvRows<'p>
    where
        'a: 'p,
    {
        if from >= to || self.kv_type == KvType::Float32 && self.position == d {
            return self.of_head(h, (from, to), d);
        }
        packed.resize((to - from) * d);
        let (rows, step) = self.widened(isa, h, (from, to), (d, scratch));
        for (packed, row) in packed.chunks_exact_mut(d).zip(rows.chunks(step)) {
            packed.copy_from_slice(&row[..d]);
        }
        KvRows {
            data: packed.as_ptr().cast(),
            len: packed.len(),
            kv_type: KvType::Float32,
            head: 0,
            position: d,
            memory: PhantomData,
        }
    }

    /// The address of a position, or null if it does not exist.
    pub(crate) fn ptr(&self, h: usize, at: usize) -> *const u8 {
        let first = self.data.cast::<u8>();
        first.wrapping_add((h * self.head + at * self.position) * self.kv_type.size())
    }

    /// The number of bytes between two positions.
    pub(crate) fn position_bytes(&self) -> usize {
        self.position * self.kv_type.size()
    }

    /// The elements from the start of position `from` to the end of position `to - 1`.
    pub(crate) fn span<T: KvElement>(
        &self,
        h: usize,
        (from, to): (usize, usize),
        d: usize,
    ) -> &'a [T] {
        assert!(T::stores(self.kv_type));
        let start = h * self.head + from * self.position;
        let n = (to - from - 1) * self.position + self.kv_type.row(d);
        assert!(start <= self.len && n <= self.len - start);
        // SAFETY: `T` is the type of the elements. The range is within them, and nothing writes
        // them afterwards.
        unsafe { std::slice::from_raw_parts(self.data.cast::<T>().add(start), n) }
    }

    /// Positions `from..to` as float32, and their stride in elements. `scratch` holds converted
    /// elements.
    pub(crate) fn widened<'s>(
        &self,
        isa: Isa,
        h: usize,
        (from, to): (usize, usize),
        (d, scratch): (usize, &'s mut Vec<f32>),
    ) -> (&'s [f32], usize)
    where
        'a: 's,
    {
        match self.kv_type {
            KvType::Float32 => (self.span(h, (from, to), d), self.position),
            KvType::Float16 => {
                let span = self.span::<u16>(h, (from, to), d);
                (
                    widen(isa, (span, self.position), (to - from, d), scratch),
                    d,
                )
            }
            KvType::Packed(packing) => {
                let span = self.span::<u32>(h, (from, to), d);
                (
                    packing.unpack_rows(isa, (span, self.position), (to - from, d), scratch),
                    d,
                )
            }
        }
    }
}

/// The inputs that all units of work of an operation read, and its output.
pub(crate) struct AttentionTask<'a> {
    pub attend: &'a Attention,
    pub packed: &'a [f32],
    pub norm: Option<(&'a [f32], f32)>,
    pub rotation: Option<(&'a Rotation, &'a [f32])>,
    /// Keys and values of each row.
    pub kv: &'a [KvRows<'a>],
    pub sinks: Option<&'a [f32]>,
    pub out: SharedOutput,
}

impl AttentionTask<'_> {
    /// Writes head `h` of query `q` to `query`, after norm, rotation and scaling.
    pub(crate) fn query(&self, q: usize, h: usize, query: &mut [f32]) {
        let Attention {
            head_dim: d,
            width,
            isa,
            scale,
            ..
        } = *self.attend;
        let start = self.attend.queries[q].row * width + h * d;
        query.copy_from_slice(&self.packed[start..start + d]);
        if let Some((weight, eps)) = self.norm {
            normalize(isa, weight, eps, query);
        }
        if let Some((rotation, _)) = self.rotation {
            apply_rope(isa, rotation, self.rope_table(q), query);
        }
        query.iter_mut().for_each(|v| *v *= scale);
    }

    /// Head `h` of at most `LANES` queries, each with the factor on scores; `None` if queries need
    /// a norm or a rotation.
    pub(crate) fn plain_queries(
        &self,
        queries: &Range<usize>,
        h: usize,
    ) -> Option<[ScaledRow<'_>; LANES]> {
        if self.norm.is_some() || self.rotation.is_some() {
            return None;
        }
        let Attention {
            head_dim: d, scale, ..
        } = *self.attend;
        let mut rows: [ScaledRow<'_>; LANES] = [(&[], scale); LANES];
        for (row, q) in rows.iter_mut().zip(queries.clone()) {
            row.0 = &self.packed_row(q)[h * d..(h + 1) * d];
        }
        Some(rows)
    }

    /// Keys and values of a sequence.
    pub(crate) fn kv(&self, sequence: usize) -> [KvRows<'_>; 2] {
        let first = if self.kv.len() == 2 { 0 } else { 2 * sequence };
        [self.kv[first], self.kv[first + 1]]
    }

    /// The packed row of query `q`.
    pub(crate) fn packed_row(&self, q: usize) -> &[f32] {
        let width = self.attend.width;
        &self.packed[self.attend.queries[q].row * width..][..width]
    }

    /// The row of the rotation table for the position of query `q`.
    pub(crate) fn rope_table(&self, q: usize) -> &[f32] {
        let Some((rotation, rope_table)) = self.rotation else {
            return &[];
        };
        // Each pair of elements has a sine and a cosine.
        let each = 2 * rotation.radians.len();
        &rope_table[q * each..(q + 1) * each]
    }

    /// The output of head `h` of query `q`.
    ///
    /// # Safety
    /// No other thread may use this output.
    #[allow(
        clippy::mut_from_ref,
        reason = "each query and head has a place of its own"
    )]
    pub(crate) unsafe fn output(&self, q: usize, h: usize) -> &mut [f32] {
        let Attention {
            head_dim: d, heads, ..
        } = *self.attend;
        // SAFETY: the caller guarantees that no other thread uses this output.
        unsafe { self.out.slice_mut((q * heads + h) * d, d) }
    }

    /// The approximate number of multiplications that these queries require.
    pub(crate) fn multiplications(&self, queries: impl Iterator<Item = usize>) -> usize {
        let Attention {
            heads, head_dim: d, ..
        } = *self.attend;
        let keys: usize = queries.map(|q| self.attend.visible_count(q) + 16).sum();
        2 * keys * heads * d
    }
}
