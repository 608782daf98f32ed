//! Element-wise functions. MLX computes them on one core, and exponentials without vector
//! instructions.

use crate::isa::{Isa, compiled_for_each_isa};
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::portable::vmath::{exp, softplus, tanh};
use crate::work::{Input, Work};

/// The number of elements per unit of work. They fit the L1 cache.
const BLOCK: usize = 4096;

/// A function of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `ln(1 + exp(x))`.
    Softplus,
    /// The hyperbolic tangent.
    Tanh,
}

/// A function of each element. The input is row-contiguous float32 with `len` elements.
pub struct Elementwise {
    /// The number of elements.
    pub len: usize,
    /// The function.
    pub function: Function,
}

impl Work for Elementwise {
    fn outputs(&self) -> usize {
        self.len
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let isa = Isa::detect();
        // SAFETY: the caller passes row-contiguous float32.
        let x = unsafe { inputs[0].as_slice::<f32>() };
        let out = SharedOutput::new(output);
        // An exponential costs about as much as sixteen multiplications.
        parallel_ranges(self.len.div_ceil(BLOCK), 16 * self.len, &|first, last| {
            for block in first..last {
                let range = block * BLOCK..self.len.min((block + 1) * BLOCK);
                // SAFETY: blocks do not overlap, and only one thread processes each block.
                let out = unsafe { out.slice_mut(range.start, range.len()) };
                apply(isa, self.function, &x[range], out);
            }
        });
    }
}

compiled_for_each_isa! {
    fn apply(function: Function, x: &[f32], out: &mut [f32]) = apply_with;
}

#[inline(always)]
fn apply_with(function: Function, x: &[f32], out: &mut [f32]) {
    let both = out.iter_mut().zip(x);
    match function {
        Function::Sigmoid => both.for_each(|(out, x)| *out = 1.0 / (1.0 + exp(-x))),
        Function::Softplus => both.for_each(|(out, x)| *out = softplus(*x)),
        Function::Tanh => both.for_each(|(out, x)| *out = tanh(*x)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    #[test]
    fn functions_equal_their_definitions() {
        with_each(|_| {
            for len in [1, 37, 4096, 70_001] {
                let mut x: Vec<f32> = noise(len, 1).iter().map(|v| 9.0 * v).collect();
                x[0] = -200.0;
                if let [.., last] = x.as_mut_slice() {
                    *last = if len > 1 { 200.0 } else { *last };
                }
                for function in [Function::Sigmoid, Function::Softplus, Function::Tanh] {
                    let mut out = vec![f32::NAN; len];
                    let work = Elementwise { len, function };
                    // SAFETY: the input is float32 with `len` elements.
                    unsafe { work.run(&[Input::from_slice(&x)], &mut out) };
                    for (x, out) in x.iter().zip(out) {
                        let x = f64::from(*x);
                        let wanted = match function {
                            Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                            Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
                            Function::Tanh => x.tanh(),
                        };
                        let error = (f64::from(out) - wanted).abs();
                        assert!(
                            error < 1e-6 + 1e-6 * wanted.abs(),
                            "{function:?} {x}: {out}"
                        );
                    }
                }
            }
        });
    }

    #[test]
    fn nan_stays_nan() {
        with_each(|_| {
            for function in [Function::Sigmoid, Function::Softplus, Function::Tanh] {
                let mut out = [0.0];
                let work = Elementwise { len: 1, function };
                // SAFETY: the input is float32 with one element.
                unsafe { work.run(&[Input::from_slice(&[f32::NAN])], &mut out) };
                assert!(out[0].is_nan(), "{function:?}");
            }
        });
    }
}
