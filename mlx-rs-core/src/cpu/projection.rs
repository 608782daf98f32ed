//! Multiplication of rows with matrices, and the decoder operations that are fused with it: a norm,
//! several matrices on the same input, biases, and an epilogue (gate or residual).

use std::sync::Arc;

use mlx_cpu_kernels::{
    ColumnPart, ColumnProduct, Gate, Isa, MAX_PARTS, MatrixFormat, MatrixPart, Product, ScaleFormat,
};

use super::dense::DenseMatrix;
use super::host_op::{self, OpKind};
use super::matrix::Matrix;
use super::quantized::QuantizedMatrix;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The operation on the outputs of the matrices.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<'a> {
    /// Concatenates the outputs along the last axis.
    None,
    /// Adds this array, which must have the output's shape.
    Add(&'a Array),
    /// Applies a gate to the first of two outputs and multiplies it with the second.
    Gate(Gate),
    /// Applies an activation to the output of one matrix.
    Activate(Gate),
}

/// A product of the rows of an input with the transposes of matrices.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix, Projection, Epilogue}};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
///         let bias = Array::from_slice(&[0.5f32, -0.5], &[2])?;
///         let before = Array::from_slice(&[100.0f32, 200.0], &[1, 2])?;
///         let parts = [(&matrix, Some(&bias))];
///         let block = Projection { parts: &parts, norm: None, then: Epilogue::Add(&before) };
///         let y = block.of(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
///         assert_eq!(y.to_vec::<f32>()?, [121.5, 242.5]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// Matrices with the same number of inputs, each with an optional float32 bias `[n]`.
    pub parts: &'a [(&'a Matrix, Option<&'a Array>)],
    /// An RMS norm before the product: a float32 weight `[k]`, and `eps`.
    pub norm: Option<(&'a Array, f32)>,
    /// The epilogue.
    pub then: Epilogue<'a>,
}

impl Matrix {
    /// Products of `x` with the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`Projection::of`].
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///         let y = Matrix::Dense(matrix).product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
    ///         assert_eq!(y.to_vec::<f32>()?, [21.0, 43.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product(&self, x: &Array) -> Result<Array> {
        self.product_with(x, false)
    }

    /// [`Self::product`]. With `float_inputs`, inputs are never quantized.
    pub(super) fn product_with(&self, x: &Array, float_inputs: bool) -> Result<Array> {
        let parts = [(self, None)];
        Projection {
            parts: &parts,
            norm: None,
            then: Epilogue::None,
        }
        .with(x, float_inputs)
    }
}

impl DenseMatrix {
    /// Products of `x` with the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::product`].
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::DenseMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///         let y = matrix.product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
    ///         assert_eq!(y.to_vec::<f32>()?, [21.0, 43.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product(&self, x: &Array) -> Result<Array> {
        Matrix::Dense(self.clone()).product(x)
    }
}

impl QuantizedMatrix {
    /// Products of `x` with the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `x` has another type or its last axis is not the input dimension;
    /// MLX's message when the current stream is not on the CPU.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[0.5f32; 2 * 32], &[2, 32])?;
    ///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
    ///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
    ///         let y = matrix.product(&Array::from_slice(&[1.0f32; 32], &[1, 32])?)?;
    ///         assert!(y.to_vec::<f32>()?.iter().all(|y| (y - 16.0).abs() < 1e-3));
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn product(&self, x: &Array) -> Result<Array> {
        Matrix::Quantized(self.clone()).product(x)
    }
}

/// How an operation receives its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operands {
    /// All matrices are inputs of the graph node.
    Inputs,
    /// The operation stores quantized matrices itself if possible. The other matrices are inputs of
    /// the graph node.
    Stored,
    /// The caller keeps the matrices. None is an input of the graph node.
    Elsewhere,
}

impl<'a> Projection<'a> {
    /// Computes the products for `x` on the CPU: float32 `[.., k]` to `[.., n]`. `n` is the sum of
    /// the matrices' outputs; with a gate it is that of one matrix.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream
    /// is not on the CPU.
    pub fn of(&self, x: &Array) -> Result<Array> {
        self.with(x, false)
    }

    /// [`Self::of`]. With `float_inputs`, inputs are never quantized: a differentiated product must
    /// use exact inputs, however few rows it has.
    pub(super) fn with(&self, x: &Array, float_inputs: bool) -> Result<Array> {
        let op = "cpu::project";
        let fault = |message: String| Error::new(ErrorKind::Shape, op, message).with_inputs(&[x]);
        let Some((first, _)) = self.parts.first() else {
            return Err(fault("needs a matrix".into()));
        };
        let k = first.size().k;
        let fits = x.dtype() == Dtype::Float32
            && x.shape()
                .last()
                .is_some_and(|&last| i64::from(last) == k as i64);
        if !fits {
            return Err(fault(format!("needs float32 [.., {k}]")));
        }
        if !float_inputs && let Some(product) = self.column_product(x)? {
            return Ok(product);
        }
        let mut inputs = vec![x];
        let adds = matches!(self.then, Epilogue::Add(_));
        // MLX differentiates only a plain product. For the gradient, the matrix must be an input of
        // the node.
        let alone = matches!(
            (self.parts, self.norm, self.then),
            ([(_, None)], None, Epilogue::None)
        );
        let operands = match alone {
            true => Operands::Inputs,
            false => Operands::Stored,
        };
        let mut work = self.plan(x.size() / k, (adds, operands), &mut inputs)?;
        work.float_inputs = float_inputs;
        let shape = self.finish(x, work.n, &mut inputs)?;
        let meaning = match work.parts.as_slice() {
            [part] if alone && part.stored.is_none() => match part.kind {
                MatrixFormat::Dense(_) => OpKind::DenseProduct,
                MatrixFormat::Quantized {
                    bits,
                    group,
                    scales: ScaleFormat::F32 | ScaleFormat::F16,
                } => OpKind::QuantizedProduct {
                    rows: part.size.n as i32, // all of them were i32 in the matrix
                    group_size: group as i32,
                    bits: bits as i32,
                },
                // MLX cannot differentiate or batch the other formats.
                MatrixFormat::Quantized { .. } => OpKind::Opaque,
            },
            _ => OpKind::Opaque,
        };
        host_op::add(op, meaning, work, &inputs, &shape)
    }

    /// Appends the residual to the inputs, and returns the shape of the output.
    fn finish(&self, x: &Array, n: usize, inputs: &mut Vec<&'a Array>) -> Result<Vec<i32>> {
        let fault = |message: String| {
            Error::new(ErrorKind::Shape, "cpu::project", message).with_inputs(&[x])
        };
        let mut shape = x.shape().to_vec();
        match (shape.last_mut(), i32::try_from(n)) {
            (Some(last), Ok(n)) => *last = n,
            _ => return Err(fault(format!("an axis cannot have {n} outputs"))),
        }
        if let Epilogue::Add(residual) = self.then {
            if residual.shape() != shape || residual.dtype() != Dtype::Float32 {
                return Err(fault(format!("what is added must be float32 {shape:?}")));
            }
            inputs.push(residual);
        }
        Ok(shape)
    }

    /// The product by the kernel of packed matrices; `None` unless all matrices are packed
    /// ([`DenseMatrix::into_columns`]).
    fn column_product(&self, x: &Array) -> Result<Option<Array>> {
        let columns = self.parts.iter().map(|(matrix, _)| matrix.columns());
        let Some(columns) = columns.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let adds = matches!(self.then, Epilogue::Add(_));
        let mut inputs = vec![x];
        let Product {
            parts,
            rows,
            k,
            n,
            eps,
            gate,
            activation,
            residual,
            ..
        } = self.plan(
            x.size() / self.inputs(),
            (adds, Operands::Elsewhere),
            &mut inputs,
        )?;
        let work = ColumnProduct {
            parts: (columns.into_iter().zip(parts))
                .map(|(matrix, part)| ColumnPart {
                    matrix: Arc::clone(matrix),
                    bias: part.bias,
                })
                .collect(),
            rows,
            k,
            n,
            eps,
            gate,
            activation,
            residual,
        };
        let shape = self.finish(x, n, &mut inputs)?;
        host_op::add("cpu::project", OpKind::Opaque, work, &inputs, &shape).map(Some)
    }

    /// The number of inputs of the matrices; 1 without matrices.
    fn inputs(&self) -> usize {
        self.parts.first().map_or(1, |(first, _)| first.size().k)
    }

    /// The work for `rows` rows. It reads the rows, then the arrays that this function appends to
    /// `inputs`, and with `adds` the residual.
    pub(super) fn plan(
        &self,
        rows: usize,
        (adds, operands): (bool, Operands),
        inputs: &mut Vec<&'a Array>,
    ) -> Result<Product> {
        let fault = |message: String| Error::new(ErrorKind::Shape, "cpu::project", message);
        let k = self.parts.first().map_or(0, |(first, _)| first.size().k);
        if self.parts.len() > MAX_PARTS || self.parts.iter().any(|(m, _)| m.size().k != k) {
            return Err(fault(format!(
                "the matrices must be at most {MAX_PARTS}, with {k} inputs each"
            )));
        }
        let vector =
            |a: &Array, n: usize| a.dtype() == Dtype::Float32 && a.ndim() == 1 && a.size() == n;
        if let Some((weight, _)) = self.norm {
            if !vector(weight, k) {
                return Err(fault(format!("the norm needs a float32 weight [{k}]")));
            }
            inputs.push(weight);
        }
        let mut parts = Vec::with_capacity(self.parts.len());
        let mut n = 0;
        for (matrix, bias) in self.parts {
            let size = matrix.size();
            let packed = match matrix {
                Matrix::Quantized(q) if operands == Operands::Stored => q.stored_matrix()?,
                Matrix::Dense(d) if operands != Operands::Elsewhere => d.stored_matrix()?,
                _ => None,
            };
            if packed.is_none() && operands != Operands::Elsewhere {
                inputs.extend(matrix.arrays()?);
            }
            if let Some(bias) = bias {
                if !vector(bias, size.n) {
                    return Err(fault(format!("a bias must be float32 [{}]", size.n)));
                }
                inputs.push(bias);
            }
            parts.push(MatrixPart {
                kind: matrix.kind(),
                size,
                bias: bias.is_some(),
                stored: packed,
            });
            n += size.n;
        }
        if let Epilogue::Gate(_) = self.then {
            let [(gate, _), (up, _)] = self.parts else {
                return Err(fault("a gate needs two matrices".into()));
            };
            if gate.size().n != up.size().n {
                return Err(fault("a gate needs two matrices of one size".into()));
            }
            n /= 2;
        }
        let activation = match self.then {
            Epilogue::Activate(activation) if self.parts.len() == 1 => Some(activation),
            Epilogue::Activate(_) => return Err(fault("an activation needs one matrix".into())),
            _ => None,
        };
        Ok(Product {
            parts,
            rows,
            k,
            n,
            eps: self.norm.map(|(_, eps)| eps),
            gate: match self.then {
                Epilogue::Gate(gate) => Some(gate),
                _ => None,
            },
            activation,
            residual: adds,
            float_inputs: false,
            prefill_inputs: (self.parts.iter().map(|(m, _)| m.prefill_inputs()).max())
                .unwrap_or_default(),
            isa: Isa::detect(),
        })
    }
}
