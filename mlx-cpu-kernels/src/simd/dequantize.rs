//! Converts quantized matrices to float32: some rows, or all rows transposed. The instruction set
//! determines the kernel.

use std::ops::Range;

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::layout::byte_panel::{BytePanelMut, CodeBytes};
#[cfg(target_arch = "x86_64")]
use crate::layout::integer_panel::CodePanelMut;
use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix, PackedRow};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};
use crate::simd::{portable, vmath};

/// Scratch memory for the rows of a row block.
#[derive(Default)]
pub(crate) struct DequantizeScratch {
    /// Packed words, stored as floats of the same size. They are copied, but never used as numbers.
    words: Vec<f32>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// Scales or biases before they are arranged by row.
    wide: Vec<f32>,
}

impl PackedMatrix<'_> {
    /// Dequantizes some rows of the matrix, row by row. It begins at column `from`, which must be
    /// the start of a group. `out` is `[rows, columns]` with whole groups. For 4-bit integers, the
    /// even elements of a chunk precede the odd ones.
    pub(crate) fn dequantize_rows(
        self,
        isa: Isa,
        rows: Range<usize>,
        from: usize,
        buffer: &mut DequantizeScratch,
        out: &mut [f32],
    ) {
        let columns = out.len() / rows.len().max(1);
        if columns == 0 {
            return;
        }
        let per = self.words_per_group();
        let width = self.group_size();
        let groups = from / width..(from + columns) / width;
        let n = groups.len();
        for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns)) {
            let lane = row % INTERLEAVED_ROWS;
            if lane == 0 || row == rows.start {
                let block = self.block_range(row / INTERLEAVED_ROWS..row / INTERLEAVED_ROWS + 1);
                let words = &block.words
                    [groups.start * per * INTERLEAVED_ROWS..groups.end * per * INTERLEAVED_ROWS];
                buffer.words.resize(words.len(), 0.0);
                deinterleave(isa, bytemuck::cast_slice(words), &mut buffer.words);
                let range = groups.clone();
                group_params_by_row(
                    isa,
                    block.scales,
                    range.clone(),
                    &mut buffer.wide,
                    &mut buffer.scales,
                );
                group_params_by_row(
                    isa,
                    block.biases,
                    range,
                    &mut buffer.wide,
                    &mut buffer.biases,
                );
            }
            let row = PackedRow {
                packed: bytemuck::cast_slice(&buffer.words[lane * n * per..(lane + 1) * n * per]),
                scales: &buffer.scales[lane * n..(lane + 1) * n],
                biases: &buffer.biases[lane * n..(lane + 1) * n],
                codes: self.codes(),
            };
            dequantize_packed_row(isa, row, self.bits, out);
        }
    }

    /// Writes the codes of all rows as integers, two columns at a time. Scales and biases follow
    /// for each group. Codes must represent integers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn integer_pairs(self, isa: Isa, to: CodePanelMut<'_>) {
        match isa {
            // SAFETY: only `detect` makes these, on processors with all features of the kernels.
            Isa::Avx512 | Isa::Amx => unsafe { avx512::integer_pairs::integer_pairs(self, to) },
            // SAFETY: only `detect` makes it, on processors with avx2, fma and f16c.
            Isa::Avx2 => unsafe { avx2::integer_pairs::integer_pairs(self, to, 0) },
            _ => unreachable!("a product of `fits_integers`"),
        }
    }

    /// Writes the codes of all rows as bytes, four columns at a time. Scales and biases follow for
    /// each group. Codes must represent integers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn byte_quads(self, bytes: CodeBytes, to: BytePanelMut<'_>) {
        // SAFETY: `Dot::for_isa`, which determines `bytes`, checked avx2. `detect` accepts only
        // processors that have avx2, fma and f16c together.
        unsafe { avx2::byte_quads::byte_quads(self, bytes, to) }
    }

    /// Dequantizes all rows, column by column: `[columns, rows]`. It needs no operations across
    /// lanes.
    pub(crate) fn dequantize_transposed(self, isa: Isa, out: &mut [f32]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `detect` makes these, on processors with avx2, fma and f16c.
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
                avx2::dequantize::dequantize_transposed(self, out);
            },
            _ => portable::dequantize::dequantize_transposed(self, out),
        }
    }
}

/// Dequantizes a row of a matrix. For 4-bit integers, the even elements of a chunk precede the odd
/// ones.
fn dequantize_packed_row(isa: Isa, row: PackedRow<'_>, bits: u32, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            avx2::dequantize::dequantize_row(row, bits, out);
        },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => portable::dequantize::dequantize_row(row, bits, out),
        Isa::Portable => portable::dequantize::dequantize_row(row, bits, out),
    }
}

/// Converts scales or biases of a row block to float32, row by row.
fn group_params_by_row(
    isa: Isa,
    block: GroupParams<'_>,
    groups: Range<usize>,
    buffer: &mut Vec<f32>,
    to: &mut Vec<f32>,
) {
    let n = groups.len();
    to.resize(INTERLEAVED_ROWS * n, 0.0);
    match block.slice(groups.start * INTERLEAVED_ROWS..groups.end * INTERLEAVED_ROWS) {
        GroupParams::F32(all) => deinterleave(isa, all, to),
        GroupParams::F16(all) => {
            buffer.resize(INTERLEAVED_ROWS * n, 0.0);
            vmath::f16_to_f32(isa, all, buffer);
            deinterleave(isa, buffer, to);
        }
        all @ (GroupParams::Symmetric { .. }
        | GroupParams::Super { .. }
        | GroupParams::SuperAffine { .. }
        | GroupParams::Table { .. }
        | GroupParams::Bytes { .. }) => {
            buffer.clear();
            buffer.extend((0..n).flat_map(|g| all.group(g)));
            deinterleave(isa, buffer, to);
        }
    }
}

/// Transposes `[n, INTERLEAVED_ROWS]` to `[INTERLEAVED_ROWS, n]`, for any 32-bit type.
fn deinterleave(isa: Isa, from: &[f32], to: &mut [f32]) {
    assert!(from.len() == to.len());
    #[cfg(target_arch = "x86_64")]
    let done = match isa {
        // SAFETY: only `detect` makes these, on processors with avx2 and fma; the lengths are
        // asserted.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::transpose::transpose_8(from, to) },
        _ => 0,
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (done, _) = (0, isa);
    let n = from.len() / INTERLEAVED_ROWS;
    for (i, eight) in from
        .as_chunks::<INTERLEAVED_ROWS>()
        .0
        .iter()
        .enumerate()
        .skip(done)
    {
        for (row, word) in eight.iter().enumerate() {
            to[row * n + i] = *word;
        }
    }
}
