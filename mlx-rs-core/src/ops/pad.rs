//! Padding with zeros, a value or edges.

use mlx_sys as sys;

use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// The values of the elements that [`Array::pad`] adds.
#[derive(Debug, Clone, Copy)]
pub enum Pad<'a> {
    /// Zero.
    Zero,
    /// A single value, converted to the type of the array.
    Value(&'a Array),
    /// The nearest element of the array.
    Edge,
}

impl Array {
    /// Adds `low` elements before and `high` elements after each of `axes`. `mode` determines their
    /// values.
    ///
    /// ```
    /// use mlx_rs_core::{Pad, array};
    /// let a = array!([1, 2])?;
    /// assert_eq!(a.pad(&[0], &[1], &[2], Pad::Zero)?.to_vec::<i32>()?, [0, 1, 2, 0, 0]);
    /// assert_eq!(a.pad(&[0], &[1], &[2], Pad::Edge)?.to_vec::<i32>()?, [1, 1, 2, 2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are named twice; [`ErrorKind::Shape`]
    /// when the lists differ in length, or an axis is empty and has no edge; [`ErrorKind::Value`]
    /// for negative padding, or a resulting axis longer than `i32::MAX`; MLX's message for a value
    /// that is not a scalar.
    #[doc(alias = "mlx_pad")]
    pub fn pad(&self, axes: &[i32], low: &[i32], high: &[i32], mode: Pad<'_>) -> Result<Array> {
        let op = "pad";
        let axes = self.distinct_axes(op, axes)?;
        if low.len() != axes.len() || high.len() != axes.len() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "give one low and one high padding for each of {} axes, not {} and {}",
                    axes.len(),
                    low.len(),
                    high.len()
                ),
            ));
        }
        let fits = axes.iter().enumerate().all(|(i, &axis)| {
            let total = i64::from(self.shape()[axis as usize]) // resolved above
                + i64::from(low[i])
                + i64::from(high[i]);
            low[i] >= 0 && high[i] >= 0 && total <= i64::from(i32::MAX)
        });
        if !fits {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("padding {low:?} and {high:?} is negative or makes an axis too long"),
            )
            .with_inputs(&[self]));
        }
        // When MLX pads with edges, it uses positions in these lists as axes. So the lists must
        // name every axis in order.
        let n = self.ndim();
        let mut full = (vec![0; n], vec![0; n]);
        for (i, &axis) in axes.iter().enumerate() {
            full.0[axis as usize] = low[i];
            full.1[axis as usize] = high[i];
        }
        if let Some(value) = self.pad_value(op, mode)? {
            return self.padded(&full.0, &full.1, value.as_ref());
        }
        let (value, name) = (Array::scalar(false)?.astype(self.dtype())?, c"edge");
        let all: Vec<i32> = (0..n).map(|i| i as i32).collect();
        call::array(op, |out, s| {
            // SAFETY: pointers and lengths describe lists with one entry per axis. Every axis of
            // the result fits an `i32`. The mode is a static string.
            unsafe {
                sys::mlx_pad(
                    out,
                    self.raw(),
                    all.as_ptr(),
                    all.len(),
                    full.0.as_ptr(),
                    n,
                    full.1.as_ptr(),
                    n,
                    value.raw(),
                    name.as_ptr(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// [`Array::pad`] with the same `width` on all sides.
    ///
    /// ```
    /// use mlx_rs_core::{Pad, array};
    /// let a = array!([1, 2])?.pad_symmetric(1, Pad::Value(&array!(9)?))?;
    /// assert_eq!(a.to_vec::<i32>()?, [9, 1, 2, 9]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::pad`].
    #[doc(alias = "mlx_pad_symmetric")]
    pub fn pad_symmetric(&self, width: i32, mode: Pad<'_>) -> Result<Array> {
        let op = "pad";
        let fits = width >= 0
            && self
                .shape()
                .iter()
                .all(|&d| i64::from(d) + 2 * i64::from(width) <= i64::from(i32::MAX));
        if !fits {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("a padding of {width} is negative or makes an axis too long"),
            )
            .with_inputs(&[self]));
        }
        if let Some(value) = self.pad_value(op, mode)? {
            let width = vec![width; self.ndim()];
            return self.padded(&width, &width, value.as_ref());
        }
        let (value, name) = (Array::scalar(false)?.astype(self.dtype())?, c"edge");
        call::array(op, |out, s| {
            // SAFETY: all handles are live. Every axis of the result fits an `i32`. The mode is a
            // static string.
            unsafe { sys::mlx_pad_symmetric(out, self.raw(), width, value.raw(), name.as_ptr(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Pads axis `i` with `low[i]` elements before and `high[i]` after it. Their value is `value`,
    /// or zero. The result is a slice update of a constant array, because MLX's own padding fails
    /// under `vmap`.
    fn padded(&self, low: &[i32], high: &[i32], value: Option<&Array>) -> Result<Array> {
        let add = |a: &[i32], b: &[i32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let stop = add(self.shape(), low);
        let shape = add(&stop, high);
        if shape == self.shape() {
            return Ok(self.clone());
        }
        let around = match value {
            Some(value) => super::full(&shape, value, self.dtype())?,
            None => super::zeros(&shape, self.dtype())?,
        };
        around.slice_update(self, low, &stop, &vec![1; low.len()])
    }

    /// The value to pad with, as a scalar. `Some(None)` means zeros, and `None` means edges.
    fn pad_value(&self, op: &'static str, mode: Pad<'_>) -> Result<Option<Option<Array>>> {
        match mode {
            Pad::Zero => Ok(Some(None)),
            Pad::Value(value) if value.size() == 1 => Ok(Some(Some(value.reshape(&[])?))),
            Pad::Value(value) => Err(Error::new(
                ErrorKind::Shape,
                op,
                "the value to pad with must be a single one",
            )
            .with_inputs(&[self, value])),
            Pad::Edge if self.size() > 0 => Ok(None),
            Pad::Edge => Err(
                Error::new(ErrorKind::Shape, op, "an empty array has no edge").with_inputs(&[self]),
            ),
        }
    }
}
