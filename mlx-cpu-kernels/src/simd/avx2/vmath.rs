//! Element-wise functions and dot products with AVX2: eight float32 at a time.

use crate::simd::portable::vmath::{
    self, EXP_MAX, EXP_MIN, EXP_POLY, GELU_CUBIC, Gate, LN_2, NORMAL_MAX, NORMAL_POLY, NORMAL_TAIL,
    ROUND_BIAS, SQRT_2_OVER_PI,
};

use std::arch::x86_64::{
    __m256, _CMP_LT_OQ, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128, _mm_movehl_ps,
    _mm_shuffle_ps, _mm256_add_epi32, _mm256_add_ps, _mm256_andnot_ps, _mm256_blendv_ps,
    _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_div_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps,
    _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_xor_ps,
};

/// Converts float16 to float32. Stops at the end of the shorter slice.
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn f16_to_f32(from: &[u16], to: &mut [f32]) {
    let n = from.len().min(to.len());
    let (from, from_rest) = from[..n].as_chunks::<8>();
    let (to, to_rest) = to[..n].as_chunks_mut::<8>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both slices have eight elements.
        unsafe {
            let eight = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
            _mm256_storeu_ps(to.as_mut_ptr(), eight);
        }
    }
    let mut last = [0u16; 8];
    last[..from_rest.len()].copy_from_slice(from_rest);
    let mut wide = [0.0f32; 8];
    // SAFETY: both slices have eight elements.
    unsafe {
        let eight = _mm256_cvtph_ps(_mm_loadu_si128(last.as_ptr().cast()));
        _mm256_storeu_ps(wide.as_mut_ptr(), eight);
    }
    to_rest.copy_from_slice(&wide[..to_rest.len()]);
}

/// [`crate::simd::portable::vmath::exp`] of eight elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn exp(x: __m256) -> __m256 {
    let all = _mm256_set1_ps;
    let least = all(EXP_MIN);
    // The instructions return the second operand if either is NaN, so NaN is kept.
    let bounded = _mm256_max_ps(least, _mm256_min_ps(all(EXP_MAX), x));
    let shifted = _mm256_fmadd_ps(bounded, all(std::f32::consts::LOG2_E), all(ROUND_BIAS));
    let n = _mm256_sub_ps(shifted, all(ROUND_BIAS));
    let r = _mm256_fnmadd_ps(n, all(LN_2[0]), bounded);
    let r = _mm256_fnmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(EXP_POLY[0]);
    for factor in &EXP_POLY[1..] {
        p = _mm256_fmadd_ps(p, r, all(*factor));
    }
    let value = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), all(1.0));
    let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    let power = _mm256_add_epi32(power, _mm256_castps_si256(all(1.0)));
    let power = _mm256_mul_ps(value, _mm256_castsi256_ps(power));
    // Below the minimum, the result is zero.
    let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, least);
    _mm256_andnot_ps(below, power)
}

/// [`exp`] of eight elements, none of them positive. It needs no bounds: below the minimum, the
/// result is zero in any case.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn exp_of_negative(x: __m256) -> __m256 {
    let all = _mm256_set1_ps;
    let shifted = _mm256_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(ROUND_BIAS));
    let n = _mm256_sub_ps(shifted, all(ROUND_BIAS));
    let r = _mm256_fnmadd_ps(n, all(LN_2[0]), x);
    let r = _mm256_fnmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(EXP_POLY[0]);
    for factor in &EXP_POLY[1..] {
        p = _mm256_fmadd_ps(p, r, all(*factor));
    }
    let value = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), all(1.0));
    let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    let power = _mm256_add_epi32(power, _mm256_castps_si256(all(1.0)));
    let power = _mm256_mul_ps(value, _mm256_castsi256_ps(power));
    // A comparison with NaN is false, so NaN is kept.
    let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, all(EXP_MIN));
    _mm256_andnot_ps(below, power)
}

/// `gates = gate(gates) * ups`, of equal lengths; see [`Gate::apply`]. The result of an element
/// does not depend on its position.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn gate_mul(gate: Gate, gates: &mut [f32], ups: &[f32]) {
    assert!(gates.len() == ups.len());
    let eight = |gates: &mut [f32; 8], ups: &[f32; 8]| {
        // SAFETY: both slices have eight elements.
        unsafe {
            let values = apply_gate(gate, _mm256_loadu_ps(gates.as_ptr()));
            let values = _mm256_mul_ps(values, _mm256_loadu_ps(ups.as_ptr()));
            _mm256_storeu_ps(gates.as_mut_ptr(), values);
        }
    };
    let (gates, last_gates) = gates.as_chunks_mut::<8>();
    let (ups, last_ups) = ups.as_chunks::<8>();
    gates.iter_mut().zip(ups).for_each(|(g, u)| eight(g, u));
    if !last_gates.is_empty() {
        let (mut last, mut other) = ([0.0; 8], [0.0; 8]);
        last[..last_gates.len()].copy_from_slice(last_gates);
        other[..last_ups.len()].copy_from_slice(last_ups);
        eight(&mut last, &other);
        last_gates.copy_from_slice(&last[..last_gates.len()]);
    }
}

/// `values = gate(values)`. The result of an element does not depend on its position.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn gate_apply(gate: Gate, values: &mut [f32]) {
    let eight = |values: &mut [f32; 8]| {
        // SAFETY: the slice has eight elements.
        unsafe {
            let x = apply_gate(gate, _mm256_loadu_ps(values.as_ptr()));
            _mm256_storeu_ps(values.as_mut_ptr(), x);
        }
    };
    let (values, last) = values.as_chunks_mut::<8>();
    values.iter_mut().for_each(eight);
    if !last.is_empty() {
        let mut eight_last = [0.0; 8];
        eight_last[..last.len()].copy_from_slice(last);
        eight(&mut eight_last);
        last.copy_from_slice(&eight_last[..last.len()]);
    }
}

/// [`Gate::apply`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn apply_gate(gate: Gate, x: __m256) -> __m256 {
    let all = _mm256_set1_ps;
    let negative = |x: __m256| _mm256_xor_ps(x, all(-0.0));
    match gate {
        Gate::Silu => _mm256_div_ps(x, _mm256_add_ps(all(1.0), exp(negative(x)))),
        Gate::Gelu => {
            let a = _mm256_andnot_ps(all(-0.0), x);
            // The instruction returns the second operand if either is NaN, so NaN is kept.
            let a = _mm256_min_ps(all(NORMAL_MAX), a);
            let t = _mm256_div_ps(all(1.0), _mm256_fmadd_ps(all(NORMAL_TAIL), a, all(1.0)));
            let mut p = all(NORMAL_POLY[0]);
            for factor in &NORMAL_POLY[1..] {
                p = _mm256_fmadd_ps(p, t, all(*factor));
            }
            let power = exp_of_negative(_mm256_mul_ps(_mm256_mul_ps(all(-0.5), a), a));
            let tail = _mm256_mul_ps(_mm256_mul_ps(p, t), power);
            let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, all(0.0));
            let share = _mm256_blendv_ps(_mm256_sub_ps(all(1.0), tail), tail, below);
            _mm256_mul_ps(x, share)
        }
        Gate::GeluTanh => {
            let cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
            let inner = _mm256_fmadd_ps(all(GELU_CUBIC), cube, x);
            // With `z = SQRT_2_OVER_PI * inner`, `(1 + tanh(z)) / 2` is `1 / (1 + exp(-2 z))`.
            let power = exp(negative(_mm256_mul_ps(all(2.0 * SQRT_2_OVER_PI), inner)));
            _mm256_div_ps(x, _mm256_add_ps(all(1.0), power))
        }
        // A comparison with NaN is false, so NaN is kept.
        Gate::Relu => _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, all(0.0)), x),
    }
}

/// The sum of the eight elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn horizontal_sum(v: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dot_ptr(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the caller guarantees `n` elements at both addresses.
    unsafe {
        let mut sum = _mm256_setzero_ps();
        let vectorized = n / 8 * 8;
        let mut i = 0;
        while i < vectorized {
            sum = _mm256_fmadd_ps(_mm256_loadu_ps(a.add(i)), _mm256_loadu_ps(b.add(i)), sum);
            i += 8;
        }
        let mut total = horizontal_sum(sum);
        while i < n {
            total += *a.add(i) * *b.add(i);
            i += 1;
        }
        total
    }
}

/// [`vmath::add_scaled`] for this instruction set.
#[target_feature(enable = "avx2")]
pub(crate) fn add_scaled<const N: usize>(y: &mut [f32], rows: [&[f32]; N], weights: [f32; N]) {
    vmath::add_scaled(y, rows, weights);
}

/// `a . b`.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the length is that of the shorter slice. The caller guarantees the features.
    unsafe { dot_ptr(a.as_ptr(), b.as_ptr(), a.len().min(b.len())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns inputs that are not positive: usual values, values at and near the limits, infinity
    /// and NaN.
    fn inputs() -> Vec<[f32; 8]> {
        let mut all: Vec<[f32; 8]> = (0..4000)
            .map(|i| std::array::from_fn(|j| -0.003 * (8 * i + j) as f32))
            .collect();
        let payload = f32::from_bits(0x7fc0_0001);
        all.push([
            -0.0,
            0.0,
            EXP_MIN,
            EXP_MIN.next_down(),
            EXP_MIN.next_up(),
            -1e30,
            -3e38,
            -1e-40,
        ]);
        all.push([
            f32::NEG_INFINITY,
            f32::NAN,
            payload,
            -f32::NAN,
            -88.0,
            -87.0,
            -1.0,
            -104.0,
        ]);
        all
    }

    #[test]
    fn exponentials_without_bounds_have_the_bits_of_those_with_bounds() {
        if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
            return;
        }
        for x in inputs() {
            let (mut with, mut without) = ([0.0f32; 8], [0.0f32; 8]);
            // SAFETY: the processor has avx2 and fma, and the arrays have eight elements.
            unsafe {
                let x = _mm256_loadu_ps(x.as_ptr());
                _mm256_storeu_ps(with.as_mut_ptr(), exp(x));
                _mm256_storeu_ps(without.as_mut_ptr(), exp_of_negative(x));
            }
            for i in 0..8 {
                let equal = with[i].to_bits() == without[i].to_bits();
                let no_number = with[i].is_nan() && without[i].is_nan();
                assert!(equal || no_number, "{}: {} {}", x[i], with[i], without[i]);
            }
        }
    }

    #[test]
    fn exponentials_of_both_widths_have_the_same_bits() {
        use crate::simd::avx512::vmath as wide;
        use std::arch::x86_64::{_mm512_loadu_ps, _mm512_storeu_ps};
        if !is_x86_feature_detected!("avx512f") || !is_x86_feature_detected!("fma") {
            return;
        }
        for pair in inputs().chunks_exact(2) {
            let (mut narrow, mut both) = ([0.0f32; 16], [0.0f32; 16]);
            // SAFETY: the processor has the features, and the arrays have sixteen elements.
            unsafe {
                for (i, x) in pair.iter().enumerate() {
                    let power = exp_of_negative(_mm256_loadu_ps(x.as_ptr()));
                    _mm256_storeu_ps(narrow[8 * i..].as_mut_ptr(), power);
                }
                let x = _mm512_loadu_ps(pair.as_flattened().as_ptr());
                _mm512_storeu_ps(both.as_mut_ptr(), wide::exp_of_negative(x));
            }
            for (narrow, both) in narrow.iter().zip(&both) {
                let equal = narrow.to_bits() == both.to_bits();
                assert!(equal || narrow.is_nan() && both.is_nan(), "{narrow} {both}");
            }
        }
    }
}
