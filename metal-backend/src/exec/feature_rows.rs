//! Computes selected features of a feed-forward block from matrices with one row per feature.

use mlx_rs_core::io::Floats;
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, cpu};

pub use mlx_rs_core::cpu::FeatureNumbers;

use super::activation::Activation;

/// The inputs of [`FeatureRows`]. Matrices are `[features, hidden]`, row-major.
#[derive(Debug)]
pub struct FeatureParts {
    /// The sizes of the matrices: features, hidden.
    pub shape: [i32; 2],
    /// The gate's activation.
    pub activation: Activation,
    /// Gate rows; `None` if the model's own gate is used. In a block without a gate, these are the
    /// up rows.
    pub gate: Option<FeatureNumbers>,
    /// Up rows, if there is a gate.
    pub up: Option<FeatureNumbers>,
    /// Columns of the down matrix, one per feature.
    pub down: FeatureNumbers,
    /// Bias of the gate, `[features]`.
    pub gate_bias: Option<Floats>,
    /// Bias of the up matrix, `[features]`.
    pub up_bias: Option<Floats>,
    /// Bias of the down matrix, `[hidden]`.
    pub down_bias: Option<Floats>,
}

/// The features of a layer, prepared for computation.
#[derive(Debug)]
pub struct FeatureRows {
    activation: Activation,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Computed by our kernels from mapped memory.
    Kernel(Box<Held>),
    /// Computed by MLX from a copy on MLX's device.
    Arrays(Box<Copied>),
}

#[derive(Debug)]
struct Held {
    gate: Option<cpu::FeatureMatrix>,
    up: Option<cpu::FeatureMatrix>,
    down: cpu::FeatureMatrix,
    gate_bias: Option<Floats>,
    up_bias: Option<Floats>,
    down_bias: Option<Floats>,
}

#[derive(Debug)]
struct Copied {
    gate: Option<Array>,
    up: Option<Array>,
    down: Array,
    gate_bias: Option<Array>,
    up_bias: Option<Array>,
    down_bias: Option<Array>,
}

/// Whether features are copied to arrays. Otherwise, kernels read them from mapped memory.
pub fn copies_features(on_cpu: bool) -> bool {
    !on_cpu || !cpu::enabled()
}

impl FeatureRows {
    /// Prepares the features of a layer for the CPU if `on_cpu`; otherwise copies them as `dtype`.
    pub fn new(parts: FeatureParts, on_cpu: bool, dtype: Dtype) -> Result<Self> {
        let shape = parts.shape;
        let kind = if !copies_features(on_cpu) {
            let matrix = |floats| cpu::FeatureMatrix::new(floats, shape);
            Kind::Kernel(Box::new(Held {
                gate: parts.gate.map(matrix).transpose()?,
                up: parts.up.map(matrix).transpose()?,
                down: matrix(parts.down)?,
                gate_bias: parts.gate_bias,
                up_bias: parts.up_bias,
                down_bias: parts.down_bias,
            }))
        } else {
            let copy = |numbers: &FeatureNumbers| numbers.to_array(&shape)?.astype(dtype);
            let matrix = |numbers: Option<&FeatureNumbers>| numbers.map(copy).transpose();
            let vector = |floats: Option<&Floats>, n: i32| {
                let copy = |all: &Floats| Array::from_slice(all.as_ref(), &[n])?.astype(dtype);
                floats.map(copy).transpose()
            };
            Kind::Arrays(Box::new(Copied {
                gate: matrix(parts.gate.as_ref())?,
                up: matrix(parts.up.as_ref())?,
                down: copy(&parts.down)?,
                gate_bias: vector(parts.gate_bias.as_ref(), shape[0])?,
                up_bias: vector(parts.up_bias.as_ref(), shape[0])?,
                down_bias: vector(parts.down_bias.as_ref(), shape[1])?,
            }))
        };
        Ok(Self {
            activation: parts.activation,
            kind,
        })
    }

    /// The gate's activation.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Whether the block has up rows in addition to gate rows.
    pub fn is_gated(&self) -> bool {
        match &self.kind {
            Kind::Kernel(rows) => rows.up.is_some(),
            Kind::Arrays(arrays) => arrays.up.is_some(),
        }
    }

    /// Returns the gates of all features before the activation function, computed from the gate
    /// rows: `[.., hidden] -> [.., features]`.
    ///
    /// # Errors
    /// If shapes do not match, or there are no gate rows.
    pub fn gates(&self, x: &Array) -> Result<Array> {
        let gates = match &self.kind {
            Kind::Kernel(rows) => (rows.gate.as_ref())
                .map(|gate| gate.product(x, rows.gate_bias.as_ref()))
                .transpose()?,
            Kind::Arrays(arrays) => match (&arrays.gate, &arrays.gate_bias) {
                (Some(gate), None) => Some(x.matmul(&gate.swap_axes(0, 1)?)?),
                (Some(gate), Some(bias)) => {
                    Some(bias.addmm(x, &gate.swap_axes(0, 1)?, 1.0, 1.0)?)
                }
                (None, _) => None,
            },
        };
        gates.ok_or_else(|| {
            let message = "the gate is neither loaded nor among the features";
            Error::new(ErrorKind::Value, "walk", message)
        })
    }

    /// Returns the inputs of the down rows, `[.., features]`. Features outside the position's
    /// `top_k` are 0. This function computes all features, including those that become 0.
    ///
    /// # Errors
    /// The errors of [`Self::walk`].
    pub fn activations(&self, x: &Array, gates: &Array, top_k: usize) -> Result<Array> {
        let mut all = self.activation.apply(gates)?;
        let products = match &self.kind {
            Kind::Kernel(rows) => (rows.up.as_ref())
                .map(|up| up.product(x, rows.up_bias.as_ref()))
                .transpose()?,
            Kind::Arrays(arrays) => arrays.products(x)?,
        };
        if let Some(products) = products {
            all = all.multiply(&products)?;
        }
        match greatest_features(gates, top_k)? {
            Some(best) => only_features(&all, &best),
            None => Ok(all),
        }
    }

    /// Returns the output `[.., hidden]` of the `top_k` features with the greatest gate magnitude
    /// per position. Inputs are `x` `[.., hidden]` and the gates before the activation function,
    /// `[.., features]`.
    ///
    /// # Errors
    /// If shapes do not match, or gradients are required, which this function does not support.
    pub fn walk(
        &self,
        x: &Array,
        gates: &Array,
        top_k: usize,
        differentiated: bool,
    ) -> Result<Array> {
        if differentiated {
            let message = "selected features have no derivatives; train the model without them";
            return Err(Error::new(ErrorKind::Value, "walk", message));
        }
        match &self.kind {
            Kind::Kernel(rows) => {
                let activation = self.activation.kernel();
                let walk = cpu::FeatureWalk {
                    up: rows.up.as_ref(),
                    up_bias: rows.up_bias.as_ref(),
                    down: &rows.down,
                    down_bias: rows.down_bias.as_ref(),
                    activation,
                    top_k,
                };
                let activated = match activation {
                    Some(_) => None,
                    None => Some(self.activation.apply(gates)?),
                };
                walk.of(x, gates, activated.as_ref())
            }
            Kind::Arrays(arrays) => arrays.walk(self.activation, x, gates, top_k),
        }
    }
}

/// Multiplies states `[n, hidden]` by rows `[features, hidden]` on the CPU, and adds a bias
/// `[features]`: float32 `[n, features]`.
pub fn gate_products(
    rows: FeatureNumbers,
    shape: [i32; 2],
    bias: Option<&Floats>,
    x: &Array,
) -> Result<Array> {
    if !copies_features(true) {
        return cpu::FeatureMatrix::new(rows, shape)?.product(x, bias);
    }
    let rows = rows.to_array(&shape)?.astype(Dtype::Float32)?;
    let products = x.matmul(&rows.swap_axes(0, 1)?)?;
    match bias {
        Some(bias) => products.add(&Array::from_slice(bias.as_ref(), &shape[..1])?),
        None => Ok(products),
    }
}

/// Returns the indices of the `top_k` greatest gate magnitudes per position, `[.., features] ->
/// [.., k]`. Returns `None` if all features are selected.
pub fn greatest_features(gates: &Array, top_k: usize) -> Result<Option<Array>> {
    let features = gates.dim(-1)?;
    match i32::try_from(top_k) {
        Ok(k) if k < features => {
            let order = gates.abs()?.argpartition(features - k, -1)?;
            order.slice_axis(-1, features - k, features).map(Some)
        }
        _ => Ok(None),
    }
}

/// Keeps `values` at the features `best`, and sets all others to 0: `[.., features]`.
pub fn only_features(values: &Array, best: &Array) -> Result<Array> {
    let selected = values.take_along_axis(best, -1)?;
    values.zeros_like()?.put_along_axis(best, &selected, -1)
}

impl Copied {
    /// Multiplies `x` by all up rows, if there are any: `[.., hidden] -> [.., features]`.
    fn products(&self, x: &Array) -> Result<Option<Array>> {
        let Some(up) = &self.up else { return Ok(None) };
        let products = x.matmul(&up.swap_axes(0, 1)?)?;
        match &self.up_bias {
            Some(bias) => products.add(bias).map(Some),
            None => Ok(Some(products)),
        }
    }

    fn walk(
        &self,
        activation: Activation,
        x: &Array,
        gates: &Array,
        top_k: usize,
    ) -> Result<Array> {
        let hidden = x.dim(-1)?;
        let best = greatest_features(gates, top_k)?;
        let activated = activation.apply(gates)?;
        let y = match best {
            // A single position needs only the rows of its selected features.
            Some(best) if x.size() == hidden.unsigned_abs() as usize => {
                let best = best.reshape(&[-1])?;
                let mut weights = activated.reshape(&[-1])?.take_clamped(&best, 0)?; // [k]
                if let Some(up) = &self.up {
                    let rows = up.take_clamped(&best, 0)?; // [k, hidden]
                    let mut products = rows.matmul(&x.reshape(&[-1, 1])?)?.reshape(&[-1])?;
                    if let Some(bias) = &self.up_bias {
                        products = products.add(&bias.take_clamped(&best, 0)?)?;
                    }
                    weights = weights.multiply(&products)?;
                }
                let rows = self.down.take_clamped(&best, 0)?;
                (weights.reshape(&[1, -1])?.matmul(&rows)?).reshape(x.shape())?
            }
            best => {
                let mut weights = activated;
                if let Some(products) = self.products(x)? {
                    weights = weights.multiply(&products)?;
                }
                if let Some(best) = best {
                    weights = only_features(&weights, &best)?;
                }
                weights.matmul(&self.down)?
            }
        };
        match &self.down_bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs_core::{Device, Stream};

    use super::*;

    fn noise(n: usize, seed: usize) -> Floats {
        // All magnitudes must differ, because the order of equal magnitudes is arbitrary.
        let value = |i: usize| ((i + seed) * 7919 % 211) as f32 * 0.01 - 1.003;
        Floats::from((0..n).map(value).collect::<Vec<_>>())
    }

    /// Both implementations must agree: with and without a gate and biases, for one position and
    /// for several.
    #[test]
    fn kernels_give_what_mlx_gives() {
        let (features, hidden) = (48, 32);
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            for activation in [Activation::Silu, Activation::Gelu, Activation::Relu2] {
                for (gated, biased) in [(true, false), (true, true), (false, true)] {
                    let rows = |on_cpu: bool| {
                        let matrix = |seed| noise(features * hidden, seed);
                        let parts = FeatureParts {
                            shape: [features as i32, hidden as i32],
                            activation,
                            gate: Some(matrix(1).into()),
                            up: gated.then(|| matrix(2).into()),
                            down: matrix(3).into(),
                            gate_bias: biased.then(|| noise(features, 6)),
                            up_bias: (biased && gated).then(|| noise(features, 4)),
                            down_bias: biased.then(|| noise(hidden, 5)),
                        };
                        FeatureRows::new(parts, on_cpu, Dtype::Float32).unwrap()
                    };
                    let (ours, plain) = (rows(true), rows(false));
                    assert_eq!(ours.is_gated(), gated);
                    for length in [1, 6] {
                        let array = |n: usize, seed: usize| {
                            let all = noise(length * n, seed);
                            Array::from_slice(all.as_ref(), &[1, length as i32, n as i32]).unwrap()
                        };
                        let (x, gates) = (array(hidden, 8), array(features, 9));
                        let [a, b] = [&ours, &plain].map(|rows| rows.gates(&x).unwrap());
                        assert_eq!(a.shape(), gates.shape());
                        assert!(a.all_close(&b, 1e-5, 1e-4).unwrap());
                        for top_k in [1, 7, 47, 48, usize::MAX] {
                            let [a, b] = [&ours, &plain]
                                .map(|rows| rows.walk(&x, &gates, top_k, false).unwrap());
                            assert_eq!(a.shape(), x.shape());
                            assert!(
                                a.all_close(&b, 1e-5, 1e-4).unwrap(),
                                "{activation:?} {top_k}"
                            );
                        }
                        assert!(ours.walk(&x, &gates, 3, true).is_err());
                    }
                }
            }
        });
    }
}
