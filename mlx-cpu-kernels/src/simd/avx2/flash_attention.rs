//! Scores and softmax of a panel of sixteen queries with a block of keys, for AVX2. A lane belongs
//! to one query. See [`crate::simd::flash_attention`] for the order of sums.

use std::arch::x86_64::{
    __m256, _CMP_EQ_OQ, _mm256_add_ps, _mm256_andnot_ps, _mm256_broadcast_ss, _mm256_cmp_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm256_sub_ps,
};

use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::avx2::vmath::exp;

/// The number of vectors of a panel.
const VECTORS: usize = LANES / 8;

/// The sums of some keys.
type Sums<const M: usize> = [[__m256; VECTORS]; M];

/// See [`crate::simd::flash_attention::scores`].
///
/// # Safety
/// The obligations of that function. The processor must also have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn scores(
    (n, d): (usize, usize),
    mut keys: TileA,
    queries: TileB,
    mut to: TileC,
) {
    let mut rest = n;
    while rest > 0 {
        // SAFETY: these keys are among the `n` keys that the caller guarantees.
        let tall = unsafe {
            match rest {
                6.. => scores_tile::<6>(d, keys, queries, to),
                4.. => scores_tile::<4>(d, keys, queries, to),
                2.. => scores_tile::<2>(d, keys, queries, to),
                _ => scores_tile::<1>(d, keys, queries, to),
            }
        };
        keys.data = keys.data.wrapping_add(tall * keys.row_stride);
        to.data = to.data.wrapping_add(tall * to.row_stride);
        rest -= tall;
    }
}

/// The scores of `M` keys. Returns `M`. The partial sums that wait for others are in memory.
///
/// # Safety
/// The obligations of [`scores`], for `M` keys.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_tile<const M: usize>(d: usize, keys: TileA, queries: TileB, to: TileC) -> usize {
    // SAFETY: the caller guarantees `M` keys and the queries, each with `d` elements, and a place
    // for each score.
    unsafe {
        let one = |first: usize| partial_sums::<M>((first, d), keys, queries);
        let two = |first: usize| add(one(first), one(first + 1));
        let sums = add(add(two(0), two(2)), add(two(4), two(6)));
        for (m, sums) in sums.into_iter().enumerate() {
            let place = to.data.wrapping_add(m * to.row_stride);
            for (v, sum) in sums.into_iter().enumerate() {
                _mm256_storeu_ps(place.wrapping_add(8 * v), sum);
            }
        }
    }
    M
}

/// The sums over the elements from `first` on whose indices differ by multiples of 8.
///
/// # Safety
/// The obligations of [`scores_tile`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn partial_sums<const M: usize>(
    (first, d): (usize, usize),
    keys: TileA,
    queries: TileB,
) -> Sums<M> {
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; M];
    for i in (first..d).step_by(8) {
        // SAFETY: `i` is below `d`, and the caller guarantees the elements.
        unsafe {
            let query = queries.data.wrapping_add(i * queries.stride);
            let lanes: [__m256; VECTORS] =
                std::array::from_fn(|v| _mm256_loadu_ps(query.wrapping_add(8 * v)));
            let key = keys.data.wrapping_add(i * keys.stride);
            for (m, sums) in sums.iter_mut().enumerate() {
                let key = _mm256_broadcast_ss(&*key.wrapping_add(m * keys.row_stride));
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = _mm256_fmadd_ps(key, lanes, *sum);
                }
            }
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn add<const M: usize>(a: Sums<M>, b: Sums<M>) -> Sums<M> {
    std::array::from_fn(|m| std::array::from_fn(|v| _mm256_add_ps(a[m][v], b[m][v])))
}

/// See [`crate::simd::flash_attention::softmax`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn softmax(scores: &mut [[f32; LANES]], first: usize) -> BlockSoftmax {
    let (mut greatest, mut totals) = ([0.0; LANES], [0.0; LANES]);
    let none = _mm256_set1_ps(f32::NEG_INFINITY);
    for lane in (0..LANES).step_by(8) {
        let mut most = none;
        for lanes in &*scores {
            // SAFETY: eight elements exist from `lane` on. The instruction returns its second
            // operand if one is NaN, so a NaN score is ignored.
            most = unsafe { _mm256_max_ps(_mm256_loadu_ps(lanes[lane..].as_ptr()), most) };
        }
        // The base is finite, even if a query has no visible key.
        let unseen = _mm256_cmp_ps::<_CMP_EQ_OQ>(most, none);
        let base = _mm256_andnot_ps(unseen, most);
        let mut sums = [_mm256_setzero_ps(); 8];
        for (key, lanes) in (first..).zip(&mut *scores) {
            let lanes = &mut lanes[lane..];
            // SAFETY: eight elements exist from `lane` on.
            unsafe {
                let power = exp(_mm256_sub_ps(_mm256_loadu_ps(lanes.as_ptr()), base));
                _mm256_storeu_ps(lanes.as_mut_ptr(), power);
                sums[key % 8] = _mm256_add_ps(sums[key % 8], power);
            }
        }
        let half: [__m256; 4] = std::array::from_fn(|i| _mm256_add_ps(sums[i], sums[i + 4]));
        let quarter: [__m256; 2] = std::array::from_fn(|i| _mm256_add_ps(half[i], half[i + 2]));
        let total = _mm256_add_ps(quarter[0], quarter[1]);
        // SAFETY: both arrays have eight elements from `lane` on.
        unsafe {
            _mm256_storeu_ps(greatest[lane..].as_mut_ptr(), most);
            _mm256_storeu_ps(totals[lane..].as_mut_ptr(), total);
        }
    }
    (greatest, totals)
}
