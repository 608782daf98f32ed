//! Converts scales and biases of a pair of output tiles, before the tiles are multiplied.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castps_pd, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_pd, _mm512_castpd_ps, _mm512_castpd256_pd512,
    _mm512_cvtph_ps, _mm512_fnmadd_ps, _mm512_insertf64x4, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_storeu_ps,
};

use super::encoding::code_offset_and_scale;
use super::tiles::{ROW_BYTES, TileRow, TileSources};
use crate::layout::packed::{GROUPS_PER_AFFINE_SUPER, GroupParams, INTERLEAVED_ROWS};
use crate::simd::avx2::float_codes::super_affine;

/// Writes the scales and biases of both tiles' outputs, one line each, group by group. Codes in
/// tiles have an offset and a factor ([`code_offset_and_scale`]). The written biases compensate for
/// the offset, and the written scales for the factor.
///
/// # Safety
/// The processor must have avx512f and f16c. Both tiles must have this number of groups. `to` must
/// have four lines for each group.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(crate) unsafe fn prepare<const BITS: u32>(
    from: &TileSources<'_>,
    groups: usize,
    to: *mut TileRow,
) {
    for i in 0..2 {
        let second = from.second[i];
        // SAFETY: the caller guarantees the features, the groups of both tiles, and the lines at
        // `to`.
        unsafe {
            let to = to.add(i);
            match (from.scales[i], from.biases[i]) {
                (GroupParams::F16(scales), GroupParams::F16(biases)) => {
                    let all = [scales.as_ptr(), biases.as_ptr()];
                    let sixteen = |pointers: [_; 2]| pointers.map(|at| sixteen_halves(at, second));
                    convert::<BITS, _>(all, second, groups, to, sixteen);
                }
                (GroupParams::F32(scales), GroupParams::F32(biases)) => {
                    let all = [scales.as_ptr(), biases.as_ptr()];
                    let sixteen = |pointers: [*const f32; 2]| {
                        pointers.map(|at| {
                            let low = _mm512_castpd256_pd512(_mm256_loadu_pd(at.cast()));
                            let high = _mm256_loadu_pd(at.add(second).cast());
                            _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high))
                        })
                    };
                    convert::<BITS, _>(all, second, groups, to, sixteen);
                }
                (GroupParams::Symmetric { halves, .. }, GroupParams::Symmetric { factor, .. }) => {
                    let zero = _mm512_set1_ps(factor);
                    let sixteen = |[at, _]: [*const u16; 2]| {
                        let scales = sixteen_halves(at, second);
                        [scales, _mm512_mul_ps(scales, zero)]
                    };
                    convert::<BITS, _>([halves.as_ptr(); 2], second, groups, to, sixteen);
                }
                (
                    GroupParams::SuperAffine {
                        codes,
                        supers,
                        first,
                        ..
                    },
                    GroupParams::SuperAffine { .. },
                ) => {
                    let supers = &supers[first / GROUPS_PER_AFFINE_SUPER * 2 * INTERLEAVED_ROWS..];
                    convert_super_affine::<BITS>(codes, supers, second, groups, to);
                }
                _ => unreachable!("widths of AMX have scales and biases of one type"),
            }
        }
    }
}

/// Converts eight float16 of one row block, and eight of another row block `second` elements later.
///
/// # Safety
/// The processor must have avx512f. The sixteen float16 must exist.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn sixteen_halves(at: *const u16, second: usize) -> __m512 {
    // SAFETY: the caller guarantees avx512f and the sixteen float16.
    unsafe {
        let low = _mm_loadu_si128(at.cast());
        let high = _mm_loadu_si128(at.add(second).cast());
        let low = _mm256_castsi128_si256(low);
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(low, high))
    }
}

/// Converts the scales and biases of each group of two row blocks. `sixteen` loads the values of
/// both row blocks; the second one is `second` elements after the first. Later values are
/// prefetched.
///
/// # Safety
/// The processor must have avx512f. `sixteen` must be valid for each group, and `to` must have
/// lines for all groups.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn convert<const BITS: u32, T>(
    all: [*const T; 2],
    second: usize,
    groups: usize,
    to: *mut TileRow,
    sixteen: impl Fn([*const T; 2]) -> [__m512; 2],
) {
    // The prefetch distance is two tiles of two row blocks each, as for words.
    let ahead = 4 * groups * INTERLEAVED_ROWS;
    for group in 0..groups {
        let pointers = all.map(|all| all.wrapping_add(group * INTERLEAVED_ROWS));
        if group % (ROW_BYTES / (INTERLEAVED_ROWS * size_of::<T>())) == 0 {
            for at in pointers {
                let next = at.wrapping_add(ahead);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(second).cast());
            }
        }
        // SAFETY: the caller guarantees a valid `sixteen` for each group, and lines at `to`.
        unsafe { store::<BITS>(sixteen(pointers), to.add(4 * group)) };
    }
}

/// [`convert`] for [`crate::layout::packed::ScaleFormat::SuperAffine`]. The second row block is
/// `second` scales after the first.
///
/// # Safety
/// The processor must have avx512f. Both row blocks must have this number of groups, and `to` must
/// have lines for all groups.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn convert_super_affine<const BITS: u32>(
    codes: &[i8],
    supers: &[u16],
    second: usize,
    groups: usize,
    to: *mut TileRow,
) {
    const PAIR: usize = 2 * INTERLEAVED_ROWS;
    let (per, ahead) = (GROUPS_PER_AFFINE_SUPER, 4 * groups * PAIR);
    assert!(second == 0 || second == groups * INTERLEAVED_ROWS);
    let blocks = second / (groups * INTERLEAVED_ROWS).max(1) + 1;
    assert!(groups.is_multiple_of(per) && codes.len() >= blocks * groups * PAIR);
    assert!(supers.len() >= blocks * groups / per * PAIR);
    for group in 0..groups {
        // SAFETY: each group of each row block has sixteen bytes, and each super-group sixteen
        // float16, as asserted. Prefetched addresses need not be valid.
        unsafe {
            let group_codes = codes.as_ptr().add(group * PAIR);
            if group % (ROW_BYTES / PAIR) == 0 {
                _mm_prefetch::<_MM_HINT_T0>(group_codes.wrapping_add(ahead));
                _mm_prefetch::<_MM_HINT_T0>(group_codes.wrapping_add(ahead + 2 * second));
            }
            let halves = supers.as_ptr().add(group / per * PAIR);
            let low = super_affine(group_codes, halves);
            let high = super_affine(group_codes.add(2 * second), halves.add(2 * second / per));
            let both = [0, 1].map(|i| {
                let low = _mm512_castpd256_pd512(_mm256_castps_pd(low[i]));
                let high = _mm256_castps_pd(high[i]);
                _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high))
            });
            store::<BITS>(both, to.add(4 * group));
        }
    }
}

/// Writes the scales and biases of a group, adjusted for the encoding of codes in tiles.
///
/// # Safety
/// The processor must have avx512f. Three lines from `to` on must exist.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn store<const BITS: u32>([scales, biases]: [__m512; 2], to: *mut TileRow) {
    let (more, measure) = code_offset_and_scale(BITS);
    let (more, measure) = (_mm512_set1_ps(more / measure), _mm512_set1_ps(measure));
    let scales = _mm512_mul_ps(scales, measure);
    let biases = _mm512_fnmadd_ps(more, scales, biases);
    // SAFETY: the caller guarantees avx512f and three lines from `to` on.
    unsafe {
        _mm512_storeu_ps(to.cast(), scales);
        _mm512_storeu_ps(to.add(2).cast(), biases);
    }
}
