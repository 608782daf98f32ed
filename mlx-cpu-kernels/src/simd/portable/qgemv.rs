//! Multiplication of quantized matrices with few input rows, without vector instructions.

use crate::layout::float_codes::{Codes, number};
use crate::layout::input_panel::{
    INPUTS_PER_SCALE, InputPanel, InputPanelMut, MAX_QUANT, RUN, integer_index,
};
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, code};
use crate::partition::OutputBlock;

/// [`crate::simd::qgemv::prepare_inputs`]. The function is inlined, so that it is compiled for the
/// caller's instruction set.
#[inline(always)]
pub(crate) fn prepare_inputs(
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: InputPanelMut<'_>,
) {
    if !to.quants.is_empty() {
        let rows = x.len() / k;
        let sums = to.sums.chunks_exact_mut(k / group);
        for ((row, x), sums) in x.chunks_exact(k).enumerate().zip(sums) {
            for ((g, x), sum) in x.chunks_exact(group).enumerate().zip(sums) {
                let first = g * group / INPUTS_PER_SCALE;
                *sum = quantize_inputs(x, first, (bits, row, rows), to.quants, to.scales);
            }
        }
        return;
    }
    for (sum, part) in to.sums.iter_mut().zip(x.chunks_exact(group)) {
        // Eight partial sums are precise enough, and the compiler can vectorize them.
        let mut lanes = [0.0f32; 8];
        for part in part.as_chunks::<8>().0 {
            for (lane, value) in lanes.iter_mut().zip(part) {
                *lane += value;
            }
        }
        *sum = lanes.iter().sum();
    }
    to.values.copy_from_slice(x);
}

/// Quantizes a group of a row to 16-bit integers. The group begins `first` scales after the row's
/// first scale. Returns the sum of the rounded inputs, in the order of the vector kernels. A NaN
/// becomes an arbitrary integer, but the sum stays NaN.
#[inline(always)]
fn quantize_inputs(
    x: &[f32],
    first: usize,
    (bits, row, rows): (u32, usize, usize),
    quants: &mut [i16],
    scales: &mut [f32],
) -> f32 {
    let (mut all, mut no_number) = (0.0, 0.0);
    for (step, x) in x.chunks_exact(INPUTS_PER_SCALE).enumerate() {
        let place = first + step;
        let greatest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let greatest = greatest.max(f32::MIN_POSITIVE * MAX_QUANT);
        let (inverse, scale) = (MAX_QUANT / greatest, greatest * (1.0 / MAX_QUANT));
        scales[place * rows + row] = scale;
        let mut total = 0;
        for (run, x) in x.chunks_exact(RUN).enumerate() {
            let run = place * (INPUTS_PER_SCALE / RUN) + run;
            let quants = &mut quants[(run * rows + row) * RUN..][..RUN];
            for (i, x) in x.iter().enumerate() {
                let quantized = (x * inverse).round_ties_even() as i16;
                no_number += x * 0.0;
                total += i32::from(quantized);
                quants[integer_index(i, bits)] = quantized;
            }
        }
        all += total as f32 * scale;
    }
    all + no_number
}

/// See [`crate::simd::qgemv::qgemv`].
pub(crate) fn qgemv<const BITS: u32, const CODES: u32>(
    matrix: PackedMatrix<'_>,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let (groups, per, size) = (matrix.groups, matrix.words_per_group(), matrix.group_size());
    // The values of 4-bit codes, for codes that index a table. Other codes are decoded without it.
    let table: [f32; 16] = std::array::from_fn(|code| matrix.codes().number(code as u32));
    for block in 0..matrix.row_blocks() {
        let packed = matrix.block_range(block..block + 1);
        let words = packed.words.as_chunks::<INTERLEAVED_ROWS>().0;
        for i in 0..x.rows {
            let row = x.row(i, groups * size, groups);
            let mut totals = [0.0f32; INTERLEAVED_ROWS];
            for g in 0..groups {
                let words = &words[g * per..(g + 1) * per];
                let sums =
                    group_sums::<BITS, CODES>(words, &row.values[g * size..(g + 1) * size], &table);
                let (scales, biases) = (packed.scales.group(g), packed.biases.group(g));
                for lane in 0..INTERLEAVED_ROWS {
                    totals[lane] += scales[lane] * sums[lane] + biases[lane] * row.sums[g];
                }
            }
            out.row_mut(i)[block * INTERLEAVED_ROWS..][..INTERLEAVED_ROWS].copy_from_slice(&totals);
        }
    }
}

/// The sums of products of a group's codes, for eight rows, with the group's inputs.
#[inline(always)]
fn group_sums<const BITS: u32, const CODES: u32>(
    words: &[[u32; INTERLEAVED_ROWS]],
    x: &[f32],
    table: &[f32; 16],
) -> [f32; INTERLEAVED_ROWS] {
    let number = |q: u32| match CODES {
        Codes::TABLE_ID => table[q as usize & 15],
        _ => number::<CODES>(q),
    };
    let mut sums = [0.0f32; INTERLEAVED_ROWS];
    let mut add = |codes: [u32; INTERLEAVED_ROWS], x: f32| {
        for (sum, q) in sums.iter_mut().zip(codes) {
            *sum += number(q) * x;
        }
    };
    if 32 % BITS == 0 {
        for (words, x) in words.iter().zip(x.chunks_exact(32 / BITS as usize)) {
            for (i, x) in x.iter().enumerate() {
                let mask = u32::MAX >> (32 - BITS);
                add(words.map(|word| word >> (i as u32 * BITS) & mask), *x);
            }
        }
    } else {
        for (i, x) in x.iter().enumerate() {
            let lanes = std::array::from_fn(|lane| code(i, BITS, |w| words[w][lane]));
            add(lanes, *x);
        }
    }
    sums
}
