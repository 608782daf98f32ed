//! Finds the greatest outputs of a product with many columns, as one operation that does not store
//! the other outputs.

use mlx_cpu_kernels::{GreatestOutputs, MAX_ROW_LEN};

use super::host_op::{self, OpKind};
use super::projection::{Epilogue, Operands, Projection};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

impl Projection<'_> {
    /// The `k` greatest outputs of each row of `x`, float32 `[.., inputs]`, in descending order,
    /// and their columns: float32 and uint32 `[rows, k]`. Equal outputs are sorted by column. NaN
    /// counts as minus infinity. The product uses float32 inputs, and ignores the matrix's prefill
    /// type. It runs on the CPU.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit, with more than one matrix, an epilogue
    /// other than an activation, or more than [`MAX_ROW_LEN`] outputs; [`ErrorKind::Index`] when
    /// `k` is 0 or more than the outputs; MLX's message when the current stream is not on the CPU.
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix, Projection, Epilogue}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 5.0, 3.0], &[3, 1])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
    ///         let parts = [(&matrix, None)];
    ///         let head = Projection { parts: &parts, norm: None, then: Epilogue::None };
    ///         let (values, columns) = head.greatest(&Array::from_slice(&[2.0f32], &[1, 1])?, 2)?;
    ///         assert_eq!(values.to_vec::<f32>()?, [10.0, 6.0]);
    ///         assert_eq!(columns.to_vec::<u32>()?, [1, 2]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn greatest(&self, x: &Array, k: usize) -> Result<(Array, Array)> {
        const OP: &str = "cpu::greatest";
        let fault = |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&[x]);
        let ([(matrix, _)], Epilogue::None | Epilogue::Activate(_)) = (self.parts, self.then)
        else {
            return Err(fault("needs one matrix, and nothing added or gated".into()));
        };
        let size = matrix.size();
        let last = x.shape().last().and_then(|n| usize::try_from(*n).ok());
        if x.dtype() != Dtype::Float32 || last != Some(size.k) {
            return Err(fault(format!("needs float32 [.., {}]", size.k)));
        }
        if size.n > MAX_ROW_LEN {
            let message = format!("{} outputs are more than {MAX_ROW_LEN}", size.n);
            return Err(fault(message));
        }
        if k == 0 || k > size.n {
            let message = format!("{k} of {} outputs", size.n);
            return Err(Error::new(ErrorKind::Index, OP, message));
        }
        let rows = x.size() / size.k;
        let width = i32::try_from(k).unwrap_or(i32::MAX); // at most `MAX_ROW_LEN`
        let height = i32::try_from(rows).map_err(|_| fault(format!("{rows} rows")))?;
        let mut inputs = vec![x];
        let product = self.plan(rows, (false, Operands::Stored), &mut inputs)?;
        let work = GreatestOutputs { product, k };
        let out = host_op::add(OP, OpKind::Opaque, work, &inputs, &[height, 2 * width])?;
        let columns = out.slice_axis(1, width, 2 * width)?;
        Ok((out.slice_axis(1, 0, width)?, columns.astype(Dtype::Uint32)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{DenseMatrix, Matrix};
    use crate::{Device, Stream};

    fn numbers(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let value = |i: i32| ((i + seed) * 7919 % 10007) as f32 * 2e-4 - 1.0;
        Array::from_slice(&(0..n).map(value).collect::<Vec<_>>(), shape).unwrap()
    }

    #[test]
    fn they_are_those_of_the_whole_product() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let weight = numbers(&[700, 48], 1);
            let matrix = Matrix::Dense(DenseMatrix::new(&weight).unwrap().unwrap());
            let (bias, norm) = (numbers(&[700], 2), numbers(&[48], 3));
            let parts = [(&matrix, Some(&bias))];
            let head = Projection {
                parts: &parts,
                norm: Some((&norm, 1e-5)),
                then: Epilogue::None,
            };
            let x = numbers(&[1, 21, 48], 4);
            let all = head.of(&x).unwrap().to_vec::<f32>().unwrap();
            for k in [1, 10, 700] {
                let (values, columns) = head.greatest(&x, k).unwrap();
                assert_eq!(values.shape(), [21, k as i32]);
                assert_eq!(columns.shape(), values.shape());
                let columns = columns.to_vec::<u32>().unwrap();
                let values = values.to_vec::<f32>().unwrap();
                for (i, row) in all.chunks_exact(700).enumerate() {
                    let mut sorted = row.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    for j in 0..k {
                        assert!((values[i * k + j] - sorted[j]).abs() < 1e-4);
                        assert!(
                            (values[i * k + j] - row[columns[i * k + j] as usize]).abs() < 1e-4
                        );
                    }
                }
            }
        });
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let weight = numbers(&[5, 4], 1);
            let matrix = Matrix::Dense(DenseMatrix::new(&weight).unwrap().unwrap());
            let (one, two) = ([(&matrix, None)], [(&matrix, None), (&matrix, None)]);
            let head = |parts, then| Projection {
                parts,
                norm: None,
                then,
            };
            let (x, other) = (numbers(&[2, 4], 1), numbers(&[2, 3], 1));
            let plain = head(&one, Epilogue::None);
            assert!(plain.greatest(&x, 5).is_ok());
            for k in [0, 6, usize::MAX] {
                assert_eq!(plain.greatest(&x, k).unwrap_err().kind(), ErrorKind::Index);
            }
            let halves = x.astype(Dtype::Float16).unwrap();
            for error in [
                plain.greatest(&other, 1),
                plain.greatest(&halves, 1),
                head(&two, Epilogue::None).greatest(&x, 1),
                head(&one, Epilogue::Add(&x)).greatest(&x, 1),
            ] {
                assert_eq!(error.unwrap_err().kind(), ErrorKind::Shape);
            }
            // An input with zero rows is valid.
            let none = numbers(&[0, 4], 1);
            assert_eq!(plain.greatest(&none, 3).unwrap().0.shape(), [0, 3]);
        });
    }
}
