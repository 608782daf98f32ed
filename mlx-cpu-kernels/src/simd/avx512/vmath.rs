//! Element-wise functions with AVX-512. The steps are those of `avx2/vmath.rs`.

use std::arch::x86_64::{
    __m512, __mmask16, _CMP_LT_OQ, _CMP_NLT_UQ, _mm256_loadu_si256, _mm512_abs_ps,
    _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_mask_mov_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_maskz_mul_ps, _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps,
    _mm512_rcp14_ps, _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_xor_si512,
};

use crate::simd::portable::vmath::{
    EXP_MAX, EXP_MIN, EXP_POLY, GELU_CUBIC, Gate, LN_2, NORMAL_MAX, NORMAL_POLY, NORMAL_TAIL,
    ROUND_BIAS, SQRT_2_OVER_PI,
};

/// Converts float16 to float32. Stops at the end of the shorter slice.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn f16_to_f32(from: &[u16], to: &mut [f32]) {
    let n = from.len().min(to.len());
    let (from, from_rest) = from[..n].as_chunks::<16>();
    let (to, to_rest) = to[..n].as_chunks_mut::<16>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both slices have sixteen elements.
        unsafe {
            let sixteen = _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_storeu_ps(to.as_mut_ptr(), sixteen);
        }
    }
    if !to_rest.is_empty() {
        let (mut last, mut wide) = ([0u16; 16], [0.0f32; 16]);
        last[..from_rest.len()].copy_from_slice(from_rest);
        // SAFETY: both arrays have sixteen elements.
        unsafe {
            let sixteen = _mm512_cvtph_ps(_mm256_loadu_si256(last.as_ptr().cast()));
            _mm512_storeu_ps(wide.as_mut_ptr(), sixteen);
        }
        to_rest.copy_from_slice(&wide[..to_rest.len()]);
    }
}

/// [`crate::simd::portable::vmath::exp`] of sixteen elements.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn exp(x: __m512) -> __m512 {
    let all = _mm512_set1_ps;
    let least = all(EXP_MIN);
    // The instructions return the second operand if either is NaN, so NaN is kept.
    let bounded = _mm512_max_ps(least, _mm512_min_ps(all(EXP_MAX), x));
    let shifted = _mm512_fmadd_ps(bounded, all(std::f32::consts::LOG2_E), all(ROUND_BIAS));
    let n = _mm512_sub_ps(shifted, all(ROUND_BIAS));
    let r = _mm512_fnmadd_ps(n, all(LN_2[0]), bounded);
    let r = _mm512_fnmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(EXP_POLY[0]);
    for factor in &EXP_POLY[1..] {
        p = _mm512_fmadd_ps(p, r, all(*factor));
    }
    let value = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), all(1.0));
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    let power = _mm512_add_epi32(power, _mm512_castps_si512(all(1.0)));
    let power = _mm512_mul_ps(value, _mm512_castsi512_ps(power));
    // Below the minimum, the result is zero.
    let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, least);
    _mm512_mask_mov_ps(power, below, _mm512_setzero_ps())
}

/// [`exp`] of sixteen elements, none of them positive. It needs no bounds: below the minimum the
/// result is zero, whatever the earlier steps compute.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn exp_of_negative(x: __m512) -> __m512 {
    let all = _mm512_set1_ps;
    let shifted = _mm512_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(ROUND_BIAS));
    let n = _mm512_sub_ps(shifted, all(ROUND_BIAS));
    let r = _mm512_fnmadd_ps(n, all(LN_2[0]), x);
    let r = _mm512_fnmadd_ps(n, all(LN_2[1]), r);
    let mut p = all(EXP_POLY[0]);
    for factor in &EXP_POLY[1..] {
        p = _mm512_fmadd_ps(p, r, all(*factor));
    }
    let value = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), all(1.0));
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    let power = _mm512_add_epi32(power, _mm512_castps_si512(all(1.0)));
    // A comparison with NaN is true here, so NaN is kept.
    let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, all(EXP_MIN));
    _mm512_maskz_mul_ps(kept, value, _mm512_castsi512_ps(power))
}

/// `x / y` with an error of about a unit in the last place, for `y >= 1`. It estimates the inverse,
/// and a Newton step doubles the number of correct bits. This is faster than a division.
#[inline]
#[target_feature(enable = "avx512f")]
fn quotient(x: __m512, y: __m512) -> __m512 {
    let near = _mm512_rcp14_ps(y);
    let rest = _mm512_fnmadd_ps(y, near, _mm512_set1_ps(1.0));
    _mm512_mul_ps(x, _mm512_fmadd_ps(rest, near, near))
}

/// `gate(x) * up`; see [`Gate::apply`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn apply_gate(gate: Gate, x: __m512, up: __m512) -> __m512 {
    _mm512_mul_ps(activate(gate, x), up)
}

/// [`Gate::apply`] of sixteen elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn activate(gate: Gate, x: __m512) -> __m512 {
    let all = _mm512_set1_ps;
    let negative = |x: __m512| {
        let (x, sign) = (_mm512_castps_si512(x), _mm512_castps_si512(all(-0.0)));
        _mm512_castsi512_ps(_mm512_xor_si512(x, sign))
    };
    match gate {
        Gate::Silu => quotient(x, _mm512_add_ps(all(1.0), exp(negative(x)))),
        Gate::Gelu => {
            // The instruction returns the second operand if either is NaN, so NaN is kept.
            let a = _mm512_min_ps(all(NORMAL_MAX), _mm512_abs_ps(x));
            let t = quotient(all(1.0), _mm512_fmadd_ps(all(NORMAL_TAIL), a, all(1.0)));
            let mut p = all(NORMAL_POLY[0]);
            for factor in &NORMAL_POLY[1..] {
                p = _mm512_fmadd_ps(p, t, all(*factor));
            }
            let power = exp_of_negative(_mm512_mul_ps(_mm512_mul_ps(all(-0.5), a), a));
            let tail = _mm512_mul_ps(_mm512_mul_ps(p, t), power);
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, all(0.0));
            let share = _mm512_mask_mov_ps(_mm512_sub_ps(all(1.0), tail), below, tail);
            _mm512_mul_ps(x, share)
        }
        Gate::GeluTanh => {
            let cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
            let inner = _mm512_fmadd_ps(all(GELU_CUBIC), cube, x);
            // With `z = SQRT_2_OVER_PI * inner`, `(1 + tanh(z)) / 2` is `1 / (1 + exp(-2 z))`.
            let power = exp(negative(_mm512_mul_ps(all(2.0 * SQRT_2_OVER_PI), inner)));
            quotient(x, _mm512_add_ps(all(1.0), power))
        }
        // A comparison with NaN is false, so NaN is kept.
        Gate::Relu => {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, all(0.0));
            _mm512_mask_mov_ps(x, less, _mm512_setzero_ps())
        }
    }
}

/// The mask of the first `lanes` lanes, at most sixteen.
pub(crate) fn lane_mask(lanes: usize) -> __mmask16 {
    ((1_u32 << lanes.min(16)) - 1) as __mmask16
}

/// `gates = gate(gates) * ups`, of equal lengths.
#[target_feature(enable = "avx512f")]
pub(crate) fn gate_mul(gate: Gate, gates: &mut [f32], ups: &[f32]) {
    assert!(gates.len() == ups.len());
    for (gates, ups) in gates.chunks_mut(16).zip(ups.chunks(16)) {
        let lanes = lane_mask(gates.len());
        // SAFETY: both slices have an element for each lane of the mask.
        unsafe {
            let values = _mm512_maskz_loadu_ps(lanes, gates.as_ptr());
            let values = apply_gate(gate, values, _mm512_maskz_loadu_ps(lanes, ups.as_ptr()));
            _mm512_mask_storeu_ps(gates.as_mut_ptr(), lanes, values);
        }
    }
}

/// `values = gate(values)`.
#[target_feature(enable = "avx512f")]
pub(crate) fn gate_apply(gate: Gate, values: &mut [f32]) {
    for values in values.chunks_mut(16) {
        let lanes = lane_mask(values.len());
        // SAFETY: the slice has an element for each lane of the mask.
        unsafe {
            let x = _mm512_maskz_loadu_ps(lanes, values.as_ptr());
            _mm512_mask_storeu_ps(values.as_mut_ptr(), lanes, activate(gate, x));
        }
    }
}

/// `a . b`. Stops at the end of the shorter slice.
#[target_feature(enable = "avx512f")]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Four independent sums hide the latency.
    let mut sums = [_mm512_setzero_ps(); 4];
    for (a, b) in a.chunks(64).zip(b.chunks(64)) {
        let n = a.len().min(b.len());
        for (i, sum) in sums.iter_mut().enumerate().take(n.div_ceil(16)) {
            let lanes = lane_mask(n - 16 * i);
            // SAFETY: both slices have an element for each lane of the mask.
            unsafe {
                let a = _mm512_maskz_loadu_ps(lanes, a.as_ptr().add(16 * i));
                let b = _mm512_maskz_loadu_ps(lanes, b.as_ptr().add(16 * i));
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
    }
    let [a, b, c, d] = sums;
    _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)))
}
