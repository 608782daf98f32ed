//! Layer norms (Ba et al. 2016, arXiv:1607.06450), which encoders have between matrix
//! multiplications. RMS norms are fused with the multiplications that read them.

use crate::isa::{Isa, compiled_for_each_isa};
use crate::partition::{SharedOutput, parallel_ranges};
use crate::work::{Input, Work};

/// `(x - mean) / sqrt(variance + eps) * weight + bias`, row by row. The inputs are float32: the
/// rows `[rows, k]`, the weight `[k]`, and an optional bias `[k]`.
pub struct LayerNorm {
    /// The number of rows of the input.
    pub rows: usize,
    /// The number of elements of a row.
    pub k: usize,
    /// Epsilon, added to the variance.
    pub eps: f32,
    /// Whether there is a bias.
    pub bias: bool,
    /// The instruction set.
    pub isa: Isa,
}

impl Work for LayerNorm {
    fn outputs(&self) -> usize {
        self.rows * self.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let floats = |i: usize| {
            // SAFETY: `layer_norm` passes float32 arrays in this order.
            inputs.get(i).map_or(&[][..], |i| unsafe { i.as_slice() })
        };
        let (x, weight) = (floats(0), floats(1));
        let bias = self.bias.then(|| floats(2));
        let &Self {
            rows, k, eps, isa, ..
        } = self;
        let out = SharedOutput::new(output);
        parallel_ranges(rows, rows * k * 4, &|from, to| {
            let x = &x[from * k..to * k];
            // SAFETY: no other part of the job writes these rows.
            let out = unsafe { out.slice_mut(from * k, (to - from) * k) };
            normalize(isa, x, (weight, bias, eps), out);
        });
    }
}

/// A weight, a bias and epsilon.
type Parameters<'a> = (&'a [f32], Option<&'a [f32]>, f32);

compiled_for_each_isa! {
    fn normalize(x: &[f32], parameters: Parameters<'_>, out: &mut [f32]) = normalize_with;
}

#[inline(always)]
fn normalize_with(x: &[f32], (weight, bias, eps): Parameters<'_>, out: &mut [f32]) {
    let k = weight.len();
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
        let mean = sum(x, |v| v) / k as f32;
        let variance = sum(x, |v| (v - mean) * (v - mean)) / k as f32;
        let factor = 1.0 / (variance + eps).sqrt();
        let both = out.iter_mut().zip(x).zip(weight);
        match bias {
            Some(bias) => both
                .zip(bias)
                .for_each(|(((out, x), w), b)| *out = (x - mean) * factor * w + b),
            None => both.for_each(|((out, x), w)| *out = (x - mean) * factor * w),
        }
    }
}

/// The sum of `f` over the elements. It has one partial sum per lane, so that the loop is
/// vectorized.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (head, tail) = x.as_chunks::<16>();
    for part in head {
        for (lane, v) in lanes.iter_mut().zip(part) {
            *lane += f(*v);
        }
    }
    lanes.iter().sum::<f32>() + tail.iter().map(|v| f(*v)).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    #[test]
    fn rows_are_those_of_the_formula_in_float64() {
        for (rows, k) in [(1, 1), (3, 5), (7, 16), (40, 384), (2, 1027)] {
            // The values are far from zero. There, a variance from sums of squares would lose
            // digits.
            let x: Vec<f32> = noise(rows * k, 1).iter().map(|v| v * 3.0 + 20.0).collect();
            let (weight, bias) = (noise(k, 2), noise(k, 3));
            with_each(|isa| {
                for bias in [None, Some(bias.as_slice())] {
                    let work = LayerNorm {
                        rows,
                        k,
                        eps: 1e-5,
                        bias: bias.is_some(),
                        isa,
                    };
                    let mut inputs = vec![Input::from_slice(&x), Input::from_slice(&weight)];
                    inputs.extend(bias.map(Input::from_slice));
                    let mut out = vec![f32::NAN; work.outputs()];
                    // SAFETY: the inputs are float32 of these sizes, in this order.
                    unsafe { work.run(&inputs, &mut out) };
                    for (x, out) in x.chunks(k).zip(out.chunks(k)) {
                        let wide = |v: &f32| f64::from(*v);
                        let mean = x.iter().map(wide).sum::<f64>() / k as f64;
                        let variance =
                            x.iter().map(|v| (wide(v) - mean).powi(2)).sum::<f64>() / k as f64;
                        for i in 0..k {
                            let normalized = (wide(&x[i]) - mean) / (variance + 1e-5).sqrt();
                            let wanted =
                                normalized * wide(&weight[i]) + bias.map_or(0.0, |b| wide(&b[i]));
                            let error = (f64::from(out[i]) - wanted).abs();
                            assert!(error < 2e-5, "{isa:?} {rows} {k}: {} {wanted}", out[i]);
                        }
                    }
                }
            });
        }
    }
}
