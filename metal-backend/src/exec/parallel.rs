//! Multiplication by quantized matrices with MLX, for formats that our kernels do not support. On a
//! CPU stream, MLX runs one operation at a time, on one core. So a matrix is split into two halves
//! on two streams, which use two cores. A GPU does not benefit from this split.

use std::sync::OnceLock;

use mlx_rs_core::{Array, Device, Dtype, Quantized, Result, Stream, concatenate, eval};

/// Minimum number of weights for a split. For fewer weights, switching streams costs more time than
/// the split saves.
const WORTH_CUTTING: i64 = 64 * 1024;

/// A quantized matrix, complete or split for two streams.
#[derive(Debug, Clone)]
enum How {
    /// The complete matrix.
    Whole(Quantized),
    /// The upper and the lower half of the rows. Both share the matrix's memory.
    Halves(Quantized, Quantized),
}

/// A quantized matrix, prepared for parallel products.
#[derive(Debug, Clone)]
pub struct ParallelMatrix(How);

/// The process-wide stream for second halves. First halves use MLX's default stream.
fn helper() -> Result<&'static Stream> {
    static HELPER: OnceLock<Stream> = OnceLock::new();
    if let Some(stream) = HELPER.get() {
        return Ok(stream);
    }
    let stream = Stream::new(Device::cpu())?;
    Ok(HELPER.get_or_init(|| stream))
}

/// Whether the machine has a second core.
fn two_cores() -> bool {
    std::thread::available_parallelism().is_ok_and(|n| n.get() > 1)
}

impl ParallelMatrix {
    /// Prepares the matrix, for a CPU if `on_cpu`.
    ///
    /// # Errors
    /// If the parts of the matrix do not match.
    pub fn new(matrix: Quantized, on_cpu: bool) -> Result<Self> {
        matrix.validate("linear")?;
        Self::with_mlx(matrix, on_cpu && two_cores())
    }

    /// Prepares the matrix for MLX, split into halves if `cut` is set and the matrix is large
    /// enough.
    fn with_mlx(matrix: Quantized, cut: bool) -> Result<Self> {
        let shape = matrix.weight.shape();
        let rows = shape.first().copied().unwrap_or(0);
        let weights = i64::try_from(matrix.weight.size())
            .unwrap_or(i64::MAX)
            .saturating_mul(32)
            / i64::from(matrix.bits.max(1));
        if !cut || shape.len() != 2 || rows < 2 || weights < WORTH_CUTTING {
            return Ok(Self(How::Whole(matrix)));
        }
        let part = |from: i32, to: i32| -> Result<Quantized> {
            let rows = |a: &Array| a.slice_axis(0, from, to);
            let part = Quantized {
                weight: rows(&matrix.weight)?,
                scales: rows(&matrix.scales)?,
                biases: matrix.biases.as_ref().map(rows).transpose()?,
                ..matrix
            };
            // The halves are views of the matrix. Evaluating them here avoids an evaluation in
            // every step.
            eval([&part.weight, &part.scales].into_iter().chain(&part.biases))?;
            Ok(part)
        };
        Ok(Self(How::Halves(part(0, rows / 2)?, part(rows / 2, rows)?)))
    }

    /// Returns the weights `[n, k]` in float32.
    pub fn dense(&self) -> Result<Array> {
        match &self.0 {
            How::Whole(matrix) => matrix.dequantize(Dtype::Float32),
            How::Halves(first, second) => concatenate(
                &[
                    &first.dequantize(Dtype::Float32)?,
                    &second.dequantize(Dtype::Float32)?,
                ],
                0,
            ),
        }
    }

    /// Multiplies `x` by the transposed matrix: `[.., k] -> [.., n]`.
    pub fn product(&self, x: &Array) -> Result<Array> {
        match &self.0 {
            How::Whole(matrix) => matrix.matmul_transposed(x),
            How::Halves(first, second) => {
                let lower = helper()?.scope(|| second.matmul_transposed(x))?;
                let upper = first.matmul_transposed(x)?;
                concatenate(&[&upper, &lower], -1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs_core::QuantMode;

    #[test]
    fn every_way_gives_the_same() {
        let values: Vec<f32> = (0..512 * 256)
            .map(|i| ((i * 37) % 101) as f32 * 0.01)
            .collect();
        let weight = Array::from_slice(&values, &[512, 256]).unwrap();
        let x = weight.slice_axis(0, 3, 8).unwrap();
        for bits in [4, 8] {
            let matrix = Quantized::quantize(&weight, 32, bits, QuantMode::Affine).unwrap();
            let unsplit = ParallelMatrix::with_mlx(matrix.clone(), false).unwrap();
            let halves = ParallelMatrix::with_mlx(matrix.clone(), true).unwrap();
            assert!(matches!(halves.0, How::Halves(..)));
            let (a, b) = (unsplit.product(&x).unwrap(), halves.product(&x).unwrap());
            assert_eq!(a.shape(), [5, 512]);
            assert_eq!(a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
        }
    }
}
