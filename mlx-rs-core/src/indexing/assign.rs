//! Reads and writes the part of an array that an index selects.

use super::plan::{Plan, broadcast, error, lone_mask};
use super::raw::{self, Scatter};
use super::{Entry, Index};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Result};
use crate::operators::Operand;
use crate::ops::{where_, zeros};

/// A part of an array, made by [`Array::at_idx`]. It can be read, or combined with values into a
/// new array. If an index array repeats a position, that position is combined repeatedly.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    array: &'a Array,
    index: &'a [Index<'a>],
}

/// How an update combines with the existing values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Update {
    Set,
    Add,
    Subtract,
    Multiply,
    Divide,
    Maximum,
    Minimum,
}

impl Array {
    /// The part of this array that `index` selects, like `a[...]` in Python.
    /// [`indexing`](crate::indexing) lists the forms that are lazy and those that are evaluated.
    ///
    /// An integer drops its axis, and a range keeps it. Index arrays replace their axes by their
    /// (broadcast) shape. If a range, a new axis or an ellipsis separates the index arrays, that
    /// shape comes first.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// assert_eq!(a.get(idx![1])?.to_vec::<i32>()?, [4, 5, 6]);
    /// assert_eq!(a.get(idx![.., ..; -1])?.to_vec::<i32>()?, [3, 2, 1, 6, 5, 4]);
    /// assert!(a.get(idx![2]).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for an index out of range, more indices than axes, or a mask of another
    /// shape; [`ErrorKind::Shape`] for index arrays that do not broadcast; [`ErrorKind::Dtype`] for
    /// an index array of neither integers nor booleans; [`ErrorKind::Value`] for a zero step.
    pub fn get(&self, index: &[Index<'_>]) -> Result<Array> {
        let plan = Plan::new("get", self, index)?;
        plan.read(self)
    }

    /// Assigns `value` to the part that `index` selects, like `a[...] = value` in Python. The value
    /// broadcasts to the part, and is converted to the type of this array. MLX reuses the memory if
    /// no other handle to this array exists. After an error, this array is unchanged.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let mut a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// a.set(idx![.., 0], 9)?;
    /// a.set(idx![1, 1..], &array!([7, 8])?)?;
    /// assert_eq!(a.to_vec::<i32>()?, [9, 2, 3, 9, 7, 8]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Array::get`]; [`ErrorKind::Shape`] when the value does not broadcast to the part;
    /// [`ErrorKind::Value`] for an integer that does not fit the type.
    pub fn set(&mut self, index: &[Index<'_>], value: impl Operand) -> Result<()> {
        *self = self.updated("set", index, &value, Update::Set)?;
        Ok(())
    }

    /// The part that `index` selects, for updates that make a new array. This is `a.at[...]` in
    /// Python.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = array!([0, 0, 0])?;
    /// let b = a.at_idx(idx![[0, 2, 0]]).add(&array!([1, 2, 3])?)?;
    /// assert_eq!(b.to_vec::<i32>()?, [4, 0, 2]);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn at_idx<'a>(&'a self, index: &'a [Index<'a>]) -> At<'a> {
        At { array: self, index }
    }

    fn updated(
        &self,
        op: &'static str,
        index: &[Index<'_>],
        value: &impl Operand,
        update: Update,
    ) -> Result<Array> {
        let value = value.beside(self.dtype())?.astype(self.dtype())?;
        if update == Update::Divide && !self.dtype().is_float() && self.dtype() != Dtype::Complex64
        {
            return Err(error(
                op,
                ErrorKind::Dtype,
                format!(
                    "quotients are floats, the array holds {}; convert it first",
                    self.dtype()
                ),
                self,
            ));
        }
        if let Some(array) = self.masked(index, &value, update)? {
            return Ok(array);
        }
        Plan::new(op, self, index)?.write(op, self, &value, update)
    }

    /// The update by a single mask, if the value does not depend on the number of true positions.
    /// It is a selection (`where`), so it stays lazy.
    fn masked(&self, index: &[Index<'_>], value: &Array, update: Update) -> Result<Option<Array>> {
        let Some((entry, before)) = lone_mask(self, index) else {
            return Ok(None);
        };
        let Some(mask_shape) = entry.mask_shape() else {
            return Ok(None);
        };
        let after = &self.shape()[before + mask_shape.len()..];
        let value = strip(value, after.len())?;
        if self.shape()[before..before + mask_shape.len()] != mask_shape[..]
            || broadcast(value.shape(), after).as_deref() != Some(after)
        {
            return Ok(None);
        }
        let mut shape = vec![1; before];
        shape.extend(&mask_shape);
        shape.resize(self.ndim(), 1);
        let mask = match entry {
            Entry::Array(mask) => mask.reshape(&shape)?,
            Entry::Bools(list) => Array::from_slice(list, &shape)?,
            Entry::Bool(value) => Array::scalar(*value)?,
            _ => return Ok(None),
        };
        let new = update.apply(self, &value)?;
        Ok(Some(where_(&mask, &new, self)?))
    }
}

impl Update {
    fn apply(self, old: &Array, value: &Array) -> Result<Array> {
        match self {
            Update::Set => Ok(value.clone()),
            Update::Add => old.add(value),
            Update::Subtract => old.subtract(value),
            Update::Multiply => old.multiply(value),
            Update::Divide => old.divide(value),
            Update::Maximum => old.maximum(value),
            Update::Minimum => old.minimum(value),
        }
    }
}

/// Removes leading axes of length one beyond `axes`, which NumPy allows in assigned values.
fn strip(value: &Array, axes: usize) -> Result<Array> {
    let extra = value.ndim().saturating_sub(axes);
    let ones = value.shape().iter().take_while(|&&d| d == 1).count();
    match extra.min(ones) {
        0 => Ok(value.clone()),
        n => value.reshape(&value.shape()[n..]),
    }
}

impl Plan {
    /// The array after all steps before the gather.
    fn view(&self, array: &Array) -> Result<Array> {
        let mut x = self.merge(array)?;
        if self.sliced {
            x = raw::slice(&x, &self.start, &self.stop, &self.stride)?;
        }
        x = raw::squeeze(&x, &self.dropped)?;
        raw::expand(&x, &self.inserted)
    }

    fn merge(&self, array: &Array) -> Result<Array> {
        if self.merged == array.shape() {
            Ok(array.clone())
        } else {
            array.reshape(&self.merged)
        }
    }

    fn is_empty(&self) -> bool {
        self.result.contains(&0)
    }

    fn read(&self, array: &Array) -> Result<Array> {
        if self.gathered.is_empty() {
            return self.view(array);
        }
        if self.is_empty() {
            return zeros(&self.result, array.dtype());
        }
        // [indices, view with ones] -> [indices, kept], then the axes of the indices move to their
        // final place.
        let b = self.broadcast.len() as i32;
        let x = raw::gather(&self.view(array)?, &self.gathered)?;
        let ones: Vec<i32> = self.gathered.iter().map(|g| b + g.0).collect();
        let x = raw::squeeze(&x, &ones)?;
        if self.place == 0 || b == 0 {
            return Ok(x);
        }
        let place = self.place as i32;
        let order: Vec<i32> = (b..b + place)
            .chain(0..b)
            .chain(b + place..b + self.kept() as i32)
            .collect();
        x.transpose_axes(&order)
    }

    fn write(
        &self,
        op: &'static str,
        array: &Array,
        value: &Array,
        update: Update,
    ) -> Result<Array> {
        let value = strip(value, self.result.len())?;
        if broadcast(value.shape(), &self.result).as_deref() != Some(&self.result[..]) {
            return Err(error(
                op,
                ErrorKind::Shape,
                format!(
                    "a value of shape {:?} does not broadcast to the indexed part, of shape {:?}",
                    value.shape(),
                    self.result
                ),
                array,
            ));
        }
        if self.is_empty() {
            return Ok(array.clone());
        }
        let value = value.broadcast_to(&self.result)?;
        let new = if self.gathered.is_empty() {
            match update {
                Update::Set => value,
                _ => update.apply(&self.view(array)?, &value)?,
            }
        } else {
            self.scatter(array, &value, update)?
        };
        // Applies the inverse of the view's steps.
        let new = raw::squeeze(&new, &self.inserted)?;
        let new = raw::expand(&new, &self.dropped)?;
        let new = if self.sliced {
            raw::slice_update(
                &self.merge(array)?,
                &new,
                &self.start,
                &self.stop,
                &self.stride,
            )?
        } else {
            new
        };
        if self.merged == array.shape() {
            Ok(new)
        } else {
            new.reshape(array.shape())
        }
    }

    fn scatter(&self, array: &Array, value: &Array, update: Update) -> Result<Array> {
        let (b, place) = (self.broadcast.len() as i32, self.place as i32);
        // The order is: the axes of the indices, then the kept axes, with length one at indexed
        // axes.
        let order: Vec<i32> = (place..place + b)
            .chain(0..place)
            .chain(place + b..self.result.len() as i32)
            .collect();
        let value = value.transpose_axes(&order)?;
        let ones: Vec<i32> = self.gathered.iter().map(|g| b + g.0).collect();
        let value = raw::expand(&value, &ones)?;
        let (value, how) = match update {
            Update::Set => (value, Scatter::Set),
            Update::Add => (value, Scatter::Add),
            Update::Subtract => (value.negative()?, Scatter::Add),
            Update::Multiply => (value, Scatter::Multiply),
            Update::Divide => (value.reciprocal()?, Scatter::Multiply),
            Update::Maximum => (value, Scatter::Maximum),
            Update::Minimum => (value, Scatter::Minimum),
        };
        raw::scatter(&self.view(array)?, &self.gathered, &value, how)
    }
}

macro_rules! updates {
    ($($(#[$doc:meta])* $name:ident = $update:ident;)*) => {
        impl At<'_> {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// As [`Array::set`]; MLX's message when the type does not fit.
                pub fn $name(&self, value: impl Operand) -> Result<Array> {
                    self.array.updated(stringify!($name), self.index, &value, Update::$update)
                }
            )*
        }
    };
}

updates! {
    /// Returns the array with the part replaced by `value`.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![1..]).set(0)?.to_vec::<i32>()?, [1, 0, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    set = Set;
    /// Returns the array with `value` added to the part.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// // Every index counts, also when it is there twice.
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![[0, 0, 2]]).add(10)?.to_vec::<i32>()?, [21, 2, 13]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    add = Add;
    /// Returns the array with `value` subtracted from the part.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![-1]).subtract(1)?.to_vec::<i32>()?, [1, 2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    subtract = Subtract;
    /// Returns the array with the part multiplied by `value`.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![..2]).multiply(5)?.to_vec::<i32>()?, [5, 10, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    multiply = Multiply;
    /// Returns the array, which must be of floats, with the part divided by `value`.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1.0, 2.0])?.at_idx(idx![0]).divide(4.0)?.to_vec::<f32>()?, [0.25, 2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    divide = Divide;
    /// Returns the array with the part replaced by the element-wise maximum of the part and
    /// `value`.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![..]).maximum(2)?.to_vec::<i32>()?, [2, 2, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    maximum = Maximum;
    /// Returns the array with the part replaced by the element-wise minimum of the part and
    /// `value`.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// assert_eq!(array!([1, 2, 3])?.at_idx(idx![..]).minimum(2)?.to_vec::<i32>()?, [1, 2, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    minimum = Minimum;
}

impl At<'_> {
    /// Reads the part.
    ///
    /// ```
    /// use mlx_rs_core::{array, idx};
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.at_idx(idx![1..]).get()?.to_vec::<i32>()?, [2, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::get`].
    pub fn get(&self) -> Result<Array> {
        self.array.get(self.index)
    }
}
