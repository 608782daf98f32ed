//! The gates of a matrix memory, as factors for a chunk. Sums of logarithms are float64. In
//! float32, the difference of two long sums would lose digits.

use crate::isa::{Isa, compiled_for_each_isa};
use crate::layout::tile::LANES;
use crate::memory::resize;
use crate::simd::portable::vmath;

/// The minimum logarithm of a forget gate. The exponential of anything smaller is zero. Without
/// this limit, sums with large magnitudes would lose the digits of small logarithms.
const LEAST_LOG: f64 = -1e6;

/// The minimum stabilizer whose `exp(-m)` is used. Below this value a denominator would overflow,
/// and the output is nearly zero.
const LEAST_M: f32 = -80.0;

/// `cap * tanh(x / cap)`.
pub(crate) fn capped(x: f32, cap: Option<f32>) -> f32 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

/// `-log(1 + exp(-x))`. It stays precise where the sigmoid is near 0 or 1.
pub(crate) fn log_sigmoid(x: f32) -> f32 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// `max(|dot|, exp(-m)) + eps`.
pub(crate) fn denominator(dot: f32, m: f32, eps: f32) -> f32 {
    dot.abs().max((-m.max(LEAST_M)).exp()) + eps
}

/// The decay and write factors of a chunk of positions of one head.
///
/// `F` is the running sum of the logarithms of the forget gates, `i` are the logarithms of the
/// input gates, and `u = i - F`. A value written at position `s` has the weight `exp(u_s - M_t)` at
/// `t`. The memory before the chunk has the weight `exp(m - M_t)`. If input gates are exponential,
/// `M_t` is the maximum of `m` and of `u` up to `t`; otherwise it is `-F_t`.
#[derive(Debug, Default)]
pub(crate) struct ChunkGates {
    /// `u` of each position.
    written: Vec<f64>,
    /// `M` of each position.
    reference: Vec<f64>,
    /// For each position, the factor on the memory before the chunk.
    pub keep: Vec<f32>,
    /// The stabilizer `F + M` of each position; zero without exponential input gates.
    pub m: Vec<f32>,
}

impl ChunkGates {
    /// Begins an empty chunk.
    pub(crate) fn clear(&mut self) {
        self.written.clear();
        self.reference.clear();
        self.keep.clear();
        self.m.clear();
    }

    /// Fills the gates from pairs of logarithms: of a forget gate and of an input gate. `m` is the
    /// stabilizer before the chunk, if input gates are exponential.
    pub(crate) fn fill(&mut self, m: Option<f32>, logs: impl Iterator<Item = (f32, f32)>) {
        self.clear();
        let before = f64::from(m.unwrap_or(0.0));
        let (mut sum, mut greatest) = (0.0f64, before);
        for (f, i) in logs {
            // `max` would lose a NaN.
            let f = f64::from(f);
            sum += if f < LEAST_LOG { LEAST_LOG } else { f };
            let written = f64::from(i) - sum;
            let reference = match m {
                Some(_) => {
                    greatest = if written > greatest {
                        written
                    } else {
                        greatest
                    };
                    greatest
                }
                None => -sum,
            };
            self.written.push(written);
            self.reference.push(reference);
            self.keep.push(((before - reference) as f32).exp());
            self.m.push(if m.is_some() {
                (sum + reference) as f32
            } else {
                0.0
            });
        }
    }

    /// The number of positions.
    pub(crate) fn len(&self) -> usize {
        self.keep.len()
    }

    /// Writes to `take` the factors that written values have in the memory after the chunk.
    pub(crate) fn take(&self, take: &mut Vec<f32>) {
        take.clear();
        let last = self.reference.last().copied().unwrap_or(0.0);
        take.extend(self.written.iter().map(|u| ((u - last) as f32).exp()));
    }

    /// `weighted[t][s] = scores[t][s] * exp(u_s - M_t) * factor(t)` for `s <= t`, or for `s < t` if
    /// `strict`; zero for other `s`. Both arrays are `[len, stride]`. The part of `scores` above
    /// the diagonal is not read.
    pub(crate) fn weigh(
        &mut self,
        isa: Isa,
        (scores, weighted): (&[f32], &mut [f32]),
        stride: usize,
        factors: Option<&[f32]>,
    ) {
        let len = self.len();
        assert!(stride.is_multiple_of(LANES) && stride >= len);
        resize(&mut self.written, stride, 0.0);
        for t in 0..len {
            let (row, out) = (&scores[t * stride..][..stride], &mut weighted[t * stride..]);
            let out = &mut out[..stride];
            let (count, factor) = match factors {
                Some(factors) => (t, factors[t]),
                None => (t + 1, 1.0),
            };
            weigh_row(
                isa,
                (&self.written, self.reference[t]),
                row,
                out,
                (count, factor),
            );
        }
        self.written.truncate(len);
    }
}

compiled_for_each_isa! {
    /// One row of [`ChunkGates::weigh`]: the first `count` elements, then zeros.
    fn weigh_row(from: (&[f64], f64), scores: &[f32], out: &mut [f32], which: (usize, f32))
        = weigh_row_with;
}

#[inline(always)]
fn weigh_row_with(
    (written, reference): (&[f64], f64),
    scores: &[f32],
    out: &mut [f32],
    (count, factor): (usize, f32),
) {
    let used = count.next_multiple_of(LANES).min(out.len());
    out[used..].fill(0.0);
    let lanes = (out[..used].as_chunks_mut::<LANES>().0.iter_mut())
        .zip(scores.as_chunks::<LANES>().0)
        .zip(written.as_chunks::<LANES>().0);
    for (first, ((out, scores), written)) in (0..).step_by(LANES).zip(lanes) {
        for lane in 0..LANES {
            let weight = vmath::exp((written[lane] - reference) as f32) * factor;
            out[lane] = if first + lane < count {
                scores[lane] * weight
            } else {
                0.0
            };
        }
    }
}
