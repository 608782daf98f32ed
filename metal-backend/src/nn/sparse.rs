//! A feed-forward backend that computes only the features with the greatest gates.

use std::sync::Arc;

use mlx_rs_core::io::Floats;
use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::adapter;
use super::feed_forward::{FeedForward, FfnBackend, FfnPart};
use super::linear::Linear;
use crate::exec::{Activation, FeatureParts, FeatureRows, greatest_features, only_features};

/// Computes the `top_k` features with the greatest gate magnitude at each position. The magnitude
/// is that of the activation function's input. The order of equal magnitudes is arbitrary.
///
/// Single columns of a quantized matrix cannot be read, so loading converts the layer's up and down
/// matrices to float32 rows, one per feature. A pass then reads only the selected rows. On a GPU,
/// this applies only to single positions: for several positions, the layer computes all features
/// and drops the others. A layer with an adapter or in training always computes all features.
#[derive(Debug, Clone, Copy)]
pub struct SparseFfn {
    /// The number of features computed per position.
    pub top_k: usize,
}

/// The backend of one layer, with the layer's features as rows.
#[derive(Debug)]
struct SparseRows {
    inner: SparseFfn,
    rows: FeatureRows,
}

impl SparseFfn {
    /// Keeps `activations` where `gate` is among the `top_k` greatest magnitudes of its position,
    /// and sets all others to 0. Both are `[.., features]`.
    fn chosen(self, gate: &Array, activations: &Array) -> Result<Array> {
        match greatest_features(gate, self.top_k)? {
            Some(best) => only_features(activations, &best),
            None => Ok(activations.clone()),
        }
    }

    /// Returns the selected activations of a layer, computed from its own matrices: `[.., hidden]
    /// -> [.., features]`.
    fn activations(self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        let (gates, all) = match part.dense() {
            FeedForward::Gated(mlp) => {
                let gates = mlp.gate.forward(x)?;
                let all = mlp
                    .activation
                    .apply(&gates)?
                    .multiply(&mlp.up.forward(x)?)?;
                (gates, all)
            }
            FeedForward::Plain(mlp) => {
                let input = mlp.up.forward(x)?;
                let all = mlp.activation.apply(&input)?;
                (input, all)
            }
            _ => return Err(refused(part)),
        };
        self.chosen(&gates, &all)
    }
}

impl FfnBackend for SparseFfn {
    fn name(&self) -> &str {
        "sparse"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        part.down(&self.activations(part, x)?)
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let activations = self.activations(part, x)?;
        Ok((part.down(&activations)?, activations))
    }

    fn bind(&self, part: &FfnPart<'_>) -> Result<Option<Arc<dyn FfnBackend>>> {
        if part.without_features().is_some() {
            return Err(refused(part));
        }
        if part.features().is_some_and(|all| self.top_k >= all) {
            return Ok(None);
        }
        let rows = rows_of(part)?;
        Ok(Some(Arc::new(SparseRows { inner: *self, rows })))
    }
}

impl FfnBackend for SparseRows {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        let adapted = match part.dense() {
            FeedForward::Gated(mlp) => mlp.up.is_adapted() || mlp.down.is_adapted(),
            FeedForward::Plain(mlp) => mlp.down.is_adapted(),
            _ => return Err(refused(part)),
        };
        if adapted || adapter::differentiated() {
            return self.inner.forward(part, x);
        }
        (self.rows).walk(x, &part.gates(x)?, self.inner.top_k, false)
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        self.inner.forward_with_activation(part, x)
    }
}

fn refused(part: &FfnPart<'_>) -> Error {
    let why = part.without_features().unwrap_or_default();
    Error::new(ErrorKind::Unsupported, "sparse", why)
}

/// Copies the features of a layer from the model's matrices to rows, without the gate.
fn rows_of(part: &FfnPart<'_>) -> Result<FeatureRows> {
    let (up, down, activation): (Option<&Linear>, &Linear, Activation) = match part.dense() {
        FeedForward::Gated(mlp) => (Some(&mlp.up), &mlp.down, mlp.activation),
        FeedForward::Plain(mlp) => (None, &mlp.down, mlp.activation),
        _ => return Err(refused(part)),
    };
    let bias = |linear: &Linear| -> Result<Option<Floats>> {
        let bias = linear.part().and_then(|(_, bias)| bias);
        Ok(bias.map(Array::to_f32_vec).transpose()?.map(Floats::from))
    };
    let columns = down.dense()?.swap_axes(0, 1)?; // [hidden, features] -> [features, hidden]
    let shape = [columns.dim(0)?, columns.dim(1)?];
    let parts = FeatureParts {
        shape,
        activation,
        gate: None,
        up: up
            .map(|up| Ok::<_, Error>(Floats::from(up.dense()?.to_f32_vec()?).into()))
            .transpose()?,
        down: Floats::from(columns.to_f32_vec()?).into(),
        gate_bias: None,
        up_bias: up.map(bias).transpose()?.flatten(),
        down_bias: bias(down)?,
    };
    FeatureRows::new(parts, part.place().on_cpu, part.place().dtype)
}

#[cfg(test)]
mod tests {
    use mlx_rs_core::{Device, Dtype, Stream};

    use super::super::feed_forward::FfnPlace;
    use super::super::mlp::GatedMlp;
    use super::*;

    fn linear(values: &[f32], shape: &[i32]) -> Linear {
        let weight = Array::from_slice(values, shape).unwrap();
        Linear::new(crate::exec::Weight::Dense(weight), None, true).unwrap()
    }

    /// Features that are not selected must not be read: their values are NaN, which would spread to
    /// the output.
    #[test]
    fn other_features_are_not_read() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            // Three features of states with two elements. The second feature has the smallest gate.
            let gate = linear(&[2.0, 0.0, 0.1, 0.0, -3.0, 0.0], &[3, 2]);
            let nan = f32::NAN;
            let mlp = FeedForward::Gated(GatedMlp {
                gate,
                up: linear(&[1.0, 1.0, nan, nan, 2.0, 1.0], &[3, 2]),
                down: linear(&[1.0, nan, 10.0, 2.0, nan, 20.0], &[2, 3]),
                activation: Activation::Relu2,
            });
            let place = FfnPlace {
                layer: 0,
                on_cpu: true,
                dtype: Dtype::Float32,
            };
            let part = FfnPart::new(&mlp, place);
            let bound = SparseFfn { top_k: 2 }.bind(&part).unwrap().unwrap();
            for rows in [1, 3] {
                let x = Array::from_slice(&[1.0f32, 4.0].repeat(rows), &[1, rows as i32, 2]);
                let y = bound.forward(&part, &x.unwrap()).unwrap();
                // The first feature adds 2^2 * 5. The third feature has a negative gate, so its
                // activation is zero.
                assert_eq!(y.to_vec::<f32>().unwrap(), [20.0f32, 40.0].repeat(rows));
            }
            let all = SparseFfn { top_k: 3 };
            assert!(all.bind(&part).unwrap().is_none());
            let one = Array::from_slice(&[1.0f32, 4.0], &[1, 1, 2]).unwrap();
            let y = all.forward(&part, &one).unwrap().to_vec::<f32>().unwrap();
            assert!(y.iter().all(|y| y.is_nan()), "all of them are read");
        });
    }

    #[test]
    fn the_greatest_gates_of_each_position_stay() {
        let gate = Array::from_slice(&[3.0f32, -5.0, 1.0, 0.5, -0.1, 0.2, -0.3, 0.0], &[1, 2, 4]);
        let values = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[1, 2, 4]);
        let (gate, values) = (gate.unwrap(), values.unwrap());
        let selected = |top_k: usize| {
            let output = SparseFfn { top_k }.chosen(&gate, &values).unwrap();
            assert_eq!(output.shape(), [1, 2, 4]);
            output.to_vec::<f32>().unwrap()
        };
        assert_eq!(selected(1), [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0, 0.0]);
        assert_eq!(selected(2), [1.0, 2.0, 0.0, 0.0, 0.0, 6.0, 7.0, 0.0]);
        for all in [4, 5, usize::MAX] {
            assert_eq!(selected(all), values.to_vec::<f32>().unwrap());
        }
    }
}
