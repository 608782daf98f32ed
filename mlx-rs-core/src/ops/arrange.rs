//! Rearranges elements: repetition, rolling, grids, and moving axes. `pad.rs` has padding;
//! `shape.rs` has plain views, joins and splits.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::vector(&[1i32, 2, 3])?;
//! assert_eq!(a.roll(1, 0)?.to_vec::<i32>()?, [3, 1, 2]);
//! assert_eq!(a.tile(&[2])?.shape(), [6]);
//! # Ok(()) }
//! ```

use mlx_sys as sys;

use super::Axes;
use crate::array::{Array, axis_of};
use crate::call::{self, ArrayVec};
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;

impl Array {
    /// Repeats the whole array `reps[i]` times along axis `i`. Missing leading counts are one, and
    /// missing leading axes have length one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2]])?.tile(&[2, 2])?.to_vec::<i32>()?, [1, 2, 1, 2, 1, 2, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative count, or an axis longer than `i32::MAX`.
    #[doc(alias = "mlx_tile")]
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
            // SAFETY: pointer and length describe the slice. Every axis of the result fits an
            // `i32`.
            unsafe { sys::mlx_tile(out, self.raw(), reps.as_ptr(), reps.len(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Shifts elements by `shift` places towards the end. Elements that leave the end wrap around
    /// to the front. `axes` is one axis, several, or [`super::All`], which shifts in the flattened
    /// array.
    ///
    /// ```
    /// use mlx_rs_core::{All, array};
    /// assert_eq!(array!([1, 2, 3])?.roll(1, 0)?.to_vec::<i32>()?, [3, 1, 2]);
    /// assert_eq!(array!([[1, 2], [3, 4]])?.roll(-1, All)?.to_vec::<i32>()?, [2, 3, 4, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are named twice.
    #[doc(alias("mlx_roll_axis", "mlx_roll"))]
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

    /// Like [`Array::roll`], with a separate shift for each axis.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2], [3, 4]])?;
    /// assert_eq!(a.roll_axes(&[1, 1], &[0, 1])?.to_vec::<i32>()?, [4, 3, 2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the numbers of shifts and axes differ; [`ErrorKind::Index`] for
    /// axes that do not exist or are named twice.
    #[doc(alias = "mlx_roll_axes")]
    pub fn roll_axes(&self, shifts: &[i32], axes: &[i32]) -> Result<Array> {
        let op = "roll";
        let axes = self.distinct_axes(op, axes)?;
        if shifts.len() != axes.len() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "{} shifts were given for {} axes; give one for each",
                    shifts.len(),
                    axes.len()
                ),
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

    /// Flattens the array, and repeats each element `repeats` times in a row.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1], [2]])?.repeat_flat(2)?.to_vec::<i32>()?, [1, 1, 2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative count, or more elements than `i32::MAX`.
    #[doc(alias = "mlx_repeat")]
    pub fn repeat_flat(&self, repeats: i32) -> Result<Array> {
        let op = "repeat";
        let n = self.count(op)?;
        if repeats < 0 || repeats.checked_mul(n).is_none() {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("cannot repeat {n} elements {repeats} times"),
            ));
        }
        if repeats == 0 {
            return super::zeros(&[0], self.dtype());
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. The number of elements of the result fits an `i32`.
            unsafe { sys::mlx_repeat(out, self.raw(), repeats, s) }
        })
    }

    /// Moves axis `from` to position `to` of the result. The other axes keep their order.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// assert_eq!(zeros(&[2, 3, 4], Dtype::Float32)?.move_axis(0, -1)?.shape(), [3, 4, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    #[doc(alias = "mlx_moveaxis")]
    pub fn move_axis(&self, from: i32, to: i32) -> Result<Array> {
        self.axis("move_axis", from)?;
        self.axis("move_axis", to)?;
        call::array("move_axis", |out, s| {
            // SAFETY: all handles are live; both axes exist.
            unsafe { sys::mlx_moveaxis(out, self.raw(), from, to, s) }
        })
    }

    /// Splits axis `axis` into axes of the lengths `shape`. One length may be -1, and is then
    /// inferred.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// assert_eq!(zeros(&[2, 12], Dtype::Float32)?.unflatten(1, &[3, -1])?.shape(), [2, 3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis; [`ErrorKind::Shape`] when the product of
    /// `shape` differs from the length of the axis.
    #[doc(alias = "mlx_unflatten")]
    pub fn unflatten(&self, axis: i32, shape: &[i32]) -> Result<Array> {
        let op = "unflatten";
        let length = i64::from(self.shape()[self.axis(op, axis)?]);
        let known = shape.iter().filter(|&&d| d != -1).try_fold(1i64, |p, &d| {
            p.checked_mul(i64::from(d)).filter(|p| *p >= 0)
        });
        let inferred = shape.iter().filter(|&&d| d == -1).count();
        let fits = match (known, inferred) {
            (Some(p), 0) => p == length && !shape.is_empty(),
            (Some(p), 1) => p > 0 && length % p == 0,
            _ => false,
        };
        if !fits || shape.iter().any(|&d| d < -1) {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("an axis of length {length} cannot become axes {shape:?}"),
            )
            .with_inputs(&[self]));
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the shape, whose product is the length of the
            // axis.
            unsafe { sys::mlx_unflatten(out, self.raw(), axis, shape.as_ptr(), shape.len(), s) }
        })
        .and_then(|cut| cut.with_own_flags(self))
    }

    /// Adds axes of length one. `axes` are their positions in the result.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.expand_dims_axes(&[0, 2])?.shape(), [1, 2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when a position is beyond the end or named twice.
    #[doc(alias = "mlx_expand_dims_axes")]
    pub fn expand_dims_axes(&self, axes: &[i32]) -> Result<Array> {
        let op = "expand_dims";
        let total = self.ndim() + axes.len();
        let mut seen = vec![false; total];
        for &axis in axes {
            let at = axis_of(op, axis, total)?;
            if std::mem::replace(&mut seen[at], true) {
                return Err(Error::new(
                    ErrorKind::Index,
                    op,
                    format!("axis {axis} is named twice in {axes:?}"),
                ));
            }
        }
        if mapped::inside() {
            // Under `vmap`, MLX miscounts axes if several are added at once, so they are added one
            // by one.
            let new = (0..total as i32).zip(seen).filter(|(_, seen)| *seen);
            return new
                .map(|(at, _)| at)
                .try_fold(self.clone(), |a, at| a.expand_dims(at));
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the axes, which exist in the result.
            unsafe { sys::mlx_expand_dims_axes(out, self.raw(), axes.as_ptr(), axes.len(), s) }
        })
    }

    /// Removes `axes`, which must have length one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[[1], [2]]])?.squeeze_axes(&[0, 2])?.shape(), [2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are named twice; MLX's message when one
    /// of them is longer than one.
    #[doc(alias = "mlx_squeeze_axes")]
    pub fn squeeze_axes(&self, axes: &[i32]) -> Result<Array> {
        let axes = self.distinct_axes("squeeze", axes)?;
        call::array("squeeze", |out, s| {
            // SAFETY: pointer and length describe the axes, which exist.
            unsafe { sys::mlx_squeeze_axes(out, self.raw(), axes.as_ptr(), axes.len(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Splits the array along `axis`, before each of `positions`, which must ascend. `[2, 5]`
    /// results in three parts.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// let parts = array!([1, 2, 3, 4])?.split_at(&[1, 3], 0)?;
    /// assert_eq!(parts.iter().map(Array::size).collect::<Vec<_>>(), [1, 2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis, or for positions that do not ascend within
    /// it.
    #[doc(alias = "mlx_split_sections")]
    pub fn split_at(&self, positions: &[i32], axis: i32) -> Result<Vec<Array>> {
        let op = "split_at";
        let length = self.shape()[self.axis(op, axis)?];
        let inside = positions.iter().all(|p| (0..=length).contains(p))
            && positions.windows(2).all(|w| w[0] <= w[1]);
        if !inside {
            return Err(Error::new(
                ErrorKind::Index,
                op,
                format!("positions {positions:?} do not ascend inside an axis of length {length}"),
            ));
        }
        // `split` explains why this copy is needed.
        let row_major = self.contiguous()?;
        call::arrays(op, |out, s| {
            // SAFETY: pointer and length describe the positions, which ascend within the axis. No
            // axis has a negative stride.
            unsafe {
                sys::mlx_split_sections(
                    out,
                    row_major.raw(),
                    positions.as_ptr(),
                    positions.len(),
                    axis,
                    s,
                )
            }
        })
    }
}

/// Flattens the arrays, and concatenates them.
///
/// ```
/// use mlx_rs_core::{array, concatenate_flat};
/// let (a, b) = (array!([[1], [2]])?, array!([3])?);
/// assert_eq!(concatenate_flat(&[&a, &b])?.to_vec::<i32>()?, [1, 2, 3]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without arrays; [`ErrorKind::Shape`] for more elements than `i32::MAX`.
#[doc(alias = "mlx_concatenate")]
pub fn concatenate_flat(arrays: &[&Array]) -> Result<Array> {
    let op = "concatenate";
    let total: usize = arrays.iter().map(|a| a.size()).sum();
    if arrays.is_empty() || i32::try_from(total).is_err() {
        return Err(Error::new(
            if arrays.is_empty() {
                ErrorKind::Value
            } else {
                ErrorKind::Shape
            },
            op,
            format!(
                "{} arrays of {total} elements cannot be joined",
                arrays.len()
            ),
        ));
    }
    let vec = ArrayVec::new(op, arrays.iter().copied())?;
    call::array(op, |out, s| {
        // SAFETY: the vector and the stream are live. The number of elements fits an `i32`.
        unsafe { sys::mlx_concatenate(out, vec.raw(), s) }
    })
}

/// Broadcasts all `arrays` to their common shape.
///
/// ```
/// use mlx_rs_core::{array, broadcast_arrays};
/// let both = broadcast_arrays(&[&array!([[1], [2]])?, &array!([3, 4])?])?;
/// assert_eq!((both[0].shape(), both[1].shape()), (&[2, 2][..], &[2, 2][..]));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when the shapes do not broadcast.
#[doc(alias = "mlx_broadcast_arrays")]
pub fn broadcast_arrays(arrays: &[&Array]) -> Result<Vec<Array>> {
    let vec = ArrayVec::new("broadcast_arrays", arrays.iter().copied())?;
    call::arrays("broadcast_arrays", |out, s| {
        // SAFETY: the vector and the stream are live.
        unsafe { sys::mlx_broadcast_arrays(out, vec.raw(), s) }
    })
    .map_err(|e| e.with_inputs(arrays))
}

/// Coordinate grids of one-axis arrays. With `Ij`, array `i` varies along axis `i` of every result.
/// With `Xy`, the first two axes are exchanged. With `sparse`, the other axes of each result have
/// length one.
///
/// ```
/// use mlx_rs_core::{GridIndexing, array, meshgrid};
/// let (x, y) = (array!([1, 2, 3])?, array!([10, 20])?);
/// let grids = meshgrid(&[&x, &y], false, GridIndexing::Xy)?;
/// assert_eq!(grids[0].to_vec::<i32>()?, [1, 2, 3, 1, 2, 3]); // [2, 3]
/// assert_eq!(grids[1].to_vec::<i32>()?, [10, 10, 10, 20, 20, 20]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without arrays; [`ErrorKind::Shape`] for arrays with more than one axis.
#[doc(alias = "mlx_meshgrid")]
pub fn meshgrid(arrays: &[&Array], sparse: bool, indexing: GridIndexing) -> Result<Vec<Array>> {
    let op = "meshgrid";
    if arrays.is_empty() {
        return Err(Error::new(ErrorKind::Value, op, "give at least one array"));
    }
    if arrays.iter().any(|a| a.ndim() > 1 || a.size() == 0) {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            "coordinates are arrays of one axis that are not empty",
        )
        .with_inputs(arrays));
    }
    let vec = ArrayVec::new(op, arrays.iter().copied())?;
    let name = match indexing {
        GridIndexing::Xy => c"xy",
        GridIndexing::Ij => c"ij",
    };
    call::arrays(op, |out, s| {
        // SAFETY: the vector and the stream are live; the name is a static string.
        unsafe { sys::mlx_meshgrid(out, vec.raw(), sparse, name.as_ptr(), s) }
    })
    .map_err(|e| e.with_inputs(arrays))
}

/// The order of axes in [`meshgrid`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GridIndexing {
    /// Cartesian: the first array varies along the second axis.
    #[default]
    Xy,
    /// Matrix: array `i` varies along axis `i`.
    Ij,
}

/// Returns the `inputs`, which are computed only after all `dependencies` are computed.
///
/// ```
/// use mlx_rs_core::{array, depends};
/// let (first, second) = (array!([1.0])?.exp()?, array!([2.0])?);
/// let second = depends(&[&second], &[&first])?;
/// assert_eq!(second[0].to_vec::<f32>()?, [2.0]); // `first` was computed before
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without inputs.
#[doc(alias = "mlx_depends")]
pub fn depends(inputs: &[&Array], dependencies: &[&Array]) -> Result<Vec<Array>> {
    let op = "depends";
    if inputs.is_empty() {
        return Err(Error::new(ErrorKind::Value, op, "give at least one input"));
    }
    let vec = ArrayVec::new(op, inputs.iter().copied())?;
    let after = ArrayVec::new(op, dependencies.iter().copied())?;
    call::arrays(op, |out, _| {
        // SAFETY: both vectors are live; there is at least one input.
        unsafe { sys::mlx_depends(out, vec.raw(), after.raw()) }
    })
}

/// An equivalent shift that is shorter than the axis. MLX negates and adds shifts, which must not
/// overflow.
fn short_shift(shift: i32, length: i32) -> i32 {
    if length == 0 {
        0
    } else {
        shift.rem_euclid(length)
    }
}
