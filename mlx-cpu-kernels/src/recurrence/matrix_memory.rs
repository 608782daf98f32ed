//! A matrix memory per head, over the positions of some rows: its rule, its sizes, and the division
//! of work. `chunk.rs` and `step.rs` have the arithmetic.

use std::ops::Range;

use crate::layout::tile::LANES;
use crate::partition::SharedOutput;

/// The maximum positions per chunk, which bounds a thread's scratch memory.
const MAX_CHUNK: usize = 128;

/// The minimum panels of columns per part, for one position and for several. Each part computes its
/// own scores, which is worthwhile only for many panels.
const MIN_PANELS: (usize, usize) = (4, 8);

/// The update of a memory `C` of `[key_dim, value_dim]` by a position with query `q`, key `k`,
/// value `v`, and the logarithm `f` of its forget gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MemoryRule {
    /// mLSTM (Beck et al. 2024, arXiv:2405.04517, section 2.3): both gates are exponential, and a
    /// normalizer `n` and a stabilizer `m` are part of the state. The gates are unmodified outputs
    /// of their projections; `f = logsigmoid(forget gate)`.
    ///
    /// ```text
    /// m' = max(f + m, i)
    /// C' = exp(f + m - m') C + exp(i - m') k^T v,   n' likewise of k
    /// y  = q C' / (max(|q n'|, exp(-m')) + eps)
    /// ```
    Exponential {
        /// Both gates are capped to `-cap..cap` by a tanh.
        gate_cap: Option<f32>,
        /// Added to the denominator.
        eps: f32,
    },
    /// The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): `C' = exp(f) C + k^T v`,
    /// `y = q C'`.
    Decay,
    /// The gated delta rule (Yang et al. 2024, arXiv:2412.06464):
    /// `C' = exp(f) C + k^T b (v - k exp(f) C)`, `y = q C'`, with a write strength `b`.
    Delta,
}

impl MemoryRule {
    /// Whether the state has a normalizer and a stabilizer.
    pub fn is_normalized(self) -> bool {
        matches!(self, Self::Exponential { .. })
    }

    /// Whether positions have a second gate besides the forget gate.
    pub fn has_second_gate(self) -> bool {
        !matches!(self, Self::Decay)
    }
}

/// A matrix memory over a sequence. Inputs, all float32; first the state, row-contiguous:
///
/// - `C` `[rows, heads, key_dim, value_dim]`; for a normalized rule also `n` `[rows, heads,
///   key_dim]` and `m` `[rows, heads]`;
/// - then, with any strides of the first two axes: queries and keys `[rows, length, key_heads *
///   key_dim]`, values `[rows, length, heads * value_dim]`, forget gates `[rows, length, heads]`,
///   and if the rule has a second gate, that gate in the same shape.
///
/// Output: `y` `[rows, length, heads * value_dim]`, then the final state with the same parts as in
/// the inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixMemory {
    /// The update rule.
    pub rule: MemoryRule,
    /// The number of sequences.
    pub rows: usize,
    /// The positions per sequence.
    pub length: usize,
    /// Value heads, each with a memory.
    pub heads: usize,
    /// Query and key heads, which divides `heads`: head `h` uses number `h / (heads / key_heads)`.
    /// A normalized rule needs as many as `heads`.
    pub key_heads: usize,
    /// Elements of a query and a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// The factor on queries.
    pub scale: f32,
    /// The number of positions per chunk.
    pub chunk: usize,
}

/// An input `[rows, length, width]`; only the last axis must be contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    pub data: &'a [f32],
    /// The strides of rows and positions, in elements.
    pub row: usize,
    pub position: usize,
}

impl<'a> Positions<'a> {
    /// `count` elements of a position, from index `from` on.
    pub(crate) fn at(&self, row: usize, position: usize, from: usize, count: usize) -> &'a [f32] {
        let first = row * self.row + position * self.position + from;
        &self.data[first..first + count]
    }
}

/// The inputs, and the places of the outputs.
pub(crate) struct Buffers<'a> {
    pub c: &'a [f32],
    pub n: &'a [f32],
    pub m: &'a [f32],
    pub q: Positions<'a>,
    pub k: Positions<'a>,
    pub v: Positions<'a>,
    pub f: Positions<'a>,
    pub second: Option<Positions<'a>>,
    pub y: SharedOutput,
    pub new_c: SharedOutput,
    pub new_n: SharedOutput,
    pub new_m: SharedOutput,
}

/// The unit of work: some columns of heads that share queries and keys.
pub(crate) struct Part {
    pub row: usize,
    pub key_head: usize,
    /// The range of panels of `LANES` columns, over all heads that share `key_head`.
    pub panels: Range<usize>,
}

impl MatrixMemory {
    /// The number of elements of `y`, `C`, `n` and `m`.
    pub(crate) fn sizes(&self) -> [usize; 4] {
        let heads = self.rows * self.heads;
        let normalized = usize::from(self.rule.is_normalized());
        [
            self.rows * self.length * self.heads * self.value_dim,
            heads * self.key_dim * self.value_dim,
            heads * self.key_dim * normalized,
            heads * normalized,
        ]
    }

    /// The number of heads that share queries and keys.
    pub(crate) fn repeats(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }

    /// The number of column panels per head.
    pub(crate) fn panels(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    /// The positions per chunk.
    pub(crate) fn chunk_len(&self) -> usize {
        self.chunk.clamp(1, MAX_CHUNK)
    }

    /// The number of parts per row and key head.
    pub(crate) fn splits(&self, threads: usize) -> usize {
        let shared = (self.rows * self.key_heads).max(1);
        let least = if self.length == 1 {
            MIN_PANELS.0
        } else {
            MIN_PANELS.1
        };
        let most = (self.repeats() * self.panels() / least).max(1);
        match threads {
            1 => 1,
            _ => (2 * threads).div_ceil(shared).clamp(1, most),
        }
    }
}
