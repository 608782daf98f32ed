//! The activation functions of feed-forward features, in float64.

use serde::{Deserialize, Serialize};

/// The activation functions of features, with the names in configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the exact normal distribution.
    Gelu,
    /// `x * Phi(x)` by its tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// The square of `max(x, 0)`.
    Relu2,
}

impl Activation {
    /// The activation of this name in a vindex.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "silu" => Self::Silu,
            "gelu" => Self::Gelu,
            "gelu_tanh" => Self::GeluTanh,
            "relu" => Self::Relu,
            "relu2" => Self::Relu2,
            _ => return None,
        })
    }

    /// The name in a vindex, and in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Relu2 => "relu2",
        }
    }

    /// Applies the activation to a value.
    pub(super) fn apply(self, x: f64) -> f64 {
        match self {
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            Self::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            Self::Relu => x.max(0.0),
            Self::Relu2 => x.max(0.0).powi(2),
        }
    }
}

/// The error function by its Maclaurin series, which converges everywhere. Beyond 6, the function
/// is 1 in float64.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    // erf x = 2/sqrt(pi) exp(-x^2) sum of 2^n x^(2n+1) / (2n+1)!!, whose terms have one sign.
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}
