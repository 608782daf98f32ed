//! The inputs of an attention operation, and data shared by its units of work. `run.rs` computes
//! it.

use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::kv_write::normalize;
use crate::attention::rope::{Rotation, apply_rope};
use crate::isa::Isa;
use crate::partition::SharedOutput;
use crate::work::{Input, dim};

/// One query: its sequence, its packed row, and its position.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// The sequence of the batch.
    pub sequence: usize,
    /// The packed row.
    pub row: usize,
    /// The position in the sequence.
    pub position: i32,
}

/// The keys that the queries of a sequence attend to.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMask {
    /// The number of keys.
    pub len: usize,
    /// The number of kept keys, which come first, and the position of the first other key. `None`:
    /// the keys are unordered, and a query sees all of them.
    pub order: Option<(usize, i32)>,
    /// A query sees the kept keys and this many last ones of the others.
    pub window: Option<i32>,
    /// Full attention without a causal mask; overrides the other fields.
    pub around: Option<Around>,
}

/// The keys that a query sees on both sides: those of its sequence in an array shared by packed
/// sequences.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    /// The key index of the sequence's first position.
    pub first: usize,
    /// The maximum distance of visible keys.
    pub reach: Option<i32>,
}

impl AttentionMask {
    /// The keys that a query attends to: a prefix of this length, and a range.
    pub(crate) fn visible_keys(&self, position: i32) -> (usize, Range<usize>) {
        if let Some(Around { first, reach }) = self.around {
            let at = dim(position);
            let begin = reach.map_or(0, |n| at.saturating_sub(dim(n))).min(self.len);
            let end = reach.map_or(self.len, |n| at.saturating_add(dim(n) + 1).min(self.len));
            return (0, first + begin..first + end);
        }
        let Some((sink_tokens, start)) = self.order else {
            return (0, 0..self.len);
        };
        let kept_seen = sink_tokens.min(dim(position.saturating_add(1)));
        // Key `sink_tokens + i` is at index `start + i`.
        let after = |p: i32| sink_tokens + dim(p.saturating_sub(start)).min(self.len - sink_tokens);
        let end = after(position.saturating_add(1));
        let begin = match self.window {
            Some(window) => after(position.saturating_add(1).saturating_sub(window)),
            None => sink_tokens,
        };
        (kept_seen, begin.min(end)..end)
    }
}

/// Attention of packed queries over caches. Its inputs are float32: packed rows `[rows, width]`,
/// the weight of the norm of queries `[d]`, and the sinks `[heads]`. Then follow keys and values
/// `[1, Hkv, n, d]` of each sequence, or one pair shared by all.
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Query heads per key head.
    pub queries_per_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a packed row.
    pub width: usize,
    /// The factor on scores.
    pub scale: f32,
    /// Scores are capped to `-cap..cap` by a tanh.
    pub softcap: Option<f32>,
    /// Epsilon of the query norm, if there is one.
    pub eps: Option<f32>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// The rotary embedding of queries.
    pub rotation: Option<Rotation>,
    /// The queries, one output row each.
    pub queries: Vec<Query>,
    /// The masks of each sequence.
    pub plans: Vec<AttentionMask>,
    /// The instruction set.
    pub isa: Isa,
}

impl Attention {
    /// The keys that a query sees.
    pub(crate) fn visible_keys(&self, q: usize) -> (usize, Range<usize>) {
        let Query {
            sequence, position, ..
        } = self.queries[q];
        self.plans[sequence].visible_keys(position)
    }

    /// The first position that a query sees.
    pub(crate) fn first_visible(&self, q: usize) -> usize {
        match self.visible_keys(q) {
            (0, range) => range.start,
            _ => 0,
        }
    }

    /// The number of keys that a query sees.
    pub(crate) fn visible_count(&self, q: usize) -> usize {
        let (sink_tokens, range) = self.visible_keys(q);
        sink_tokens + range.len()
    }
}

/// Keys or values of a row of a batch.
#[derive(Clone, Copy)]
pub(crate) struct KvRows<'a> {
    data: *const [f32],
    /// The stride between heads, in elements.
    head: usize,
    /// The stride between positions, in elements.
    pub position: usize,
    memory: PhantomData<&'a [f32]>,
}

// SAFETY: the caller of `KvRows::of` guarantees that no thread writes elements while another reads
// them.
unsafe impl Sync for KvRows<'_> {}

impl<'a> KvRows<'a> {
    /// # Safety
    /// The array must be float32. Elements read through [`Self::reach`] must not be written
    /// afterwards.
    pub(crate) unsafe fn from_input(input: &'a Input) -> Self {
        let strides = input.strides();
        Self {
            // SAFETY: guaranteed by the caller; the span follows from the strides.
            data: unsafe { input.span() },
            head: strides[1],
            position: strides[2],
            memory: PhantomData,
        }
    }

    /// The address of a position, or null if it does not exist.
    pub(crate) fn ptr(&self, h: usize, at: usize) -> *const f32 {
        let first = self.data.cast::<f32>();
        first.wrapping_add(h * self.head + at * self.position)
    }

    /// The elements from the first of position `from` to the last before position `to`.
    pub(crate) fn span(&self, h: usize, from: usize, to: usize, d: usize) -> &'a [f32] {
        let start = h * self.head + from * self.position;
        let n = (to - from - 1) * self.position + d;
        assert!(start <= self.data.len() && n <= self.data.len() - start);
        // SAFETY: within the elements, which are not written afterwards.
        unsafe { std::slice::from_raw_parts(self.data.cast::<f32>().add(start), n) }
    }
}

/// The inputs that all units of an operation read, and its output.
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
    /// Head `h` of query `q` after norm, rotation and scaling.
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

    /// The rotation table of the position of query `q`.
    pub(crate) fn rope_table(&self, q: usize) -> &[f32] {
        let Some((rotation, rope_table)) = self.rotation else {
            return &[];
        };
        // Each pair has a sine and a cosine.
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
        // SAFETY: guaranteed by the caller.
        unsafe { self.out.slice_mut((q * heads + h) * d, d) }
    }

    /// The approximate number of multiplications for `queries`.
    pub(crate) fn multiplications(&self, queries: impl Iterator<Item = usize>) -> usize {
        let Attention {
            heads, head_dim: d, ..
        } = *self.attend;
        let keys: usize = queries
            .map(|q| {
                let (sink_tokens, range) = self.attend.visible_keys(q);
                sink_tokens + range.len() + 16
            })
            .sum();
        2 * keys * heads * d
    }
}
