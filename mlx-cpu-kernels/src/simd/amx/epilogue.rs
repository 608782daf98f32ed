//! The epilogue of a pair of output tiles: adds biases, applies a gate, adds a residual, and stores
//! rows of the output.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
};

use super::tiles::{OutputRow, TILE_ROWS};
use crate::partition::OutputBlock;
use crate::simd::avx512::vmath::{apply_gate, lane_mask};
use crate::simd::portable::vmath::Gate;

/// The epilogue of a product.
pub(crate) struct Epilogue<'a> {
    /// The biases of both tiles. At the end of a matrix they may be shorter than a tile.
    pub biases: [Option<&'a [f32]>; 2],
    /// The activation of the first tile's outputs, which are then multiplied with the second tile's
    /// outputs.
    pub gate: Option<Gate>,
    /// The residual, with the row stride of the output.
    pub residual: Option<&'a [f32]>,
}

/// Writes `sums`, `[2, padded rows]`, to the columns that exist. With a gate, the output has the
/// columns of one tile.
///
/// # Panics
/// If there are fewer sums than rows, or an operand is shorter than the output.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(crate) unsafe fn store_outputs(
    sums: &[OutputRow],
    epilogue: &Epilogue<'_>,
    to: &mut OutputBlock<'_>,
) {
    let (rows, width) = to.dims();
    let (to, step) = to.raw_parts();
    let (one, other) = sums.split_at(sums.len() / 2);
    let (one, other) = (&one[..rows], &other[..rows]);
    let tiles = if epilogue.gate.is_some() { 1 } else { 2 };
    assert!((1..=tiles * TILE_ROWS).contains(&width));
    assert!((epilogue.residual).is_none_or(|residual| residual.len() >= (rows - 1) * step + width));
    let lanes = [lane_mask(width), lane_mask(width.saturating_sub(TILE_ROWS))];
    let tiles = width.div_ceil(TILE_ROWS);
    let bias = epilogue.biases.map(|bias| {
        // SAFETY: `values` has an element for each lane of the mask.
        bias.map(|values| unsafe {
            _mm512_maskz_loadu_ps(lane_mask(values.len()), values.as_ptr())
        })
    });
    let biased = |sums: &OutputRow, bias: Option<__m512>| {
        // SAFETY: sixteen elements exist.
        let sums = unsafe { _mm512_loadu_ps(sums.0.as_ptr()) };
        bias.map_or(sums, |bias| _mm512_add_ps(sums, bias))
    };
    for (row, sums) in one.iter().zip(other).enumerate() {
        let mut both = [biased(sums.0, bias[0]), biased(sums.1, bias[1])];
        if let Some(gate) = epilogue.gate {
            both[0] = apply_gate(gate, both[0], both[1]);
        }
        for (i, output) in both.into_iter().take(tiles).enumerate() {
            let at = row * step + i * TILE_ROWS;
            // SAFETY: by the assertions, the columns of this row exist, also in the residual. Lanes
            // beyond the mask are not written.
            unsafe {
                let output = match epilogue.residual {
                    Some(residual) => {
                        let residual = _mm512_maskz_loadu_ps(lanes[i], residual.as_ptr().add(at));
                        _mm512_add_ps(output, residual)
                    }
                    None => output,
                };
                _mm512_mask_storeu_ps(to.add(at), lanes[i], output);
            }
        }
    }
}
