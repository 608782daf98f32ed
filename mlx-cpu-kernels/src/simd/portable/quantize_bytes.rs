//! Quantizes inputs to 8-bit integers, in loops that the compiler vectorizes.

use crate::layout::byte_panel::{ByteColumnsMut, HALF, MAX_BYTE, UNIT};
use crate::layout::tile::LANES;

/// See [`crate::simd::byte_tile::quantize`]. The function is inlined into a function with vector
/// instructions. All instruction sets round in the same way, so the integers do not depend on the
/// instruction set.
#[inline(always)]
pub(crate) fn quantize_lanes(columns: &[f32], to: ByteColumnsMut<'_>) {
    let columns = columns.as_chunks::<LANES>().0;
    let units = columns.len() / UNIT;
    assert!(columns.len() == units * UNIT);
    let (quads, _) = to.quads.as_chunks_mut::<LANES>();
    let (scales, _) = to.scales.as_chunks_mut::<LANES>();
    let (sums, _) = to.sums.as_chunks_mut::<LANES>();
    assert!(quads.len() == columns.len() / 4 && scales.len() == units && sums.len() == 2 * units);
    for ((x, quads), (scale, sums)) in columns
        .as_chunks::<UNIT>()
        .0
        .iter()
        .zip(quads.as_chunks_mut::<{ UNIT / 4 }>().0)
        .zip(scales.iter_mut().zip(sums.as_chunks_mut::<2>().0))
    {
        let mut most = [0.0f32; LANES];
        // The sum is zero; it is NaN if an input is infinite or NaN.
        let mut poison = [0.0f32; LANES];
        for x in x {
            for ((most, poison), x) in most.iter_mut().zip(&mut poison).zip(x) {
                *most = if x.abs() > *most { x.abs() } else { *most };
                *poison += x * 0.0;
            }
        }
        let mut inverse = [0.0f32; LANES];
        for ((most, inverse), scale) in most.iter().zip(&mut inverse).zip(&mut *scale) {
            // In a row of zeros, any scale with a finite inverse is correct.
            let most = most.max(f32::MIN_POSITIVE * MAX_BYTE);
            *inverse = MAX_BYTE / most;
            *scale = most / MAX_BYTE;
        }
        for (half, sums) in sums.iter_mut().enumerate() {
            let mut total = [0i32; LANES];
            for quad in half * (HALF / 4)..(half + 1) * (HALF / 4) {
                let lanes = quads[quad].iter_mut().zip(&mut total).zip(&inverse);
                for (l, ((to, total), inverse)) in lanes.enumerate() {
                    let mut four = 0;
                    for (c, x) in x[4 * quad..4 * quad + 4].iter().enumerate() {
                        let quantized = (x[l] * inverse).round_ties_even();
                        // SAFETY: the scale limits the magnitude to 128, and NaN is replaced by
                        // zero.
                        let quantized: i32 = unsafe {
                            let quantized = if quantized.abs() <= 128.0 {
                                quantized
                            } else {
                                0.0
                            };
                            quantized.to_int_unchecked()
                        };
                        *total += quantized;
                        four |= (quantized & 0xff) << (8 * c);
                    }
                    *to = four;
                }
            }
            let by_lane = total.iter().zip(&*scale).zip(&poison);
            for (sum, ((total, scale), poison)) in sums.iter_mut().zip(by_lane) {
                *sum = *total as f32 * scale + poison;
            }
        }
    }
}
