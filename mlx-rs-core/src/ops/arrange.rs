//! Rearranging: repetition, rolling, padding and moving axes. Views and joins are in `shape.rs`.

use mlx_sys as sys;

use super::Axes;
use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};

impl Array {
    /// The whole array `reps[i]` times along axis `i`; missing counts at the front are one, missing
    /// axes too.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative count or an axis too long to be counted.
    pub fn tile(&self, reps: &[i32]) -> Result<Array> {
        let op = "tile";
        let axes = self.ndim().max(reps.len());
        let at = |list: &[i32], i: usize| (i + list.len()).checked_sub(axes).map_or(1, |i| list[i]);
        let countable = (0..axes).all(|i| {
            let r = at(reps, i);
            r >= 0 && r.checked_mul(at(self.shape(), i)).is_some()
        });
        if !countable {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("counts {reps:?} are negative or make an axis too long"),
            )
            .with_inputs(&[self]));
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the slice; every axis of the result can be counted.
            unsafe { sys::mlx_tile(out, self.raw(), reps.as_ptr(), reps.len(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Values moved by `shift` places towards the end, the last ones coming back at the front: along
    /// one axis, several axes alike, or [`super::All`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are named twice.
    pub fn roll<'a>(&self, shift: i32, axes: impl Into<Axes<'a>>) -> Result<Array> {
        let op = "roll";
        match axes.into() {
            Axes::All => {
                let n = self.count(op)?;
                let shift = [short_shift(shift, n)];
                call::array(op, |out, s| {
                    // SAFETY: pointer and length describe the one shift, which is within the array.
                    unsafe { sys::mlx_roll(out, self.raw(), shift.as_ptr(), 1, s) }
                })
            }
            Axes::One(axis) => {
                let length = self.shape()[self.axis(op, axis)?];
                let shift = [short_shift(shift, length)];
                call::array(op, |out, s| {
                    // SAFETY: pointer and length describe the one shift; the axis exists.
                    unsafe { sys::mlx_roll_axis(out, self.raw(), shift.as_ptr(), 1, axis, s) }
                })
            }
            Axes::Many(axes) => self.roll_axes(&vec![shift; axes.len()], axes),
        }
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// [`Array::roll`] with a shift for each of several axes.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when there is not one shift per axis; [`ErrorKind::Index`] for axes that do
    /// not exist or are named twice.
    pub fn roll_axes(&self, shifts: &[i32], axes: &[i32]) -> Result<Array> {
        let op = "roll";
        let axes = self.distinct_axes(op, axes)?;
        if shifts.len() != axes.len() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("{} shifts for {} axes", shifts.len(), axes.len()),
            ));
        }
        let shifts: Vec<i32> = shifts
            .iter()
            .zip(&axes)
            .map(|(&shift, &axis)| short_shift(shift, self.shape()[axis as usize]))
            .collect();
        call::array(op, |out, s| {
            // SAFETY: pointers and lengths describe the slices; the axes exist.
            unsafe {
                sys::mlx_roll_axes(
                    out,
                    self.raw(),
                    shifts.as_ptr(),
                    shifts.len(),
                    axes.as_ptr(),
                    axes.len(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }
}

/// The same roll with a shift below the length: MLX negates and adds shifts, which must not overflow.
fn short_shift(shift: i32, length: i32) -> i32 {
    if length == 0 {
        0
    } else {
        shift.rem_euclid(length)
    }
}
