//! Quantized matrices as floats, without vector instructions.

use crate::layout::packed::{CHUNK, INTERLEAVED_ROWS, PackedMatrix, PackedRow};

/// A row as floats, for whatever instructions it is compiled for.
#[inline(always)]
pub(crate) fn dequantize_row(row: PackedRow<'_>, bits: u32, out: &mut [f32]) {
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

/// See [`PackedMatrix::dequantize_transposed`].
pub(crate) fn dequantize_transposed(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    let (per, near) = (matrix.words_per_group(), matrix.values_per_word());
    let (width, mask) = (
        matrix.row_blocks() * INTERLEAVED_ROWS,
        u32::MAX >> (32 - matrix.bits),
    );
    for i in 0..matrix.row_blocks() {
        let block = matrix.block_range(i..i + 1);
        let groups = out.chunks_exact_mut(per * near * width);
        for ((g, out), words) in groups
            .enumerate()
            .zip(block.words.chunks_exact(per * INTERLEAVED_ROWS))
        {
            let (scales, biases) = (block.scales.group(g), block.biases.group(g));
            let words = words.as_chunks::<INTERLEAVED_ROWS>().0.iter();
            for (words, columns) in words.zip(out.chunks_exact_mut(near * width)) {
                for (j, column) in columns.chunks_exact_mut(width).enumerate() {
                    for (lane, out) in column[i * INTERLEAVED_ROWS..][..INTERLEAVED_ROWS]
                        .iter_mut()
                        .enumerate()
                    {
                        let q = words[lane] >> (j as u32 * matrix.bits) & mask;
                        *out = q.cast_signed() as f32 * scales[lane] + biases[lane];
                    }
                }
            }
        }
    }
}
