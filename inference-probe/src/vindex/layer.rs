//! The features of one layer: how strongly a state activates them, and their output. Computed in
//! float64.

use serde::Serialize;

use super::activation::Activation;
use super::index::{Experts, MAX_WIDTH};
use crate::error::{Error, Result};

/// The feed-forward part of one layer. Matrices are `[features, hidden]`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The activation of the gate rows, or of the up rows of a layer without a gate.
    pub activation: Activation,
    /// Gate rows; in a layer without a gate, the up rows.
    pub gate: Vec<f32>,
    /// Up rows of a layer with a gate.
    pub up: Option<Vec<f32>>,
    /// Columns of the down matrix.
    pub down: Vec<f32>,
    /// Biases of the gate and up rows, `[features]`, and of the output, `[hidden]`.
    pub biases: Option<Biases>,
    /// The experts among which the features are divided.
    pub experts: Option<Experts>,
}

/// The biases of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Biases {
    /// `[features]`.
    pub gate: Vec<f32>,
    /// `[features]`; `None` if the layer has no up rows.
    pub up: Option<Vec<f32>>,
    /// `[hidden]`; with experts, `[experts, hidden]`.
    pub down: Vec<f32>,
}

/// A feature that a state activates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hit {
    /// The index of the feature in the layer.
    pub feature: usize,
    /// The gate value before the activation: dot product of row and state, plus bias.
    pub gate: f32,
}

/// Features, each with its activation, which is the factor of its column of the down matrix.
pub type Taken = Vec<(usize, f32)>;

impl Layer {
    /// The number of features of the layer.
    #[must_use]
    pub fn features(&self, hidden: usize) -> usize {
        self.gate.len().checked_div(hidden).unwrap_or(0)
    }

    pub(super) fn check(&self, hidden: usize) -> Result<usize> {
        let features = self.features(hidden);
        let matrix = |m: &[f32]| m.len() == features * hidden;
        let biases = self.biases.as_ref().is_none_or(|b| {
            let up = (b.up.as_ref()).map_or(self.up.is_none(), |up| {
                self.up.is_some() && up.len() == features
            });
            let outputs = self.experts.map_or(1, |e| e.count);
            b.gate.len() == features && up && b.down.len() == outputs * hidden
        });
        let divided = (self.experts)
            .is_none_or(|e| e.count > 0 && e.count.checked_mul(e.features) == Some(features));
        let fits = matrix(&self.gate)
            && self.up.as_deref().is_none_or(matrix)
            && matrix(&self.down)
            && biases
            && divided;
        if !fits || features == 0 || features > MAX_WIDTH {
            return Err(Error::data(format!(
                "the parts of a layer do not fit {features} features of {hidden} elements"
            )));
        }
        Ok(features)
    }

    /// The activation of a feature for a state `[hidden]`, in float64.
    fn activation_of(&self, feature: usize, gate: f64, x: &[f32]) -> f64 {
        let hidden = x.len();
        let opened = self.activation.apply(gate);
        let Some(up) = &self.up else { return opened };
        let bias = self.biases.as_ref().and_then(|b| b.up.as_ref());
        let bias = bias.map_or(0.0, |b| f64::from(b[feature]));
        opened * (dot(&up[feature * hidden..(feature + 1) * hidden], x) + bias)
    }

    /// The gate values of all features for a state `[hidden]`, before the activation, in float64.
    fn gates(&self, x: &[f32]) -> Vec<f64> {
        gates(
            &self.gate,
            self.biases.as_ref().map(|b| b.gate.as_slice()),
            x,
        )
    }

    /// The activations of features for a state `[hidden]`, which are the factors of the columns of
    /// the down matrix.
    ///
    /// # Errors
    /// [`Error::Data`] for a state of another length, and a feature that does not exist.
    pub fn activations(&self, x: &[f32], hits: &[Hit]) -> Result<Taken> {
        let features = self.check(x.len())?;
        let of = |hit: &Hit| match hit.feature < features {
            true => {
                let row = &self.gate[hit.feature * x.len()..(hit.feature + 1) * x.len()];
                let bias = self.biases.as_ref().map_or(0.0, |b| b.gate[hit.feature]);
                let gate = dot(row, x) + f64::from(bias);
                Ok((hit.feature, self.activation_of(hit.feature, gate, x) as f32))
            }
            false => Err(Error::data(format!("there is no feature {}", hit.feature))),
        };
        hits.iter().map(of).collect()
    }

    /// The `top_k` features with the largest gate values by magnitude, the largest first. Equal
    /// values are sorted by index. The state `[hidden]` must be the input of the feed-forward part
    /// (after the norm).
    ///
    /// # Errors
    /// [`Error::Data`] for a state of another length.
    pub fn nearest(&self, x: &[f32], top_k: usize) -> Result<Vec<Hit>> {
        self.check(x.len())?;
        Ok(hits(&self.gates(x), top_k))
    }

    /// The output of the feed-forward part with only the `top_k` nearest features, and the
    /// activation of each of them. `[hidden] -> [hidden]`.
    ///
    /// # Errors
    /// As [`Layer::nearest`]; [`Error::Data`] for a layer with experts, because a router must
    /// choose the experts.
    pub fn walk(&self, x: &[f32], top_k: usize) -> Result<(Vec<f32>, Taken)> {
        self.check(x.len())?;
        self.walk_by(x, &self.gates(x), top_k)
    }

    /// Like [`Layer::walk`], but the caller passes the gate values `[features]`. They include the
    /// biases, and the activation is not yet applied.
    ///
    /// # Errors
    /// As [`Layer::walk`]; [`Error::Data`] if the number of gates is not the number of features.
    pub fn walk_from(&self, x: &[f32], gates: &[f32], top_k: usize) -> Result<(Vec<f32>, Taken)> {
        let features = self.check(x.len())?;
        if gates.len() != features {
            let message = format!("{} gates of {features} features", gates.len());
            return Err(Error::data(message));
        }
        let gates: Vec<f64> = gates.iter().copied().map(f64::from).collect();
        self.walk_by(x, &gates, top_k)
    }

    fn walk_by(&self, x: &[f32], gates: &[f64], top_k: usize) -> Result<(Vec<f32>, Taken)> {
        if self.experts.is_some() {
            return Err(Error::data(
                "features of experts make no output without the router that chooses experts",
            ));
        }
        let mut sum: Vec<f64> = match &self.biases {
            Some(biases) => biases.down.iter().copied().map(f64::from).collect(),
            None => vec![0.0; x.len()],
        };
        let mut taken = Vec::new();
        for feature in greatest_by_magnitude(gates, top_k) {
            let activation = self.activation_of(feature, gates[feature], x);
            let row = &self.down[feature * x.len()..(feature + 1) * x.len()];
            for (sum, down) in sum.iter_mut().zip(row) {
                *sum += activation * f64::from(*down);
            }
            taken.push((feature, activation as f32));
        }
        Ok((sum.into_iter().map(|v| v as f32).collect(), taken))
    }
}

/// The gates of all features for a state, before the activation.
pub(super) fn gates(rows: &[f32], bias: Option<&[f32]>, x: &[f32]) -> Vec<f64> {
    let rows = rows.chunks_exact(x.len().max(1)).enumerate();
    let of = |f: usize| bias.and_then(|b| b.get(f)).copied().map_or(0.0, f64::from);
    rows.map(|(f, row)| dot(row, x) + of(f)).collect()
}

/// The features with the largest gates.
pub(super) fn hits(gates: &[f64], top_k: usize) -> Vec<Hit> {
    greatest_by_magnitude(gates, top_k)
        .into_iter()
        .map(|feature| Hit {
            feature,
            gate: gates[feature] as f32,
        })
        .collect()
}

/// Eight separate sums let the compiler use vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_left) = a.as_chunks::<8>();
    let (b, b_left) = b.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let left = a_left.iter().zip(b_left);
    let left: f64 = left.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.iter().sum::<f64>() + left
}

/// The indices of the `k` largest values by magnitude. The largest comes first; equal ones are
/// sorted by index.
#[must_use]
pub fn greatest_by_magnitude(values: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let before = |a: &usize, b: &usize| {
        let by_size = values[*b].abs().total_cmp(&values[*a].abs());
        by_size.then(a.cmp(b))
    };
    if k < order.len() {
        if k > 0 {
            order.select_nth_unstable_by(k - 1, before);
        }
        order.truncate(k);
    }
    order.sort_unstable_by(before);
    order
}
