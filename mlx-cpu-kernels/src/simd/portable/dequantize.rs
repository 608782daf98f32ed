//! Converts quantized matrices to floats, without vector instructions.

use crate::layout::float_codes::{Codes, number};
use crate::layout::packed::{CHUNK, INTERLEAVED_ROWS, PackedMatrix, PackedRow, code};

/// Dequantizes a row. The function is inlined, so that it is compiled for the caller's instruction
/// set.
#[inline(always)]
pub(crate) fn dequantize_row(row: PackedRow<'_>, bits: u32, out: &mut [f32]) {
    let groups = row.scales.len().max(1);
    let (width, bytes) = (out.len() / groups, row.packed.len() / groups);
    let parts = out
        .chunks_exact_mut(width)
        .zip(row.packed.chunks_exact(bytes))
        .zip(row.scales.iter().zip(row.biases));
    for ((out, packed), (&scale, &bias)) in parts {
        if matches!(row.codes, Codes::E2m1 | Codes::Table(_)) {
            for (out, q) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
                out[0] = row.codes.number(u32::from(q & 15)) * scale + bias;
                out[1] = row.codes.number(u32::from(q >> 4)) * scale + bias;
            }
        } else if row.codes == Codes::E4m3 {
            for (out, q) in out.iter_mut().zip(packed) {
                *out = Codes::E4m3.number(u32::from(*q)) * scale + bias;
            }
        } else if bits == 4 {
            let chunks = packed.as_chunks::<{ CHUNK / 2 }>().0;
            for (out, q) in out.as_chunks_mut::<CHUNK>().0.iter_mut().zip(chunks) {
                let (even, odd) = out.split_at_mut(CHUNK / 2);
                for i in 0..CHUNK / 2 {
                    even[i] = f32::from(q[i] & 15) * scale + bias;
                    odd[i] = f32::from(q[i] >> 4) * scale + bias;
                }
            }
        } else if bits == 8 {
            for (out, q) in out.iter_mut().zip(packed) {
                *out = f32::from(*q) * scale + bias;
            }
        } else {
            // Eight codes occupy `bits` bytes.
            let eights = packed.chunks_exact(bits as usize);
            for (out, bytes) in out.chunks_exact_mut(8).zip(eights) {
                let stream = bytes
                    .iter()
                    .rev()
                    .fold(0, |all, b| all << 8 | u64::from(*b));
                for (i, out) in (0..).zip(out) {
                    let q = (stream >> (i * bits)) as u32 & (u32::MAX >> (32 - bits));
                    *out = q as f32 * scale + bias;
                }
            }
        }
    }
}

/// See [`PackedMatrix::dequantize_transposed`].
pub(crate) fn dequantize_transposed(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    match matrix.codes() {
        Codes::Integers => dequantize_transposed_as::<{ Codes::INTEGERS_ID }>(matrix, out),
        Codes::E2m1 => dequantize_transposed_as::<{ Codes::E2M1_ID }>(matrix, out),
        Codes::E4m3 => dequantize_transposed_as::<{ Codes::E4M3_ID }>(matrix, out),
        Codes::Table(_) => dequantize_transposed_as::<{ Codes::TABLE_ID }>(matrix, out),
    }
}

fn dequantize_transposed_as<const CODES: u32>(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    let (per, size) = (matrix.words_per_group(), matrix.group_size());
    let width = matrix.row_blocks() * INTERLEAVED_ROWS;
    for i in 0..matrix.row_blocks() {
        let block = matrix.block_range(i..i + 1);
        let groups = block.words.chunks_exact(per * INTERLEAVED_ROWS);
        for ((g, words), out) in groups.enumerate().zip(out.chunks_exact_mut(size * width)) {
            let (scales, biases) = (block.scales.group(g), block.biases.group(g));
            let words = words.as_chunks::<INTERLEAVED_ROWS>().0;
            for (j, column) in out.chunks_exact_mut(width).enumerate() {
                let column = &mut column[i * INTERLEAVED_ROWS..][..INTERLEAVED_ROWS];
                for (lane, out) in column.iter_mut().enumerate() {
                    let q = code(j, matrix.bits, |w| words[w][lane]);
                    let n = match CODES {
                        Codes::TABLE_ID => matrix.codes().number(q),
                        _ => number::<CODES>(q),
                    };
                    *out = n * scales[lane] + biases[lane];
                }
            }
        }
    }
}
