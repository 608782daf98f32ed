//! Attention of single queries with AVX2: scores, softmax and weighted sums.

use crate::simd::avx2::vmath::{exp, horizontal_sum};
use crate::simd::portable::softmax::{max_score, softmax_base};
use crate::simd::prefetch::KeyPrefetch;

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_loadu_si128, _mm_storeu_ps, _mm256_add_ps, _mm256_broadcast_ss,
    _mm256_castps256_ps128, _mm256_cvtph_ps, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm256_sub_ps,
};

/// The largest number of lanes whose sums are computed at once. With three heads, twelve vectors of
/// sums fill the registers.
pub(crate) const VALUE_LANES: usize = 32;

/// An element of a cache.
pub(crate) trait CacheElement: Copy {
    /// Eight elements as float32.
    ///
    /// # Safety
    /// The processor must have avx2 and f16c, and the elements must exist.
    unsafe fn load(from: *const Self) -> __m256;
}

impl CacheElement for f32 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> __m256 {
        // SAFETY: the caller guarantees the feature and the elements.
        unsafe { _mm256_loadu_ps(from) }
    }
}

/// The bits of float16.
impl CacheElement for u16 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> __m256 {
        // SAFETY: the caller guarantees the features and the elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

/// Adds eight times `V` lanes of `n` weighted values, for `R` heads. The sums continue key by key.
/// Each of the three operands is an address and a row stride in elements. Shares and sums have one
/// row per head, and values have `n` rows.
///
/// # Safety
/// The processor must have avx2, fma and f16c. All these elements must exist, and no other thread
/// may use the sums.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn accumulate_values<T: CacheElement, const R: usize, const V: usize>(
    (shares, step): (*const f32, usize),
    (values, position): (*const T, usize),
    n: usize,
    (sums, row): (*mut f32, usize),
    next: KeyPrefetch,
) {
    // SAFETY: the caller guarantees the features, and that all elements of the operands exist.
    unsafe {
        let place = |r: usize, j: usize| sums.add(r * row + 8 * j);
        let mut totals: [[__m256; V]; R] =
            std::array::from_fn(|r| std::array::from_fn(|j| _mm256_loadu_ps(place(r, j))));
        for i in 0..n {
            next.fetch(i, 8 * V * size_of::<T>());
            let value = values.add(i * position);
            let mut broadcast = [_mm256_setzero_ps(); R];
            for (r, share) in broadcast.iter_mut().enumerate() {
                *share = _mm256_broadcast_ss(&*shares.add(r * step + i));
            }
            for j in 0..V {
                let value = T::load(value.add(8 * j));
                for (totals, share) in totals.iter_mut().zip(broadcast) {
                    totals[j] = _mm256_fmadd_ps(share, value, totals[j]);
                }
            }
        }
        for (r, totals) in totals.into_iter().enumerate() {
            for (j, total) in totals.into_iter().enumerate() {
                _mm256_storeu_ps(place(r, j), total);
            }
        }
    }
}

/// # Safety
/// The processor must have avx2, fma and f16c. There must be `R` queries of `d` elements, a
/// multiple of 8, and `n` keys at the given stride. The output must have space for `n` results per
/// query at its stride.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn scores<T: CacheElement, const R: usize>(
    queries: *const f32,
    (keys, step): (*const T, usize),
    (n, d): (usize, usize),
    (to, row): (*mut f32, usize),
    next: KeyPrefetch,
) {
    // SAFETY: all offsets are within the caller's guarantees.
    unsafe {
        let mut i = 0;
        while i + 4 <= n {
            (i..i + 4).for_each(|i| next.fetch(i, d * size_of::<T>()));
            let sums = scores_block::<T, R, 4>(queries, keys.add(i * step), step, d);
            for (r, [a, b, c, e]) in sums.into_iter().enumerate() {
                let four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, e));
                let sum = _mm_add_ps(
                    _mm256_castps256_ps128(four),
                    _mm256_extractf128_ps::<1>(four),
                );
                _mm_storeu_ps(to.add(r * row + i), sum);
            }
            i += 4;
        }
        while i < n {
            next.fetch(i, d * size_of::<T>());
            let sums = scores_block::<T, R, 1>(queries, keys.add(i * step), step, d);
            for (r, [a]) in sums.into_iter().enumerate() {
                let two = _mm256_hadd_ps(a, a);
                let one = _mm256_hadd_ps(two, two);
                let sum = _mm_add_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps::<1>(one));
                *to.add(r * row + i) = std::arch::x86_64::_mm_cvtss_f32(sum);
            }
            i += 1;
        }
    }
}

/// Computes the dot products of `R` queries with `K` keys, with eight partial sums each.
///
/// # Safety
/// The obligations of [`scores`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scores_block<T: CacheElement, const R: usize, const K: usize>(
    queries: *const f32,
    keys: *const T,
    step: usize,
    d: usize,
) -> [[__m256; K]; R] {
    let mut sums = [[_mm256_setzero_ps(); K]; R];
    let mut at = 0;
    while at < d {
        // SAFETY: offsets are below `d` in each query and key.
        unsafe {
            let mut key_lanes = [_mm256_setzero_ps(); K];
            for (k, lanes) in key_lanes.iter_mut().enumerate() {
                *lanes = T::load(keys.add(k * step + at));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = _mm256_loadu_ps(queries.add(r * d + at));
                for (sum, key) in sums.iter_mut().zip(key_lanes) {
                    *sum = _mm256_fmadd_ps(query, key, *sum);
                }
            }
        }
        at += 8;
    }
    sums
}

/// Replaces scores by their exponentials relative to the maximum. Returns the maximum, and the sum
/// of the exponentials. The number of scores must be a multiple of 8.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
    let (lanes, rest) = scores.as_chunks_mut::<8>();
    assert!(rest.is_empty());
    let mut most = _mm256_set1_ps(f32::NEG_INFINITY);
    for scores in &*lanes {
        // SAFETY: eight elements exist. The instruction returns its second operand if one is NaN,
        // so a NaN score is ignored.
        most = unsafe { _mm256_max_ps(_mm256_loadu_ps(scores.as_ptr()), most) };
    }
    let mut eight = [0.0; 8];
    // SAFETY: eight elements exist.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), most) };
    let max_score = max_score(&eight);
    let base = _mm256_set1_ps(softmax_base(max_score));
    let mut sums = _mm256_setzero_ps();
    for scores in lanes {
        // SAFETY: eight elements exist; the caller guarantees the features.
        unsafe {
            let power = exp(_mm256_sub_ps(_mm256_loadu_ps(scores.as_ptr()), base));
            _mm256_storeu_ps(scores.as_mut_ptr(), power);
            sums = _mm256_add_ps(sums, power);
        }
    }
    (max_score, horizontal_sum(sums))
}
