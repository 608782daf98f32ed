//! Stacks of matrices that are selected by index, as in mixtures of experts: matrix
//! multiplications, and the whole feed-forward block of a mixture as one operation.

use mlx_cpu_kernels::{
    ExpertBlock as BlockWork, ExpertGate, ExpertProduct, ExpertStack, ExpertVjp, INTERLEAVED_ROWS,
    Isa, LANES, PrefillInputs, Routing, Size,
};

use super::host_op::{self, OpKind};
use super::matrix::Matrix;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::transforms::CustomFunction;

/// Matrices `[n, k]` of one format, one per expert. A clone is another handle to the same memory.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, ExpertMatrix, Matrix}};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Two experts with one output each.
///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
///         let experts = ExpertMatrix::new(matrix, 2)?;
///         assert!(matches!(experts.matrix(), Matrix::Dense(_)));
///         let x = Array::from_slice(&[1.0f32, 10.0], &[1, 2])?;
///         let y = experts.product(&x, &Array::from_slice(&[1u32, 0], &[1, 2])?)?;
///         assert_eq!(y.shape(), [1, 2, 1]);
///         assert_eq!(y.to_vec::<f32>()?, [43.0, 21.0]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ExpertMatrix {
    matrix: Matrix,
    experts: usize,
}

impl ExpertMatrix {
    /// Makes a stack from a matrix `[experts * n, k]`, which concatenates the experts' rows. In a
    /// quantized matrix, `n` must be a multiple of 8.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the number of rows is not divisible by `experts`, or the rows of a
    /// quantized expert not by 8.
    pub fn new(matrix: Matrix, experts: i32) -> Result<Self> {
        let rows = matrix.outputs();
        let n = rows.checked_div(experts).unwrap_or(0);
        let divisible = match matrix {
            Matrix::Quantized(_) => Self::fits(n),
            Matrix::Dense(_) => true,
        };
        let count = usize::try_from(experts).unwrap_or(0);
        if n == 0 || count == 0 || n.checked_mul(experts) != Some(rows) || !divisible {
            let message = format!("{rows} rows do not divide into {experts} experts");
            return Err(Error::new(ErrorKind::Shape, "cpu::ExpertMatrix", message));
        }
        Ok(Self {
            matrix,
            experts: count,
        })
    }

    /// The rows of all experts, expert by expert: `[experts * n, k]`.
    ///
    /// ```
    /// use mlx_rs_core::cpu::ExpertMatrix;
    /// let outputs = |stack: &ExpertMatrix| stack.rows().outputs() / stack.experts();
    /// ```
    #[must_use]
    pub fn rows(&self) -> &Matrix {
        &self.matrix
    }

    /// The number of experts.
    ///
    /// ```
    /// use mlx_rs_core::cpu::ExpertMatrix;
    /// let one = |stack: &ExpertMatrix| stack.experts() == 1;
    /// ```
    #[must_use]
    pub fn experts(&self) -> i32 {
        // The number was an `i32` argument of `new`.
        self.experts as i32
    }

    /// Sets the type of prefill inputs, for experts with 16 or more rows; see
    /// [`super::QuantizedMatrix::with_prefill_inputs`]. A dense stack is unchanged.
    ///
    /// ```
    /// use mlx_rs_core::cpu::{ExpertMatrix, PrefillInputs};
    /// let fast = |stack: ExpertMatrix| stack.with_prefill_inputs(PrefillInputs::Int8);
    /// ```
    #[must_use]
    pub fn with_prefill_inputs(self, prefill_inputs: PrefillInputs) -> Self {
        let matrix = match self.matrix {
            Matrix::Quantized(m) => Matrix::Quantized(m.with_prefill_inputs(prefill_inputs)),
            dense => dense,
        };
        Self { matrix, ..self }
    }

    /// Whether a quantized stack supports experts with `rows` rows: a multiple of 8.
    /// ```
    /// use mlx_rs_core::cpu::ExpertMatrix;
    /// assert!(ExpertMatrix::fits(768) && !ExpertMatrix::fits(4));
    /// ```
    #[must_use]
    pub fn fits(rows: i32) -> bool {
        (rows.unsigned_abs() as usize).is_multiple_of(INTERLEAVED_ROWS)
    }

    /// The rows of all experts, expert by expert.
    #[must_use]
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// The shape of the stack, `[experts, n, k]`.
    #[must_use]
    pub fn shape(&self) -> [i32; 3] {
        let Size { n, k } = self.size();
        // All three sizes come from the matrix's shape, so they fit `i32`.
        [self.experts as i32, n as i32, k as i32]
    }

    /// The size of one expert's matrix.
    fn size(&self) -> Size {
        let Size { n, k } = self.matrix.size();
        Size {
            n: n / self.experts,
            k,
        }
    }

    /// Products of each row of `x` with the transposed matrices of its experts, on the CPU: float32
    /// `[.., k]` and integers `[.., e]` with equal leading axes to `[.., e, n]`. An index out of
    /// range selects the nearest expert.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream
    /// is not on the CPU.
    pub fn product(&self, x: &Array, ids: &Array) -> Result<Array> {
        self.product_with(x, ids, false)
    }

    /// [`Self::product`]. With `float_inputs`, inputs are never quantized.
    fn product_with(&self, x: &Array, ids: &Array, float_inputs: bool) -> Result<Array> {
        let op = "cpu::expert_product";
        let ids = numbers(op, ids, self.experts)?;
        let routing = self.routing(op, x, &ids)?;
        let mut inputs = vec![x, &ids];
        let work = ExpertProduct {
            stack: self.stack(op, None, !float_inputs, &mut inputs)?,
            routing,
            float_inputs,
            prefill_inputs: self.matrix.prefill_inputs(),
            isa: Isa::detect(),
        };
        let mut shape = ids.shape().to_vec();
        shape.push(self.shape()[1]);
        host_op::add(op, OpKind::Opaque, work, &inputs, &shape)
    }

    /// [`Self::product`] with a kernel for the backward pass with respect to `x`. `None` if `k` is
    /// not a multiple of 16.
    ///
    /// # Errors
    /// As [`Self::product`].
    /// ```
    /// use mlx_rs_core::{Array, Device, Dtype, Stream, cpu::{DenseMatrix, ExpertMatrix, Matrix}, ones};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = ones(&[6, 16], Dtype::Float32)?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
    ///         let experts = ExpertMatrix::new(matrix, 2)?;
    ///         let (x, ids) = (ones(&[1, 16], Dtype::Float32)?, Array::from_slice(&[1u32], &[1, 1])?);
    ///         let y = experts.product_for_gradients(&x, &ids)?;
    ///         assert_eq!(y.map(|y| y.shape().to_vec()), Some(vec![1, 1, 3]));
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product_for_gradients(&self, x: &Array, ids: &Array) -> Result<Option<Array>> {
        if !self.size().k.is_multiple_of(LANES) {
            return Ok(None);
        }
        let ids = numbers("cpu::expert_product", ids, self.experts)?;
        let (forward, backward) = (self.clone(), self.clone());
        let product = CustomFunction::new(move |inputs: &[Array]| match inputs {
            [x, ids] => Ok(vec![forward.product_with(x, ids, true)?]),
            _ => Err(lost("argument")),
        });
        let product = product.with_vjp(move |inputs, cotangents, _| match (inputs, cotangents) {
            ([_, ids], [cotangent]) => Ok(vec![
                backward.vjp_of(cotangent, ids)?,
                // The selection by index has no gradient, so it is zero.
                crate::zeros(ids.shape(), ids.dtype())?,
            ]),
            _ => Err(lost("cotangent")),
        });
        let mut outputs = product.call(&[x.clone(), ids])?;
        outputs.pop().map(Some).ok_or_else(|| lost("output"))
    }

    /// Multiplies gradients `[.., e, n]` with the matrices, and sums over the experts: `[.., k]`.
    fn vjp_of(&self, c: &Array, ids: &Array) -> Result<Array> {
        let op = "cpu::expert_vjp";
        let Size { n, k } = self.size();
        let per_row = ids
            .shape()
            .last()
            .map_or(0, |&last| last.unsigned_abs() as usize);
        if c.dtype() != Dtype::Float32 || c.size() != ids.size() * n || per_row == 0 {
            let message = format!("needs float32 [.., {per_row}, {n}]");
            return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[c, ids]));
        }
        let c = c.contiguous()?;
        let mut inputs = vec![&c, ids];
        let work = ExpertVjp {
            stack: self.stack(op, None, false, &mut inputs)?,
            routing: Routing {
                rows: ids.size() / per_row,
                per_row,
                signed: ids.dtype() == Dtype::Int32,
            },
            isa: Isa::detect(),
        };
        let mut shape = ids.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = k as i32; // it was an i32 in the matrix's shape
        }
        host_op::add(op, OpKind::Opaque, work, &inputs, &shape)
    }

    /// The stack for an operation, which reads the arrays that this function appends to `inputs`.
    /// With `holds`, the operation stores quantized matrices itself if possible. They are then not
    /// among its inputs.
    fn stack<'a>(
        &'a self,
        op: &'static str,
        bias: Option<&'a Array>,
        holds: bool,
        inputs: &mut Vec<&'a Array>,
    ) -> Result<ExpertStack> {
        let packed = match &self.matrix {
            Matrix::Quantized(q) if holds => q.stored_matrix()?,
            _ => None,
        };
        if packed.is_none() {
            inputs.extend(self.matrix.arrays()?);
        }
        if let Some(bias) = bias {
            let [experts, n, _] = self.shape();
            if bias.dtype() != Dtype::Float32 || bias.shape() != [experts, n] {
                let message = format!("biases must be float32 [{experts}, {n}]");
                return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[bias]));
            }
            inputs.push(bias);
        }
        Ok(ExpertStack {
            kind: self.matrix.kind(),
            experts: self.experts,
            size: self.size(),
            bias: bias.is_some(),
            stored: packed,
        })
    }

    /// The experts of each row of `x`.
    fn routing(&self, op: &'static str, x: &Array, ids: &Array) -> Result<Routing> {
        let k = self.size().k;
        if let ([rows @ .., last], [others @ .., per_row]) = (x.shape(), ids.shape())
            && rows == others
            && *per_row > 0
            && i64::from(*last) == k as i64
            && x.dtype() == Dtype::Float32
        {
            return Ok(Routing {
                rows: x.size() / k,
                per_row: per_row.unsigned_abs() as usize,
                signed: ids.dtype() == Dtype::Int32,
            });
        }
        let message = format!("needs float32 [.., {k}] and experts [.., n] of each row");
        Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[x, ids]))
    }
}

/// The expert indices as 32-bit integers.
fn numbers(op: &'static str, ids: &Array, experts: usize) -> Result<Array> {
    match ids.dtype() {
        // The operation itself handles indices out of range.
        Dtype::Int32 | Dtype::Uint32 => Ok(ids.clone()),
        // The number of experts divides a size of the matrix's shape, so it fits `i32`.
        _ => Array::clamp_indices(op, ids, experts as i32)?.astype(Dtype::Int32),
    }
}

fn lost(what: &str) -> Error {
    let message = format!("one {what} is missing");
    Error::new(ErrorKind::Mlx, "cpu::expert_product", message)
}

/// A stack and its optional biases, float32 `[experts, n]`.
pub type BiasedExperts<'a> = (&'a ExpertMatrix, Option<&'a Array>);

/// The gated feed-forward block of a mixture of experts, as one operation.
/// ```
/// use mlx_rs_core::cpu::{DenseMatrix, ExpertBlock, ExpertGate, ExpertMatrix, Gate, Matrix};
/// use mlx_rs_core::{Array, Device, Dtype, Stream, ones};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = ones(&[3 * 4, 4], Dtype::Float32)?; // three experts
///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
///         let experts = ExpertMatrix::new(matrix, 3)?;
///         let block = ExpertBlock {
///             gate: (&experts, None),
///             up: (&experts, None),
///             down: (&experts, None),
///             activation: ExpertGate::Plain(Gate::Relu),
///         };
///         let (x, ids) = (ones(&[1, 4], Dtype::Float32)?, Array::from_slice(&[0u32, 2], &[1, 2])?);
///         let y = block.of(&x, &ids, &Array::from_slice(&[0.5f32, 0.25], &[1, 2])?)?;
///         assert_eq!(y.to_vec::<f32>()?, [48.0; 4]); // (4 * 4) * 4 * 0.75
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ExpertBlock<'a> {
    /// The gate matrices, `hidden -> width`.
    pub gate: BiasedExperts<'a>,
    /// The up matrices, `hidden -> width`.
    pub up: BiasedExperts<'a>,
    /// The down matrices, `width -> hidden`.
    pub down: BiasedExperts<'a>,
    /// How gate and up outputs are combined.
    pub activation: ExpertGate,
}

impl ExpertBlock<'_> {
    /// For each row, the weighted sum of the outputs of experts `ids`, `[.., e]`, with `weights` of
    /// the same shape. Computed on the CPU: float32 `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream
    /// is not on the CPU.
    pub fn of(&self, x: &Array, ids: &Array, weights: &Array) -> Result<Array> {
        let op = "cpu::expert_block";
        let (gate, up, down) = (self.gate.0, self.up.0, self.down.0);
        let [experts, width, hidden] = gate.shape();
        if up.shape() != [experts, width, hidden] || down.shape() != [experts, hidden, width] {
            let message = format!(
                "the stacks {:?}, {:?}, {:?} do not fit each other",
                gate.shape(),
                up.shape(),
                down.shape()
            );
            return Err(Error::new(ErrorKind::Shape, op, message));
        }
        let ids = numbers(op, ids, gate.experts)?;
        let routing = gate.routing(op, x, &ids)?;
        if weights.dtype() != Dtype::Float32 || weights.shape() != ids.shape() {
            let message = format!("weights must be float32 {:?}", ids.shape());
            return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[weights]));
        }
        let mut inputs = vec![x, &ids, weights];
        let work = BlockWork {
            gate: gate.stack(op, self.gate.1, true, &mut inputs)?,
            up: up.stack(op, self.up.1, true, &mut inputs)?,
            down: down.stack(op, self.down.1, true, &mut inputs)?,
            activation: self.activation,
            routing,
            prefill_inputs: (gate.matrix.prefill_inputs())
                .max(up.matrix.prefill_inputs())
                .max(down.matrix.prefill_inputs()),
            isa: Isa::detect(),
        };
        host_op::add(op, OpKind::Opaque, work, &inputs, x.shape())
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::super::{DenseMatrix, Gate, QuantizedMatrix};
    use super::*;
    use crate::ops::{QuantMode, Quantized};
    use crate::transforms::vjp;
    use crate::{Device, Stream};

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|i| (((i + seed) * 7919) % 211) as f32 * 0.01 - 1.0)
            .collect();
        Array::from_slice(&values, shape).unwrap()
    }

    fn experts(rows: i32, k: i32, seed: i32) -> Option<(ExpertMatrix, Quantized)> {
        let weight = noise(&[3 * rows, k], seed);
        let q = Quantized::quantize(&weight, 32, 4, QuantMode::Affine).unwrap();
        let matrix = QuantizedMatrix::new(&q).unwrap()?;
        let experts = ExpertMatrix::new(Matrix::Quantized(matrix), 3).unwrap();
        let stack = |a: &Array| a.reshape(&[3, rows, a.shape()[1]]).unwrap();
        let q = Quantized {
            weight: stack(&q.weight),
            scales: stack(&q.scales),
            biases: q.biases.as_ref().map(stack),
            ..q
        };
        Some((experts, q))
    }

    #[test]
    fn products_and_gradients_are_those_of_mlx() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            // If the kernels are disabled, there is nothing to compare.
            let Some((experts, q)) = experts(24, 64, 3) else {
                return;
            };
            assert_eq!(experts.shape(), [3, 24, 64]);
            for rows in [1, 30] {
                let (x, c) = (noise(&[1, rows, 64], 5), noise(&[1, rows, 2, 24], 7));
                let ids: Vec<u32> = (0..2 * rows as u32).map(|i| (i * i + i / 3) % 3).collect();
                let ids = Array::from_slice(&ids, &[1, rows, 2]).unwrap();
                let plain = |x: &[Array]| -> Result<Vec<Array>> {
                    let x = x[0].expand_dims(-2)?.expand_dims(-2)?;
                    let y = q.gather_matmul(&x, None, &ids, true, false)?;
                    Ok(vec![y.squeeze_axis(-2)?])
                };
                let ours = |x: &[Array]| -> Result<Vec<Array>> {
                    Ok(vec![experts.product_for_gradients(&x[0], &ids)?.unwrap()])
                };
                let (y, dx) = vjp(ours, from_ref(&x), from_ref(&c)).unwrap();
                let (wanted, slope) = vjp(plain, from_ref(&x), from_ref(&c)).unwrap();
                assert!(y[0].all_close(&wanted[0], 1e-4, 2e-3).unwrap());
                assert!(dx[0].all_close(&slope[0], 1e-4, 2e-3).unwrap());
                let few = experts.product(&x, &ids).unwrap();
                assert!(few.all_close(&wanted[0], 1e-4, 2e-3).unwrap());
            }
        });
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let Some((wide, _)) = experts(32, 64, 3) else {
            return;
        };
        let weight = noise(&[9, 64], 1);
        let dense = || Matrix::Dense(DenseMatrix::new(&weight).unwrap().unwrap());
        for count in [0, -1, 2, 10] {
            assert!(ExpertMatrix::new(dense(), count).is_err(), "{count}");
        }
        assert!(
            ExpertMatrix::new(wide.matrix().clone(), 8).is_err(),
            "12 rows"
        );
        let narrow = ExpertMatrix::new(dense(), 3).unwrap();
        let (x, ids) = (
            noise(&[4, 64], 1),
            Array::from_slice(&[0u32; 8], &[4, 2]).unwrap(),
        );
        assert!(wide.product(&x, &ids).is_ok());
        assert!(wide.product(&noise(&[4, 32], 1), &ids).is_err());
        assert!(wide.product(&noise(&[3, 64], 1), &ids).is_err());
        let long = ids.astype(Dtype::Int64).unwrap();
        assert!(wide.product(&x, &long).is_ok(), "integers of any type");
        assert!(wide.product(&x, &x).is_err());
        let block = |down| ExpertBlock {
            gate: (&wide, None),
            up: (&wide, None),
            down: (down, None),
            activation: ExpertGate::Plain(Gate::Silu),
        };
        let weights = noise(&[4, 2], 1);
        assert!(block(&narrow).of(&x, &ids, &weights).is_err());
        let down = experts(64, 32, 5).unwrap().0;
        assert!(block(&down).of(&x, &ids, &weights).is_ok());
        assert!(block(&down).of(&x, &ids, &noise(&[2, 4], 1)).is_err());
        let mut biased = block(&down);
        let bias = noise(&[3, 31], 1);
        biased.up.1 = Some(&bias);
        assert!(biased.of(&x, &ids, &weights).is_err());
    }
}
