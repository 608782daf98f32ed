//! The scales and biases of a place's outputs, made ready before its groups are multiplied.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_storeu_ps,
};

use super::super::bands::{BAND, Factors};
use super::numbers::form;
use super::{Line, Sources, sixteen};

/// The scales and biases of both tiles' outputs, a line each, group after group. Biases make up for numbers that are greater than
/// they should be, and scales for numbers in another measure ([`form`]).
///
/// # Safety
/// The processor must have avx512f and f16c; there must be as many groups, and four lines for each.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(super) unsafe fn prepare<const BITS: u32>(from: &Sources<'_>, groups: usize, to: *mut Line) {
    let (more, measure) = form(BITS);
    let (more, measure) = (_mm512_set1_ps(more / measure), _mm512_set1_ps(measure));
    // SAFETY: the caller's promise.
    unsafe {
        for i in 0..2 {
            let all = to.add(i);
            convert(from.scales[i], from.second[i], groups, |group, scales| {
                let scales = _mm512_mul_ps(scales, measure);
                _mm512_storeu_ps(all.add(4 * group).cast(), scales);
            });
            convert(from.biases[i], from.second[i], groups, |group, biases| {
                let to = all.add(4 * group);
                let biases = _mm512_fnmadd_ps(more, _mm512_loadu_ps(to.cast()), biases);
                _mm512_storeu_ps(to.add(2).cast(), biases);
            });
        }
    }
}

/// The factors of each group of two bands, the second `second` elements after the first. Those that follow are fetched.
///
/// # Safety
/// As of [`sixteen`], for as many groups.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn convert(all: Factors<'_>, second: usize, groups: usize, put: impl Fn(usize, __m512)) {
    // Two tiles of two bands are ahead, as of words.
    let ahead = 4 * groups * BAND;
    let fetch = |at: *const u8| _mm_prefetch::<_MM_HINT_T0>(at.cast());
    // SAFETY: the caller's promise; what is fetched need not be there.
    unsafe {
        match all {
            Factors::Half(half) => {
                for group in 0..groups {
                    if group % 4 == 0 {
                        let next = half.as_ptr().wrapping_add(group * BAND + ahead);
                        fetch(next.cast());
                        fetch(next.wrapping_add(second).cast());
                    }
                    put(group, sixteen(Factors::Half(half), group, second));
                }
            }
            Factors::Single(single) => {
                for group in 0..groups {
                    if group % 2 == 0 {
                        let next = single.as_ptr().wrapping_add(group * BAND + ahead);
                        fetch(next.cast());
                        fetch(next.wrapping_add(second).cast());
                    }
                    put(group, sixteen(Factors::Single(single), group, second));
                }
            }
        }
    }
}
