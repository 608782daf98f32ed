//! Multiplications by matrices that an index selects from a stack, and mixtures of experts.

use mlx_rs_core::cpu::{self, PrefillInputs};
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Quantized, Result};

use super::activation::Activation;
use super::matrix::kernel_numbers;
use super::weight::Weight;

/// The kernels' backward pass requires a multiple of this number of inputs.
const KERNEL_INPUTS: i32 = 16;

/// A stack of matrices `[experts, out, in]`, prepared for multiplication.
#[derive(Debug, Clone)]
pub struct ExpertMatrix(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// The transposed view `[experts, in, out]`.
    Dense { transposed: Array },
    /// Multiplied by MLX.
    Quantized(Quantized),
    /// Multiplied by our kernels.
    Kernel(cpu::ExpertMatrix),
}

/// A stack with optional biases `[experts, out]`.
pub type ExpertPart<'a> = (&'a ExpertMatrix, Option<&'a Array>);

impl ExpertMatrix {
    /// Prepares a stack `[experts, out, in]`. `on_cpu` says whether a CPU computes in float32.
    pub fn new(weight: Weight, on_cpu: bool) -> Result<Self> {
        if on_cpu && let Some(stack) = kernel_stack(&weight)? {
            return Ok(Self(Kind::Kernel(stack)));
        }
        let dense = |w: Array| -> Result<Kind> {
            Ok(Kind::Dense {
                transposed: w.swap_axes(-1, -2)?,
            })
        };
        Ok(Self(match weight {
            // Only our kernels multiply float32 inputs by 16-bit matrices. MLX computes this
            // product, so it needs float32 weights.
            Weight::Dense(w) if on_cpu => dense(w.astype(Dtype::Float32)?)?,
            Weight::Dense(w) => dense(w)?,
            Weight::Quantized(q) => Kind::Quantized(q),
            packed => match packed.quantized()? {
                Some(q) => Kind::Quantized(q),
                None => dense(packed.dense(Dtype::Float32)?)?,
            },
        }))
    }

    /// Returns the stack as a weight that shares memory with this matrix.
    pub fn weight(&self) -> Result<Weight> {
        Ok(match &self.0 {
            Kind::Dense { transposed } => Weight::Dense(transposed.swap_axes(-1, -2)?),
            Kind::Quantized(q) => Weight::Quantized(q.clone()),
            Kind::Kernel(stack) => match stack.rows() {
                cpu::Matrix::Quantized(rows) => {
                    Weight::Interleaved(rows.clone()).into_experts(stack.experts())
                }
                cpu::Matrix::Dense(rows) => {
                    let rows = rows.weight()?;
                    let inputs = rows.dim(-1)?;
                    Weight::Dense(rows.reshape(&[stack.experts(), -1, inputs])?)
                }
            },
        })
    }

    /// Returns the weights `[experts, out, in]` in float32.
    pub fn dense(&self) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => transposed.swap_axes(-1, -2)?.astype(Dtype::Float32),
            Kind::Quantized(q) => q.dequantize(Dtype::Float32),
            Kind::Kernel(stack) => {
                let rows = kernel_numbers(stack.rows())?; // [experts * out, in]
                rows.reshape(&[stack.experts(), -1, rows.dim(-1)?])
            }
        }
    }

    /// Multiplies `x` `[.., 1, in]` by the matrices of the experts `ids` `[..]`, after
    /// broadcasting: `[.., 1, out]`. `sorted` says that the ids are in ascending order,
    /// `differentiated` that the result needs gradients.
    pub fn product(
        &self,
        x: &Array,
        ids: &Array,
        sorted: bool,
        differentiated: bool,
    ) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => x.gather_mm(transposed, None, ids, sorted),
            Kind::Quantized(q) => q.gather_matmul(x, None, ids, true, sorted),
            Kind::Kernel(stack) => by_kernel(stack, x, ids, differentiated),
        }
    }

    /// Sets the type to which prefill inputs are converted, for stacks that the kernels compute.
    #[must_use]
    pub fn with_prefill_inputs(self, prefill_inputs: PrefillInputs) -> Self {
        Self(match self.0 {
            Kind::Kernel(stack) => Kind::Kernel(stack.with_prefill_inputs(prefill_inputs)),
            other => other,
        })
    }

    /// Whether our kernels multiply by this stack.
    pub fn is_kernel(&self) -> bool {
        matches!(self.0, Kind::Kernel(_))
    }
}

/// Returns the stack for our kernels; `None` if the kernels do not support its format.
fn kernel_stack(weight: &Weight) -> Result<Option<cpu::ExpertMatrix>> {
    let [experts, outputs, inputs] = weight.shape()[..] else {
        return Ok(None);
    };
    let rows = |a: &Array| a.reshape(&[experts * outputs, -1]);
    let halves = |w: &Array| inputs % KERNEL_INPUTS == 0 && cpu::DenseMatrix::supports(w.dtype());
    let matrix = match weight {
        Weight::Experts { rows, .. } => Some(cpu::Matrix::Quantized(rows.clone())),
        Weight::Dense(w) if halves(w) => cpu::DenseMatrix::new(&rows(w)?)?.map(cpu::Matrix::Dense),
        Weight::Quantized(q) if cpu::ExpertMatrix::fits(outputs) => {
            let q = Quantized {
                weight: rows(&q.weight)?,
                scales: rows(&q.scales)?,
                biases: q.biases.as_ref().map(rows).transpose()?,
                ..*q
            };
            cpu::QuantizedMatrix::new(&q)?.map(cpu::Matrix::Quantized)
        }
        _ => None,
    };
    let stack = matrix.map(|matrix| cpu::ExpertMatrix::new(matrix, experts));
    stack.transpose()
}

/// Implements [`ExpertMatrix::product`] with our kernels.
fn by_kernel(
    stack: &cpu::ExpertMatrix,
    x: &Array,
    ids: &Array,
    differentiated: bool,
) -> Result<Array> {
    let product = |x: &Array, ids: &Array| {
        if differentiated && let Some(y) = stack.product_for_gradients(x, ids)? {
            return Ok(y);
        }
        stack.product(x, ids)
    };
    let x = x.squeeze_axis(-2)?; // [.., in]
    match (x.shape(), ids.shape()) {
        ([rows @ .., _], ids_shape) if rows == ids_shape => product(&x, &ids.expand_dims(-1)?),
        // All experts of a token read the same input row: [B, L, 1, in] with [B, L, k].
        _ => product(&x.squeeze_axis(-2)?, ids)?.expand_dims(-2),
    }
}

/// How an expert combines its gate and up outputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGate {
    /// `act(gate) * up`.
    Plain(Activation),
    /// The gate of gpt-oss: `gate * sigmoid(alpha * gate) * (up + 1)`. `gate` is clamped to at most
    /// `limit`, and `up` to `-limit..limit`.
    Clamped {
        /// Slope of the sigmoid.
        alpha: f32,
        /// The clamp of `gate` and `up`.
        limit: f32,
    },
    /// The gate of Step 3.5: `act(gate) * up`. `act(gate)` is at most `limit`, and `up` is clamped
    /// to `-limit..limit`.
    Limited {
        /// The activation function.
        activation: Activation,
        /// The limit of both factors.
        limit: f32,
    },
}

impl ExpertGate {
    /// Returns the kernels' gate; `None` if the kernels do not support it.
    fn kernel(self) -> Option<cpu::ExpertGate> {
        match self {
            Self::Plain(activation) => activation.kernel().map(cpu::ExpertGate::Plain),
            Self::Clamped { alpha, limit } => Some(cpu::ExpertGate::Clamped { alpha, limit }),
            Self::Limited { .. } => None,
        }
    }

    /// Applies the activation function to `up`, for experts without a gate.
    ///
    /// # Errors
    /// If `self` is not a plain activation function.
    pub fn alone(self, up: &Array) -> Result<Array> {
        match self {
            Self::Plain(activation) => activation.apply(up),
            Self::Clamped { .. } | Self::Limited { .. } => Err(Error::new(
                ErrorKind::Value,
                "experts",
                "a clamped gate needs its matrix",
            )),
        }
    }

    /// Combines `gate` and `up` element by element.
    pub fn apply(self, gate: &Array, up: &Array) -> Result<Array> {
        match self {
            Self::Plain(activation) => activation.apply(gate)?.multiply(up),
            Self::Clamped { alpha, limit } => {
                let scalar = |v: f32| Array::scalar(v)?.astype(gate.dtype());
                let (high, low) = (scalar(limit)?, scalar(-limit)?);
                let gate = gate.minimum(&high)?;
                let up = up.minimum(&high)?.maximum(&low)?;
                let open = gate.multiply(&scalar(alpha)?)?.sigmoid()?;
                gate.multiply(&open)?.multiply(&up.add(&scalar(1.0)?)?)
            }
            Self::Limited { activation, limit } => {
                let scalar = |v: f32| Array::scalar(v)?.astype(gate.dtype());
                let (high, low) = (scalar(limit)?, scalar(-limit)?);
                let up = up.minimum(&high)?.maximum(&low)?;
                activation.apply(gate)?.minimum(&high)?.multiply(&up)
            }
        }
    }
}

/// Computes a mixture of experts as one operation: the experts `ids` `[.., k]` for rows `x` `[..,
/// hidden]`, summed with `weights` `[.., k]`: `[.., hidden]`. `parts` are gate, up and down.
/// Returns `None` if the kernels do not support the mixture, or if a part is `None`.
pub fn expert_block(
    parts: [Option<ExpertPart<'_>>; 3],
    activation: ExpertGate,
    x: &Array,
    [ids, weights]: [&Array; 2],
) -> Result<Option<Array>> {
    fn kernel(part: Option<ExpertPart<'_>>) -> Option<cpu::BiasedExperts<'_>> {
        match part {
            Some((ExpertMatrix(Kind::Kernel(stack)), bias)) => Some((stack, bias)),
            _ => None,
        }
    }
    let ([Some(gate), Some(up), Some(down)], Some(activation)) =
        (parts.map(kernel), activation.kernel())
    else {
        return Ok(None);
    };
    let block = cpu::ExpertBlock {
        gate,
        up,
        down,
        activation,
    };
    block.of(x, ids, &weights.astype(Dtype::Float32)?).map(Some)
}
