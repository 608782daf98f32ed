//! Dequantization with AVX2.

use crate::layout::float_codes::{ByteScales, Codes};
use crate::layout::formats::with_codes;
use crate::layout::packed::{
    GROUPS_PER_AFFINE_SUPER, GroupParams, INTERLEAVED_ROWS, PackedMatrix, PackedRow, code_position,
    codes_per_chunk,
};
use crate::simd::avx2::float_codes::{e4m3, e4m3_lanes, e8m0, fp4_codes, integers, super_affine};
use crate::simd::portable;

use std::arch::x86_64::{
    __m256, __m256i, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm256_add_ps,
    _mm256_and_si256, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_shuffle_epi8, _mm256_sll_epi32, _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srl_epi32,
    _mm256_storeu_ps,
};

/// See [`crate::simd::dequantize::dequantize_packed_row`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn dequantize_row(row: PackedRow<'_>, bits: u32, out: &mut [f32]) {
    portable::dequantize::dequantize_row(row, bits, out);
}

/// See [`PackedMatrix::dequantize_transposed`].
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn dequantize_transposed(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    // SAFETY: the caller guarantees avx2, fma and f16c.
    unsafe { with_codes!(dequantize_transposed_bits(matrix, out)) }
}

/// [`dequantize_transposed`] for codes of this bit width.
///
/// # Safety
/// As [`dequantize_transposed`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize_transposed_bits<const BITS: u32, const CODES: u32>(
    matrix: PackedMatrix<'_>,
    out: &mut [f32],
) {
    let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
    let (width, size) = (count * INTERLEAVED_ROWS, matrix.group_size());
    let chunk = codes_of_whole_words(BITS);
    let words = chunk * BITS as usize / 32;
    // All reads and writes below are within these bounds.
    assert!(matrix.words.len() == groups * per * width && matrix.bits == BITS);
    assert!(matrix.scales.len() == groups * width && matrix.biases.len() == groups * width);
    assert!(out.len() == groups * size * width && size * BITS as usize == 32 * per);
    assert!(size.is_multiple_of(chunk));
    let table = integers(matrix.codes());
    let mask = _mm256_set1_epi32((u32::MAX >> (32 - BITS)).cast_signed());
    for i in 0..count {
        for g in 0..groups {
            // SAFETY: group `g` of row block `i` has its words from `g * per` on. The words and
            // their columns are within the asserted bounds.
            unsafe {
                let at = i * groups + g;
                let (scale, bias) = (
                    group_params(matrix.scales, at),
                    group_params(matrix.biases, at),
                );
                for c in 0..size / chunk {
                    let from = (i * groups * per + g * per + c * words) * INTERLEAVED_ROWS;
                    let from = matrix.words.as_ptr().add(from);
                    let mut q = [mask; 5];
                    for (i, q) in q.iter_mut().enumerate().take(words) {
                        *q = _mm256_loadu_si256(from.add(i * INTERLEAVED_ROWS).cast());
                    }
                    let column = g * size + c * chunk;
                    for j in 0..chunk {
                        let n = match CODES {
                            Codes::E4M3_ID => {
                                e4m3_lanes(_mm256_and_si256(code_at::<BITS>(&q, j), mask))
                            }
                            _ => _mm256_cvtepi32_ps(integer::<BITS, CODES>(&q, j, mask, table)),
                        };
                        let n = _mm256_add_ps(_mm256_mul_ps(n, scale), bias);
                        let to = out
                            .as_mut_ptr()
                            .add((column + j) * width + i * INTERLEAVED_ROWS);
                        _mm256_storeu_ps(to, n);
                    }
                }
            }
        }
    }
}

/// The number of codes of this width after which a code starts at a word boundary again.
pub(super) const fn codes_of_whole_words(bits: u32) -> usize {
    if 32 % bits == 0 {
        32 / bits as usize
    } else {
        codes_per_chunk(bits)
    }
}

/// The integer that code `j` of a chunk represents in each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn integer<const BITS: u32, const CODES: u32>(
    q: &[__m256i; 5],
    j: usize,
    mask: __m256i,
    table: __m256i,
) -> __m256i {
    let n = _mm256_and_si256(code_at::<BITS>(q, j), mask);
    match CODES {
        Codes::E2M1_ID => {
            // The lookup also maps the zero bytes between the codes, so these are cleared.
            let n = _mm256_shuffle_epi8(fp4_codes(), n);
            _mm256_and_si256(n, _mm256_set1_epi32(255))
        }
        Codes::TABLE_ID => {
            let n = _mm256_slli_epi32::<24>(_mm256_shuffle_epi8(table, n));
            _mm256_srai_epi32::<24>(n)
        }
        _ => n,
    }
}

/// Code `j` of a chunk in the lowest bits of each lane, with arbitrary bits above.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn code_at<const BITS: u32>(q: &[__m256i; 5], j: usize) -> __m256i {
    let (word, bit) = code_position(j, BITS);
    let low = _mm256_srl_epi32(q[word], _mm_cvtsi32_si128(bit.cast_signed()));
    if bit + BITS > 32 {
        // The code continues in the next word, so both parts are combined.
        let count = _mm_cvtsi32_si128((32 - bit).cast_signed());
        _mm256_or_si256(low, _mm256_sll_epi32(q[word + 1], count))
    } else {
        low
    }
}

/// The scales or biases of a group of a row block.
///
/// # Safety
/// The processor must have avx2 and f16c. The group must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn group_params(factors: GroupParams<'_>, group: usize) -> __m256 {
    // SAFETY: the caller guarantees avx2 and f16c, and that the group exists.
    unsafe {
        match factors {
            GroupParams::F32(all) => _mm256_loadu_ps(all.as_ptr().add(group * INTERLEAVED_ROWS)),
            GroupParams::F16(all) => _mm256_cvtph_ps(_mm_loadu_si128(
                all.as_ptr().add(group * INTERLEAVED_ROWS).cast(),
            )),
            GroupParams::SuperAffine {
                codes,
                supers,
                first,
                is_bias,
            } => {
                let codes = codes.as_ptr().add(group * 2 * INTERLEAVED_ROWS);
                let place = (first + group) / GROUPS_PER_AFFINE_SUPER * 2 * INTERLEAVED_ROWS;
                super_affine(codes, supers[place..].as_ptr())[usize::from(is_bias)]
            }
            GroupParams::Symmetric { halves, factor }
            | GroupParams::Table { halves, factor, .. } => {
                let halves = halves.as_ptr().add(group * INTERLEAVED_ROWS);
                let scales = _mm256_cvtph_ps(_mm_loadu_si128(halves.cast()));
                _mm256_mul_ps(scales, _mm256_set1_ps(factor))
            }
            GroupParams::Super {
                codes,
                supers,
                per,
                first,
                factor,
                ..
            } => {
                let codes = codes.as_ptr().add(group * INTERLEAVED_ROWS);
                let codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.cast()));
                let supers = &supers[(first + group) / per * INTERLEAVED_ROWS..];
                let supers = _mm256_cvtph_ps(_mm_loadu_si128(supers.as_ptr().cast()));
                let scales = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), supers);
                _mm256_mul_ps(scales, _mm256_set1_ps(factor))
            }
            GroupParams::Bytes {
                codes,
                scales,
                factor,
            } => {
                let codes = _mm_loadl_epi64(codes.as_ptr().add(group * INTERLEAVED_ROWS).cast());
                let scales = match scales {
                    ByteScales::E8m0 => e8m0(codes),
                    ByteScales::E4m3 => e4m3(codes),
                };
                _mm256_mul_ps(scales, _mm256_set1_ps(factor))
            }
        }
    }
}

/// The byte scales of a group of a row block, one per lane.
///
/// # Safety
/// The processor must have avx2. The group must exist.
///
/// # Panics
/// If the scales are not bytes with a shared float factor.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn byte_scales(scales: GroupParams<'_>, group: usize) -> __m256i {
    let (codes, place) = match scales {
        GroupParams::Super { codes, .. } => (codes, group * INTERLEAVED_ROWS),
        GroupParams::SuperAffine { codes, .. } => (codes, group * 2 * INTERLEAVED_ROWS),
        _ => unreachable!("`has_byte_scales` has seen the format"),
    };
    // SAFETY: the caller guarantees the eight bytes of the group.
    unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.as_ptr().add(place).cast())) }
}

/// The float factors of the byte scales of a group in a row block.
///
/// # Safety
/// The processor must have avx2 and f16c.
///
/// # Panics
/// If the scales are not bytes with a shared float factor, or the group does not exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn shared_scales(scales: GroupParams<'_>, group: usize) -> __m256 {
    let (supers, factor) = match scales {
        GroupParams::Super {
            supers,
            per,
            first,
            factor,
            ..
        } => (
            &supers[(first + group) / per * INTERLEAVED_ROWS..][..INTERLEAVED_ROWS],
            factor,
        ),
        GroupParams::SuperAffine { supers, first, .. } => {
            let place = (first + group) / GROUPS_PER_AFFINE_SUPER * 2 * INTERLEAVED_ROWS;
            (&supers[place..][..INTERLEAVED_ROWS], 1.0)
        }
        _ => unreachable!("`has_byte_scales` has seen the format"),
    };
    // SAFETY: there are eight float16.
    let supers = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(supers.as_ptr().cast())) };
    _mm256_mul_ps(supers, _mm256_set1_ps(factor))
}
