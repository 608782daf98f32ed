//! A causal depthwise convolution over the last positions. Recurrent layers store its last inputs
//! in their state.

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, concatenate};

use super::adapter::SlotView;

/// A vector that a layer uses without a matrix product. Its slot makes it trainable.
#[derive(Debug, Clone)]
pub struct Vector {
    /// The loaded value.
    pub value: Array,
    /// The slot of the vector.
    pub slot: SlotView,
}

impl Vector {
    /// Returns the current value in float32: the trained value if there is one, otherwise the
    /// loaded value.
    pub fn current(&self) -> Result<Array> {
        match self.slot.vector(Dtype::Float32)? {
            Some(state) => Ok(state),
            None => self.value.astype(Dtype::Float32),
        }
    }
}

/// A depthwise convolution over the last positions, in float32.
#[derive(Debug, Clone)]
pub struct CausalConv {
    weight: Vector,
    bias: Option<Vector>,
    /// The weight as `[width, channels]`; the last row applies to the current position.
    taps: Array,
    width: i32,
}

impl CausalConv {
    /// Creates the layer from `weight` `[channels, 1, width]` or `[channels, width, 1]`, and an
    /// optional bias `[channels]`. The last tap of the weight applies to the current position.
    ///
    /// # Errors
    /// If the weight has another shape.
    pub fn new(weight: Vector, bias: Option<Vector>) -> Result<Self> {
        let width = match *weight.value.shape() {
            [_, 1, width] | [_, width, 1] => width,
            _ => {
                let message = format!(
                    "{:?} is not the shape of a convolution's weight",
                    weight.value.shape()
                );
                return Err(Error::new(ErrorKind::Shape, "convolution", message));
            }
        };
        let taps = taps(&weight.value.astype(Dtype::Float32)?, width)?;
        taps.eval()?;
        Ok(Self {
            weight,
            bias,
            taps,
            width,
        })
    }

    /// The number of positions that one output reads, including its own position.
    pub fn width(&self) -> i32 {
        self.width
    }

    /// Convolves `x` `[R, L, channels]` in float32, which follows the inputs `before` `[R, width -
    /// 1, channels]`. Returns the outputs, and the inputs to store in the state.
    pub fn forward(&self, x: &Array, before: &Array) -> Result<(Array, Array)> {
        let (width, length) = (self.width, x.dim(1)?);
        let all = concatenate(&[before, x], 1)?;
        let taps = match self.weight.slot.vector(Dtype::Float32)? {
            Some(weight) => taps(&weight, width)?,
            None => self.taps.clone(),
        };
        let mut y = if length == 1 {
            all.multiply(&taps)?.sum(1, true)?
        } else {
            let part = |at: i32| {
                let tap = taps.slice_axis(0, at, at + 1)?; // [1, channels]
                all.slice_axis(1, at, at + length)?.multiply(&tap)
            };
            let mut sum = part(0)?;
            for at in 1..width {
                sum = sum.add(&part(at)?)?;
            }
            sum
        };
        if let Some(bias) = &self.bias {
            y = y.add(&bias.current()?)?;
        }
        let total = all.dim(1)?;
        Ok((y, all.slice_axis(1, total - (width - 1), total)?))
    }
}

/// Transposes `[channels, 1, width]` or `[channels, width, 1]` to `[width, channels]`.
fn taps(weight: &Array, width: i32) -> Result<Array> {
    weight.reshape(&[-1, width])?.swap_axes(0, 1)?.contiguous()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::exec::Weight;
    use crate::nn::adapter::{ParamSlot, SlotKind};

    fn vector(values: &[f32], shape: &[i32]) -> Vector {
        let value = Array::from_slice(values, shape).unwrap();
        let kind = SlotKind::Norm { plus: 0.0 };
        let slot = ParamSlot::new("conv", kind, Weight::Dense(value.clone()));
        Vector {
            value,
            slot: SlotView::new(Arc::clone(&slot), None),
        }
    }

    /// Two channels with three taps, with expected values computed by hand. The input is convolved
    /// at once and in two parts, with both weight layouts.
    #[test]
    fn each_position_sees_itself_and_those_before() {
        let values = [1.0, 10.0, 100.0, 0.5, 0.0, -1.0];
        let x = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let x = Array::from_slice(&x, &[1, 4, 2]).unwrap();
        let zeros = Array::from_slice(&[0.0f32; 4], &[1, 2, 2]).unwrap();
        let expected = [101.0, -1.0, 311.0, -3.0, 532.0, -4.0, 754.0, -5.0];
        for shape in [[2, 1, 3], [2, 3, 1]] {
            let bias = vector(&[1.0, 1.0], &[2]);
            let conv = CausalConv::new(vector(&values, &shape), Some(bias)).unwrap();
            assert_eq!(conv.width(), 3);
            let (y, after) = conv.forward(&x, &zeros).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), expected);
            assert_eq!(after.to_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 8.0]);
            let part = |from, to| x.slice_axis(1, from, to).unwrap();
            let (first, before) = conv.forward(&part(0, 3), &zeros).unwrap();
            let (last, after) = conv.forward(&part(3, 4), &before).unwrap();
            let pieces = concatenate(&[&first, &last], 1).unwrap();
            assert_eq!(pieces.to_vec::<f32>().unwrap(), expected);
            assert_eq!(after.to_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 8.0]);
        }
        assert!(CausalConv::new(vector(&values, &[2, 3, 1]), None).is_ok());
        let matrix = vector(&values, &[3, 2]);
        assert!(CausalConv::new(matrix, None).is_err());
    }
}
