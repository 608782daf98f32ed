//! Iteration over the first axis. Elements of evaluated data are iterated through
//! [`Array::data`](crate::Array::data).

use std::iter::FusedIterator;

use super::Array;
use crate::error::{Error, ErrorKind, Result};

/// The parts of an array along its first axis, in order; made by [`Array::iter`].
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    array: &'a Array,
    front: i32,
    back: i32,
}

impl Array {
    /// The parts along the first axis, each without that axis; lazy views, nothing is computed.
    ///
    /// An array without axes cannot be iterated: its iterator yields one error.
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
        // `front` never passes `back`.
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
