//! One linear layer for dense and quantized weights: `y = x W^T + b`.

use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::adapter::{self, SlotView};
use super::norm::{Norm, spec, through};
use crate::exec::{self, Epilogue, Matrix, Part, Weight};

/// A linear layer.
#[derive(Debug, Clone)]
pub struct Linear {
    matrix: Matrix,
    bias: Option<Array>,
    /// The slot for adapters, if an adapter can change the weight.
    slot: Option<SlotView>,
    /// The slot through which the bias can be trained.
    bias_slot: Option<SlotView>,
    outputs: i32,
    /// The processes among which the inputs are divided; `None` if this process has all inputs.
    /// Their partial products are summed before the bias is added.
    summed_over: Option<Group>,
}

impl Linear {
    /// Creates a layer from a weight `[out, in]` and an optional bias `[out]`. `on_cpu` says
    /// whether a CPU computes the layer.
    pub fn new(weight: Weight, bias: Option<Array>, on_cpu: bool) -> Result<Self> {
        Ok(Self {
            outputs: weight.shape().first().copied().unwrap_or(0),
            matrix: Matrix::new(weight, on_cpu)?,
            bias,
            slot: None,
            bias_slot: None,
            summed_over: None,
        })
    }

    /// Creates a layer that is not loaded in this process, because other processes compute it.
    #[must_use]
    pub fn absent() -> Self {
        Self {
            outputs: 0,
            matrix: Matrix::absent(),
            bias: None,
            slot: None,
            bias_slot: None,
            summed_over: None,
        }
    }

    /// Converts the matrix to the layout of [`Matrix::into_columns`].
    ///
    /// # Errors
    /// The errors of [`Matrix::into_columns`].
    pub fn into_columns(self) -> Result<Self> {
        Ok(Self {
            matrix: self.matrix.into_columns()?,
            ..self
        })
    }

    /// Returns the number of outputs; 0 if the layer is not loaded.
    pub fn outputs(&self) -> i32 {
        self.outputs
    }

    /// Whether the layer is loaded.
    pub fn is_loaded(&self) -> bool {
        self.matrix.is_loaded()
    }

    /// Sets the slot for adapters.
    #[must_use]
    pub fn at(mut self, slot: SlotView) -> Self {
        self.slot = Some(slot);
        self
    }

    /// Sets the slot through which the bias can be trained.
    #[must_use]
    pub fn with_bias_at(mut self, slot: Option<SlotView>) -> Self {
        self.bias_slot = slot;
        self
    }

    /// Sets the processes among which the inputs are divided. Their partial outputs are summed.
    #[must_use]
    pub fn summed_over(mut self, group: Option<Group>) -> Self {
        self.summed_over = group;
        self
    }

    /// Whether an adapter or a trained bias changes the layer's output.
    pub fn is_adapted(&self) -> bool {
        let slots = [&self.slot, &self.bias_slot];
        slots.into_iter().flatten().any(SlotView::is_adapted)
    }

    /// Returns the layer's weights `[out, in]` in float32, without an adapter.
    ///
    /// # Errors
    /// If the layer is not loaded, this process has only a slice of it, or memory runs out.
    pub fn dense(&self) -> Result<Array> {
        if self.summed_over.is_some() {
            let message = "this process has a part of the matrix only";
            return Err(Error::new(ErrorKind::Unsupported, "linear", message));
        }
        self.matrix.dense()
    }

    /// Returns the matrix and bias for kernels. `None` if the layer has an adapter, its inputs are
    /// divided among processes, or it is not loaded.
    pub fn part(&self) -> Option<Part<'_>> {
        (self.is_loaded() && !self.is_adapted() && self.summed_over.is_none())
            .then_some((&self.matrix, self.bias.as_ref()))
    }

    /// Maps `[.., in]` to `[.., out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        if let Some(slot) = &self.slot {
            slot.observe(x, None)?;
        }
        if self.is_adapted() {
            let adapted = match &self.slot {
                Some(slot) => slot.forward(x, self.matrix.is_kernel(), || self.product(x))?,
                None => None,
            };
            let y = match adapted {
                Some(y) => y,
                None => self.product(x)?,
            };
            let y = match &self.summed_over {
                Some(group) => group.all_sum(&y)?,
                None => y,
            };
            let trained = match &self.bias_slot {
                Some(slot) => slot.vector(y.dtype())?,
                None => None,
            };
            return match trained.as_ref().or(self.bias.as_ref()) {
                Some(b) => y.add(b),
                None => Ok(y),
            };
        }
        if let Some(group) = &self.summed_over {
            let y = group.all_sum(&self.product(x)?)?;
            return match &self.bias {
                Some(bias) => y.add(bias),
                None => Ok(y),
            };
        }
        match &self.bias {
            Some(bias) => self.matrix.affine(x, bias, adapter::differentiated()),
            None => self.product(x),
        }
    }

    /// Returns the `k` greatest outputs for each row of `x` `[.., in]`, as [`exec::greatest`].
    pub fn greatest(&self, x: &Array, k: usize) -> Result<Option<(Array, Array)>> {
        if adapter::differentiated() {
            return Ok(None);
        }
        exec::greatest(self.part(), spec(None), x, k)
    }

    /// Computes `x W^T`, without bias and adapter.
    fn product(&self, x: &Array) -> Result<Array> {
        self.matrix.product(x, adapter::differentiated())
    }

    /// Computes `forward(norm(x)) + add`: `[.., in] -> [.., out]`. `norm` and `add` are optional.
    pub fn forward_from(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        add: Option<&Array>,
    ) -> Result<Array> {
        let then = add.map_or(Epilogue::None, Epilogue::Add);
        if let Some(done) = project(&[self], norm, then, x)? {
            return Ok(done);
        }
        let y = self.forward(&through(norm, x)?)?;
        match add {
            Some(add) => add.add(&y),
            None => Ok(y),
        }
    }
}

/// Computes several layers of the same input, after a norm, as one operation ([`exec::project`]).
/// Concatenates outputs along the last axis, unless `then` combines two of them. Returns `None` if
/// the kernels do not support the layers.
pub fn project(
    layers: &[&Linear],
    norm: Option<&Norm>,
    then: Epilogue<'_>,
    x: &Array,
) -> Result<Option<Array>> {
    let parts = layers.iter().map(|layer| layer.part());
    exec::project(parts, spec(norm), then, x, adapter::differentiated())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs_core::{QuantMode, Quantized, cpu};

    use crate::exec::Activation;

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|i| (((i + seed) * 7919) % 211) as f32 * 0.01 - 1.0)
            .collect();
        Array::from_slice(&values, shape).unwrap()
    }

    fn near(a: &Array, b: &Array) -> bool {
        a.all_close(b, 1e-4, 2e-3).unwrap()
    }

    #[test]
    fn kernels_give_what_mlx_gives_with_all_that_stands_around() {
        let norm = Norm::Rms {
            weight: Some(noise(&[64], 5)),
            eps: 1e-5,
        };
        for bits in [0, 2, 3, 4, 5, 6, 8] {
            let layers = |on_cpu: bool| -> Vec<Linear> {
                [96, 64, 64]
                    .iter()
                    .enumerate()
                    .map(|(i, &n)| {
                        let w = noise(&[n, 64], i as i32);
                        let bias = (i != 1).then(|| noise(&[n], 9));
                        let weight = match bits {
                            0 => Weight::Dense(w),
                            bits => {
                                let mode = QuantMode::Affine;
                                Weight::Quantized(Quantized::quantize(&w, 32, bits, mode).unwrap())
                            }
                        };
                        Linear::new(weight, bias, on_cpu).unwrap()
                    })
                    .collect()
            };
            let (ours, plain) = (layers(true), layers(false));
            for rows in [1, 2, 5, 19] {
                let x = noise(&[1, rows, 64], 3);
                let add = noise(&[1, rows, 64], 4);
                assert!(near(
                    &ours[1].forward_from(Some(&norm), &x, Some(&add)).unwrap(),
                    &plain[1].forward_from(Some(&norm), &x, Some(&add)).unwrap(),
                ));
                assert!(near(
                    &ours[0].forward(&x).unwrap(),
                    &plain[0].forward(&x).unwrap()
                ));
                let all: Vec<&Linear> = ours.iter().collect();
                let nothing = Epilogue::None;
                let joined = project(&all, Some(&norm), nothing, &x).unwrap();
                let normed = norm.forward(&x).unwrap();
                let parts: Vec<Array> = plain.iter().map(|l| l.forward(&normed).unwrap()).collect();
                let expected =
                    mlx_rs_core::concatenate(&parts.iter().collect::<Vec<_>>(), -1).unwrap();
                if cpu::enabled() {
                    assert!(
                        near(&joined.unwrap(), &expected),
                        "{bits} bits, {rows} rows"
                    );
                } else {
                    assert!(joined.is_none());
                }
                for activation in [Activation::Silu, Activation::GeluTanh, Activation::Relu] {
                    let pair = [&ours[1], &ours[2]];
                    let gate = Epilogue::Gate(activation);
                    let Some(got) = project(&pair, None, gate, &x).unwrap() else {
                        continue;
                    };
                    let open = activation.apply(&plain[1].forward(&x).unwrap()).unwrap();
                    let expected = open.multiply(&plain[2].forward(&x).unwrap()).unwrap();
                    assert!(
                        near(&got, &expected),
                        "{bits} bits, {rows} rows, {activation:?}"
                    );
                }
            }
        }
    }
}
