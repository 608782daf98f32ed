//! Chooses the kernels of a product by its number of rows, the formats of its matrices and the
//! instruction set.

use std::cell::RefCell;

use crate::gemm::activations::{Forms, Scratch};
use crate::gemm::packed_gemm::GemmTask;
use crate::gemm::product::{MAX_PARTS, MatrixData, Product};
use crate::partition::SharedOutput;
#[cfg(target_arch = "x86_64")]
use crate::partition::parallel_ranges;
#[cfg(target_arch = "x86_64")]
use crate::prefill_inputs::PrefillInputs;
#[cfg(target_arch = "x86_64")]
use crate::simd::vmath::gate_apply;
use crate::work::{Input, Work};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for Product {
    fn outputs(&self) -> usize {
        self.rows * self.n
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: the caller guarantees the inputs.
        unsafe {
            self.with_task(inputs, |task, packings| {
                task.compute(packings, &SharedOutput::new(output));
            });
        }
        if !self.is_intact() {
            output.fill(f32::NAN);
        }
    }
}

impl Product {
    /// Calls `with` with the product of these inputs, and with the packings of its quantized
    /// matrices.
    ///
    /// # Safety
    /// The obligations of [`Work::run`].
    pub(crate) unsafe fn with_task(
        &self,
        inputs: &[Input],
        with: impl FnOnce(&GemmTask<'_>, &[(u32, usize)]),
    ) {
        let mut inputs = inputs.iter();
        fn floats(input: Option<&Input>) -> &[f32] {
            // SAFETY: `Projection::plan` and its caller pass arrays of float32, or of words of the
            // same size, in the documented order.
            input.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let x = floats(inputs.next());
        let norm = self.eps.map(|eps| (floats(inputs.next()), eps));
        let mut packings: Vec<(u32, usize)> = Vec::with_capacity(MAX_PARTS);
        let mut data: Vec<(MatrixData<'_>, Option<&[f32]>)> = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            // SAFETY: the note for `floats` above applies to these inputs.
            let matrix = unsafe {
                part.kind
                    .matrix(self.k, part.stored.as_ref(), &mut inputs, &mut packings)
            };
            let bias = part.bias.then(|| floats(inputs.next()));
            data.push((matrix, bias));
        }
        let residual = self.residual.then(|| floats(inputs.next()));
        let task = GemmTask {
            product: self,
            x,
            norm,
            data: &data,
            residual,
        };
        with(&task, &packings);
    }
}

impl GemmTask<'_> {
    /// Applies the activation to the outputs. Only kernels that do not fuse the activation need
    /// this pass.
    #[cfg(target_arch = "x86_64")]
    fn activate(&self, out: &SharedOutput) {
        let Product {
            rows,
            n,
            isa,
            activation: Some(activation),
            ..
        } = *self.product
        else {
            return;
        };
        parallel_ranges(rows, rows * n * 16, &|from, to| {
            // SAFETY: no other part of the job writes these rows.
            let outputs = unsafe { out.slice_mut(from * n, (to - from) * n) };
            gate_apply(isa, activation, outputs);
        });
    }

    /// Computes the product with the kernels that suit it. `packings` are the distinct packings of
    /// its quantized matrices.
    pub(crate) fn compute(&self, packings: &[(u32, usize)], out: &SharedOutput) {
        let product = self.product;
        #[cfg(target_arch = "x86_64")]
        if !product.float_inputs {
            if self.fits_amx_quantized() {
                self.run_amx_quantized(packings, out);
                return self.activate(out);
            }
            if self.fits_amx_bf16() {
                self.run_amx_bf16(out);
                return self.activate(out);
            }
            match (product.prefill_inputs, self.byte_dot()) {
                (PrefillInputs::Int8, Some(dot)) => return self.run_bytes((dot, false), out),
                (PrefillInputs::Mixed, Some(dot)) => return self.run_bytes((dot, true), out),
                (PrefillInputs::Int16 | PrefillInputs::Mixed, _) if self.fits_integers() => {
                    return self.run_integers(out);
                }
                _ => {}
            }
            if self.fits_dense() {
                return self.run_dense(out);
            }
        }
        if product.rows >= product.few_below() {
            return self.run(out);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let forms = Forms {
                packings,
                dense: product.has_dense(),
                most: product.panel_rows(),
                threads: true,
            };
            let rows = scratch.fill(product.isa, self.x, self.norm, product.k, forms);
            match product.gate {
                Some(gate) => product.run_few_rows_gated(gate, self.data, &rows, out),
                None => product.run_few_rows(self.data, self.residual, &rows, out),
            }
        });
    }
}
