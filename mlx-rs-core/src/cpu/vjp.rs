//! Products with a kernel for the backward pass, which multiplies gradients with the matrix (not
//! transposed). Matrices stay packed.

use mlx_cpu_kernels::{Isa, LANES, ProductVjp};

use super::host_op::{self, OpKind};
use super::matrix::Matrix;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::transforms::CustomFunction;

impl Matrix {
    /// [`Matrix::product`] with a kernel for the backward pass with respect to `x`. For `vmap` and
    /// second derivatives, use [`Matrix::product`].
    ///
    /// # Errors
    /// As [`Matrix::product`].
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
    ///         let x = Array::from_slice(&[1.0f32, 10.0], &[1, 2])?;
    ///         assert_eq!(matrix.product_for_gradients(&x)?.to_vec::<f32>()?, [21.0, 43.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product_for_gradients(&self, x: &Array) -> Result<Array> {
        if !self.size().k.is_multiple_of(LANES) {
            return self.product_with(x, true);
        }
        let (forward, backward) = (self.clone(), self.clone());
        let product = CustomFunction::new(move |x: &[Array]| match x {
            [x] => Ok(vec![forward.product_with(x, true)?]),
            _ => Err(one("argument")),
        });
        let product = product.with_vjp(move |_, cotangents, _| match cotangents {
            [cotangent] => Ok(vec![backward.vjp_of(cotangent)?]),
            _ => Err(one("cotangent")),
        });
        let mut outputs = product.call(std::slice::from_ref(x))?;
        outputs.pop().ok_or_else(|| one("output"))
    }

    /// `c` times the matrix: float32 `[.., n] -> [.., k]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `c` has another type or its last axis is not the output dimension;
    /// MLX's message when the current stream is not on the CPU.
    fn vjp_of(&self, c: &Array) -> Result<Array> {
        let op = "cpu::vjp_of";
        let size = self.size();
        let fits = c.dtype() == Dtype::Float32
            && c.shape()
                .last()
                .is_some_and(|&last| i64::from(last) == size.n as i64);
        if !fits {
            let message = format!("needs float32 [.., {}]", size.n);
            return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[c]));
        }
        let mut shape = c.shape().to_vec();
        if let (Some(last), Ok(k)) = (shape.last_mut(), i32::try_from(size.k)) {
            *last = k;
        }
        let work = ProductVjp {
            size,
            rows: c.size() / size.n,
            kind: self.kind(),
            isa: Isa::detect(),
        };
        let c = c.contiguous()?;
        let inputs: Vec<&Array> = std::iter::once(&c).chain(self.arrays()?).collect();
        host_op::add(op, OpKind::Opaque, work, &inputs, &shape)
    }
}

fn one(what: &str) -> Error {
    let message = format!("one {what} is expected");
    Error::new(ErrorKind::Value, "cpu::product_for_gradients", message)
}

#[cfg(test)]
mod tests {
    use super::super::tests::in_few_digits;
    use super::super::{DenseMatrix, QuantizedMatrix};
    use super::*;
    use crate::ops::{QuantMode, Quantized};
    use crate::transforms::vjp;
    use std::slice::from_ref;

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|i| (((i + seed) * 7919) % 211) as f32 * 0.01 - 1.0)
            .collect();
        Array::from_slice(&values, shape).unwrap()
    }

    #[test]
    fn it_is_the_backward_pass_of_mlx() {
        for (n, k) in [(96, 64), (50, 192), (300, 160), (7, 48), (5, 20)] {
            // The values 0, 1, 2 mean dense matrices; 40, 41, 42 mean floats of four and eight
            // bits.
            for bits in [0, 1, 2, 3, 4, 5, 6, 8, 40, 41, 42] {
                let weight = noise(&[n, k], 3);
                let types = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];
                let (matrix, dense) = if let Some(dtype) = types.get(bits as usize) {
                    let stored = weight.astype(*dtype).unwrap();
                    (
                        DenseMatrix::new(&stored).unwrap().map(Matrix::Dense),
                        stored.astype(Dtype::Float32).unwrap(),
                    )
                } else if k % 32 == 0 && bits >= 40 {
                    let modes = [QuantMode::Mxfp4, QuantMode::Nvfp4, QuantMode::Mxfp8];
                    let mode = modes[bits as usize - 40];
                    let (bits, group) = match mode {
                        QuantMode::Mxfp8 => (8, 32),
                        QuantMode::Nvfp4 => (4, 16),
                        _ => (4, 32),
                    };
                    let packed = Quantized::quantize(&weight, group, bits, mode).unwrap();
                    let dense = packed.dequantize(Dtype::Float32).unwrap();
                    let matrix = QuantizedMatrix::new(&packed).unwrap();
                    (matrix.map(Matrix::Quantized), dense)
                } else if k % 32 == 0 {
                    let packed = Quantized::quantize(&weight, 32, bits, QuantMode::Affine).unwrap();
                    let packed = if bits == 8 {
                        // float16 represents these scales exactly, so the kernels store them as
                        // float16.
                        in_few_digits(packed)
                    } else {
                        packed
                    };
                    let dense = packed.dequantize(Dtype::Float32).unwrap();
                    let matrix = QuantizedMatrix::new(&packed).unwrap();
                    (matrix.map(Matrix::Quantized), dense)
                } else {
                    continue;
                };
                // If the kernels are disabled, there is nothing to compare.
                let Some(matrix) = matrix else { continue };
                for rows in [1, 5, 33] {
                    let (x, c) = (noise(&[1, rows, k], 5), noise(&[1, rows, n], 7));
                    for ours in [true, false] {
                        // For these formats, only the kernels have a backward pass.
                        let ours = ours || bits >= 40;
                        let run = |x: &[Array]| -> Result<Vec<Array>> {
                            Ok(vec![if ours {
                                matrix.product_for_gradients(&x[0])?
                            } else {
                                matrix.product(&x[0])?
                            }])
                        };
                        let (y, dx) = vjp(run, from_ref(&x), from_ref(&c)).unwrap();
                        let expected = c.matmul(&dense).unwrap();
                        assert!(
                            dx[0].all_close(&expected, 1e-4, 1e-3).unwrap(),
                            "{n} {k} {bits} {rows}"
                        );
                        let expected = x.matmul(&dense.swap_axes(0, 1).unwrap()).unwrap();
                        assert!(y[0].all_close(&expected, 1e-4, 2e-3).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn a_dense_matrix_has_a_gradient_of_its_own_type() {
        for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
            let weight = noise(&[7, 20], 3).astype(dtype).unwrap();
            let (x, c) = (noise(&[1, 5, 20], 5), noise(&[1, 5, 7], 7));
            let run = |w: &[Array]| -> Result<Vec<Array>> {
                // If the kernels are disabled, there is nothing to compare.
                match DenseMatrix::new(&w[0])? {
                    Some(matrix) => Ok(vec![matrix.product(&x)?]),
                    None => Ok(vec![x.matmul(&w[0].swap_axes(0, 1)?)?]),
                }
            };
            let (_, dw) = vjp(run, from_ref(&weight), from_ref(&c)).unwrap();
            assert_eq!(dw[0].dtype(), dtype);
            let (rows, columns) = (c.squeeze_axis(0).unwrap(), x.squeeze_axis(0).unwrap());
            let expected = rows.swap_axes(0, 1).unwrap().matmul(&columns).unwrap();
            let actual = dw[0].astype(Dtype::Float32).unwrap();
            assert!(
                actual.all_close(&expected, 1e-2, 1e-2).unwrap(),
                "{dtype:?}"
            );
        }
    }
}
