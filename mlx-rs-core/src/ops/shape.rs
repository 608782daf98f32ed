//! Changes shape and layout: views, joins and splits. This module checks that every view stays
//! inside its array.

use super::methods::unary_ops;
use crate::array::{Array, axis_of};
use crate::call::{self, ArrayVec};
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

unary_ops! {
    /// Reverses the order of the axes.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// assert_eq!(a.transpose()?.to_vec::<i32>()?, [1, 4, 2, 5, 3, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_transpose")]
    transpose = mlx_transpose;
    /// Removes all axes of length one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[[1], [2]]])?.squeeze()?.shape(), [2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_squeeze")]
    squeeze = mlx_squeeze;
    /// A copy of the array. The two share no memory.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.copy()?.to_vec::<i32>()?, [1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_copy")]
    copy = mlx_copy;
}

/// Whether two indices of a view may refer to the same element in memory. Axes with a stride of
/// zero are ignored. It may also return true for a view without overlaps, because it checks the
/// usual sufficient condition: each stride must exceed the extent of the smaller strides.
fn overlaps(shape: &[i32], strides: &[i64]) -> bool {
    let axes = shape.iter().zip(strides);
    let mut axes: Vec<(u64, u64)> = axes
        .filter(|&(&d, &stride)| d > 1 && stride != 0)
        .map(|(&d, &stride)| (stride.unsigned_abs(), u64::from(d.unsigned_abs()) - 1))
        .collect();
    axes.sort_unstable();
    let mut reach = 0u64;
    for (stride, steps) in axes {
        if stride <= reach {
            return true;
        }
        reach = reach.saturating_add(stride.saturating_mul(steps));
    }
    false
}

impl Array {
    /// The same values in another shape with the same number of elements. One dimension may be -1,
    /// and is then inferred.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2, 3, 4])?.reshape(&[2, -1])?.shape(), [2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the sizes differ.
    #[doc(alias = "mlx_reshape")]
    pub fn reshape(&self, shape: &[i32]) -> Result<Array> {
        if shape.iter().any(|&d| d < -1) {
            return Err(Error::new(
                ErrorKind::Shape,
                "reshape",
                format!("shape {shape:?} has a negative dimension other than one -1"),
            )
            .with_inputs(&[self]));
        }
        call::array("reshape", |out, s| {
            // SAFETY: pointer and length describe the slice; all handles are live.
            unsafe { mlx_sys::mlx_reshape(out, self.raw(), shape.as_ptr(), shape.len(), s) }
        })
        .and_then(|reshaped| reshaped.with_own_flags(self))
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Corrects the flags of this array, which is a view of `source` in another shape. When axes
    /// are split, MLX keeps the column-major flag of `source` on a view that is not column-major.
    /// It then adds such arrays in memory order. A transposition recomputes the flags.
    pub(crate) fn with_own_flags(self, source: &Array) -> Result<Array> {
        if !cuts_axes(source.shape(), self.shape()) {
            return Ok(self);
        }
        self.swap_axes(0, -1)?.swap_axes(0, -1)
    }

    /// Reorders the axes: axis `i` of the result is axis `axes[i]` of this array.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// assert_eq!(zeros(&[2, 3, 4], Dtype::Float32)?.transpose_axes(&[2, 0, 1])?.shape(), [4, 2, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis; MLX's message when one is named twice.
    #[doc(alias = "mlx_transpose_axes")]
    pub fn transpose_axes(&self, axes: &[i32]) -> Result<Array> {
        for &axis in axes {
            self.axis("transpose_axes", axis)?;
        }
        call::array("transpose_axes", |out, s| {
            // SAFETY: pointer and length describe the slice; the axes exist.
            unsafe { mlx_sys::mlx_transpose_axes(out, self.raw(), axes.as_ptr(), axes.len(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Exchanges two axes.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// assert_eq!(zeros(&[2, 3, 4], Dtype::Float32)?.swap_axes(0, -1)?.shape(), [4, 3, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    #[doc(alias = "mlx_swapaxes")]
    pub fn swap_axes(&self, a: i32, b: i32) -> Result<Array> {
        self.axis("swap_axes", a)?;
        self.axis("swap_axes", b)?;
        call::array("swap_axes", |out, s| {
            // SAFETY: all handles are live; the axes exist.
            unsafe { mlx_sys::mlx_swapaxes(out, self.raw(), a, b, s) }
        })
    }

    /// Adds an axis of length one. `axis` is its position in the result.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2])?;
    /// assert_eq!((a.expand_dims(0)?.shape(), a.expand_dims(-1)?.shape()), (&[1, 2][..], &[2, 1][..]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the position is beyond the end.
    #[doc(alias = "mlx_expand_dims")]
    pub fn expand_dims(&self, axis: i32) -> Result<Array> {
        axis_of("expand_dims", axis, self.ndim() + 1)?;
        call::array("expand_dims", |out, s| {
            // SAFETY: all handles are live; the position exists in the result.
            unsafe { mlx_sys::mlx_expand_dims(out, self.raw(), axis, s) }
        })
    }

    /// Removes axis `axis`, which must have length one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[[1], [2]]])?.squeeze_axis(0)?.shape(), [2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis; MLX's message when the axis is longer than
    /// one.
    #[doc(alias = "mlx_squeeze_axis")]
    pub fn squeeze_axis(&self, axis: i32) -> Result<Array> {
        self.axis("squeeze_axis", axis)?;
        call::array("squeeze_axis", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_squeeze_axis(out, self.raw(), axis, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Joins the axes `start` to `end`, both included, into one axis.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// let a = zeros(&[2, 3, 4], Dtype::Float32)?;
    /// assert_eq!(a.flatten(0, 1)?.shape(), [6, 4]);
    /// assert_eq!(a.flatten(0, -1)?.shape(), [24]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the joined axis exceeds `i32::MAX`; MLX's message when there are
    /// no such axes.
    #[doc(alias = "mlx_flatten")]
    pub fn flatten(&self, start: i32, end: i32) -> Result<Array> {
        if self.count("flatten").is_err() {
            // The product of the joined axes must fit. This check is rarely needed, so it may be
            // slow.
            let at = |axis: i32| {
                let n = self.ndim() as i64;
                let axis = i64::from(axis) + if axis < 0 { n } else { 0 };
                axis.clamp(0, n) as usize
            };
            let joined = at(start)..(at(end) + 1).min(self.ndim()).max(at(start));
            let product = self.shape()[joined]
                .iter()
                .try_fold(1i32, |p, &d| p.checked_mul(d));
            if product.is_none() {
                return Err(Error::new(
                    ErrorKind::Shape,
                    "flatten",
                    "the joined axis would exceed i32::MAX",
                )
                .with_inputs(&[self]));
            }
        }
        call::array("flatten", |out, s| {
            // SAFETY: all handles are live; MLX checks the axes.
            unsafe { mlx_sys::mlx_flatten(out, self.raw(), start, end, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Repeats the array along missing axes and axes of length one, up to `shape`. Nothing is
    /// copied.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.broadcast_to(&[2, 2])?.to_vec::<i32>()?, [1, 2, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast; [`ErrorKind::Shape`] for a shape with too
    /// many elements.
    #[doc(alias = "mlx_broadcast_to")]
    pub fn broadcast_to(&self, shape: &[i32]) -> Result<Array> {
        if memory::checked_bytes(shape, 1).is_none() {
            return Err(Error::new(
                ErrorKind::Shape,
                "broadcast_to",
                format!("shape {shape:?} has a negative dimension or too many elements"),
            ));
        }
        call::array("broadcast_to", |out, s| {
            // SAFETY: pointer and length describe the slice; all handles are live.
            unsafe { mlx_sys::mlx_broadcast_to(out, self.raw(), shape.as_ptr(), shape.len(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The values in row-major layout. If the array already has this layout, it is returned.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.transpose()?.contiguous()?.to_vec::<i32>()?, [1, 3, 2, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate memory for the copy.
    #[doc(alias = "mlx_contiguous")]
    pub fn contiguous(&self) -> Result<Array> {
        call::array("contiguous", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_contiguous(out, self.raw(), false, s) }
        })
    }

    /// A view of the row-major elements, with explicit `strides` and `offset` in elements. If
    /// different indices refer to the same element, other than by a stride of zero, the result is a
    /// copy.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// // Windows of three, each one element further.
    /// let a = array!([1, 2, 3, 4])?;
    /// assert_eq!(a.as_strided(&[2, 3], &[1, 1], 0)?.to_vec::<i32>()?, [1, 2, 3, 2, 3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shape and strides differ in length or a dimension is negative;
    /// [`ErrorKind::Index`] when the view would reach outside the array.
    #[doc(alias = "mlx_as_strided")]
    pub fn as_strided(&self, shape: &[i32], strides: &[i64], offset: usize) -> Result<Array> {
        let op = "as_strided";
        let shape_error = |why: &str| {
            Error::new(
                ErrorKind::Shape,
                op,
                format!("{why}: shape {shape:?}, strides {strides:?}, offset {offset}"),
            )
            .with_inputs(&[self])
        };
        if shape.len() != strides.len() {
            return Err(shape_error("shape and strides differ in length"));
        }
        if memory::checked_bytes(shape, 1).is_none() {
            return Err(shape_error(
                "a dimension is negative or there are too many elements",
            ));
        }
        // The lowest and the highest element that the view can reach, in 128-bit arithmetic.
        let (mut low, mut high) = (offset as i128, offset as i128);
        for (&d, &stride) in shape.iter().zip(strides) {
            let reach = i128::from(d.max(1) - 1) * i128::from(stride);
            if reach < 0 {
                low += reach;
            } else {
                high += reach;
            }
        }
        let empty = shape.contains(&0);
        if !empty && (low < 0 || high >= self.size() as i128) {
            return Err(Error::new(
                ErrorKind::Index,
                op,
                format!(
                    "the view reaches elements {low} to {high} of an array of {} (shape {shape:?}, \
                     strides {strides:?}, offset {offset})",
                    self.size()
                ),
            )
            .with_inputs(&[self]));
        }
        // MLX fails for a vector with gaps, so the array is made contiguous first.
        let row_major = self.contiguous()?;
        let view = call::array(op, |out, s| {
            // SAFETY: both slices have the same length; every element lies inside the array.
            unsafe {
                mlx_sys::mlx_as_strided(
                    out,
                    row_major.raw(),
                    shape.as_ptr(),
                    shape.len(),
                    strides.as_ptr(),
                    strides.len(),
                    offset,
                    s,
                )
            }
        })?;
        // MLX 0.30.6 would sum such a view in blocks of the stride, which exceed the result, and
        // write beyond it. So the view is copied.
        if overlaps(shape, strides) {
            return view.contiguous();
        }
        Ok(view)
    }

    /// Splits the array into `parts` of equal length along `axis`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let parts = array!([1, 2, 3, 4])?.split(2, 0)?;
    /// assert_eq!(parts[1].to_vec::<i32>()?, [3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the length is not divisible by `parts`; [`ErrorKind::Index`] when
    /// there is no such axis.
    #[doc(alias = "mlx_split")]
    pub fn split(&self, parts: i32, axis: i32) -> Result<Vec<Array>> {
        let length = self.shape()[self.axis("split", axis)?];
        // An empty axis can be split into any number of parts. The memory of the handles limits the
        // number.
        if parts <= 0 || length % parts != 0 || parts > length.max(1 << 16) {
            return Err(Error::new(
                ErrorKind::Shape,
                "split",
                format!("an axis of length {length} cannot be cut into {parts} equal parts"),
            ));
        }
        // MLX would treat parts of a reversed array as scalars, and read out of bounds.
        let row_major = self.contiguous()?;
        call::arrays("split", |out, s| {
            // SAFETY: all handles are live. The axis exists and is divisible, and no axis has a
            // negative stride.
            unsafe { mlx_sys::mlx_split(out, row_major.raw(), parts, axis, s) }
        })
    }

    /// Repeats each element `repeats` times in a row along `axis`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1], [2]])?.repeat(2, 0)?.to_vec::<i32>()?, [1, 1, 2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative count; [`ErrorKind::Index`] when there is no such axis.
    #[doc(alias = "mlx_repeat_axis")]
    pub fn repeat(&self, repeats: i32, axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("repeat", axis)?];
        if repeats < 0 || repeats.checked_mul(length).is_none() {
            return Err(Error::new(
                ErrorKind::Value,
                "repeat",
                format!("cannot repeat an axis of length {length} {repeats} times"),
            ));
        }
        if repeats == 0 {
            // With zero repeats, MLX would drop the other axes.
            return self.slice_axis(axis, 0, 0);
        }
        call::array("repeat", |out, s| {
            // SAFETY: all handles are live. The axis exists, and the count is valid.
            unsafe { mlx_sys::mlx_repeat_axis(out, self.raw(), repeats, axis, s) }
        })
    }
}

/// Concatenates the arrays along an existing axis.
///
/// ```
/// use mlx_rs_core::{array, concatenate};
/// let (a, b) = (array!([[1, 2]])?, array!([[3, 4]])?);
/// assert_eq!(concatenate(&[&a, &b], 0)?.shape(), [2, 2]);
/// assert_eq!(concatenate(&[&a, &b], 1)?.to_vec::<i32>()?, [1, 2, 3, 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without arrays; MLX's message when the other axes differ.
#[doc(alias = "mlx_concatenate_axis")]
pub fn concatenate(arrays: &[&Array], axis: i32) -> Result<Array> {
    let Some(first) = arrays.first() else {
        return Err(Error::new(
            ErrorKind::Value,
            "concatenate",
            "give at least one array",
        ));
    };
    let at = first.axis("concatenate", axis)?;
    // MLX adds the lengths in an i32, so the sum is checked here.
    let length: i64 = arrays
        .iter()
        .filter_map(|a| a.shape().get(at))
        .map(|&d| i64::from(d))
        .sum();
    if length > i64::from(i32::MAX) {
        return Err(Error::new(
            ErrorKind::Shape,
            "concatenate",
            format!("an axis of {length} elements exceeds i32::MAX"),
        )
        .with_inputs(arrays));
    }
    let vec = ArrayVec::new("concatenate", arrays.iter().copied())?;
    call::array("concatenate", |out, s| {
        // SAFETY: the vector and the stream are live.
        unsafe { mlx_sys::mlx_concatenate_axis(out, vec.raw(), axis, s) }
    })
    .map_err(|e| e.with_inputs(arrays))
}

/// Joins arrays of equal shape along a new axis.
///
/// ```
/// use mlx_rs_core::{array, stack};
/// let (a, b) = (array!([1, 2])?, array!([3, 4])?);
/// assert_eq!(stack(&[&a, &b], 0)?.shape(), [2, 2]);
/// assert_eq!(stack(&[&a, &b], -1)?.to_vec::<i32>()?, [1, 3, 2, 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without arrays; MLX's message when the shapes differ.
#[doc(alias = "mlx_stack_axis")]
pub fn stack(arrays: &[&Array], axis: i32) -> Result<Array> {
    let Some(first) = arrays.first() else {
        return Err(Error::new(
            ErrorKind::Value,
            "stack",
            "give at least one array",
        ));
    };
    axis_of("stack", axis, first.ndim() + 1)?;
    let vec = ArrayVec::new("stack", arrays.iter().copied())?;
    call::array("stack", |out, s| {
        // SAFETY: the vector and the stream are live.
        unsafe { mlx_sys::mlx_stack_axis(out, vec.raw(), axis, s) }
    })
    .map_err(|e| e.with_inputs(arrays))
}

/// Whether MLX may return a view for a reshape from `from` to `to`, even if the array is not
/// row-major. Such a view keeps the order of the axes, and splits some of them into several. At
/// least two axes of `from` must be longer than one.
fn cuts_axes(from: &[i32], to: &[i32]) -> bool {
    let long = |shape: &[i32]| shape.iter().filter(|&&d| d != 1).count();
    if long(from) < 2 || long(to) <= long(from) || from.contains(&0) {
        return false;
    }
    let mut parts = to.iter().filter(|&&d| d != 1);
    from.iter().all(|&length| {
        let mut product = 1;
        while product < i64::from(length) {
            match parts.next() {
                Some(&part) => product *= i64::from(part),
                None => return false,
            }
        }
        product == i64::from(length)
    })
}

#[cfg(test)]
mod tests {
    use super::cuts_axes;

    #[test]
    fn strides_that_share_places() {
        use super::overlaps;
        for (shape, strides) in [
            (&[2, 3][..], &[2i64, 1][..]),
            (&[2, 3], &[1, 1]),
            (&[3, 2], &[1, 2]),
            (&[2, 2, 2], &[1, 4, 1]),
            (&[2, 3], &[-2, -1]),
            (&[2, 3], &[i64::MAX, i64::MAX]),
        ] {
            assert!(overlaps(shape, strides), "{shape:?} {strides:?}");
        }
        for (shape, strides) in [
            (&[2, 3][..], &[3i64, 1][..]),
            (&[3, 2], &[1, 3]),
            (&[2, 3], &[0, 1]),
            (&[1, 3], &[1, 1]),
            (&[2, 3], &[-9, 2]),
            (&[0, 3], &[7, 2]),
            (&[], &[]),
        ] {
            assert!(!overlaps(shape, strides), "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn only_finer_shapes_cut_axes() {
        assert!(cuts_axes(&[4, 3], &[2, 2, 3]));
        assert!(cuts_axes(&[1, 7, 64], &[1, 7, 4, 16]));
        assert!(cuts_axes(&[4, 1, 6], &[2, 2, 2, 1, 3]));
        assert!(!cuts_axes(&[1, 1, 64], &[1, 1, 4, 16]));
        assert!(!cuts_axes(&[4, 3], &[4, 1, 3]));
        assert!(!cuts_axes(&[4, 3], &[3, 4]));
        assert!(!cuts_axes(&[4, 3], &[2, 6]));
        assert!(!cuts_axes(&[4, 3], &[2, 3, 2]));
        assert!(!cuts_axes(&[0, 3, 4], &[0, 3, 2, 2]));
    }
}
