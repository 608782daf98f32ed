//! Feature `ndarray`: conversion from and to arrays of the `ndarray` crate. Values are copied, with
//! two exceptions: an owned row-major array is not copied, and [`Data::view`] borrows.

use ::ndarray::{ArrayBase, ArrayD, ArrayViewD, Data as Storage, Dimension, IxDyn};

use super::{Array, Data};
use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

fn dims(op: &'static str, shape: &[usize]) -> Result<Vec<i32>> {
    shape
        .iter()
        .map(|&d| i32::try_from(d))
        .collect::<Result<_, _>>()
        .map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                op,
                format!("shape {shape:?} has an axis longer than MLX can count"),
            )
        })
}

fn mismatch(op: &'static str, e: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Shape, op, e.to_string())
}

/// The shape in ndarray's type; MLX's dimensions are never negative.
fn wide(array: &Array) -> Vec<usize> {
    array.shape().iter().map(|&d| d as usize).collect()
}

impl Array {
    /// An array with a row-major copy of an `ndarray` array or view, whatever its strides.
    ///
    /// ```
    /// use mlx_rs_core::Array;
    /// let n = ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0]]);
    /// let a = Array::from_ndarray(&n.t())?;
    /// assert_eq!(a.to_vec::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an axis longer than `i32::MAX`.
    pub fn from_ndarray<T, S, D>(array: &ArrayBase<S, D>) -> Result<Self>
    where
        T: Element,
        S: Storage<Elem = T>,
        D: Dimension,
    {
        let shape = dims("from_ndarray", array.shape())?;
        match array.as_slice() {
            Some(values) => Self::from_slice(values, &shape),
            // The iterator follows the logical order, which is row-major.
            None => Self::from_vec(array.iter().copied().collect(), &shape),
        }
    }

    /// Evaluates this array and copies it into an `ndarray` array of any number of axes.
    ///
    /// ```
    /// let n = mlx_rs_core::array!([[1, 2], [3, 4]])?.to_ndarray::<i32>()?;
    /// assert_eq!(n[[1, 0]], 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when `T` is not the array's type; MLX's message when evaluation fails.
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        ArrayD::from_shape_vec(IxDyn(&wide(self)), self.to_vec::<T>()?)
            .map_err(|e| mismatch("to_ndarray", e))
    }
}

impl<T: Element> Data<'_, T> {
    /// Borrows these values as an `ndarray` view of `shape`, without a copy.
    ///
    /// ```
    /// let a = mlx_rs_core::array!([[1, 2], [3, 4]])?;
    /// let data = a.data::<i32>()?;
    /// assert_eq!(data.view(a.shape())?[[1, 0]], 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a dimension is negative, or the shape does not have exactly this
    /// number of values.
    pub fn view(&self, shape: &[i32]) -> Result<ArrayViewD<'_, T>> {
        let wide = shape
            .iter()
            .map(|&d| usize::try_from(d))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| mismatch("view", e))?;
        // `from_shape` would also accept a shape with fewer values.
        if memory::checked_bytes(shape, 1) != Some(self.len() as u64) {
            let message = format!(
                "shape {shape:?} does not hold exactly {} values",
                self.len()
            );
            return Err(mismatch("view", message));
        }
        ArrayViewD::from_shape(IxDyn(&wide), self).map_err(|e| mismatch("view", e))
    }
}

impl<T: Element, D: Dimension> TryFrom<::ndarray::Array<T, D>> for Array {
    type Error = Error;
    /// Takes ownership of the vector if its values are row-major and fill it; otherwise copies.
    fn try_from(array: ::ndarray::Array<T, D>) -> Result<Self> {
        if !array.is_standard_layout() {
            return Self::from_ndarray(&array);
        }
        let shape = dims("from_ndarray", array.shape())?;
        let n = array.len();
        match array.into_raw_vec_and_offset() {
            (values, None | Some(0)) if values.len() == n => Self::from_vec(values, &shape),
            (values, offset) => {
                let start = offset.unwrap_or(0);
                // The vector of an owned array contains the elements from the offset on.
                let part = values.get(start..start + n).unwrap_or_default();
                Self::from_slice(part, &shape)
            }
        }
    }
}

impl<T: Element, D: Dimension> TryFrom<&Array> for ::ndarray::Array<T, D> {
    type Error = Error;
    /// As [`Array::to_ndarray`], with the number of axes of `D`.
    fn try_from(array: &Array) -> Result<Self> {
        array
            .to_ndarray::<T>()?
            .into_dimensionality()
            .map_err(|e| mismatch("to_ndarray", e).with_inputs(&[array]))
    }
}
