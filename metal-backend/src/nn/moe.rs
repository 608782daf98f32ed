//! Mixtures of experts (Shazeer et al. 2017). A router assigns each token to a few of many
//! feed-forward blocks. Each matrix is stacked over all blocks, and products select the experts by
//! index.

use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, Result, ones};

use super::adapter::{self, SlotView};
use super::expert_router::Router;
use super::linear::Linear;
use super::mlp::{GatedMlp, LimitedMlp, Mlp};
use crate::exec::{ExpertGate, ExpertMatrix, ExpertPart, PrefillInputs, Weight, expert_block};

/// The number of rows from which rows are sorted by expert, so that each matrix is read only once.
const WORTH_SORTING: usize = 64;

/// One matrix of all experts, as a stack.
#[derive(Debug, Clone)]
pub struct ExpertLinear {
    matrix: ExpertMatrix,
    /// `[experts, out]`.
    bias: Option<Array>,
    /// The slot for adapters.
    slot: Option<SlotView>,
    /// The processes among which the inputs are divided; `None` if this process has all inputs.
    summed_over: Option<Group>,
}

impl ExpertLinear {
    /// Creates the layer from a stack `[experts, out, in]` and an optional bias `[experts, out]`.
    /// `on_cpu` says whether a CPU computes the layer in float32.
    pub fn new(weight: Weight, bias: Option<Array>, on_cpu: bool) -> Result<Self> {
        Ok(Self {
            matrix: ExpertMatrix::new(weight, on_cpu)?,
            bias,
            slot: None,
            summed_over: None,
        })
    }

    /// Sets the type to which prefill inputs are converted, if the kernels compute the layer.
    #[must_use]
    pub fn with_prefill_inputs(mut self, prefill_inputs: PrefillInputs) -> Self {
        self.matrix = self.matrix.with_prefill_inputs(prefill_inputs);
        self
    }

    /// Sets the processes among which the inputs are divided. The caller must sum the outputs over
    /// them.
    #[must_use]
    pub fn summed_over(mut self, group: Group) -> Self {
        self.summed_over = Some(group);
        self
    }

    /// Sets the slot for adapters.
    #[must_use]
    pub fn at(mut self, slot: SlotView) -> Self {
        self.slot = Some(slot);
        self
    }

    /// Returns the stack `[experts, out, in]` as a weight that shares memory with the layer.
    pub fn weight(&self) -> Result<Weight> {
        self.matrix.weight()
    }

    /// Returns the experts' weights `[experts, out, in]` in float32, and biases `[experts, out]`,
    /// without adapters.
    pub fn dense(&self) -> Result<(Array, Option<Array>)> {
        Ok((self.matrix.dense()?, self.bias.clone()))
    }

    /// Whether an adapter changes the experts' weights.
    fn is_adapted(&self) -> bool {
        self.slot.as_ref().is_some_and(SlotView::is_adapted)
    }

    /// Returns the stack and biases for kernels; `None` if an adapter changes the weights.
    fn part(&self) -> Option<ExpertPart<'_>> {
        (!self.is_adapted()).then_some((&self.matrix, self.bias.as_ref()))
    }

    /// Multiplies `x` `[.., 1, in]` by the matrices of the experts `ids` `[..]`, after
    /// broadcasting: `[.., 1, out]`.
    fn forward(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        if let Some(slot) = &self.slot {
            slot.observe(x, Some(ids))?;
        }
        let plain = || {
            self.matrix
                .product(x, ids, sorted, adapter::differentiated())
        };
        let adapted = match self.slot.as_ref().filter(|p| p.is_adapted()) {
            Some(slot) => slot.forward_experts(x, ids, sorted, plain)?,
            None => None,
        };
        let y = match adapted {
            Some(y) => y,
            None => plain()?,
        };
        match &self.bias {
            Some(bias) => y.add(&bias.take_clamped(ids, 0)?.expand_dims(-2)?),
            None => Ok(y),
        }
    }
}

/// Feed-forward blocks, one per expert.
#[derive(Debug, Clone)]
pub struct Experts {
    /// `[hidden] -> [intermediate]`. If `None`, the activation function applies to the output of
    /// `up`.
    pub gate: Option<ExpertLinear>,
    /// `[hidden] -> [intermediate]`.
    pub up: ExpertLinear,
    /// `[intermediate] -> [hidden]`.
    pub down: ExpertLinear,
    /// The gate and activation function between `up` and `down`.
    pub activation: ExpertGate,
}

impl Experts {
    /// Applies the experts `ids` `[B, L, k]` to `x` `[B, L, hidden]`, and sums their outputs with
    /// `weights` `[B, L, k]`: `[B, L, hidden]`.
    pub fn forward(&self, x: &Array, ids: &Array, weights: &Array) -> Result<Array> {
        let y = self.weighed(x, ids, weights)?;
        match &self.down.summed_over {
            Some(group) => group.all_sum(&y),
            None => Ok(y),
        }
    }

    /// Computes [`Self::forward`] without the sum over the processes that share the inputs.
    fn weighed(&self, x: &Array, ids: &Array, weights: &Array) -> Result<Array> {
        if !adapter::differentiated()
            && let Some(gate) = &self.gate
            && let parts = [gate, &self.up, &self.down].map(ExpertLinear::part)
            && let Some(y) = expert_block(parts, self.activation, x, [ids, weights])?
        {
            return Ok(y);
        }
        weigh(&self.outputs(x, ids)?, weights)
    }

    /// Returns the sum of the selected experts' outputs. The inputs of the experts are `x` `[B, L,
    /// hidden]` times `weights` `[B, L, k]`.
    fn forward_weighed(&self, x: &Array, ids: &Array, weights: &Array) -> Result<Array> {
        let (batch, length, k) = (ids.dim(0)?, ids.dim(1)?, ids.dim(2)?);
        let hidden = x.dim(-1)?;
        let weights = weights.astype(x.dtype())?.expand_dims(-1)?;
        // Each pair of a token and an expert becomes a token with one expert.
        let x = (x.expand_dims(-2)?.multiply(&weights)?).reshape(&[batch, length * k, hidden])?;
        let ids = ids.reshape(&[batch, length * k, 1])?;
        let ones = ones(&[batch, length * k, 1], x.dtype())?;
        let y = self.forward(&x, &ids, &ones)?;
        y.reshape(&[batch, length, k, hidden])?.sum(-2, false)
    }

    /// Returns the output of each expert: `[B, L, k, hidden]`.
    fn outputs(&self, x: &Array, ids: &Array) -> Result<Array> {
        if ids.size() < WORTH_SORTING {
            let x = x.expand_dims(-2)?.expand_dims(-2)?; // [B, L, 1, 1, hidden]
            return self.through(&x, ids, false)?.squeeze_axis(-2);
        }
        let shape = ids.shape().to_vec();
        let (per_token, hidden) = (ids.dim(-1)?, x.dim(-1)?);
        let ids = ids.reshape(&[-1])?;
        let order = ids.argsort(-1)?;
        let back = order.argsort(-1)?;
        let k = Array::scalar(u32::try_from(per_token).unwrap_or(1))?;
        let rows = x
            .reshape(&[-1, 1, hidden])?
            .take_clamped(&order.floor_divide(&k)?, 0)?;
        let y = self.through(&rows, &ids.take_clamped(&order, 0)?, true)?;
        let mut out = shape;
        out.push(y.dim(-1)?);
        y.squeeze_axis(-2)?.take_clamped(&back, 0)?.reshape(&out)
    }

    fn through(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        let up = self.up.forward(x, ids, sorted)?;
        let y = match &self.gate {
            Some(gate) => {
                let gate = gate.forward(x, ids, sorted)?;
                self.activation.apply(&gate, &up)?
            }
            None => self.activation.alone(&up)?,
        };
        self.down.forward(&y, ids, sorted)
    }
}

/// Sums expert outputs `[B, L, k, hidden]` with weights `[B, L, k]`: `[B, L, hidden]`.
fn weigh(outputs: &Array, weights: &Array) -> Result<Array> {
    outputs
        .multiply(&weights.astype(outputs.dtype())?.expand_dims(-1)?)?
        .sum(-2, false)
}

/// A router and its experts, with an optional shared expert.
#[derive(Debug, Clone)]
pub struct Mixture {
    /// The router.
    pub router: Router,
    /// The experts.
    pub experts: Experts,
    /// The shared expert, and the gate `[hidden] -> [1]` on its output (Qwen 2).
    pub shared: Option<(SharedExpert, Option<Linear>)>,
    /// Factor on the sum of the experts' and the shared expert's outputs (Cohere).
    pub scale: Option<Array>,
    /// Whether the router's weights scale the experts' inputs instead of their outputs (Llama 4).
    pub weighs_inputs: bool,
}

/// An expert that processes every token.
#[derive(Debug, Clone)]
pub enum SharedExpert {
    /// A gated block.
    Gated(GatedMlp),
    /// A gated block whose gate has limits.
    Limited(LimitedMlp),
    /// Two matrices without a gate.
    Plain(Mlp),
}

impl SharedExpert {
    fn forward(&self, x: &Array, add: Option<&Array>) -> Result<Array> {
        match (self, add) {
            (Self::Gated(mlp), add) => mlp.forward_from(None, x, add),
            (Self::Limited(mlp), Some(add)) => add.add(&mlp.forward(x)?),
            (Self::Limited(mlp), None) => mlp.forward(x),
            (Self::Plain(mlp), Some(add)) => add.add(&mlp.forward(x)?),
            (Self::Plain(mlp), None) => mlp.forward(x),
        }
    }
}

impl Mixture {
    /// Whether an adapter changes the router, the experts, the shared expert or its gate.
    pub fn is_adapted(&self) -> bool {
        let experts = [
            self.experts.gate.as_ref(),
            Some(&self.experts.up),
            Some(&self.experts.down),
        ];
        let shared = (self.shared.as_ref()).is_some_and(|(mlp, gate)| {
            let expert_is_adapted = match mlp {
                SharedExpert::Gated(mlp) => mlp.is_adapted(),
                SharedExpert::Limited(limited) => limited.mlp.is_adapted(),
                SharedExpert::Plain(mlp) => mlp.is_adapted(),
            };
            expert_is_adapted || gate.as_ref().is_some_and(Linear::is_adapted)
        });
        let mut experts = experts.into_iter().flatten();
        self.router.linear.is_adapted() || shared || experts.any(ExpertLinear::is_adapted)
    }

    /// Maps `[B, L, hidden]` to `[B, L, hidden]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let (ids, weights) = self.router.forward(x)?;
        let y = match self.weighs_inputs {
            false => self.experts.forward(x, &ids, &weights)?,
            true => self.experts.forward_weighed(x, &ids, &weights)?,
        };
        let y = match &self.shared {
            Some((mlp, Some(gate))) => y.add(
                &gate
                    .forward(x)?
                    .sigmoid()?
                    .multiply(&mlp.forward(x, None)?)?,
            )?,
            Some((mlp, None)) => mlp.forward(x, Some(&y))?,
            None => y,
        };
        match &self.scale {
            Some(scale) => y.multiply(scale),
            None => Ok(y),
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs_core::{Device, Dtype, QuantMode, Quantized, Stream};

    use super::*;
    use crate::exec::Activation;

    fn numbers(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|i| ((i * 31 + seed) % 23) as f32 * 0.1 - 1.1)
            .collect();
        Array::from_slice(&values, shape).unwrap()
    }

    #[test]
    fn sorted_and_unsorted_rows_give_the_same() {
        let linear = |inputs, outputs, seed| {
            let weight = Weight::Dense(numbers(&[4, outputs, inputs], seed));
            ExpertLinear::new(weight, Some(numbers(&[4, outputs], seed + 1)), false).unwrap()
        };
        let experts = Experts {
            gate: Some(linear(8, 16, 1)),
            up: linear(8, 16, 2),
            down: linear(16, 8, 3),
            activation: ExpertGate::Plain(Activation::Silu),
        };
        let x = numbers(&[1, 40, 8], 5);
        let ids: Vec<u32> = (0..80).map(|i| (i * 3 + i / 7) % 4).collect();
        let ids = Array::from_slice(&ids, &[1, 40, 2]).unwrap();
        let many = experts.outputs(&x, &ids).unwrap();
        assert_eq!(many.shape(), [1, 40, 2, 8]);
        for at in [0, 17, 39] {
            let one = |a: &Array| a.slice_axis(1, at, at + 1).unwrap();
            let few = experts.outputs(&one(&x), &one(&ids)).unwrap();
            assert!(few.all_close(&one(&many), 1e-5, 1e-5).unwrap());
        }
    }

    /// Checks that the difference between the arrays is small relative to the greatest value.
    fn near(got: &Array, wanted: &Array, what: &str) {
        let (got, wanted) = (got.to_f32_vec().unwrap(), wanted.to_f32_vec().unwrap());
        let largest = wanted.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        for (got, wanted) in got.iter().zip(&wanted) {
            assert!(
                (got - wanted).abs() <= 3e-4 * largest,
                "{what}: {got} {wanted}"
            );
        }
    }

    /// Our kernels must equal MLX's operations: fused and separate, with and without biases, for
    /// few rows and for many rows.
    #[test]
    fn kernels_and_mlx_give_the_same() {
        let plain = Stream::default_of(Device::cpu()).unwrap();
        plain.scope(|| {
            // 0 and 16 are dense weights; 40, 41 and 42 are floating-point formats of four and
            // eight bits.
            for bits in [0, 16, 2, 4, 5, 6, 8, 40, 41, 42] {
                for activation in [
                    ExpertGate::Plain(Activation::Silu),
                    ExpertGate::Plain(Activation::Gelu),
                    ExpertGate::Clamped {
                        alpha: 1.702,
                        limit: 1.5,
                    },
                ] {
                    let linear = |inputs, outputs, seed, on_cpu: bool| {
                        let w = numbers(&[4, outputs, inputs], seed);
                        let weight = match bits {
                            0 => Weight::Dense(w),
                            16 => Weight::Dense(w.astype(Dtype::Bfloat16).unwrap()),
                            40.. => {
                                let modes = [QuantMode::Mxfp4, QuantMode::Nvfp4, QuantMode::Mxfp8];
                                let mode = modes[bits as usize - 40];
                                let bits = if mode == QuantMode::Mxfp8 { 8 } else { 4 };
                                let group = if mode == QuantMode::Nvfp4 { 16 } else { 32 };
                                Weight::Quantized(
                                    Quantized::quantize(&w, group, bits, mode).unwrap(),
                                )
                            }
                            bits => Weight::Quantized(
                                Quantized::quantize(&w, 32, bits, QuantMode::Affine).unwrap(),
                            ),
                        };
                        let weight = match weight {
                            Weight::Dense(w) if !on_cpu => {
                                Weight::Dense(w.astype(Dtype::Float32).unwrap())
                            }
                            other => other,
                        };
                        let bias = (bits != 4).then(|| numbers(&[4, outputs], seed + 1));
                        ExpertLinear::new(weight, bias, on_cpu).unwrap()
                    };
                    let experts = |on_cpu| Experts {
                        gate: Some(linear(32, 64, 1, on_cpu)),
                        up: linear(32, 64, 2, on_cpu),
                        down: linear(64, 32, 3, on_cpu),
                        activation,
                    };
                    let (ours, plain) = (experts(true), experts(false));
                    let kernels = crate::exec::keeps_gguf_bits(Dtype::Float32);
                    assert_eq!(ours.up.matrix.is_kernel(), kernels, "{bits} bits");
                    assert!(!plain.up.matrix.is_kernel());
                    for tokens in [1, 7, 50] {
                        let x = numbers(&[1, tokens, 32], 5);
                        let ids: Vec<u32> = (0..2 * tokens as u32)
                            .map(|i| (i * 3 + i / 7) % 4)
                            .collect();
                        let ids = Array::from_slice(&ids, &[1, tokens, 2]).unwrap();
                        let weights = numbers(&[1, tokens, 2], 6);
                        let wanted = plain.forward(&x, &ids, &weights).unwrap();
                        let got = ours.forward(&x, &ids, &weights).unwrap();
                        let what = format!("{bits} bits, {tokens} tokens, {activation:?}");
                        near(&got, &wanted, &what);
                        let each = ours.outputs(&x, &ids).unwrap();
                        let wanted = plain.outputs(&x, &ids).unwrap();
                        assert_eq!(each.shape(), wanted.shape());
                        near(&each, &wanted, &what);
                    }
                }
            }
        });
    }

    #[test]
    fn the_clamped_gate_is_bounded() {
        let v = |x: &[f32]| Array::vector(x).unwrap();
        let gate = ExpertGate::Clamped {
            alpha: 1.702,
            limit: 7.0,
        };
        let y = gate.apply(&v(&[100.0, 0.0]), &v(&[-100.0, 3.0])).unwrap();
        let y = y.to_vec::<f32>().unwrap();
        assert!((y[0] + 42.0).abs() < 1e-2 && y[1] == 0.0, "{y:?}");
    }
}
