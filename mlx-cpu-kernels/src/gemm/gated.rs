//! Element-wise gates outside of matrix products, as in recurrent layers.

use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::portable::vmath::Gate;
use crate::simd::vmath::{gate_apply, gate_mul};
use crate::work::{Input, Work};

/// The number of elements per unit of work. They fit the L1 cache.
const BLOCK: usize = 4096;

/// `gate(x)`, or `gate(x) * y` if there is a second input. The inputs are float32 with `len`
/// elements.
pub struct Gated {
    /// The number of elements.
    pub len: usize,
    /// The function.
    pub gate: Gate,
    /// The instruction set.
    pub isa: Isa,
}

impl Work for Gated {
    fn outputs(&self) -> usize {
        self.len
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: the caller passes row-contiguous float32.
        let floats = |i: usize| unsafe { inputs[i].as_slice::<f32>() };
        let (x, y) = (floats(0), (inputs.len() > 1).then(|| floats(1)));
        let out = SharedOutput::new(output);
        // An exponential costs about as much as sixteen multiplications.
        parallel_ranges(self.len.div_ceil(BLOCK), 16 * self.len, &|first, last| {
            for block in first..last {
                let range = block * BLOCK..self.len.min((block + 1) * BLOCK);
                // SAFETY: no other part of the job writes these elements.
                let out = unsafe { out.slice_mut(range.start, range.len()) };
                out.copy_from_slice(&x[range.clone()]);
                match y {
                    Some(y) => gate_mul(self.isa, self.gate, out, &y[range]),
                    None => gate_apply(self.isa, self.gate, out),
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{exact_gate, noise, with_each};

    #[test]
    fn gates_equal_the_definition() {
        with_each(|isa| {
            for len in [1, 37, 4096, 70_001] {
                let x: Vec<f32> = noise(len, 1).iter().map(|v| 9.0 * v).collect();
                let y = noise(len, 2);
                for gate in [Gate::Silu, Gate::GeluTanh, Gate::Relu] {
                    let work = Gated { len, gate, isa };
                    let run = |inputs: &[Input]| {
                        let mut out = vec![f32::NAN; len];
                        // SAFETY: the inputs are float32 of this length, and outlive the call.
                        unsafe { work.run(inputs, &mut out) };
                        out
                    };
                    let alone = run(&[Input::from_slice(&x)]);
                    let product = run(&[Input::from_slice(&x), Input::from_slice(&y)]);
                    for (i, x) in x.iter().enumerate() {
                        let wanted = exact_gate(gate, f64::from(*x));
                        let near = |got: f32, wanted: f64| (f64::from(got) - wanted).abs() < 2e-6;
                        assert!(near(alone[i], wanted), "{gate:?} {x}");
                        assert!(near(product[i], wanted * f64::from(y[i])), "{gate:?} {x}");
                    }
                }
            }
        });
    }
}
