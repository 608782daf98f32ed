//! Products with matrices chosen from a stack by index, as mixtures of experts need them.

use mlx_sys as sys;

use super::Quantized;
use super::quantized::some_int;
use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// How many matrices a stack `[.., n, k]` holds.
fn stack_size(op: &'static str, stack: &Array) -> Result<i32> {
    let shape = stack.shape();
    if shape.len() < 3 {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            "the stack of matrices needs at least three axes",
        )
        .with_inputs(&[stack]));
    }
    shape[..shape.len() - 2]
        .iter()
        .try_fold(1i32, |n, &d| n.checked_mul(d))
        .filter(|&n| n > 0)
        .ok_or_else(|| {
            Error::new(ErrorKind::Shape, op, "the stack of matrices is empty").with_inputs(&[stack])
        })
}

impl Array {
    /// Products with matrices of a stack: `self` `[.., m, k]` times `stack[indices]`, where `stack`
    /// is `[e, k, n]` and `indices` (integers) broadcast against the leading axes of `self`:
    /// `[.., m, n]`. Indices out of range are clamped, lazily. `sorted` promises ascending indices,
    /// which only speeds up.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for a stack without matrices, [`ErrorKind::Dtype`] for indices that are
    /// not integers, or MLX's message when the shapes do not fit.
    pub fn gather_mm(&self, stack: &Array, indices: &Array, sorted: bool) -> Result<Array> {
        let op = "gather_mm";
        let indices = Self::clamp_indices(op, indices, stack_size(op, stack)?)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live, every index names a matrix of the stack, and null
            // stands for the rows of `self` in their order.
            unsafe {
                sys::mlx_gather_mm(
                    out,
                    self.raw(),
                    stack.raw(),
                    Array::raw_or_null(None),
                    indices.raw(),
                    sorted,
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self, stack, &indices]))
    }
}

impl Quantized {
    /// As [`Array::gather_mm`] with transposed matrices of a quantized stack `[e, n, k]`:
    /// `x` `[.., m, k]` to `[.., m, n]`.
    ///
    /// # Errors
    /// When the parts do not fit each other, `x` or the indices.
    pub fn gather_matmul_transposed(
        &self,
        x: &Array,
        indices: &Array,
        sorted: bool,
    ) -> Result<Array> {
        let op = "gather_qmm";
        self.validate(op)?;
        let indices = Array::clamp_indices(op, indices, stack_size(op, &self.weight)?)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live and checked to fit, every index names a matrix of the
            // stack, the mode is a static string, and null stands for no array.
            unsafe {
                sys::mlx_gather_qmm(
                    out,
                    x.raw(),
                    self.weight.raw(),
                    self.scales.raw(),
                    Array::raw_or_null(self.biases.as_ref()),
                    Array::raw_or_null(None),
                    indices.raw(),
                    true,
                    some_int(self.group_size),
                    some_int(self.bits),
                    self.mode.name().as_ptr(),
                    sorted,
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[x, &self.weight, &indices]))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Array, Dtype, QuantMode, Quantized};

    fn stack() -> Array {
        let values: Vec<f32> = (0..3 * 8 * 32)
            .map(|i| ((i * 7) % 13) as f32 - 6.0)
            .collect();
        Array::from_slice(&values, &[3, 8, 32]).unwrap()
    }

    #[test]
    fn each_row_meets_its_matrix() {
        let stack = stack();
        let x = stack.slice(&[0, 0, 0], &[1, 4, 32], &[1, 1, 1]).unwrap();
        let x = x.reshape(&[4, 1, 32]).unwrap();
        for ids in [[0u32, 2, 1, 2], [9, 0, 0, 1]] {
            let indices = Array::vector(&ids).unwrap();
            let turned = stack.swap_axes(1, 2).unwrap();
            let got = x.gather_mm(&turned, &indices, false).unwrap();
            assert_eq!(got.shape(), [4, 1, 8]);
            let q = Quantized::quantize(&stack, 32, 8, QuantMode::Affine).unwrap();
            let quantized = q.gather_matmul_transposed(&x, &indices, false).unwrap();
            let whole = q
                .dequantize(Dtype::Float32)
                .unwrap()
                .swap_axes(1, 2)
                .unwrap();
            for (row, id) in ids.iter().enumerate() {
                // 9 is out of range and clamped to the last.
                let pick = |a: &Array| a.take_ids(&[(*id).min(2)], 0).unwrap();
                let at = |a: &Array| a.take_ids(&[row as u32], 0).unwrap();
                let expected = at(&x).matmul(&pick(&turned)).unwrap();
                assert!(at(&got).all_close(&expected, 1e-5, 1e-4).unwrap());
                let expected = at(&x).matmul(&pick(&whole)).unwrap();
                assert!(at(&quantized).all_close(&expected, 1e-4, 1e-3).unwrap());
            }
        }
    }

    #[test]
    fn what_is_no_stack_is_refused() {
        let x = Array::vector(&[1.0f32; 32]).unwrap();
        let ids = Array::vector(&[0u32]).unwrap();
        assert!(x.gather_mm(&x, &ids, false).is_err());
        let floats = Array::vector(&[0.0f32]).unwrap();
        assert!(x.gather_mm(&stack(), &floats, false).is_err());
        let empty = Array::from_slice::<f32>(&[], &[0, 8, 32]).unwrap();
        assert!(x.gather_mm(&empty, &ids, false).is_err());
    }
}
