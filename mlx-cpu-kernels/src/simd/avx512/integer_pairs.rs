//! Unpacks quantized matrices to pairs of 16-bit integers in memory, for `integer_tile.rs`. A
//! vector has two row blocks.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256,
    _mm512_castsi256_si512, _mm512_castsi512_si256, _mm512_extracti64x4_epi64, _mm512_inserti64x4,
    _mm512_setzero_si512,
};

use crate::layout::float_codes::Codes;
use crate::layout::formats::with_codes;
use crate::layout::integer_panel::CodePanelMut;
use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::simd::avx2;
use crate::simd::avx2::dequantize::byte_scales;
use crate::simd::avx2::float_codes::integers;
use crate::simd::avx2::integer_pairs::{integer_pairs_for_vectors, params, words_at_once};
use crate::simd::avx2::qgemv::ZERO_CODE;
use crate::simd::avx512::qgemv::{
    distant_pairs_of_8bit, in_both_halves, less, looked_up_pairs, pairs_of_4bit, pairs_of_run,
    times,
};

integer_pairs_for_vectors!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512vnni", 2, _mm512_setzero_si512, table: twice
);

/// See [`PackedMatrix::integer_pairs`].
///
/// # Safety
/// The processor must have avx2, fma, f16c, avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn integer_pairs(matrix: PackedMatrix<'_>, mut to: CodePanelMut<'_>) {
    // SAFETY: the caller guarantees the features.
    unsafe {
        let whole = to.reborrow();
        with_codes!(integer_pairs_bits(matrix, whole, 0));
        let count = matrix.row_blocks();
        if !count.is_multiple_of(2) {
            avx2::integer_pairs::integer_pairs(matrix, to, count - 1);
        }
    }
}

/// A table in both halves of a vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn twice(table: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(table), table)
}

/// Word `at` of each row of a row block and of the next one, `apart` words later.
///
/// # Safety
/// The processor must have avx512f. Both words must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn load(words: *const u32, (at, apart): (usize, usize)) -> __m512i {
    // SAFETY: the caller guarantees both words of eight rows.
    unsafe {
        let at = words.add(at * INTERLEAVED_ROWS);
        let low = _mm256_loadu_si256(at.cast());
        let high = _mm256_loadu_si256(at.add(apart * INTERLEAVED_ROWS).cast());
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// Stores the pairs of two row blocks, whose pairs are `apart` pairs apart.
///
/// # Safety
/// The processor must have avx512f. There must be space for eight pairs of each row block at `to`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn store(to: *mut i32, pairs: __m512i, apart: usize) {
    // SAFETY: the caller guarantees space for eight pairs of each row block.
    unsafe {
        _mm256_storeu_si256(to.cast(), _mm512_castsi512_si256(pairs));
        let next = to.add(apart * INTERLEAVED_ROWS);
        _mm256_storeu_si256(next.cast(), _mm512_extracti64x4_epi64::<1>(pairs));
    }
}

/// Copies the scales or biases of group `g` of row blocks `i` and `i + 1`. With `SHARED`, it copies
/// the floats that this group shares with others.
///
/// # Safety
/// The processor must have avx2 and f16c. The groups, and sixteen elements at `to`, must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn factors<const SHARED: bool>(
    all: GroupParams<'_>,
    (i, groups, g): (usize, usize, usize),
    to: *mut f32,
) {
    // SAFETY: the caller guarantees the groups, and sixteen elements at `to`.
    unsafe {
        _mm256_storeu_ps(to, params::<SHARED>(all, i * groups + g));
        let next = params::<SHARED>(all, (i + 1) * groups + g);
        _mm256_storeu_ps(to.add(INTERLEAVED_ROWS), next);
    }
}

/// The byte scales of group `g` of row blocks `i` and `i + 1`, one per lane.
///
/// # Safety
/// The processor must have avx2 and avx512f. The groups must exist, and have byte scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn scale_bytes(scales: GroupParams<'_>, (i, groups, g): (usize, usize, usize)) -> __m512i {
    // SAFETY: the caller guarantees the groups.
    unsafe {
        let low = byte_scales(scales, i * groups + g);
        let high = byte_scales(scales, (i + 1) * groups + g);
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}
