//! Scales and biases of a pair of output tiles, converted before its groups are multiplied.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_pd, _mm512_castpd_ps, _mm512_castpd256_pd512,
    _mm512_cvtph_ps, _mm512_fnmadd_ps, _mm512_insertf64x4, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_storeu_ps,
};

use super::encoding::code_offset_and_scale;
use super::tiles::{ROW_BYTES, TileRow, TileSources};
use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS};

/// The scales and biases of both tiles' outputs, a line each, group after group. Biases
/// compensate the offset of the codes in tiles, scales their factor ([`code_offset_and_scale`]).
///
/// # Safety
/// The processor must have avx512f and f16c; there must be as many groups, and four lines for each.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(crate) unsafe fn prepare<const BITS: u32>(
    from: &TileSources<'_>,
    groups: usize,
    to: *mut TileRow,
) {
    for i in 0..2 {
        let second = from.second[i];
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(i);
            match (from.scales[i], from.biases[i]) {
                (GroupParams::F16(scales), GroupParams::F16(biases)) => {
                    let all = [scales.as_ptr(), biases.as_ptr()];
                    let sixteen = |at: *const u16| {
                        let low = _mm_loadu_si128(at.cast());
                        let high = _mm_loadu_si128(at.add(second).cast());
                        let low = _mm256_castsi128_si256(low);
                        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(low, high))
                    };
                    convert::<BITS, _>(all, second, groups, to, sixteen);
                }
                (GroupParams::F32(scales), GroupParams::F32(biases)) => {
                    let all = [scales.as_ptr(), biases.as_ptr()];
                    let sixteen = |at: *const f32| {
                        let low = _mm512_castpd256_pd512(_mm256_loadu_pd(at.cast()));
                        let high = _mm256_loadu_pd(at.add(second).cast());
                        _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high))
                    };
                    convert::<BITS, _>(all, second, groups, to, sixteen);
                }
                _ => unreachable!("widths of AMX have scales and biases of one type"),
            }
        }
    }
}

/// The scales and biases of each group of two row blocks, which `sixteen` joins. The second row
/// block is `second` elements after the first. Those that follow are fetched.
///
/// # Safety
/// The processor must have avx512f. `sixteen` may be called for each of as many groups, and `to`
/// has lines for them.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn convert<const BITS: u32, T>(
    all: [*const T; 2],
    second: usize,
    groups: usize,
    to: *mut TileRow,
    sixteen: impl Fn(*const T) -> __m512,
) {
    let (more, measure) = code_offset_and_scale(BITS);
    let (more, measure) = (_mm512_set1_ps(more / measure), _mm512_set1_ps(measure));
    // Two tiles of two row blocks are ahead, as of words.
    let ahead = 4 * groups * INTERLEAVED_ROWS;
    for group in 0..groups {
        let own = all.map(|all| all.wrapping_add(group * INTERLEAVED_ROWS));
        if group % (ROW_BYTES / (INTERLEAVED_ROWS * size_of::<T>())) == 0 {
            for at in own {
                let next = at.wrapping_add(ahead);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(second).cast());
            }
        }
        let [scales, biases] = own.map(&sixteen);
        let scales = _mm512_mul_ps(scales, measure);
        let biases = _mm512_fnmadd_ps(more, scales, biases);
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(4 * group);
            _mm512_storeu_ps(to.cast(), scales);
            _mm512_storeu_ps(to.add(2).cast(), biases);
        }
    }
}
