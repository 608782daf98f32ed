//! Iteration over the first axis, and over the elements.

use std::iter::FusedIterator;

use super::{Array, Data};
use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};

/// The parts of an array along its first axis, in order; made by [`Array::iter`].
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    array: &'a Array,
    front: i32,
    back: i32,
}

impl Array {
    /// The parts along the first axis, each without that axis, as lazy views.
    ///
    /// For an array without axes, the iterator yields one error.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::array!([[1, 2], [3, 4]])?;
    /// for (i, row) in a.iter().enumerate() {
    ///     assert_eq!(row?.to_vec::<i32>()?[0], 2 * i as i32 + 1);
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn iter(&self) -> Iter<'_> {
        Iter {
            array: self,
            front: 0,
            back: self.shape().first().copied().unwrap_or(1),
        }
    }
}

/// The elements of an array in row-major order; made by [`Array::iter_values`].
#[derive(Debug)]
pub struct Values<'a, T: Element> {
    data: Data<'a, T>,
    front: usize,
    back: usize,
}

impl Array {
    /// Evaluates the array, and iterates over its elements in row-major order.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::array!([[1, 2], [3, 4]])?.transpose()?;
    /// assert_eq!(a.iter_values::<i32>()?.collect::<Vec<_>>(), [1, 3, 2, 4]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Array::data`].
    pub fn iter_values<T: Element>(&self) -> Result<Values<'_, T>> {
        let data = self.data::<T>()?;
        let back = data.len();
        Ok(Values {
            data,
            front: 0,
            back,
        })
    }
}

impl<T: Element> Iterator for Values<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let value = *self.data[..self.back].get(self.front)?;
        self.front += 1;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.back - self.front;
        (left, Some(left))
    }
}

impl<T: Element> DoubleEndedIterator for Values<'_, T> {
    fn next_back(&mut self) -> Option<T> {
        let value = *self.data[self.front..self.back].last()?;
        self.back -= 1;
        Some(value)
    }
}

impl<T: Element> ExactSizeIterator for Values<'_, T> {}
impl<T: Element> FusedIterator for Values<'_, T> {}

impl Iter<'_> {
    fn part(&self, at: i32) -> Result<Array> {
        if self.array.ndim() == 0 {
            return Err(Error::new(
                ErrorKind::Shape,
                "iter",
                "an array without axes cannot be iterated; read it with item",
            ));
        }
        self.array.slice_axis(0, at, at + 1)?.squeeze_axis(0)
    }
}

impl Iterator for Iter<'_> {
    type Item = Result<Array>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.front < self.back).then(|| {
            self.front += 1;
            self.part(self.front - 1)
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // `front` never exceeds `back`.
        let left = (self.back - self.front) as usize;
        (left, Some(left))
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        (self.front < self.back).then(|| {
            self.back -= 1;
            self.part(self.back)
        })
    }
}

impl ExactSizeIterator for Iter<'_> {}
impl FusedIterator for Iter<'_> {}

impl<'a> IntoIterator for &'a Array {
    type Item = Result<Array>;
    type IntoIter = Iter<'a>;
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_in_row_major_order_from_both_ends() {
        let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]).unwrap();
        let mut values = a.iter_values::<f32>().unwrap();
        assert_eq!(values.len(), 6);
        assert_eq!((values.next(), values.next_back()), (Some(1.0), Some(6.0)));
        assert_eq!(
            values.by_ref().rev().collect::<Vec<_>>(),
            [5.0, 4.0, 3.0, 2.0]
        );
        assert_eq!((values.next(), values.next_back()), (None, None));
        // The view's logical order differs from its order in memory.
        let turned = a.transpose().unwrap();
        let sum = |x: &Array| x.iter_values::<f32>().unwrap().step_by(2).sum::<f32>();
        assert_eq!((sum(&a), sum(&turned)), (9.0, 1.0 + 2.0 + 3.0));
        assert_eq!(
            Array::from_slice(&[0u8; 0], &[0, 2])
                .unwrap()
                .iter_values::<u8>()
                .unwrap()
                .count(),
            0
        );
        let e = a.iter_values::<i32>().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Dtype);
    }
}
