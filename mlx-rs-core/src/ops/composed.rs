//! Operations that MLX has only since 0.32. They are composed of older operations, so that all
//! versions have them.

use super::create::check_shape;
use super::{Axes, arange, concatenate, full, where_, zeros};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The position that [`Array::searchsorted`] returns for a value that equals elements of the array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Side {
    /// Before the first equal element.
    #[default]
    Left,
    /// After the last equal element.
    Right,
}

impl Array {
    /// Rounds toward zero. Integers are unchanged.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([-1.5, 1.5])?.trunc()?.to_vec::<f32>()?, [-1.0, 1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] for complex values.
    pub fn trunc(&self) -> Result<Array> {
        match self.dtype() {
            Dtype::Complex64 => Err(Error::new(
                ErrorKind::Dtype,
                "trunc",
                "complex values have no nearest integer",
            )
            .with_inputs(&[self])),
            dtype if dtype.is_float() => {
                let zero = Array::scalar(0.0f32)?.astype(dtype)?;
                where_(&self.less(&zero)?, &self.ceil()?, &self.floor()?)
            }
            _ => Ok(self.clone()),
        }
    }

    /// Whether exactly one of two values is not zero.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let xor = array!([0, 1, 2])?.logical_xor(&array!([1, 0, 3])?)?;
    /// assert_eq!(xor.to_vec::<bool>()?, [true, true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast.
    pub fn logical_xor(&self, other: &Array) -> Result<Array> {
        (self.astype(Dtype::Bool)?).not_equal(&other.astype(Dtype::Bool)?)
    }

    /// Reverses the elements along some axes.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.flip(0)?.to_vec::<i32>()?, [3, 4, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist.
    pub fn flip<'a>(&self, axes: impl Into<Axes<'a>>) -> Result<Array> {
        let mut strides = vec![1; self.ndim()];
        for axis in self.listed(axes.into()) {
            strides[self.axis("flip", axis)?] = -1;
        }
        let of = |forward: i32, backward: fn(i32) -> i32| -> Vec<i32> {
            let all = strides.iter().zip(self.shape());
            all.map(|(&stride, &length)| match stride {
                1 => forward.min(length),
                _ => backward(length),
            })
            .collect()
        };
        // In MLX, a bound of a reversed slice that is before the first element counts from the end.
        let start = of(0, |length| length - 1);
        let stop = of(i32::MAX, |length| -length - 1);
        self.slice(&start, &stop, &strides)
    }

    /// Splits the array into parts of length one along an axis, and removes that axis from the
    /// parts.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let rows = array!([[1, 2], [3, 4]])?.unstack(0)?;
    /// assert_eq!(rows[1].to_vec::<i32>()?, [3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    pub fn unstack(&self, axis: i32) -> Result<Vec<Array>> {
        let length = self.shape()[self.axis("unstack", axis)?];
        if length == 0 {
            return Ok(Vec::new());
        }
        let parts = self.split(length, axis)?;
        parts.iter().map(|part| part.squeeze_axis(axis)).collect()
    }

    /// The number of nonzero elements along the axes, as `int32`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[0, 2], [3, 4]])?.count_nonzero(1, false)?.to_vec::<i32>()?, [1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist.
    pub fn count_nonzero<'a>(&self, axes: impl Into<Axes<'a>>, keepdims: bool) -> Result<Array> {
        let some = self.astype(Dtype::Bool)?.astype(Dtype::Int32)?;
        some.sum(axes, keepdims)
    }

    /// The differences of adjacent elements along an axis, computed `times` times. Each time, the
    /// axis becomes one shorter. For booleans, the result is true where neighbors differ.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 4, 9, 16])?.diff(2, 0)?.to_vec::<i32>()?, [2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    pub fn diff(&self, times: u32, axis: i32) -> Result<Array> {
        let at = self.axis("diff", axis)?;
        let mut out = self.clone();
        for _ in 0..times.min(self.shape()[at] as u32) {
            let length = out.shape()[at];
            let (after, before) = (
                out.slice_axis(axis, 1, length)?,
                out.slice_axis(axis, 0, length - 1)?,
            );
            out = match out.dtype() {
                Dtype::Bool => after.not_equal(&before)?,
                _ => after.subtract(&before)?,
            };
        }
        Ok(out)
    }

    /// The dot products along an axis that both arrays have. The first factor is conjugated.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2], [3, 4]])?;
    /// assert_eq!(a.vecdot(&array!([10, 1])?, -1)?.to_vec::<i32>()?, [12, 34]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis; [`ErrorKind::Shape`] when the lengths of
    /// the axis differ; MLX's message when the shapes do not broadcast.
    pub fn vecdot(&self, other: &Array, axis: i32) -> Result<Array> {
        let op = "vecdot";
        let length = |a: &Array| Ok(a.shape()[a.axis(op, axis)?]);
        if length(self)? != length(other)? {
            return Err(
                Error::new(ErrorKind::Shape, op, "the axis must have one length")
                    .with_inputs(&[self, other]),
            );
        }
        // The axis is counted from the end, because broadcasting aligns shapes at the end.
        let axis = if axis < 0 {
            axis
        } else {
            axis - self.ndim().max(other.ndim()) as i32
        };
        let products = self.conjugate()?.multiply(other)?;
        let dtype = products.dtype();
        products.sum(axis, false)?.astype(dtype)
    }

    /// For each value, its position in this sorted vector: after all smaller elements, and with
    /// [`Side::Right`] also after equal elements. NaN counts as greater than all other values. The
    /// result is `uint32` with the shape of `values`.
    ///
    /// ```
    /// use mlx_rs_core::{Side, array};
    /// let (sorted, values) = (array!([1, 2, 2, 3])?, array!([0, 2, 9])?);
    /// assert_eq!(sorted.searchsorted(&values, Side::Left)?.to_vec::<u32>()?, [0, 1, 4]);
    /// assert_eq!(sorted.searchsorted(&values, Side::Right)?.to_vec::<u32>()?, [0, 3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when this is not a vector; [`ErrorKind::Dtype`] for complex values.
    pub fn searchsorted(&self, values: &Array, side: Side) -> Result<Array> {
        let op = "searchsorted";
        let fault = |kind, what| Err(Error::new(kind, op, what).with_inputs(&[self, values]));
        if self.ndim() != 1 {
            return fault(ErrorKind::Shape, "needs a sorted vector");
        }
        if [self, values].iter().any(|a| a.dtype() == Dtype::Complex64) {
            return fault(ErrorKind::Dtype, "complex values have no order");
        }
        let mut place = zeros(values.shape(), Dtype::Uint32)?;
        let length = self.shape()[0] as u32;
        if length == 0 {
            return Ok(place);
        }
        // The position is found bit by bit, beginning with the highest bit.
        let last = Array::scalar(length - 1)?;
        let mut step = 1u32 << length.ilog2();
        while step > 0 {
            let next = place.add(&Array::scalar(step)?)?;
            let element =
                self.take_clamped(&next.subtract(&Array::scalar(1u32)?)?.minimum(&last)?, 0)?;
            let before = match side {
                Side::Left => precedes(&element, values)?,
                Side::Right => precedes(values, &element)?.logical_not()?,
            };
            let exists = next.less_equal(&Array::scalar(length)?)?;
            place = where_(&before.logical_and(&exists)?, &next, &place)?;
            step /= 2;
        }
        Ok(place)
    }

    /// Returns this array with `update` added to a part. Bounds and strides select the part, as in
    /// [`Array::slice_update`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.slice_add(&array!(10)?, &[1], &[3], &[1])?.to_vec::<i32>()?, [1, 12, 13]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice_update`].
    pub fn slice_add(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<Array> {
        self.slice_combine(Array::add, update, [start, stop, strides])
    }

    /// Returns this array with a part multiplied by `update`. The part is selected as in
    /// [`Array::slice_update`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.slice_multiply(&array!(10)?, &[1], &[3], &[1])?.to_vec::<i32>()?, [1, 20, 30]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice_update`].
    pub fn slice_multiply(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<Array> {
        self.slice_combine(Array::multiply, update, [start, stop, strides])
    }

    /// Returns this array with a part replaced by the maximum of the part and `update`. The part is
    /// selected as in [`Array::slice_update`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.slice_maximum(&array!(3)?, &[0], &[2], &[1])?.to_vec::<i32>()?, [3, 3, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice_update`].
    pub fn slice_maximum(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<Array> {
        self.slice_combine(Array::maximum, update, [start, stop, strides])
    }

    /// Returns this array with a part replaced by the minimum of the part and `update`. The part is
    /// selected as in [`Array::slice_update`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.slice_minimum(&array!(1)?, &[1], &[3], &[1])?.to_vec::<i32>()?, [1, 1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice_update`].
    pub fn slice_minimum(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: &[i32],
    ) -> Result<Array> {
        self.slice_combine(Array::minimum, update, [start, stop, strides])
    }

    fn slice_combine(
        &self,
        of: fn(&Array, &Array) -> Result<Array>,
        update: &Array,
        [start, stop, strides]: [&[i32]; 3],
    ) -> Result<Array> {
        let part = self.slice(start, stop, strides)?;
        let combined = of(&part, update)?.astype(self.dtype())?;
        self.slice_update(&combined, start, stop, strides)
    }
}

/// Whether `a` precedes `b` in sort order. NaN is last.
fn precedes(a: &Array, b: &Array) -> Result<Array> {
    let less = a.less(b)?;
    let last = a.is_nan()?.logical_not()?.logical_and(&b.is_nan()?)?;
    less.logical_or(&last)
}

/// A window of cosines: `a + b cos(2 pi i / (m - 1)) + c cos(4 pi i / (m - 1))` for `i` in `0..m`.
fn cosines(points: i32, [a, b, c]: [f64; 3]) -> Result<Array> {
    match points {
        ..=0 => return zeros(&[0], Dtype::Float32),
        1 => return full(&[1], &Array::scalar(1.0f32)?, Dtype::Float32),
        _ => {}
    }
    check_shape("window", &[points], Dtype::Float32)?;
    let turn = std::f64::consts::TAU / f64::from(points - 1);
    let at = |i: i32| {
        let angle = turn * f64::from(i);
        (a + b * angle.cos() + c * (2.0 * angle).cos()) as f32
    };
    let values: Vec<f32> = (0..points).map(at).collect();
    Array::from_slice(&values, &[points])
}

/// The Hann window with this number of points, `float32`: `0.5 - 0.5 cos(2 pi i / (points - 1))`.
/// It is empty if the number is not positive.
///
/// ```
/// let window = mlx_rs_core::hanning(3)?;
/// assert_eq!(window.to_vec::<f32>()?, [0.0, 1.0, 0.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] beyond the budget.
pub fn hanning(points: i32) -> Result<Array> {
    cosines(points, [0.5, -0.5, 0.0])
}

/// The Hamming window with this number of points, `float32`: `0.54 - 0.46 cos(2 pi i / (points -
/// 1))`.
///
/// ```
/// let window = mlx_rs_core::hamming(3)?.to_vec::<f32>()?;
/// assert!((window[0] - 0.08).abs() < 1e-6 && (window[1] - 1.0).abs() < 1e-6);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] beyond the budget.
pub fn hamming(points: i32) -> Result<Array> {
    cosines(points, [0.54, -0.46, 0.0])
}

/// The Blackman window with this number of points, `float32`: `0.42 - 0.5 cos(2 pi i / (points -
/// 1)) + 0.08 cos(4 pi i / (points - 1))`.
///
/// ```
/// let window = mlx_rs_core::blackman(5)?.to_vec::<f32>()?;
/// assert!((window[1] - 0.34).abs() < 1e-6 && (window[2] - 1.0).abs() < 1e-6);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] beyond the budget.
pub fn blackman(points: i32) -> Result<Array> {
    cosines(points, [0.42, -0.5, 0.08])
}

/// The Bartlett window with this number of points, `float32`: a triangle from 0 to 1 and back.
///
/// ```
/// let window = mlx_rs_core::bartlett(5)?;
/// assert_eq!(window.to_vec::<f32>()?, [0.0, 0.5, 1.0, 0.5, 0.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] beyond the budget.
pub fn bartlett(points: i32) -> Result<Array> {
    if points <= 1 {
        return cosines(points, [1.0, 0.0, 0.0]);
    }
    check_shape("window", &[points], Dtype::Float32)?;
    let middle = f64::from(points - 1) / 2.0;
    let at = |i: i32| (1.0 - (f64::from(i) - middle).abs() / middle) as f32;
    let values: Vec<f32> = (0..points).map(at).collect();
    Array::from_slice(&values, &[points])
}

/// The frequencies `0, 1, .., -2, -1`, divided by `n d`; see [`crate::fft::fftfreq`].
pub(crate) fn frequencies(n: i32, d: f64, half: bool) -> Result<Array> {
    let op = if half { "rfftfreq" } else { "fftfreq" };
    if n <= 0 {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("needs at least one point, not {n}"),
        ));
    }
    let scale = Array::scalar((1.0 / (f64::from(n) * d)) as f32)?;
    let up_to = |end: i32| arange(0.0, f64::from(end), 1.0, Dtype::Float32);
    if half {
        return up_to(n / 2 + 1)?.multiply(&scale);
    }
    let negative = arange(f64::from(-(n / 2)), 0.0, 1.0, Dtype::Float32)?;
    concatenate(&[&up_to(n - n / 2)?, &negative], 0)?.multiply(&scale)
}
