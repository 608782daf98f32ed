//! Chooses the kernels of a product by its rows, the formats of its matrices and the instruction
//! set.

use std::cell::RefCell;

use crate::gemm::activations::Scratch;
use crate::gemm::dense::DenseView;
use crate::gemm::packed_gemm::{GemmTask, MIN_GEMM_ROWS};
use crate::gemm::product::{MAX_PARTS, MatrixData, MatrixFormat, Product};
use crate::layout::packed::PackedMatrix;
use crate::partition::SharedOutput;
use crate::work::{Input, Work};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for Product {
    fn outputs(&self) -> usize {
        self.rows * self.n
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let mut inputs = inputs.iter();
        fn floats(input: Option<&Input>) -> &[f32] {
            // SAFETY: `Projection::plan` and its caller gave arrays of these types, or of words as
            // large, in this order.
            input.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let x = floats(inputs.next());
        let norm = self.eps.map(|eps| (floats(inputs.next()), eps));
        let mut packings: Vec<(u32, usize)> = Vec::with_capacity(MAX_PARTS);
        let mut data: Vec<(MatrixData<'_>, Option<&[f32]>)> = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let own = match part.kind {
                MatrixFormat::Dense(number) => {
                    // SAFETY: as of `floats`.
                    MatrixData::Dense(unsafe { DenseView::of(number, inputs.next()) })
                }
                MatrixFormat::Quantized {
                    bits,
                    group,
                    scales,
                } => {
                    let packing = (bits, group);
                    let known = packings.iter().position(|p| *p == packing);
                    let matrix = match &part.held {
                        Some(held) => held.inputs(),
                        None => {
                            let rest = inputs.as_slice();
                            let (matrix, rest) = rest.split_at(rest.len().min(3));
                            inputs = rest.iter();
                            matrix
                        }
                    };
                    MatrixData::Quantized {
                        // SAFETY: as above.
                        matrix: unsafe {
                            PackedMatrix::from_inputs(matrix, (bits, self.k / group, scales))
                        },
                        form: known.unwrap_or_else(|| {
                            packings.push(packing);
                            packings.len() - 1
                        }),
                    }
                }
            };
            let bias = part.bias.then(|| floats(inputs.next()));
            data.push((own, bias));
        }
        let residual = self.residual.then(|| floats(inputs.next()));
        let out = SharedOutput::new(output);
        let task = GemmTask {
            product: self,
            x,
            norm,
            data: &data,
            residual,
        };
        #[cfg(target_arch = "x86_64")]
        if !self.float_inputs {
            if task.fits_amx_quantized() {
                return task.run_amx_quantized(&packings, &out);
            }
            if task.fits_amx_bf16() {
                return task.run_amx_bf16(&out);
            }
        }
        if self.rows >= MIN_GEMM_ROWS || self.float_inputs {
            return task.run(&out);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let rows = scratch.fill(self.isa, x, norm, self.k, &packings);
            match self.gate {
                Some(gate) => self.run_few_rows_gated(gate, &data, &rows, &out),
                None => self.run_few_rows(&data, residual, &rows, &out),
            }
        });
    }
}
