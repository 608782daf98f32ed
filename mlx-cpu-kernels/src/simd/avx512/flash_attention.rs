//! Attention of a panel of sixteen queries with a block of keys, for AVX-512. A lane belongs to one
//! query. See [`crate::simd::flash_attention`] for the order of sums.

use std::arch::x86_64::{
    __m512, _CMP_EQ_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mask_mov_ps, _mm512_max_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    _mm512_sub_ps,
};

use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::avx512::vmath::exp;

/// The maximum number of keys per tile. Their sums, and up to three earlier partial sums of each,
/// take 28 of the 32 registers.
const MAX_KEYS: usize = 7;

/// See [`crate::simd::flash_attention::scores`].
///
/// # Safety
/// The obligations of that function. The processor must also have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn scores(
    (n, d): (usize, usize),
    mut keys: TileA,
    queries: TileB,
    mut to: TileC,
) {
    let mut rest = n;
    while rest > 0 {
        // A tile with few keys waits for its own sums, so the last two tiles share their keys.
        let tall = match rest {
            rest if rest > MAX_KEYS && rest < 2 * MAX_KEYS => rest.div_ceil(2),
            rest => rest.min(MAX_KEYS),
        };
        // SAFETY: these keys are among the `n` keys that the caller guarantees.
        unsafe {
            match tall {
                7 => scores_tile::<7>(d, keys, queries, to),
                6 => scores_tile::<6>(d, keys, queries, to),
                5 => scores_tile::<5>(d, keys, queries, to),
                4 => scores_tile::<4>(d, keys, queries, to),
                3 => scores_tile::<3>(d, keys, queries, to),
                2 => scores_tile::<2>(d, keys, queries, to),
                _ => scores_tile::<1>(d, keys, queries, to),
            }
        }
        keys.data = keys.data.wrapping_add(tall * keys.row_stride);
        to.data = to.data.wrapping_add(tall * to.row_stride);
        rest -= tall;
    }
}

/// The scores of `M` keys.
///
/// # Safety
/// The obligations of [`scores`], for `M` keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scores_tile<const M: usize>(d: usize, keys: TileA, queries: TileB, to: TileC) {
    // SAFETY: the caller guarantees `M` keys and the queries, each with `d` elements, and a place
    // for each score.
    unsafe {
        let one = |first: usize| partial_sums::<M>((first, d), keys, queries);
        let two = |first: usize| add(one(first), one(first + 1));
        let sums = add(add(two(0), two(2)), add(two(4), two(6)));
        for (m, sum) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(to.data.wrapping_add(m * to.row_stride), sum);
        }
    }
}

/// The sums over the elements from `first` on whose indices differ by multiples of 8.
///
/// # Safety
/// The obligations of [`scores_tile`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn partial_sums<const M: usize>(
    (first, d): (usize, usize),
    keys: TileA,
    queries: TileB,
) -> [__m512; M] {
    let mut sums = [_mm512_setzero_ps(); M];
    for i in (first..d).step_by(8) {
        // SAFETY: `i` is below `d`, and the caller guarantees the elements.
        unsafe {
            let lanes = _mm512_loadu_ps(queries.data.wrapping_add(i * queries.stride));
            let key = keys.data.wrapping_add(i * keys.stride);
            for (m, sum) in sums.iter_mut().enumerate() {
                let key = _mm512_set1_ps(*key.wrapping_add(m * keys.row_stride));
                *sum = _mm512_fmadd_ps(key, lanes, *sum);
            }
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add<const M: usize>(a: [__m512; M], b: [__m512; M]) -> [__m512; M] {
    std::array::from_fn(|m| _mm512_add_ps(a[m], b[m]))
}

/// See [`crate::simd::flash_attention::softmax`].
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn softmax(scores: &mut [[f32; LANES]], first: usize) -> BlockSoftmax {
    let none = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut most = none;
    for lanes in &*scores {
        // SAFETY: sixteen elements exist. The instruction returns its second operand if one is NaN,
        // so a NaN score is ignored.
        most = unsafe { _mm512_max_ps(_mm512_loadu_ps(lanes.as_ptr()), most) };
    }
    // The base is finite, even if a query has no visible key.
    let unseen = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(most, none);
    let base = _mm512_mask_mov_ps(most, unseen, _mm512_setzero_ps());
    let mut sums = [_mm512_setzero_ps(); 8];
    for (key, lanes) in (first..).zip(scores) {
        // SAFETY: sixteen elements exist.
        unsafe {
            let power = exp(_mm512_sub_ps(_mm512_loadu_ps(lanes.as_ptr()), base));
            _mm512_storeu_ps(lanes.as_mut_ptr(), power);
            sums[key % 8] = _mm512_add_ps(sums[key % 8], power);
        }
    }
    let half: [__m512; 4] = std::array::from_fn(|i| _mm512_add_ps(sums[i], sums[i + 4]));
    let quarter: [__m512; 2] = std::array::from_fn(|i| _mm512_add_ps(half[i], half[i + 2]));
    let total = _mm512_add_ps(quarter[0], quarter[1]);
    let (mut greatest, mut totals) = ([0.0; LANES], [0.0; LANES]);
    // SAFETY: both arrays have sixteen elements.
    unsafe {
        _mm512_storeu_ps(greatest.as_mut_ptr(), most);
        _mm512_storeu_ps(totals.as_mut_ptr(), total);
    }
    (greatest, totals)
}

/// The weighted sums of `V` times sixteen lanes of `n` values; see
/// [`crate::simd::flash_attention::weighted_values`].
///
/// # Safety
/// The obligations of that function, for these lanes. The processor must also have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn weighted_values<const V: usize>(
    (queries, n): (usize, usize),
    mut weights: TileA,
    values: TileB,
    mut to: TileC,
) {
    let mut rest = queries;
    while rest > 0 {
        // SAFETY: these queries are among those that the caller guarantees.
        let tall = unsafe {
            match rest {
                8.. => values_tile::<8, V>(n, weights, values, to),
                4.. => values_tile::<4, V>(n, weights, values, to),
                2.. => values_tile::<2, V>(n, weights, values, to),
                _ => values_tile::<1, V>(n, weights, values, to),
            }
        };
        weights.data = weights.data.wrapping_add(tall * weights.row_stride);
        to.data = to.data.wrapping_add(tall * to.row_stride);
        rest -= tall;
    }
}

/// The weighted sums of `M` queries. Returns `M`.
///
/// # Safety
/// The obligations of [`weighted_values`], for `M` queries.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn values_tile<const M: usize, const V: usize>(
    n: usize,
    weights: TileA,
    values: TileB,
    to: TileC,
) -> usize {
    // SAFETY: the caller guarantees `n` weights of `M` queries, `n` values, and places for the
    // sums.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        for i in 0..n {
            let value = values.data.wrapping_add(i * values.stride);
            let lanes: [__m512; V] =
                std::array::from_fn(|v| _mm512_loadu_ps(value.wrapping_add(v * LANES)));
            let weight = weights.data.wrapping_add(i * weights.stride);
            for (m, sums) in sums.iter_mut().enumerate() {
                let weight = _mm512_set1_ps(*weight.wrapping_add(m * weights.row_stride));
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = _mm512_fmadd_ps(weight, lanes, *sum);
                }
            }
        }
        for (m, sums) in sums.into_iter().enumerate() {
            let place = to.data.wrapping_add(m * to.row_stride);
            for (v, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(place.wrapping_add(v * LANES), sum);
            }
        }
    }
    M
}
