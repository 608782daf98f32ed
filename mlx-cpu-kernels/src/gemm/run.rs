//! Which kernels compute a product: by rows of inputs, the matrices' types and the instruction set.

use std::cell::RefCell;

use crate::gemm::activations::Scratch;
use crate::gemm::dense::Dense;
use crate::gemm::packed_gemm::{MANY, Many};
use crate::gemm::product::{Data, Kind, MAX_PARTS, Product};
use crate::layout::packed::Bands;
use crate::partition::Output;
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
            // SAFETY: `Projection::plan` and its caller gave arrays of these types, or of words as large, in this
            // order.
            input.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let x = floats(inputs.next());
        let norm = self.eps.map(|eps| (floats(inputs.next()), eps));
        let mut packings: Vec<(u32, usize)> = Vec::with_capacity(MAX_PARTS);
        let mut data: Vec<(Data<'_>, Option<&[f32]>)> = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let own = match part.kind {
                // SAFETY: as of `floats`.
                Kind::Dense(number) => Data::Dense(unsafe { Dense::of(number, inputs.next()) }),
                Kind::Quantized { bits, group, half } => {
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
                    Data::Quantized {
                        // SAFETY: as above.
                        bands: unsafe { Bands::of(matrix, (bits, self.k / group, half)) },
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
        let residual = self.adds.then(|| floats(inputs.next()));
        let out = Output::new(output);
        let many = Many {
            product: self,
            x,
            norm,
            data: &data,
            residual,
        };
        #[cfg(target_arch = "x86_64")]
        if !self.in_floats {
            if many.fits_squares() {
                return many.run_in_squares(&packings, &out);
            }
            if many.fits_bricks() {
                return many.run_in_bricks(&out);
            }
        }
        if self.rows >= MANY || self.in_floats {
            return many.run(&out);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let rows = scratch.fill(self.isa, x, norm, self.k, &packings);
            match self.gate {
                Some(gate) => self.gated(gate, &data, &rows, &out),
                None => self.plain(&data, residual, &rows, &out),
            }
        });
    }
}
