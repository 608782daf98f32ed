//! Unpacks quantized matrices to pairs of 16-bit integers in memory, for `integer_tile.rs`.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_storeu_ps,
    _mm256_storeu_si256,
};

use crate::layout::float_codes::Codes;
use crate::layout::formats::with_codes;
use crate::layout::integer_panel::CodePanelMut;
use crate::layout::packed::{
    GroupParams, INTERLEAVED_ROWS, PackedMatrix, ScaleFormat, codes_per_chunk,
};
use crate::simd::avx2::dequantize::{byte_scales, group_params, shared_scales};
use crate::simd::avx2::float_codes::integers;
use crate::simd::avx2::qgemv::{
    ZERO_CODE, distant_pairs_of_8bit, in_both_halves, less, looked_up_pairs, pairs_of_4bit,
    pairs_of_run, times,
};
/// The number of words that are unpacked at once.
pub(crate) const fn words_at_once(bits: u32) -> usize {
    match bits {
        4 => 1,
        8 => 2,
        _ => codes_per_chunk(bits) * bits as usize / 32,
    }
}

/// Generates `integer_pairs_bits` for `$features`. A vector has a word of each row of `$blocks` row
/// blocks. `load` loads it, `store` stores pairs, `scale_bytes` loads the byte scales of a group,
/// and `factors` copies its factors.
macro_rules! integer_pairs_for_vectors {
    ($features:literal, $blocks:literal, $zero:ident, table: $table:ident) => {
        /// Unpacks the row blocks from `from` on for codes of this width, as many as whole vectors
        /// hold.
        ///
        /// # Safety
        /// The processor must have the features of this instance.
        #[target_feature(enable = $features)]
        unsafe fn integer_pairs_bits<const BITS: u32, const CODES: u32>(
            matrix: PackedMatrix<'_>,
            to: CodePanelMut<'_>,
            from: usize,
        ) {
            // SAFETY: the caller guarantees the features.
            unsafe {
                if ScaleFormat::has_byte_scales(matrix.scales.format_id()) {
                    unpack::<BITS, CODES, true>(matrix, to, from);
                } else {
                    unpack::<BITS, CODES, false>(matrix, to, from);
                }
            }
        }

        /// [`integer_pairs_bits`]. With `SCALED`, integers are codes times byte scales.
        ///
        /// # Safety
        /// The processor must have the features of this instance.
        #[target_feature(enable = $features)]
        unsafe fn unpack<const BITS: u32, const CODES: u32, const SCALED: bool>(
            matrix: PackedMatrix<'_>,
            to: CodePanelMut<'_>,
            from: usize,
        ) {
            let (count, groups, per) =
                (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
            let (width, size) = (count * INTERLEAVED_ROWS, matrix.group_size());
            let words = const { words_at_once(BITS) };
            let runs = const { words_at_once(BITS) * 32 / BITS as usize / 8 };
            // All reads and writes below are within these bounds.
            assert!(matrix.words.len() == groups * per * width && matrix.bits == BITS);
            assert!(matrix.scales.len() == groups * width && matrix.biases.len() == groups * width);
            assert!(size * BITS as usize == 32 * per && per.is_multiple_of(words));
            assert!(to.pairs.len() == groups * size / 2 * width && size == per / words * runs * 8);
            let (group, biases_per_scale) = matrix.panel_groups();
            // Without byte scales this is a constant, because a division for each group is slow.
            let per_super = if SCALED { group / size } else { 1 };
            assert!(
                groups.is_multiple_of(per_super) && to.scales.len() == groups / per_super * width
            );
            assert!(to.biases.len() == biases_per_scale * to.scales.len());
            let has_biases = biases_per_scale > 0;
            let table = $table(integers(matrix.codes()));
            let (codes, pairs) = (matrix.words.as_ptr(), to.pairs.as_mut_ptr());
            let (row_words, row_pairs) = (groups * per, groups * size / 2);
            for vector in 0..count.saturating_sub(from) / $blocks {
                let i = from + vector * $blocks;
                for g in 0..groups {
                    // SAFETY: the row blocks are below `count`. Group `g` of a row block has its
                    // words from `g * per` on. The words and their pairs of columns are within the
                    // asserted bounds.
                    unsafe {
                        let at = (i, groups, g);
                        let row = i * INTERLEAVED_ROWS;
                        if g.is_multiple_of(per_super) {
                            let place = g / per_super * width + row;
                            factors::<SCALED>(matrix.scales, at, to.scales.as_mut_ptr().add(place));
                        }
                        if has_biases {
                            let place = g * width + row;
                            factors::<false>(matrix.biases, at, to.biases.as_mut_ptr().add(place));
                        }
                        let bytes = match SCALED {
                            true => in_both_halves(scale_bytes(matrix.scales, at)),
                            false => $zero(),
                        };
                        let mut pair = g * size / 2;
                        for w in (g * per..(g + 1) * per).step_by(words) {
                            let mut q = [$zero(); 5];
                            for (n, q) in q.iter_mut().enumerate().take(words) {
                                *q = load(codes, (i * row_words + w + n, row_words));
                            }
                            for run in 0..runs {
                                let four = match (BITS, CODES) {
                                    (8, _) => distant_pairs_of_8bit([q[0], q[1]]),
                                    (4, Codes::INTEGERS_ID) => pairs_of_4bit(q[0]),
                                    (4, _) => looked_up_pairs::<CODES>(q[0], table),
                                    _ => match run {
                                        0 => pairs_of_run::<BITS, 0>(&q),
                                        1 => pairs_of_run::<BITS, 1>(&q),
                                        2 => pairs_of_run::<BITS, 2>(&q),
                                        _ => pairs_of_run::<BITS, 3>(&q),
                                    },
                                };
                                let four = match (SCALED, BITS) {
                                    (false, _) => four,
                                    // With byte scales, only codes of this width have no biases.
                                    (true, 6) => times(less::<ZERO_CODE>(four), bytes),
                                    (true, _) => times(four, bytes),
                                };
                                for two in four {
                                    let place = (i * row_pairs + pair) * INTERLEAVED_ROWS;
                                    store(pairs.add(place), two, row_pairs);
                                    pair += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
    };
}
pub(crate) use integer_pairs_for_vectors;

integer_pairs_for_vectors!("avx2,fma,f16c", 1, _mm256_setzero_si256, table: same);

/// Unpacks the row blocks from `from` on; see [`PackedMatrix::integer_pairs`].
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn integer_pairs(matrix: PackedMatrix<'_>, to: CodePanelMut<'_>, from: usize) {
    // SAFETY: the caller guarantees avx2, fma and f16c.
    unsafe { with_codes!(integer_pairs_bits(matrix, to, from)) }
}

/// Returns the table, which already has the width of a vector.
#[inline]
fn same(table: __m256i) -> __m256i {
    table
}

/// Word `at` of each row of a row block.
///
/// # Safety
/// The processor must have avx2. The word must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(words: *const u32, (at, _): (usize, usize)) -> __m256i {
    // SAFETY: the caller guarantees the word of eight rows.
    unsafe { _mm256_loadu_si256(words.add(at * INTERLEAVED_ROWS).cast()) }
}

/// Stores the pairs of a row block.
///
/// # Safety
/// The processor must have avx2. There must be space for the pairs at `to`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(to: *mut i32, pairs: __m256i, _: usize) {
    // SAFETY: the caller guarantees space for eight pairs.
    unsafe { _mm256_storeu_si256(to.cast(), pairs) }
}

/// Copies the scales or biases of group `g` of row block `i`. With `SHARED`, it copies the floats
/// that this group shares with others.
///
/// # Safety
/// The processor must have avx2 and f16c. The group, and eight elements at `to`, must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn factors<const SHARED: bool>(
    all: GroupParams<'_>,
    (i, groups, g): (usize, usize, usize),
    to: *mut f32,
) {
    // SAFETY: the caller guarantees the group, and eight elements at `to`.
    unsafe { _mm256_storeu_ps(to, params::<SHARED>(all, i * groups + g)) }
}

/// The factors of a group; see [`factors`].
///
/// # Safety
/// The processor must have avx2 and f16c. The group must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn params<const SHARED: bool>(all: GroupParams<'_>, group: usize) -> __m256 {
    // SAFETY: the caller guarantees the features and the group.
    unsafe {
        match SHARED {
            true => shared_scales(all, group),
            false => group_params(all, group),
        }
    }
}

/// The byte scales of group `g` of row block `i`, one per lane.
///
/// # Safety
/// The processor must have avx2. The group must exist, and have byte scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scale_bytes(scales: GroupParams<'_>, (i, groups, g): (usize, usize, usize)) -> __m256i {
    // SAFETY: the caller guarantees the group.
    unsafe { byte_scales(scales, i * groups + g) }
}
