//! Random numbers by explicit keys (Threefry, Salmon et al. 2011): the same key gives the same
//! numbers, whatever else runs. There is deliberately no global generator here.

use mlx_sys as sys;

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// The state of a generator: two 32-bit words on the device.
#[derive(Debug, Clone)]
pub struct Key(Array);

impl Key {
    /// The key of a seed.
    ///
    /// # Errors
    /// When MLX cannot allocate it.
    pub fn new(seed: u64) -> Result<Self> {
        call::adopt("random_key", |out| {
            // SAFETY: `out` is a writable handle.
            unsafe { sys::mlx_random_key(out, seed) }
        })
        .map(Self)
    }

    /// Two independent keys.
    ///
    /// # Errors
    /// When MLX cannot allocate them.
    pub fn split(&self) -> Result<(Self, Self)> {
        let pair = call::array("random_split", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { sys::mlx_random_split_num(out, self.0.raw(), 2, s) }
        })?;
        // `[2, 2]`: one key a row.
        let row = |i: i32| pair.slice_axis(0, i, i + 1)?.reshape(&[2]);
        Ok((Self(row(0)?), Self(row(1)?)))
    }

    /// The two words, for evaluation together with other arrays.
    #[must_use]
    pub fn array(&self) -> &Array {
        &self.0
    }
}

fn countable(op: &'static str, shape: &[i32]) -> Result<()> {
    if memory::checked_bytes(shape, 8).is_some_and(|b| b <= memory::budget()) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("shape {shape:?} is negative or too large"),
    ))
}

fn float_only(op: &'static str, dtype: Dtype) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Dtype,
        op,
        format!("needs a float type, not {dtype}"),
    ))
}

/// Uniform numbers in `[low, high)`.
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
pub fn uniform(low: f32, high: f32, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_uniform", shape)?;
    float_only("random_uniform", dtype)?;
    let (low, high) = (Array::scalar(low)?, Array::scalar(high)?);
    call::array("random_uniform", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_uniform(
                out,
                low.raw(),
                high.raw(),
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                key.0.raw(),
                s,
            )
        }
    })
}

/// Normal numbers of the given mean and standard deviation.
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
pub fn normal(mean: f32, std: f32, shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_normal", shape)?;
    float_only("random_normal", dtype)?;
    call::array("random_normal", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_normal(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                mean,
                std,
                key.0.raw(),
                s,
            )
        }
    })
}

/// One index (`uint32`) along `axis`, drawn with probabilities `softmax(logits)`.
///
/// # Errors
/// [`ErrorKind::Index`] when there is no such axis or it is empty.
pub fn categorical(logits: &Array, axis: i32, key: &Key) -> Result<Array> {
    if logits.shape()[logits.axis("categorical", axis)?] == 0 {
        return Err(Error::new(
            ErrorKind::Index,
            "categorical",
            "there is nothing to draw from",
        )
        .with_inputs(&[logits]));
    }
    call::array("categorical", |out, s| {
        // SAFETY: all handles are live; the axis exists.
        unsafe { sys::mlx_random_categorical(out, logits.raw(), axis, key.0.raw(), s) }
    })
    .map_err(|e| e.with_inputs(&[logits]))
}

/// Standard Gumbel numbers, `-log(-log(u))`.
///
/// # Errors
/// For an impossible shape, or a type that is not a float.
pub fn gumbel(shape: &[i32], dtype: Dtype, key: &Key) -> Result<Array> {
    countable("random_gumbel", shape)?;
    float_only("random_gumbel", dtype)?;
    call::array("random_gumbel", |out, s| {
        // SAFETY: pointer and length describe the slice; all handles are live.
        unsafe {
            sys::mlx_random_gumbel(
                out,
                shape.as_ptr(),
                shape.len(),
                dtype.raw(),
                key.0.raw(),
                s,
            )
        }
    })
}
