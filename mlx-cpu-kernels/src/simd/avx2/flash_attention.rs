//! Scores and softmax of a panel of sixteen queries with a block of keys, for AVX2. A lane belongs
//! to one query. See [`crate::simd::flash_attention`] for the order of sums.

use std::arch::x86_64::{
    __m256, _CMP_EQ_OQ, _mm256_add_ps, _mm256_andnot_ps, _mm256_broadcast_ss, _mm256_cmp_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_mul_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_storeu_ps, _mm256_sub_ps,
};

use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::avx2::vmath::exp_of_negative;
use crate::simd::portable::softmax::divide_row;

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
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
    to: *mut f32,
) {
    // SAFETY: the caller guarantees the operands.
    unsafe {
        match (d, row_stride) {
            (32, 32) => scores_with::<32>((n, d), (keys, row_stride), queries, to),
            (64, 64) => scores_with::<64>((n, d), (keys, row_stride), queries, to),
            _ => scores_with::<0>((n, d), (keys, row_stride), queries, to),
        }
    }
}

/// [`scores`] for heads with `D` elements and keys with row stride `D`. If `D` is 0, both are
/// variables, and addresses take more instructions.
///
/// # Safety
/// The obligations of [`scores`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_with<const D: usize>(
    (n, d): (usize, usize),
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
    to: *mut f32,
) {
    let mut from = 0;
    while from < n {
        let operands = (
            (keys.wrapping_add(from * row_stride), row_stride),
            queries,
            to.wrapping_add(from * LANES),
        );
        // SAFETY: these keys are among the `n` keys that the caller guarantees.
        from += unsafe {
            match n - from {
                6.. => scores_tile::<6, D>(d, operands),
                4.. => scores_tile::<4, D>(d, operands),
                2.. => scores_tile::<2, D>(d, operands),
                _ => scores_tile::<1, D>(d, operands),
            }
        };
    }
}

/// Keys with their row stride, the queries, and the address of the scores.
type Operands = ((*const f32, usize), *const f32, *mut f32);

/// The scores of `M` keys. Returns `M`. The partial sums that wait for others are in memory.
///
/// # Safety
/// The obligations of [`scores`], for `M` keys.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_tile<const M: usize, const D: usize>(
    d: usize,
    (keys, queries, to): Operands,
) -> usize {
    // SAFETY: the caller guarantees `M` keys and the queries, each with `d` elements, and space for
    // each score.
    unsafe {
        // This is a macro, because a closure may become a call, which returns its sums in memory.
        macro_rules! two {
            ($first:literal) => {
                add(
                    partial_sums::<M, D>(($first, d), keys, queries),
                    partial_sums::<M, D>(($first + 1, d), keys, queries),
                )
            };
        }
        let sums = add(add(two!(0), two!(2)), add(two!(4), two!(6)));
        for (m, sums) in sums.into_iter().enumerate() {
            let place = to.wrapping_add(m * LANES);
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
unsafe fn partial_sums<const M: usize, const D: usize>(
    (first, d): (usize, usize),
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
) -> Sums<M> {
    let (d, row_stride) = if D > 0 { (D, D) } else { (d, row_stride) };
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; M];
    for i in (first..d).step_by(8) {
        // SAFETY: `i` is below `d`, and the caller guarantees the elements.
        unsafe {
            let query = queries.wrapping_add(i * LANES);
            let lanes: [__m256; VECTORS] =
                std::array::from_fn(|v| _mm256_loadu_ps(query.wrapping_add(8 * v)));
            let key = keys.wrapping_add(i);
            for (m, sums) in sums.iter_mut().enumerate() {
                let key = _mm256_broadcast_ss(&*key.wrapping_add(m * row_stride));
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
        // Four independent maxima hide the latency.
        let mut most = [none; 4];
        let (fours, last) = scores.as_chunks::<4>();
        for four in fours.iter().map(<[_; 4]>::as_slice).chain([last]) {
            for (most, lanes) in most.iter_mut().zip(four) {
                // SAFETY: eight elements exist from `lane` on. The instruction returns its second
                // operand if one is NaN, so a NaN score is ignored.
                let lanes = unsafe { _mm256_loadu_ps(lanes[lane..].as_ptr()) };
                *most = _mm256_max_ps(lanes, *most);
            }
        }
        let most = _mm256_max_ps(
            _mm256_max_ps(most[0], most[1]),
            _mm256_max_ps(most[2], most[3]),
        );
        // The base is finite, even if a query has no visible key.
        let unseen = _mm256_cmp_ps::<_CMP_EQ_OQ>(most, none);
        let base = _mm256_andnot_ps(unseen, most);
        let mut sums = [_mm256_setzero_ps(); 8];
        for (key, lanes) in (first..).zip(&mut *scores) {
            let lanes = &mut lanes[lane..];
            // SAFETY: eight elements exist from `lane` on.
            unsafe {
                let power = exp_of_negative(_mm256_sub_ps(_mm256_loadu_ps(lanes.as_ptr()), base));
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

/// See [`crate::simd::flash_attention::add_values`].
///
/// # Safety
/// The obligations of that function. The processor must also have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn add_values(
    (queries, n, d): (usize, usize, usize),
    (weights, values): (TileA, TileB),
    (to, factors): (TileC, &[[f32; LANES]; 2]),
) {
    let mut query = 0;
    while query < queries {
        let tall = match queries - query {
            // Three tiles of similar height instead of six, six and four rows.
            rest if rest > 12 => 5,
            rest => rest.min(6),
        };
        let weights = TileA {
            data: weights.data.wrapping_add(query * weights.row_stride),
            ..weights
        };
        let factors = [&factors[0][query..], &factors[1][query..]];
        for lane in (0..d).step_by(LANES) {
            let values = TileB {
                data: values.data.wrapping_add(lane),
                ..values
            };
            let to = TileC {
                data: to.data.wrapping_add(query * to.row_stride + lane),
                ..to
            };
            let operands = (n, weights, values, to);
            // SAFETY: these queries and lanes are among those that the caller guarantees.
            unsafe {
                match tall {
                    6 => values_tile::<6>(operands, factors),
                    5 => values_tile::<5>(operands, factors),
                    4 => values_tile::<4>(operands, factors),
                    3 => values_tile::<3>(operands, factors),
                    2 => values_tile::<2>(operands, factors),
                    _ => values_tile::<1>(operands, factors),
                }
            }
        }
        query += tall;
    }
}

/// Adds the weighted sums of `M` queries, in sixteen lanes.
///
/// # Safety
/// The obligations of [`add_values`], for these queries and lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn values_tile<const M: usize>(
    (n, weights, values, to): (usize, TileA, TileB, TileC),
    factors: [&[f32]; 2],
) {
    let [before, block] = factors.map(|factors| &factors[..M]);
    // SAFETY: the caller guarantees `n` weights of `M` queries, `n` values, and the sums.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); VECTORS]; M];
        for i in 0..n {
            let value = values.data.wrapping_add(i * values.stride);
            let lanes: [__m256; VECTORS] =
                std::array::from_fn(|v| _mm256_loadu_ps(value.wrapping_add(8 * v)));
            let weight = weights.data.wrapping_add(i * weights.stride);
            for (m, sums) in sums.iter_mut().enumerate() {
                let weight = _mm256_broadcast_ss(&*weight.wrapping_add(m * weights.row_stride));
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = _mm256_fmadd_ps(weight, lanes, *sum);
                }
            }
        }
        for (m, sums) in sums.into_iter().enumerate() {
            let place = to.data.wrapping_add(m * to.row_stride);
            let (before, block) = (_mm256_set1_ps(before[m]), _mm256_set1_ps(block[m]));
            for (v, sum) in sums.into_iter().enumerate() {
                let place = place.wrapping_add(8 * v);
                let old = _mm256_mul_ps(_mm256_loadu_ps(place), before);
                _mm256_storeu_ps(place, _mm256_add_ps(old, _mm256_mul_ps(sum, block)));
            }
        }
    }
}

/// `to = row / total`. Stops at the end of the shorter slice.
///
/// # Safety
/// The processor must have avx2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn divide(row: &[f32], total: f32, to: &mut [f32]) {
    divide_row(row, total, to);
}
