//! Activation functions of feed-forward blocks.

use mlx_rs_core::{Array, Dtype, Result, cpu, where_};

/// An element-wise activation function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the exact normal distribution (Hendrycks and Gimpel 2016).
    Gelu,
    /// GELU in its tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2` (So et al. 2021, arXiv:2109.08668).
    Relu2,
    /// xIELU (Huang and Schlag 2024, arXiv:2411.13010): a square for positive inputs, and an
    /// exponential for other inputs, each with a learned factor.
    Xielu {
        /// The factor on the square of positive inputs.
        positive: f32,
        /// The factor for other inputs.
        negative: f32,
        /// The slope at zero.
        beta: f32,
        /// The greatest input of the exponential, just below zero.
        eps: f32,
    },
}

/// The names that [`Activation::from_name`] accepts.
pub const NAMES: &str =
    "silu, swish, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, gelu_tanh, relu, relu2";

impl Activation {
    /// Returns the activation with this name in configurations.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "silu" | "swish" => Self::Silu,
            "gelu" => Self::Gelu,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" | "gelu_tanh" => Self::GeluTanh,
            "relu" => Self::Relu,
            "relu2" => Self::Relu2,
            _ => return None,
        })
    }

    /// The name in the public contract.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Relu2 => "relu2",
            Self::Xielu { .. } => "xielu",
        }
    }

    /// Returns the kernels' activation; `None` if the kernels do not support it.
    pub(super) fn kernel(self) -> Option<cpu::Gate> {
        match self {
            Self::Silu => Some(cpu::Gate::Silu),
            Self::Gelu => Some(cpu::Gate::Gelu),
            Self::GeluTanh => Some(cpu::Gate::GeluTanh),
            Self::Relu => Some(cpu::Gate::Relu),
            Self::Relu2 | Self::Xielu { .. } => None,
        }
    }

    /// Applies the activation element by element.
    pub fn apply(self, x: &Array) -> Result<Array> {
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu(),
            Self::GeluTanh => x.gelu_tanh(),
            Self::Relu => x.maximum(&Array::scalar(0.0f32)?.astype(x.dtype())?),
            Self::Relu2 => Self::Relu.apply(x)?.square(),
            Self::Xielu {
                positive,
                negative,
                beta,
                eps,
            } => {
                let scalar = |value: f32| Array::scalar(value)?.astype(x.dtype());
                let squares = x.square()?.multiply(&scalar(positive)?)?;
                // `where_` computes both branches. The limit keeps the exponential of a large
                // positive input from overflowing.
                let below = x.minimum(&scalar(eps)?)?.expm1()?.subtract(x)?;
                let below = below.multiply(&scalar(negative)?)?;
                let curve = where_(&x.greater(&scalar(0.0)?)?, &squares, &below)?;
                curve.add(&x.multiply(&scalar(beta)?)?)
            }
        }
    }
}

/// Computes `log(1 + exp(x))`.
///
/// # Errors
/// If memory runs out.
pub fn softplus(x: &Array, differentiated: bool) -> Result<Array> {
    match on_kernels(x, cpu::Function::Softplus, differentiated)? {
        Some(y) => Ok(y),
        None => Array::scalar(0.0f32)?.logaddexp(x),
    }
}

/// Computes `1 / (1 + exp(-x))`, with the same choice of kernels as [`silu`].
///
/// # Errors
/// If memory runs out.
pub fn sigmoid(x: &Array, differentiated: bool) -> Result<Array> {
    match on_kernels(x, cpu::Function::Sigmoid, differentiated)? {
        Some(y) => Ok(y),
        None => x.sigmoid(),
    }
}

/// Computes the hyperbolic tangent, with the same choice of kernels as [`silu`].
///
/// # Errors
/// If memory runs out.
pub fn tanh(x: &Array, differentiated: bool) -> Result<Array> {
    match on_kernels(x, cpu::Function::Tanh, differentiated)? {
        Some(y) => Ok(y),
        None => x.tanh(),
    }
}

/// Computes a function with our kernels. Returns `None` if MLX must compute it.
fn on_kernels(x: &Array, function: cpu::Function, differentiated: bool) -> Result<Option<Array>> {
    let float = x.dtype() == Dtype::Float32 && x.size() > 0;
    if !differentiated && float && super::on_kernels()? {
        return cpu::elementwise(x, function).map(Some);
    }
    Ok(None)
}

/// Computes `silu(x)`, times `y` if given. Our kernels compute it for float32 if the current stream
/// is on the CPU and the result needs no gradients.
///
/// # Errors
/// If the shapes differ.
pub fn silu(x: &Array, y: Option<&Array>, differentiated: bool) -> Result<Array> {
    let float = |a: &Array| a.dtype() == Dtype::Float32 && a.shape() == x.shape() && a.size() > 0;
    if !differentiated && float(x) && y.is_none_or(float) && super::on_kernels()? {
        return cpu::gated(x, cpu::Gate::Silu, y);
    }
    let gate = x.silu()?;
    match y {
        Some(y) => gate.multiply(y),
        None => Ok(gate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_formulas() {
        let x = Array::vector(&[-3.0f32, -0.5, 0.0, 0.5, 3.0]).unwrap();
        let close = |name: &str, expected: [f32; 5]| {
            let got = Activation::from_name(name)
                .unwrap()
                .apply(&x)
                .unwrap()
                .to_vec::<f32>()
                .unwrap();
            for (g, e) in got.iter().zip(expected) {
                assert!((g - e).abs() < 1e-6, "{name}: {g} is not {e}");
            }
        };
        close(
            "silu",
            [-0.142_277_6, -0.188_770_3, 0.0, 0.311_229_7, 2.857_722],
        );
        close(
            "gelu",
            [-0.004_049_7, -0.154_268_77, 0.0, 0.345_731_23, 2.995_95],
        );
        close(
            "gelu_pytorch_tanh",
            [-0.003_637_4, -0.154_286, 0.0, 0.345_714, 2.996_362_6],
        );
        close("relu", [0.0, 0.0, 0.0, 0.5, 3.0]);
        close("relu2", [0.0, 0.0, 0.0, 0.25, 9.0]);
        assert_eq!(Activation::from_name("mish"), None);
    }

    #[test]
    fn xielu_has_a_square_and_an_exponential() {
        let xielu = Activation::Xielu {
            positive: 0.8,
            negative: 0.6,
            beta: 0.5,
            eps: -1e-6,
        };
        let x = [-3.0f32, -0.5, 0.0, 0.5, 200.0];
        let got = xielu.apply(&Array::vector(&x).unwrap()).unwrap();
        for (got, x) in got.to_vec::<f32>().unwrap().iter().zip(x.map(f64::from)) {
            let curve = match x > 0.0 {
                true => 0.8 * x * x,
                false => 0.6 * (x.min(-1e-6).exp_m1() - x),
            };
            let expected = (curve + 0.5 * x) as f32;
            assert!(
                (got - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                "{got} {expected}"
            );
        }
    }
}
