//! Scalar definitions of exponentials, gates and dot products. Vector kernels follow the same
//! steps.

/// Below this input, [`exp`] returns zero, because the exact result would be subnormal.
pub(crate) const EXP_MIN: f32 = -87.33;

/// Above this input, [`exp`] is constant.
pub(crate) const EXP_MAX: f32 = 88.37;

/// Adding 1.5 * 2^23 rounds a float to an integer, which is then in the lowest bits.
pub(crate) const ROUND_BIAS: f32 = 12_582_912.0;

/// `ln 2` as the sum of two parts. The first part has few bits, so an integer times the first part
/// is exact.
pub(crate) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// The coefficients of Cephes' `expf` (S. Moshier), from the highest power down.
pub(crate) const EXP_POLY: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// `exp(x)` with an error of about two units in the last place, in operations that every vector
/// unit has. A NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let high = if x > EXP_MAX { EXP_MAX } else { x };
    let bounded = if high < EXP_MIN { EXP_MIN } else { high };
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND_BIAS;
    let n = shifted - ROUND_BIAS;
    let r = bounded - n * LN_2[0];
    let r = r - n * LN_2[1];
    let mut p = EXP_POLY[0];
    for factor in &EXP_POLY[1..] {
        p = p * r + factor;
    }
    let value = p * (r * r) + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    // The comparison uses `x`, because the bounded value is never NaN.
    if x < EXP_MIN { 0.0 } else { value * power }
}

/// `ln(1 + exp(x))`, to about 1e-7 of the value.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    // ln(1 + z) = 2 atanh(z / (2 + z)); z is at most 1, so the argument is at most 1/3.
    let z = exp(if x < 0.0 { x } else { -x });
    let s = z / (2.0 + z);
    let square = s * s;
    let mut sum = 1.0 / 13.0;
    for n in [11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / n;
    }
    (if x > 0.0 { x } else { 0.0 }) + 2.0 * s * sum
}

/// `2 / (1 + exp(-2x)) - 1`: the hyperbolic tangent, to about 1e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    2.0 / (1.0 + exp(-2.0 * x)) - 1.0
}

/// Constants of the tanh approximation to `x * Phi(x)`, `0.5 x (1 + tanh(SQRT_2_OVER_PI (x +
/// GELU_CUBIC x^3)))` (Hendrycks and Gimpel 2016): the square root of 2 / pi, and the weight of the
/// cube.
pub(crate) const SQRT_2_OVER_PI: f32 = 0.797_884_6;
pub(crate) const GELU_CUBIC: f32 = 0.044_715;

/// The upper tail of the normal distribution is about `exp(-x^2 / 2)` times a polynomial of
/// `1 / (1 + NORMAL_TAIL x)`, with an error of at most 7.5e-8 (Abramowitz and Stegun 1964,
/// 26.2.17). The coefficients are in the order from the fifth to the first power.
pub(crate) const NORMAL_TAIL: f32 = 0.231_641_9;
pub(crate) const NORMAL_POLY: [f32; 5] = [
    0.530_702_7,
    -0.726_576,
    0.710_706_9,
    -0.142_248_37,
    0.127_414_8,
];

/// Beyond this value the tail underflows to zero in float32.
pub(crate) const NORMAL_MAX: f32 = 40.0;

/// An element-wise activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)`, where `Phi` is the normal distribution function, with an error of about 1e-7.
    Gelu,
    /// `x * Phi(x)` by the tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

impl Gate {
    #[inline(always)]
    pub(crate) fn apply(self, x: f32) -> f32 {
        match self {
            Gate::Silu => x / (1.0 + exp(-x)),
            Gate::Gelu => {
                // `min` would replace NaN by the maximum.
                let a = x.abs();
                let a = if a > NORMAL_MAX { NORMAL_MAX } else { a };
                let t = 1.0 / (1.0 + NORMAL_TAIL * a);
                let mut p = NORMAL_POLY[0];
                for factor in &NORMAL_POLY[1..] {
                    p = p * t + factor;
                }
                let tail = p * t * exp(-0.5 * a * a);
                if x < 0.0 { x * tail } else { x * (1.0 - tail) }
            }
            Gate::GeluTanh => {
                let inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x);
                0.5 * x * (1.0 + tanh(inner))
            }
            // `max` would replace NaN by zero.
            Gate::Relu if x < 0.0 => 0.0,
            Gate::Relu => x,
        }
    }
}

/// `gates = gate(gates) * ups`.
#[inline(always)]
pub(crate) fn gate_mul(gate: Gate, gates: &mut [f32], ups: &[f32]) {
    // There is one loop per gate, so that each loop is vectorized.
    let both = gates.iter_mut().zip(ups);
    match gate {
        Gate::Silu => both.for_each(|(g, u)| *g = Gate::Silu.apply(*g) * u),
        Gate::Gelu => both.for_each(|(g, u)| *g = Gate::Gelu.apply(*g) * u),
        Gate::GeluTanh => both.for_each(|(g, u)| *g = Gate::GeluTanh.apply(*g) * u),
        Gate::Relu => both.for_each(|(g, u)| *g = Gate::Relu.apply(*g) * u),
    }
}

/// `row . x`.
pub(crate) fn dot(row: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (head, tail) = row.as_chunks::<16>();
    let (x_head, x_tail) = x.as_chunks::<16>();
    for (w, x) in head.iter().zip(x_head) {
        for i in 0..16 {
            lanes[i] += w[i] * x[i];
        }
    }
    let rest: f32 = tail.iter().zip(x_tail).map(|(w, x)| w * x).sum();
    lanes.iter().sum::<f32>() + rest
}

/// `y += weights[0] * rows[0] + ...`. Each row must be at least as long as `y`. The order of
/// additions does not depend on an element's position.
#[inline(always)]
pub(crate) fn add_scaled<const N: usize>(y: &mut [f32], rows: [&[f32]; N], weights: [f32; N]) {
    // The lengths are equal, so the loop has no bounds checks and is vectorized.
    let rows = rows.map(|row| &row[..y.len()]);
    for (i, y) in y.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (row, weight) in rows.iter().zip(&weights) {
            sum += row[i] * weight;
        }
        *y += sum;
    }
}

/// Converts bfloat16 to float32. Stops at the end of the shorter slice.
pub(crate) fn bf16_to_f32(from: &[u16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(*from) << 16);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn exponentials_and_tangents() {
        for i in -2000..2000 {
            let x = i as f32 * 0.0435;
            let (got, exact) = (f64::from(super::exp(x)), f64::from(x).exp());
            assert!((got - exact).abs() <= 4e-7 * exact, "{x}: {got} {exact}");
            let difference = (f64::from(super::tanh(x)) - f64::from(x).tanh()).abs();
            assert!(difference < 4e-7, "{x}");
            let (got, exact) = (f64::from(super::softplus(x)), f64::from(x).exp().ln_1p());
            assert!((got - exact).abs() <= 6e-7 * exact, "{x}: {got} {exact}");
        }
        assert_eq!(super::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(super::exp(-1000.0), 0.0);
        assert!(super::exp(f32::NAN).is_nan() && super::softplus(f32::NAN).is_nan());
        assert_eq!(super::softplus(f32::INFINITY), f32::INFINITY);
        assert!(super::exp(1000.0).is_finite() && super::exp(0.0) == 1.0);
    }
}
