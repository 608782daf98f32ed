//! Quantized matrices as floats, without vector instructions.

use crate::layout::packed::{BAND, Bands, CHUNK, QuantizedRow};

/// A row as floats, for whatever instructions it is compiled for.
#[inline(always)]
pub(crate) fn unpack(row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    let groups = row.scales.len().max(1);
    let (width, bytes) = (out.len() / groups, row.packed.len() / groups);
    let parts = out
        .chunks_exact_mut(width)
        .zip(row.packed.chunks_exact(bytes))
        .zip(row.scales.iter().zip(row.biases));
    for ((out, packed), (&scale, &bias)) in parts {
        if bits == 4 {
            let chunks = packed.as_chunks::<{ CHUNK / 2 }>().0;
            for (out, q) in out.as_chunks_mut::<CHUNK>().0.iter_mut().zip(chunks) {
                let (even, odd) = out.split_at_mut(CHUNK / 2);
                for i in 0..CHUNK / 2 {
                    even[i] = f32::from(q[i] & 15) * scale + bias;
                    odd[i] = f32::from(q[i] >> 4) * scale + bias;
                }
            }
        } else {
            for (out, q) in out.iter_mut().zip(packed) {
                *out = f32::from(*q) * scale + bias;
            }
        }
    }
}

/// See [`Bands::unpack_columns`].
pub(crate) fn unpack_columns(bands: Bands<'_>, out: &mut [f32]) {
    let (per, near) = (bands.group_words(), bands.per_word());
    let (width, mask) = (bands.count() * BAND, u32::MAX >> (32 - bands.bits));
    for i in 0..bands.count() {
        let band = bands.part(i..i + 1);
        let groups = out.chunks_exact_mut(per * near * width);
        for ((g, out), words) in groups.enumerate().zip(band.words.chunks_exact(per * BAND)) {
            let (scales, biases) = (band.scales.eight(g), band.biases.eight(g));
            let words = words.as_chunks::<BAND>().0.iter();
            for (words, columns) in words.zip(out.chunks_exact_mut(near * width)) {
                for (j, column) in columns.chunks_exact_mut(width).enumerate() {
                    for (lane, out) in column[i * BAND..][..BAND].iter_mut().enumerate() {
                        let q = words[lane] >> (j as u32 * bands.bits) & mask;
                        *out = q.cast_signed() as f32 * scales[lane] + biases[lane];
                    }
                }
            }
        }
    }
}
