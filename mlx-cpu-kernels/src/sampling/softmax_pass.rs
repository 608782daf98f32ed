//! Passes over long rows of logits: block maxima, and sums of exponentials. The other files of this
//! folder have the filters and draws.
//!
//! The loops process eight adjacent elements, which compilers vectorize, and use no fused
//! multiply-add. So results are bitwise equal for all instruction sets, and a seed produces the
//! same text on each of them.

use std::ops::Range;

use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_ranges};

/// The number of adjacent elements that share a maximum and a sum.
pub(crate) const BLOCK: usize = 32;

/// Elements of a vector.
const LANES: usize = 8;

/// Logits further below the maximum than this are ignored. Their total weight is below the rounding
/// error of the other weights' sum.
pub(crate) const MIN_RELATIVE_LOGIT: f32 = 60.0;

/// The distance of `x` to the maximum: 0 or less. An infinity equal to the maximum has distance 0.
#[inline(always)]
pub fn relative_logit(x: f32, max: f32) -> f32 {
    if x == max { 0.0 } else { x - max }
}

/// `exp(x)` for `x` from -[`MIN_RELATIVE_LOGIT`] to 0, within two units in the last place. The
/// exponential is a power of two times the exponential of a remainder. The remainder is at most
/// half of `ln 2` in magnitude, and a polynomial approximates its exponential (Cephes' `expf`,
/// Moshier 1989).
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Added to a small float, this constant rounds it to an integer and leaves that integer in the
    /// lowest bits.
    const ROUND_BIAS: f32 = 12_582_912.0;
    /// `ln 2` as the sum of two parts. The first part has few bits, so its products with small
    /// integers are exact.
    const LN_2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    let shifted = x * std::f32::consts::LOG2_E + ROUND_BIAS;
    let n = shifted - ROUND_BIAS;
    let r = x - n * LN_2[0] - n * LN_2[1];
    // Terms are evaluated in pairs, to shorten the chain of dependent additions.
    let square = r * r;
    let high = 1.987_569_1e-4 * r + 1.398_2e-3;
    let middle = 8.333_452e-3 * r + 4.166_579_6e-2;
    let low = 1.666_666_5e-1 * r + 0.5;
    let y = ((high * square + middle) * square + low) * square + (r + 1.0);
    // Multiplies by the power of two; the shift removes the bits added by `ROUND_BIAS`.
    f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The weight of a logit under `softmax(logits * scale)`, relative to that of the maximum. A NaN
/// has weight zero.
#[inline(always)]
fn weight(x: f32, max: f32, scale: f32) -> f32 {
    // Masks instead of branches, so that the code is vectorized.
    let level = keep(x - max, x != max);
    let below = level * scale;
    keep(exp(below), below > -MIN_RELATIVE_LOGIT)
}

/// Returns `x` if `wanted`, and 0 if not.
#[inline(always)]
fn keep(x: f32, wanted: bool) -> f32 {
    f32::from_bits(x.to_bits() & u32::from(wanted).wrapping_neg())
}

/// Generates a pass for each instruction set from one body.
macro_rules! pass {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $type:ty),*)) => {
        $(#[$doc])*
        pub(crate) fn $name(isa: Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) {
                    $body($($arg),*);
                }
                if isa.has_avx2() {
                    // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2.
                    unsafe { avx2($($arg),*) };
                    return;
                }
            }
            // On other processors, default builds already use vectors of four floats, such as NEON.
            let _ = isa;
            $body($($arg),*);
        }
    };
}

/// Calls `part` on ranges of whole blocks of the row. If the row is `alone`, the threads share the
/// blocks; otherwise this thread processes all. `out` has one element per block, and each call
/// receives the elements of its blocks.
fn for_blocks<T: Copy + Send + Sync>(
    row: &[f32],
    out: &mut Vec<T>,
    (zero, alone): (T, bool),
    part: impl Fn(Range<usize>, &[f32], &mut [T]) + Sync,
) {
    let blocks = row.len().div_ceil(BLOCK);
    out.clear();
    out.resize(blocks, zero);
    let all = SharedOutput::new(out);
    // Each element costs about as much as two multiplications.
    let work = if alone { 2 * row.len() } else { 0 };
    parallel_ranges(blocks, work, &|from, to| {
        let logits = &row[from * BLOCK..row.len().min(to * BLOCK)];
        // SAFETY: the parts have disjoint ranges of blocks.
        part(from..to, logits, unsafe { all.slice_mut(from, to - from) });
    });
}

/// The maximum of each block of `row`; minus infinity for NaN. If the row is `alone`, threads share
/// it.
pub(crate) fn block_maxima(isa: Isa, row: &[f32], out: &mut Vec<f32>, alone: bool) {
    for_blocks(row, out, (0.0, alone), |_, row, out| {
        block_maxima_part(isa, row, out);
    });
}

pass! {
    /// The maximum of each block.
    block_maxima_part = block_maxima_with(row: &[f32], out: &mut [f32])
}

#[inline(always)]
fn block_maxima_with(row: &[f32], out: &mut [f32]) {
    // Plain loops: the compiler would not compile code inside library functions for this
    // instruction set.
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for (block, out) in blocks.iter().zip(out.iter_mut()) {
        let mut greatest = [f32::NEG_INFINITY; LANES];
        let (vectors, _) = block.as_chunks::<LANES>();
        for vector in vectors {
            for (g, &x) in greatest.iter_mut().zip(vector) {
                // With this comparison NaN never becomes the maximum, and it costs no extra
                // instruction.
                *g = if x > *g { x } else { *g };
            }
        }
        *out = max_of(&greatest);
    }
    if let (Some(last), false) = (out.get_mut(blocks.len()), rest.is_empty()) {
        *last = max_of(rest);
    }
}

/// The maximum of a few values.
#[inline(always)]
pub(crate) fn max_of(values: &[f32]) -> f32 {
    let mut greatest = f32::NEG_INFINITY;
    for &x in values {
        greatest = if x > greatest { x } else { greatest };
    }
    greatest
}

/// The parameters of a row's weights: `exp((x - max) * by)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    /// The row's maximum, above minus infinity.
    pub max: f32,
    /// The factor on distances to the maximum.
    pub by: f32,
}

/// Computes the sum of weights of each block, whose maximum is in `block_maxima`. If the row is
/// `alone`, threads share the blocks.
pub(crate) fn sums(
    isa: Isa,
    row: &[f32],
    (block_maxima, scale): (&[f32], Scale),
    out: &mut Vec<f64>,
    alone: bool,
) {
    for_blocks(row, out, (0.0, alone), |part, row, out| {
        block_sums_part(isa, row, &block_maxima[part], scale, out);
    });
}

pass! {
    /// Computes the sum of weights of each block that has a non-zero weight.
    block_sums_part = block_sums_with(row: &[f32], block_maxima: &[f32], scale: Scale, out: &mut [f64])
}

#[inline(always)]
fn block_sums_with(row: &[f32], block_maxima: &[f32], scale: Scale, out: &mut [f64]) {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for ((block, &max_of), out) in blocks.iter().zip(block_maxima).zip(out.iter_mut()) {
        if weighs(max_of, scale) {
            *out = sum_of(block, scale);
        }
    }
    if let (Some(&max_of), Some(out)) = (block_maxima.get(blocks.len()), out.get_mut(blocks.len()))
        && weighs(max_of, scale)
    {
        let mut block = [f32::NEG_INFINITY; BLOCK];
        for (to, &x) in block.iter_mut().zip(rest) {
            *to = x;
        }
        *out = sum_of(&block, scale);
    }
}

/// Whether any weight in a block with this maximum is non-zero.
#[inline(always)]
fn weighs(max_of: f32, Scale { max, by }: Scale) -> bool {
    relative_logit(max_of, max) * by > -MIN_RELATIVE_LOGIT
}

/// The sum of weights of a block.
#[inline(always)]
fn sum_of(block: &[f32; BLOCK], Scale { max, by }: Scale) -> f64 {
    let mut each = [0.0f32; BLOCK];
    for (w, &x) in each.iter_mut().zip(block) {
        *w = weight(x, max, by);
    }
    let mut sum = [0.0f32; LANES];
    for (i, sum) in sum.iter_mut().enumerate() {
        *sum = (each[i] + each[i + 8]) + (each[i + 16] + each[i + 24]);
    }
    let [a, b, c, d, e, f, g, h] = sum;
    let halves = [f64::from(a) + f64::from(e), f64::from(b) + f64::from(f)];
    let others = [f64::from(c) + f64::from(g), f64::from(d) + f64::from(h)];
    (halves[0] + others[0]) + (halves[1] + others[1])
}

pass! {
    /// Computes the weight of each element.
    weights = weights_with(values: &[f32], scale: Scale, out: &mut Vec<f32>)
}

#[inline(always)]
fn weights_with(values: &[f32], scale: Scale, out: &mut Vec<f32>) {
    let Scale { max, by } = scale;
    out.clear();
    out.resize(values.len(), 0.0);
    for (&x, out) in values.iter().zip(out.iter_mut()) {
        *out = weight(x, max, by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    #[test]
    fn exponentials_are_close_and_end_at_one() {
        let mut worst = 0.0f64;
        for i in 0..600_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.4e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
    }

    #[test]
    fn what_is_certain_or_impossible_has_its_weight() {
        let inf = f32::INFINITY;
        for (x, max, expected) in [
            (1.0, 1.0, 1.0),
            (NO, 1.0, 0.0),
            (inf, inf, 1.0),
            (3e38, inf, 0.0),
            (-3e38, 3e38, 0.0),
            (f32::NAN, 1.0, 0.0),
            (f32::NAN, inf, 0.0),
        ] {
            for scale in [0.0, 1e-3, 1.0, f32::MAX] {
                // With scale 0, all tokens with a finite distance to the maximum have the same
                // probability.
                if scale == 0.0 && x == -3e38 {
                    continue;
                }
                assert_eq!(weight(x, max, scale), expected, "{x} of {max} by {scale}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut state = 9u32;
        let row: Vec<f32> = (0..1000)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match i % 97 {
                    13 => NO,
                    14 => f32::NAN,
                    _ => (state >> 8) as f32 / (1 << 24) as f32 * 70.0 - 60.0,
                }
            })
            .collect();
        // The longest row is long enough that threads share it.
        let row: Vec<f32> = row.iter().cycle().take(40_007).copied().collect();
        for n in [1usize, 7, 8, 31, 32, 33, 64, 100, 1000, 40_007] {
            let row = &row[..n];
            let all = |isa| {
                let (mut p, mut s, mut w) = (Vec::new(), Vec::new(), Vec::new());
                let alone = isa != Isa::Portable;
                block_maxima(isa, row, &mut p, alone);
                let scale = Scale {
                    max: max_of(row),
                    by: 0.7,
                };
                sums(isa, row, (&p, scale), &mut s, alone);
                weights(isa, row, scale, &mut w);
                let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let sums: Vec<u64> = s.iter().map(|x| x.to_bits()).collect();
                (bits(&p), sums, bits(&w))
            };
            let (p, s, w) = all(Isa::detect());
            let portable = all(Isa::Portable);
            assert_eq!((&p, &s, &w), (&portable.0, &portable.1, &portable.2));
            assert_eq!(p.len(), n.div_ceil(BLOCK));
            let total: f64 = s.iter().map(|&s| f64::from_bits(s)).sum();
            let each: f64 = w.iter().map(|&w| f64::from(f32::from_bits(w))).sum();
            assert!((total - each).abs() <= 1e-6 * each, "{total} {each}");
            for (block, p) in row.chunks(BLOCK).zip(p) {
                let greatest = block.iter().copied().fold(NO, f32::max);
                assert_eq!(f32::from_bits(p), greatest);
            }
        }
    }
}
