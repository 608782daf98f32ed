//! Unpacks quantized matrices to pairs of 16-bit integers in memory, for `integer_tile.rs`.

use std::arch::x86_64::{
    __m256i, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_storeu_ps, _mm256_storeu_si256,
};

use crate::layout::float_codes::Codes;
use crate::layout::formats::with_codes;
use crate::layout::integer_panel::CodePanelMut;
use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix, codes_per_chunk};
use crate::simd::avx2::dequantize::group_params;
use crate::simd::avx2::float_codes::integers;
use crate::simd::avx2::qgemv::{
    distant_pairs_of_8bit, looked_up_pairs, pairs_of_4bit, pairs_of_run,
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
/// blocks. `load` loads it, `store` stores pairs, and `factors` copies the factors of a group.
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
            assert!(to.scales.len() == groups * width && to.biases.len() == groups * width);
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
                        let place = g * width + i * INTERLEAVED_ROWS;
                        factors(
                            matrix.scales,
                            (i, groups, g),
                            to.scales.as_mut_ptr().add(place),
                        );
                        factors(
                            matrix.biases,
                            (i, groups, g),
                            to.biases.as_mut_ptr().add(place),
                        );
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

/// A table has the width of a vector already.
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
/// The processor must have avx2. The pairs must have places.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(to: *mut i32, pairs: __m256i, _: usize) {
    // SAFETY: the caller guarantees eight places.
    unsafe { _mm256_storeu_si256(to.cast(), pairs) }
}

/// Copies the scales or biases of group `g` of row block `i`.
///
/// # Safety
/// The processor must have avx2 and f16c. The group and its places must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn factors(all: GroupParams<'_>, (i, groups, g): (usize, usize, usize), to: *mut f32) {
    // SAFETY: the caller guarantees the group and its eight places.
    unsafe { _mm256_storeu_ps(to, group_params(all, i * groups + g)) }
}
