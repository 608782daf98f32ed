//! Quantized matrix rows as bytes, four columns per lane, with AVX2.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_fmadd_ps,
    _mm256_loadu_si256, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_shuffle_epi8, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_storeu_si256,
    _mm256_xor_si256,
};

use crate::layout::byte_panel::{BytePanelMut, CodeBytes};
use crate::layout::float_codes::{Codes, FP4_CODES};
use crate::layout::formats::with_codes;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix};
use crate::simd::avx2::dequantize::{code_at, codes_of_whole_words, group_params};

/// The offset that is added to integers: a positive one for table integers in unsigned bytes, -128
/// for codes in signed bytes.
fn offset(codes: Codes, bits: u32, bytes: CodeBytes) -> i8 {
    match (codes, bytes) {
        (Codes::Table(table), CodeBytes::Unsigned) => table.offset().cast_signed(),
        (Codes::Integers, CodeBytes::Signed) if bits == 8 => -128,
        _ => 0,
    }
}

/// See [`PackedMatrix::byte_quads`].
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn byte_quads(matrix: PackedMatrix<'_>, bytes: CodeBytes, to: BytePanelMut<'_>) {
    // SAFETY: the caller guarantees avx2, fma and f16c.
    unsafe { with_codes!(byte_quads_bits(matrix, bytes, to)) }
}

/// [`byte_quads`] for codes of this bit width and kind.
///
/// # Safety
/// As [`byte_quads`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn byte_quads_bits<const BITS: u32, const CODES: u32>(
    matrix: PackedMatrix<'_>,
    bytes: CodeBytes,
    to: BytePanelMut<'_>,
) {
    let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
    let (width, size) = (count * INTERLEAVED_ROWS, matrix.group_size());
    let chunk = codes_of_whole_words(BITS);
    let words = chunk * BITS as usize / 32;
    let codes = matrix.codes();
    // All reads and writes below are within these bounds.
    assert!(matrix.words.len() == groups * per * width && matrix.bits == BITS);
    assert!(matrix.scales.len() == groups * width && matrix.biases.len() == groups * width);
    assert!(size * BITS as usize == 32 * per && size.is_multiple_of(chunk));
    assert!(chunk.is_multiple_of(4) && to.quads.len() == groups * size / 4 * width);
    assert!(to.scales.len() == groups * width && to.biases.len() == groups * width);
    assert!(codes != Codes::E4m3);
    let offset = offset(codes, BITS, bytes);
    let table: [i8; 16] = match codes {
        Codes::Table(table) => table.integers().map(|n| n.wrapping_add(offset)),
        _ => FP4_CODES.map(u8::cast_signed),
    };
    // SAFETY: sixteen bytes exist.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    // An offset of -128 adds 128 to the value of unsigned bytes, and subtracts 128 from signed
    // ones.
    let back = match bytes {
        CodeBytes::Unsigned => -f32::from(offset.cast_unsigned()),
        CodeBytes::Signed => -f32::from(offset),
    };
    let lookup = CODES == Codes::E2M1_ID || CODES == Codes::TABLE_ID;
    let flip = _mm256_set1_epi8(if lookup { 0 } else { offset });
    let mask = _mm256_set1_epi32((u32::MAX >> (32 - BITS)).cast_signed());
    for i in 0..count {
        for g in 0..groups {
            // SAFETY: group `g` of row block `i` has its words from `g * per` on. The words and
            // their columns are within the asserted bounds.
            unsafe {
                let at = i * groups + g;
                let place = g * width + i * INTERLEAVED_ROWS;
                let scale = group_params(matrix.scales, at);
                _mm256_storeu_ps(to.scales.as_mut_ptr().add(place), scale);
                let bias = group_params(matrix.biases, at);
                let bias = _mm256_fmadd_ps(scale, _mm256_set1_ps(back), bias);
                _mm256_storeu_ps(to.biases.as_mut_ptr().add(place), bias);
                for c in 0..size / chunk {
                    let from = (i * groups * per + g * per + c * words) * INTERLEAVED_ROWS;
                    let from = matrix.words.as_ptr().add(from);
                    let mut q = [mask; 5];
                    for (i, q) in q.iter_mut().enumerate().take(words) {
                        *q = _mm256_loadu_si256(from.add(i * INTERLEAVED_ROWS).cast());
                    }
                    let first = (g * size + c * chunk) / 4;
                    for j in 0..chunk / 4 {
                        let mut four = quad::<BITS>(&q, 4 * j, mask);
                        if lookup {
                            four = _mm256_shuffle_epi8(table, four);
                        }
                        let four = _mm256_xor_si256(four, flip);
                        let place = (first + j) * width + i * INTERLEAVED_ROWS;
                        _mm256_storeu_si256(to.quads.as_mut_ptr().add(place).cast(), four);
                    }
                }
            }
        }
    }
}

/// Codes `j` to `j + 3` of a chunk, as the four bytes of each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quad<const BITS: u32>(q: &[__m256i; 5], j: usize, mask: __m256i) -> __m256i {
    if BITS == 8 {
        return q[j / 4];
    }
    let one = |j| _mm256_and_si256(code_at::<BITS>(q, j), mask);
    let low = _mm256_or_si256(one(j), _mm256_slli_epi32::<8>(one(j + 1)));
    let high = _mm256_or_si256(one(j + 2), _mm256_slli_epi32::<8>(one(j + 3)));
    _mm256_or_si256(low, _mm256_slli_epi32::<16>(high))
}
