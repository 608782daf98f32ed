//! What becomes of the products of two tiles of a matrix: biases, a gate, what is added, and their way to rows of an output.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
};

use super::{Outputs, SIDE};
use crate::partition::Columns;
use crate::simd::avx512::vmath::{first, gated};
use crate::simd::portable::vmath::Gate;

/// What follows a product.
pub(crate) struct Then<'a> {
    /// Of both tiles, as long as their columns are there.
    pub biases: [Option<&'a [f32]>; 2],
    /// The first tile's products go through it, and are multiplied with the second's.
    pub gate: Option<Gate>,
    /// What is added, rows as far apart as those of the output.
    pub before: Option<&'a [f32]>,
}

/// Brings `sums`, `[2, padded rows]`, to as many columns as there are; with a gate, to those of one tile.
///
/// # Panics
/// If there are fewer sums than rows, or something is shorter than the output.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(crate) unsafe fn put(sums: &[Outputs], then: &Then<'_>, to: &mut Columns<'_>) {
    let (rows, width) = to.size();
    let (to, step) = to.places();
    let (one, other) = sums.split_at(sums.len() / 2);
    let (one, other) = (&one[..rows], &other[..rows]);
    let tiles = if then.gate.is_some() { 1 } else { 2 };
    assert!((1..=tiles * SIDE).contains(&width));
    assert!((then.before).is_none_or(|before| before.len() >= (rows - 1) * step + width));
    let lanes = [first(width), first(width.saturating_sub(SIDE))];
    let tiles = width.div_ceil(SIDE);
    let bias = then.biases.map(|bias| {
        // SAFETY: as many elements as there are lanes.
        bias.map(|own| unsafe { _mm512_maskz_loadu_ps(first(own.len()), own.as_ptr()) })
    });
    let biased = |sums: &Outputs, bias: Option<__m512>| {
        // SAFETY: there are sixteen.
        let sums = unsafe { _mm512_loadu_ps(sums.0.as_ptr()) };
        bias.map_or(sums, |bias| _mm512_add_ps(sums, bias))
    };
    for (row, sums) in one.iter().zip(other).enumerate() {
        let mut both = [biased(sums.0, bias[0]), biased(sums.1, bias[1])];
        if let Some(gate) = then.gate {
            both[0] = gated(gate, both[0], both[1]);
        }
        for (i, own) in both.into_iter().take(tiles).enumerate() {
            let at = row * step + i * SIDE;
            // SAFETY: the columns of this row are there, of what is added as well, by the assertions; the lanes are no more.
            unsafe {
                let own = match then.before {
                    Some(before) => {
                        let before = _mm512_maskz_loadu_ps(lanes[i], before.as_ptr().add(at));
                        _mm512_add_ps(own, before)
                    }
                    None => own,
                };
                _mm512_mask_storeu_ps(to.add(at), lanes[i], own);
            }
        }
    }
}
