//! Attention of a panel of sixteen queries with a block of keys, for AVX-512. A lane belongs to one
//! query. See [`crate::simd::flash_attention`] for the order of sums.

use std::arch::x86_64::{
    __m512, _CMP_EQ_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::avx512::vmath::exp_of_negative;

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
#[target_feature(enable = "avx512f")]
unsafe fn scores_with<const D: usize>(
    (n, d): (usize, usize),
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
    to: *mut f32,
) {
    let mut from = 0;
    while from < n {
        // The latency of additions limits a tile with few keys. So the last two tiles divide their
        // keys evenly.
        let tall = match n - from {
            rest if rest > MAX_KEYS && rest < 2 * MAX_KEYS => rest.div_ceil(2),
            rest => rest.min(MAX_KEYS),
        };
        let operands = (
            (keys.wrapping_add(from * row_stride), row_stride),
            queries,
            to.wrapping_add(from * LANES),
        );
        // SAFETY: these keys are among the `n` keys that the caller guarantees.
        unsafe {
            match tall {
                7 => scores_tile::<7, D>(d, operands),
                6 => scores_tile::<6, D>(d, operands),
                5 => scores_tile::<5, D>(d, operands),
                4 => scores_tile::<4, D>(d, operands),
                3 => scores_tile::<3, D>(d, operands),
                2 => scores_tile::<2, D>(d, operands),
                _ => scores_tile::<1, D>(d, operands),
            }
        }
        from += tall;
    }
}

/// Keys with their row stride, the queries, and the address of the scores.
type Operands = ((*const f32, usize), *const f32, *mut f32);

/// The scores of `M` keys.
///
/// # Safety
/// The obligations of [`scores`], for `M` keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scores_tile<const M: usize, const D: usize>(d: usize, (keys, queries, to): Operands) {
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
        for (m, sum) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(to.wrapping_add(m * LANES), sum);
        }
    }
}

/// The sums over the elements from `first` on whose indices differ by multiples of 8.
///
/// # Safety
/// The obligations of [`scores_tile`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn partial_sums<const M: usize, const D: usize>(
    (first, d): (usize, usize),
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
) -> [__m512; M] {
    let (d, row_stride) = if D > 0 { (D, D) } else { (d, row_stride) };
    let mut sums = [_mm512_setzero_ps(); M];
    for i in (first..d).step_by(8) {
        // SAFETY: `i` is below `d`, and the caller guarantees the elements.
        unsafe {
            let lanes = _mm512_loadu_ps(queries.wrapping_add(i * LANES));
            let key = keys.wrapping_add(i);
            for (m, sum) in sums.iter_mut().enumerate() {
                let key = _mm512_set1_ps(*key.wrapping_add(m * row_stride));
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
    // Four independent maxima hide the latency.
    let mut most = [none; 4];
    let (fours, last) = scores.as_chunks::<4>();
    for four in fours.iter().map(<[_; 4]>::as_slice).chain([last]) {
        for (most, lanes) in most.iter_mut().zip(four) {
            // SAFETY: sixteen elements exist. The instruction returns its second operand if one is
            // NaN, so a NaN score is ignored.
            *most = unsafe { _mm512_max_ps(_mm512_loadu_ps(lanes.as_ptr()), *most) };
        }
    }
    let most = _mm512_max_ps(
        _mm512_max_ps(most[0], most[1]),
        _mm512_max_ps(most[2], most[3]),
    );
    // The base is finite, even if a query has no visible key.
    let unseen = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(most, none);
    let base = _mm512_mask_mov_ps(most, unseen, _mm512_setzero_ps());
    let power = |lanes: &mut [f32; LANES]| {
        // SAFETY: sixteen elements exist.
        unsafe {
            let power = exp_of_negative(_mm512_sub_ps(_mm512_loadu_ps(lanes.as_ptr()), base));
            _mm512_storeu_ps(lanes.as_mut_ptr(), power);
            power
        }
    };
    let mut sums = [_mm512_setzero_ps(); 8];
    // Whole groups of eight keys keep their sums in registers.
    let until = scores.len().min(first.next_multiple_of(8) - first);
    let (head, rest) = scores.split_at_mut(until);
    let (eights, tail) = rest.as_chunks_mut::<8>();
    for (key, lanes) in (first..).zip(head) {
        sums[key % 8] = _mm512_add_ps(sums[key % 8], power(lanes));
    }
    for eight in eights {
        for (sum, lanes) in sums.iter_mut().zip(eight) {
            *sum = _mm512_add_ps(*sum, power(lanes));
        }
    }
    for (sum, lanes) in sums.iter_mut().zip(tail) {
        *sum = _mm512_add_ps(*sum, power(lanes));
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

/// See [`crate::simd::flash_attention::add_values`].
///
/// # Safety
/// The obligations of that function. The processor must also have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn add_values(
    (queries, n, d): (usize, usize, usize),
    (weights, values): (TileA, TileB),
    (to, factors): (TileC, &[[f32; LANES]; 2]),
) {
    let wide = d / (2 * LANES) * 2 * LANES;
    let mut query = 0;
    while query < queries {
        let weights = TileA {
            data: weights.data.wrapping_add(query * weights.row_stride),
            ..weights
        };
        let at = |lane: usize| {
            let values = TileB {
                data: values.data.wrapping_add(lane),
                ..values
            };
            let to = TileC {
                data: to.data.wrapping_add(query * to.row_stride + lane),
                ..to
            };
            (n, weights, values, to)
        };
        let factors = [&factors[0][query..], &factors[1][query..]];
        let rest = queries - query;
        // SAFETY: these queries and lanes are among those that the caller guarantees.
        unsafe {
            for lane in (0..wide).step_by(2 * LANES) {
                match rest {
                    8.. => values_tile::<8, 2>(at(lane), factors),
                    4.. => values_tile::<4, 2>(at(lane), factors),
                    2.. => values_tile::<2, 2>(at(lane), factors),
                    _ => values_tile::<1, 2>(at(lane), factors),
                }
            }
            if wide < d {
                match rest {
                    8.. => values_tile::<8, 1>(at(wide), factors),
                    4.. => values_tile::<4, 1>(at(wide), factors),
                    2.. => values_tile::<2, 1>(at(wide), factors),
                    _ => values_tile::<1, 1>(at(wide), factors),
                }
            }
        }
        query += match rest {
            8.. => 8,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
    }
}

/// Adds the weighted sums of `M` queries, in `V` times sixteen lanes.
///
/// # Safety
/// The obligations of [`add_values`], for these queries and lanes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn values_tile<const M: usize, const V: usize>(
    (n, weights, values, to): (usize, TileA, TileB, TileC),
    factors: [&[f32]; 2],
) {
    let [before, block] = factors.map(|factors| &factors[..M]);
    // SAFETY: the caller guarantees `n` weights of `M` queries, `n` values, and the sums.
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
            let (before, block) = (_mm512_set1_ps(before[m]), _mm512_set1_ps(block[m]));
            for (v, sum) in sums.into_iter().enumerate() {
                let place = place.wrapping_add(v * LANES);
                let old = _mm512_mul_ps(_mm512_loadu_ps(place), before);
                _mm512_storeu_ps(place, _mm512_add_ps(old, _mm512_mul_ps(sum, block)));
            }
        }
    }
}
