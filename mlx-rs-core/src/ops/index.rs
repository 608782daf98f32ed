//! Slices, updates and gathers. MLX reads out of bounds for an invalid index, so this module checks
//! indices, or clamps them inside the graph.

use std::borrow::Cow;

use crate::array::Array;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;
use crate::{call, closure};

/// The start and stop of one axis in MLX's form. The arguments are Python-like bounds, which may be
/// negative or beyond the end.
fn bounds(length: i32, start: i32, stop: i32, stride: i32) -> (i32, i32) {
    let resolve = |x: i32| {
        if x < 0 {
            i64::from(x) + i64::from(length)
        } else {
            i64::from(x)
        }
    };
    let n = i64::from(length);
    let (start, stop) = if stride > 0 {
        let start = resolve(start).clamp(0, n);
        (start, resolve(stop).clamp(start, n))
    } else {
        let start = resolve(start).clamp(-1, n - 1);
        let stop = resolve(stop).clamp(-1, n - 1);
        if start <= stop {
            // The slice is empty. MLX would interpret a start before the first element as the last
            // element.
            (0, 0)
        } else {
            // In MLX, a stop before the first element is `-n - 1`.
            (start, if stop < 0 { -n - 1 } else { stop })
        }
    };
    // All values are within `[-n - 1, n]`, and an i32 can represent them.
    (start as i32, stop as i32)
}

impl Array {
    fn slice_args(
        &self,
        op: &'static str,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<[Vec<i32>; 3]> {
        let n = self.ndim();
        if start.len() != n || stop.len() != n || strides.len() != n {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "give one start, stop and stride for each of the {n} axes, not {}, {} and {}",
                    start.len(),
                    stop.len(),
                    strides.len()
                ),
            ));
        }
        if strides.contains(&0) || strides.contains(&i32::MIN) {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                "a stride cannot be zero or i32::MIN",
            ));
        }
        let mut lists = [Vec::new(), Vec::new(), Vec::new()];
        for (i, &length) in self.shape().iter().enumerate() {
            // A stride beyond the length has the same effect as the length.
            let stride = strides[i].clamp(-length.max(1), length.max(1));
            let (mut from, mut to) = bounds(length, start[i], stop[i], stride);
            let mut step = stride;
            let end = if to < 0 { -1 } else { to };
            if end != from && (i64::from(end) - i64::from(from)).abs() <= i64::from(step).abs() {
                // The slice has one element. MLX would drop the stride but keep the stop, which is
                // then wrong without the stride. Gradients and mapped functions would read several
                // elements, or none.
                (from, to, step) = (from, from + 1, 1);
            }
            for (list, value) in lists.iter_mut().zip([from, to, step]) {
                list.push(value);
            }
        }
        Ok(lists)
    }

    /// Elements `start` to `stop` of each axis, in steps of `strides`. As in Python, negative
    /// bounds count from the end, and bounds are clamped to the array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// assert_eq!(a.slice(&[0, -2], &[2, 3], &[1, 1])?.to_vec::<i32>()?, [2, 3, 5, 6]);
    /// assert_eq!(a.slice(&[1, 0], &[2, 3], &[1, 2])?.to_vec::<i32>()?, [4, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the number of bounds or strides differs from the number of axes;
    /// [`ErrorKind::Value`] for a zero stride.
    #[doc(alias = "mlx_slice")]
    pub fn slice(&self, start: &[i32], stop: &[i32], strides: &[i32]) -> Result<Array> {
        let [start, stop, strides] = self.slice_args("slice", start, stop, strides)?;
        call::array("slice", |out, s| {
            // SAFETY: the three lists have one entry per axis, and the bounds are within the axis.
            unsafe {
                mlx_sys::mlx_slice(
                    out,
                    self.raw(),
                    start.as_ptr(),
                    start.len(),
                    stop.as_ptr(),
                    stop.len(),
                    strides.as_ptr(),
                    strides.len(),
                    s,
                )
            }
        })
    }

    /// Elements `start` to `stop` of one axis.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// assert_eq!(a.slice_axis(-1, 1, 3)?.to_vec::<i32>()?, [2, 3, 5, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    pub fn slice_axis(&self, axis: i32, start: i32, stop: i32) -> Result<Array> {
        let axis = self.axis("slice_axis", axis)?;
        let mut starts = vec![0; self.ndim()];
        let mut stops = self.shape().to_vec();
        starts[axis] = start;
        stops[axis] = stop;
        self.slice(&starts, &stops, &vec![1; self.ndim()])
    }

    /// Returns a copy with the slice from `start` to `stop` (as in [`Array::slice`]) replaced by
    /// `update`, which broadcasts to the slice. MLX reuses the memory if this array has no other
    /// owner.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3, 4])?;
    /// assert_eq!(a.slice_update(&array!([7, 8])?, &[1], &[3], &[1])?.to_vec::<i32>()?, [1, 7, 8, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice`]; MLX's message when the update does not fit.
    #[doc(alias = "mlx_slice_update")]
    pub fn slice_update(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<Array> {
        let [start, stop, strides] = self.slice_args("slice_update", start, stop, strides)?;
        call::array("slice_update", |out, s| {
            // SAFETY: the three lists have one entry per axis, and the bounds are within the axis.
            unsafe {
                mlx_sys::mlx_slice_update(
                    out,
                    self.raw(),
                    update.raw(),
                    start.as_ptr(),
                    start.len(),
                    stop.as_ptr(),
                    stop.len(),
                    strides.as_ptr(),
                    strides.len(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self, update]))
    }

    /// [`Array::slice_update`] of one axis. It replaces the elements `start..start + length of
    /// update`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, zeros};
    /// let a = zeros(&[2, 3], Dtype::Int32)?;
    /// assert_eq!(a.update_axis(&array!([[5], [6]])?, 1, 2)?.to_vec::<i32>()?, [0, 0, 5, 0, 0, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the part is not within the axis.
    pub fn update_axis(&self, update: &Array, axis: i32, start: i32) -> Result<Array> {
        let at = self.axis("update_axis", axis)?;
        let length = self.shape()[at];
        let stop = i64::from(start) + i64::from(update.dim(axis)?);
        if start < 0 || stop > i64::from(length) {
            return Err(Error::new(
                ErrorKind::Index,
                "update_axis",
                format!("elements {start} to {stop} are not inside an axis of length {length}"),
            )
            .with_inputs(&[self, update]));
        }
        let mut starts = vec![0; self.ndim()];
        let mut stops = self.shape().to_vec();
        starts[at] = start;
        stops[at] = stop as i32; // at most `length`, checked above
        self.slice_update(update, &starts, &stops, &vec![1; self.ndim()])
    }

    /// Evaluates integer indices, and checks that they are within an axis of `length`.
    pub(crate) fn check_indices(op: &'static str, indices: &Array, length: i32) -> Result<()> {
        Self::index_dtype(op, indices)?;
        if indices.size() == 0 {
            return Ok(());
        }
        let wide = indices.astype(Dtype::Int64)?;
        let (low, high) = (wide.min(super::All, false)?, wide.max(super::All, false)?);
        crate::eval([&low, &high])?;
        let (low, high) = (low.item::<i64>()?, high.item::<i64>()?);
        // An unsigned 64-bit index above i64::MAX becomes negative here. It is also out of range.
        let unsigned = !indices.dtype().is_signed_integer();
        let n = i64::from(length);
        let lowest = if unsigned { 0 } else { -n };
        if low < lowest || high >= n {
            return Err(Error::new(
                ErrorKind::Index,
                op,
                format!("indices reach from {low} to {high}, outside an axis of length {length}"),
            ));
        }
        Ok(())
    }

    pub(crate) fn index_dtype(op: &'static str, indices: &Array) -> Result<()> {
        if indices.dtype().is_integer() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Dtype,
            op,
            format!("indices must be integers, not {}", indices.dtype()),
        ))
    }

    /// `indices` clamped to `0..length`, inside the graph, without evaluation.
    pub(crate) fn clamp_indices(op: &'static str, indices: &Array, length: i32) -> Result<Array> {
        Self::index_dtype(op, indices)?;
        if length == 0 {
            return Err(Error::new(
                ErrorKind::Index,
                op,
                "an empty axis has no elements to take",
            ));
        }
        match indices.dtype() {
            Dtype::Uint32 => indices.minimum(&Array::scalar((length - 1) as u32)?),
            Dtype::Int32 => indices
                .minimum(&Array::scalar(length - 1)?)?
                .maximum(&Array::scalar(0i32)?),
            _ => indices
                .astype(Dtype::Int64)?
                .minimum(&Array::scalar(i64::from(length - 1))?)?
                .maximum(&Array::scalar(0i64)?),
        }
    }

    /// Maps `indices` into `0..=last` of an axis of `length`, inside the graph. Negative indices
    /// count from the end. Other indices out of range become the nearest valid index.
    pub(crate) fn clamp_from_end(
        op: &'static str,
        indices: &Array,
        length: i32,
        last: i32,
    ) -> Result<Array> {
        Self::index_dtype(op, indices)?;
        match indices.dtype() {
            Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 => indices
                .astype(Dtype::Uint32)?
                .minimum(&Array::scalar(last as u32)?), // `last` is not negative
            Dtype::Uint64 => indices
                .minimum(&Array::scalar(u64::from(last as u32))?)?
                .astype(Dtype::Uint32),
            Dtype::Int64 => Self::wrap_and_clamp(
                indices,
                &Array::scalar(i64::from(length))?,
                &Array::scalar(0i64)?,
                &Array::scalar(i64::from(last))?,
            )?
            .astype(Dtype::Int32),
            _ => Self::wrap_and_clamp(
                &indices.astype(Dtype::Int32)?,
                &Array::scalar(length)?,
                &Array::scalar(0i32)?,
                &Array::scalar(last)?,
            ),
        }
    }

    fn wrap_and_clamp(i: &Array, length: &Array, zero: &Array, last: &Array) -> Result<Array> {
        let wrapped = super::where_(&i.less(zero)?, &i.add(length)?, i)?;
        wrapped.maximum(zero)?.minimum(last)
    }

    /// The axes that `axes` selects, as a list.
    pub(crate) fn listed(&self, axes: super::Axes<'_>) -> Vec<i32> {
        match axes {
            super::Axes::All => (0..self.ndim()).map(|i| i as i32).collect(),
            super::Axes::One(axis) => vec![axis],
            super::Axes::Many(axes) => axes.to_vec(),
        }
    }

    /// `axes`, counted from the front. Each must exist and be named only once.
    pub(crate) fn distinct_axes(&self, op: &'static str, axes: &[i32]) -> Result<Vec<i32>> {
        let mut out = Vec::with_capacity(axes.len());
        for &axis in axes {
            let resolved = self.axis(op, axis)? as i32; // an axis number is at most i32::MAX
            if out.contains(&resolved) {
                return Err(Error::new(
                    ErrorKind::Index,
                    op,
                    format!("axis {axis} is named twice in {axes:?}"),
                ));
            }
            out.push(resolved);
        }
        Ok(out)
    }

    /// The number of elements as an `i32`; an error if it does not fit. Functions that flatten need
    /// it, because MLX stores the length of an axis as an `i32`.
    pub(crate) fn count(&self, op: &'static str) -> Result<i32> {
        i32::try_from(self.size()).map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                op,
                format!("{} elements are more than one axis can count", self.size()),
            )
            .with_inputs(&[self])
        })
    }

    /// Returns this array, or a row-major copy if MLX would gather blocks of `size(axis)` wrongly.
    /// MLX copies the blocks of a column-major array in memory order. This is correct only if at
    /// most one axis is longer than one. The copy is a reshape back and forth. This also corrects
    /// forward gradients, because the tangent goes through the same operations.
    pub(crate) fn for_blocks(&self, size: impl Fn(usize) -> i32) -> Result<Cow<'_, Array>> {
        if !self.gathers_wrongly(size) {
            return Ok(Cow::Borrowed(self));
        }
        match i32::try_from(self.size()) {
            Ok(count) => self.reshape(&[count])?.reshape(self.shape()),
            // The number of elements does not fit an axis.
            Err(_) => self.contiguous(),
        }
        .map(Cow::Owned)
    }

    /// Whether MLX would reorder blocks of `size(axis)` if this array were column-major.
    pub(crate) fn gathers_wrongly(&self, size: impl Fn(usize) -> i32) -> bool {
        if mapped::inside() && (0..self.ndim()).any(|axis| size(axis) > 1) {
            // Under `vmap`, the batch may be a further axis of the blocks.
            return true;
        }
        let long = (0..self.ndim()).rfind(|&axis| size(axis) > 1).unwrap_or(0);
        let full_before = (0..long).all(|axis| size(axis) == self.shape()[axis]);
        full_before && (0..long).any(|axis| size(axis) > 1)
    }

    /// Returns this array without a gradient, for use as indices. The gradient with respect to an
    /// index is zero, but MLX 0.32 refuses it.
    pub(crate) fn without_slope(&self) -> Result<Cow<'_, Array>> {
        if cfg!(mlx_c_0_7) && closure::inside() {
            return self.stop_gradient().map(Cow::Owned);
        }
        Ok(Cow::Borrowed(self))
    }

    /// [`Array::take`] for indices that are known to be within the axis.
    pub(crate) fn take_raw(&self, op: &'static str, indices: &Array, axis: i32) -> Result<Array> {
        let at = self.axis(op, axis)?;
        let laid_out = self.for_blocks(|i| if i == at { 1 } else { self.shape()[i] })?;
        let indices = &*indices.without_slope()?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live. The axis exists, and every index is within it, which
            // the callers check or enforce.
            unsafe { mlx_sys::mlx_take_axis(out, laid_out.raw(), indices.raw(), axis, s) }
        })
        .map_err(|e| e.with_inputs(&[self, indices]))
    }

    /// The elements of `axis` at `indices`. In the result, the axes of `indices` replace `axis`.
    /// Indices are integers; negative ones count from the end. **Evaluates the indices** to check
    /// them; [`Array::take_ids`] and [`Array::take_clamped`] do not evaluate.
    ///
    /// ```
    /// use mlx_rs_core::{ErrorKind, array};
    /// let a = array!([[1, 2], [3, 4], [5, 6]])?;
    /// assert_eq!(a.take(&array!([-1, 0])?, 0)?.to_vec::<i32>()?, [5, 6, 1, 2]);
    /// assert_eq!(a.take(&array!([3])?, 0).unwrap_err().kind(), ErrorKind::Index);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when an index or the axis is out of range; [`ErrorKind::Dtype`] for
    /// indices that are not integers.
    #[doc(alias = "mlx_take_axis")]
    pub fn take(&self, indices: &Array, axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("take", axis)?];
        Self::check_indices("take", indices, length)?;
        self.take_raw("take", indices, axis)
    }

    /// The elements of the flattened array at `indices`. They are checked as in [`Array::take`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.take_flat(&array!([3, 0])?)?.to_vec::<i32>()?, [4, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::take`]; [`ErrorKind::Shape`] for more elements than `i32::MAX`.
    #[doc(alias = "mlx_take")]
    pub fn take_flat(&self, indices: &Array) -> Result<Array> {
        let length = self.count("take")?;
        Self::check_indices("take", indices, length)?;
        let indices = &*indices.without_slope()?;
        call::array("take", |out, s| {
            // SAFETY: all handles are live. Every index is within the flattened array.
            unsafe { mlx_sys::mlx_take(out, self.raw(), indices.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, indices]))
    }

    /// The elements of `axis` at indices that are known on the host, where they are checked.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2], [3, 4], [5, 6]])?;
    /// assert_eq!(a.take_ids(&[2, 0], 0)?.to_vec::<i32>()?, [5, 6, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when an index or the axis is out of range.
    #[doc(alias = "mlx_take_axis")]
    pub fn take_ids(&self, ids: &[u32], axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("take_ids", axis)?];
        if let Some(bad) = ids.iter().find(|&&id| i64::from(id) >= i64::from(length)) {
            return Err(Error::new(
                ErrorKind::Index,
                "take_ids",
                format!("index {bad} is outside an axis of length {length}"),
            ));
        }
        self.take_raw("take_ids", &Array::vector(ids)?, axis)
    }

    /// The elements of `axis` at `indices`. An index out of range selects the nearest element. The
    /// operation stays lazy. A decoder needs this for a token that it has not read back yet.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([10, 20, 30])?;
    /// assert_eq!(a.take_clamped(&array!([1, 99])?, 0)?.to_vec::<i32>()?, [20, 30]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for an empty or missing axis; [`ErrorKind::Dtype`] for indices that are
    /// not integers.
    #[doc(alias = "mlx_take_axis")]
    pub fn take_clamped(&self, indices: &Array, axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("take_clamped", axis)?];
        let indices = Self::clamp_indices("take_clamped", indices, length)?;
        self.take_raw("take_clamped", &indices, axis)
    }

    /// For each position, the element of `axis` at the index that `indices` contains at that
    /// position. The shapes must be equal except for that axis. Indices out of range are clamped,
    /// lazily, as in [`Array::take_clamped`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[10, 20], [30, 40]])?;
    /// assert_eq!(a.take_along_axis(&array!([[1], [0]])?, 1)?.to_vec::<i32>()?, [20, 30]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for an empty or missing axis; MLX's message when the shapes differ.
    #[doc(alias = "mlx_take_along_axis")]
    pub fn take_along_axis(&self, indices: &Array, axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("take_along_axis", axis)?];
        let indices = Self::clamp_indices("take_along_axis", indices, length)?;
        self.take_along_raw(&indices, axis)
    }

    /// [`Array::take_along_axis`] for indices that are known to be within the axis.
    pub(crate) fn take_along_raw(&self, indices: &Array, axis: i32) -> Result<Array> {
        let indices = &*indices.without_slope()?;
        call::array("take_along_axis", |out, s| {
            // SAFETY: all handles are live. The axis exists, and every index is within it, which
            // the callers enforce.
            unsafe { mlx_sys::mlx_take_along_axis(out, self.raw(), indices.raw(), axis, s) }
        })
        .map_err(|e| e.with_inputs(&[self, indices]))
    }

    /// Returns a copy in which, for each position, the element of `axis` at the index in `indices`
    /// is replaced by `values`, which broadcast to `indices`. Indices out of range are clamped,
    /// lazily.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[10, 20], [30, 40]])?;
    /// let b = a.put_along_axis(&array!([[1], [0]])?, &array!(0)?, 1)?;
    /// assert_eq!(b.to_vec::<i32>()?, [10, 0, 0, 40]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for an empty or missing axis; MLX's message when the shapes differ.
    #[doc(alias = "mlx_put_along_axis")]
    pub fn put_along_axis(&self, indices: &Array, values: &Array, axis: i32) -> Result<Array> {
        let length = self.shape()[self.axis("put_along_axis", axis)?];
        let indices = Self::clamp_indices("put_along_axis", indices, length)?;
        call::array("put_along_axis", |out, s| {
            // SAFETY: all handles are live; the axis exists and indices are clamped to it.
            unsafe {
                mlx_sys::mlx_put_along_axis(out, self.raw(), indices.raw(), values.raw(), axis, s)
            }
        })
        .map_err(|e| e.with_inputs(&[self, &indices, values]))
    }

    /// Evaluates the array, and returns one element as a host value.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.at::<i32>(&[1, 0])?, 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the position is out of range; [`ErrorKind::Dtype`] for another
    /// type.
    pub fn at<T: Element>(&self, position: &[i32]) -> Result<T> {
        let inside = position.len() == self.ndim()
            && position
                .iter()
                .zip(self.shape())
                .all(|(&p, &n)| (0..n).contains(&p));
        if !inside {
            return Err(Error::new(
                ErrorKind::Index,
                "at",
                format!(
                    "position {position:?} is not inside shape {:?}",
                    self.shape()
                ),
            ));
        }
        let stop: Vec<i32> = position.iter().map(|p| p + 1).collect();
        self.slice(position, &stop, &vec![1; self.ndim()])?.item()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_cut_as_in_python() {
        assert_eq!(bounds(10, 2, 5, 1), (2, 5));
        assert_eq!(bounds(10, -3, i32::MAX, 1), (7, 10));
        assert_eq!(bounds(10, i32::MIN, i32::MAX, 2), (0, 10));
        assert_eq!(bounds(10, 8, 3, 1), (8, 8));
        assert_eq!(bounds(10, i32::MAX, i32::MIN, -1), (9, -11));
        assert_eq!(bounds(10, 5, 2, -1), (5, 2));
        assert_eq!(bounds(0, 0, 5, 1), (0, 0));
    }
}
