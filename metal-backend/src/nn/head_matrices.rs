//! A matrix for each head of a layer, as in latent attention.

use mlx_rs_core::{Array, Dtype, Result, arange};

use super::adapter;
use crate::exec::{ExpertMatrix, Weight, on_kernels};

/// Matrices `[heads, in, out]`.
#[derive(Debug)]
pub enum HeadMatrices {
    /// Multiplied by our kernels, which select a matrix by the index of its head.
    Kernel {
        /// The matrices.
        stack: ExpertMatrix,
        /// The indices of the heads, `[1, 1, heads]`.
        ids: Array,
    },
    /// Multiplied by MLX.
    Dense(Array),
}

impl HeadMatrices {
    /// Prepares matrices `[heads, in, out]`. `on_cpu` says whether a CPU computes in float32.
    ///
    /// # Errors
    /// MLX's errors.
    pub fn new(matrices: Array, on_cpu: bool) -> Result<Self> {
        if on_cpu {
            let heads = matrices.dim(0)?;
            let stack = matrices.swap_axes(-1, -2)?.contiguous()?;
            let stack = ExpertMatrix::new(Weight::Dense(stack), true)?;
            if stack.is_kernel() {
                let ids = arange(0.0, f64::from(heads), 1.0, Dtype::Uint32)?;
                let ids = ids.reshape(&[1, 1, heads])?;
                ids.eval()?;
                return Ok(Self::Kernel { stack, ids });
            }
        }
        Ok(Self::Dense(matrices))
    }

    /// Multiplies each head by its matrix: `[1, T, heads, in]` to `[1, T, heads, out]`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let matrices = match self {
            Self::Kernel { stack, ids } if on_kernels()? => {
                let ids = ids.broadcast_to(&[1, x.dim(1)?, x.dim(2)?])?;
                let x = x.expand_dims(-2)?;
                let y = stack.product(&x, &ids, false, adapter::differentiated())?;
                return y.squeeze_axis(-2);
            }
            Self::Kernel { stack, .. } => &stack.dense()?.swap_axes(-1, -2)?,
            Self::Dense(matrices) => matrices,
        };
        // [1, H, T, in] x [H, in, out]
        let y = x.transpose_axes(&[0, 2, 1, 3])?.matmul(matrices)?;
        y.transpose_axes(&[0, 2, 1, 3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs_core::{Device, Stream};

    #[test]
    fn each_head_has_its_matrix() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            for (heads, inputs, outputs, length) in [(3, 32, 5, 1), (2, 16, 8, 40), (3, 10, 4, 3)] {
                let numbers = |n: i32, step: usize| -> Vec<f32> {
                    (0..n as usize)
                        .map(|i| (i * step % 13) as f32 - 6.0)
                        .collect()
                };
                let (m, x) = (heads * inputs * outputs, length * heads * inputs);
                let (m, x) = (numbers(m, 7), numbers(x, 5));
                let matrices = Array::from_slice(&m, &[heads, inputs, outputs]).unwrap();
                let inputs_array = Array::from_slice(&x, &[1, length, heads, inputs]).unwrap();
                for on_cpu in [true, false] {
                    let all = HeadMatrices::new(matrices.clone(), on_cpu).unwrap();
                    let y = all.forward(&inputs_array).unwrap();
                    assert_eq!(y.shape(), [1, length, heads, outputs]);
                    let y = y.to_vec::<f32>().unwrap();
                    let [heads, inputs, outputs] = [heads, inputs, outputs].map(|n| n as usize);
                    for (at, y) in y.iter().enumerate() {
                        let (row, o) = (at / outputs, at % outputs);
                        let wanted: f32 = (0..inputs)
                            .map(|i| {
                                x[row * inputs + i] * m[(row % heads * inputs + i) * outputs + o]
                            })
                            .sum();
                        assert_eq!(*y, wanted, "{at}");
                    }
                }
            }
        });
    }
}
