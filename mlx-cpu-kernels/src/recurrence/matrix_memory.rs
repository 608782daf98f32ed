//! A matrix memory per head, over the positions of some rows: the update rule, the sizes, and the
//! division of work. `chunk.rs` and `step.rs` have the arithmetic.

use std::ops::Range;

use crate::layout::tile::LANES;
use crate::partition::SharedOutput;
use crate::work::Input;

/// The maximum number of positions per chunk. It bounds a thread's scratch memory.
const MAX_CHUNK: usize = 128;

/// The minimum number of column panels per part, for a single position and for several positions.
/// Each part computes its own scores, which is worthwhile only for many panels.
const MIN_PANELS: (usize, usize) = (4, 8);

/// The rule that updates a memory `C` of `[key_dim, value_dim]` by a position. The position has the
/// query `q`, the key `k`, the value `v`, and the logarithm `f` of its forget gate.
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
        /// The limit `cap` of both gates, which become `cap * tanh(gate / cap)`.
        gate_cap: Option<f32>,
        /// Epsilon, which is added to the denominator.
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

/// A matrix memory over a sequence. All inputs are float32. The state comes first, row-contiguous:
///
/// - `C` `[rows, heads, key_dim, value_dim]`; for a normalized rule also `n` `[rows, heads,
///   key_dim]` and `m` `[rows, heads]`;
/// - then, with any strides of the first two axes: queries and keys `[rows, length, key_heads *
///   key_dim]`, values `[rows, length, heads * value_dim]`, forget gates `[rows, length, heads]`,
///   and if the rule has a second gate, that gate in the same shape.
///
/// The output is `y` `[rows, length, heads * value_dim]`, then the final state with the same parts
/// as in the inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixMemory {
    /// The update rule.
    pub rule: MemoryRule,
    /// The number of sequences.
    pub rows: usize,
    /// The number of positions per sequence.
    pub length: usize,
    /// The number of value heads. Each has a memory.
    pub heads: usize,
    /// The number of query and key heads. It divides `heads`: value head `h` uses query and key
    /// head `h / (heads / key_heads)`. With a normalized rule it must equal `heads`.
    pub key_heads: usize,
    /// The number of elements of a query and of a key.
    pub key_dim: usize,
    /// The number of elements of a value.
    pub value_dim: usize,
    /// The factor on queries.
    pub scale: f32,
    /// The number of positions per chunk.
    pub chunk: usize,
}

/// An input `[rows, length, width]`. Only its last axis must be contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    pub data: &'a [f32],
    /// The strides of rows and positions, in elements.
    pub row: usize,
    pub position: usize,
}

impl<'a> Positions<'a> {
    /// The positions of an input.
    ///
    /// # Safety
    /// The input must be float32 with three axes, the last of which is contiguous. It must exist
    /// and not be written during `'a`.
    pub(crate) unsafe fn new(input: &Input) -> Self {
        let strides = input.strides();
        Self {
            // SAFETY: the caller guarantees type and lifetime.
            data: unsafe { &*input.span::<f32>() },
            row: strides[0],
            position: strides[1],
        }
    }

    /// `count` elements of a position, from index `from` on.
    pub(crate) fn at(&self, row: usize, position: usize, from: usize, count: usize) -> &'a [f32] {
        let first = row * self.row + position * self.position + from;
        &self.data[first..first + count]
    }
}

/// The inputs, and the destinations of the outputs.
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

/// The unit of work: some columns of the heads that share a query and key head.
pub(crate) struct Part {
    pub row: usize,
    pub key_head: usize,
    /// The range of panels of `LANES` columns, over all heads that share `key_head`.
    pub panels: Range<usize>,
}

impl MatrixMemory {
    /// The numbers of elements of `y`, `C`, `n` and `m`.
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

    /// The number of value heads that share a query and key head.
    pub(crate) fn repeats(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }

    /// The number of column panels per head.
    pub(crate) fn panels(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    /// The number of positions per chunk.
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
