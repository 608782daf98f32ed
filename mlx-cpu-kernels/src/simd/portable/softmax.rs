//! The softmax of one row of scores, and the division by its total.

use crate::simd::portable::vmath;

/// See [`crate::attention::decode_attention`].
#[inline(always)]
pub(crate) fn softmax(scores: &mut [f32]) -> (f32, f32) {
    let max_score = max_score(scores);
    let softmax_base = softmax_base(max_score);
    let (lanes, rest) = scores.as_chunks_mut::<8>();
    let mut sums = [0.0f32; 8];
    for scores in lanes {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *score = vmath::exp(*score - softmax_base);
            *sum += *score;
        }
    }
    let mut total: f32 = sums.iter().sum();
    for score in rest {
        *score = vmath::exp(*score - softmax_base);
        total += *score;
    }
    (max_score, total)
}

/// The maximum score, ignoring NaN.
#[inline(always)]
pub(crate) fn max_score(scores: &[f32]) -> f32 {
    let (lanes, rest) = scores.as_chunks::<8>();
    let mut most = [f32::NEG_INFINITY; 8];
    for scores in lanes {
        for (most, score) in most.iter_mut().zip(scores) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    most.iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
}

/// The value subtracted from scores before exponentials. It is finite, even if all scores of a
/// query are minus infinity.
#[inline(always)]
pub(crate) fn softmax_base(max_score: f32) -> f32 {
    if max_score == f32::NEG_INFINITY {
        0.0
    } else {
        max_score
    }
}

/// `to = row / total`. Stops at the end of the shorter slice.
#[inline(always)]
pub(crate) fn divide_row(row: &[f32], total: f32, to: &mut [f32]) {
    for (to, v) in to.iter_mut().zip(row) {
        *to = v / total;
    }
}
