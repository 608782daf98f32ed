//! Indexing as NumPy defines it: ranges with steps, ellipsis, new axes, integers, integer arrays
//! and boolean masks. It reads ([`Array::get`]) and writes ([`Array::set`], [`Array::at_idx`]).
//!
//! [`idx!`](crate::idx!) makes an index. Its table lists the Python forms.
//!
//! ```
//! use mlx_rs_core::{array, idx};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let mut a = array!([[1, 2, 3], [4, 5, 6]])?;
//! assert_eq!(a.get(idx![.., ..; 2])?.to_vec::<i32>()?, [1, 3, 4, 6]);
//! assert_eq!(a.get(idx![[1, 0], 2])?.to_vec::<i32>()?, [6, 3]);
//! a.set(idx![&a.greater(&array!(4)?)?], 0)?; // a[a > 4] = 0
//! assert_eq!(a.to_vec::<i32>()?, [1, 2, 3, 4, 0, 0]);
//! let b = a.at_idx(idx![[0, 0], 0]).add(10)?; // an index that comes twice counts twice
//! assert_eq!(b.get(idx![0, 0])?.item::<i32>()?, 21);
//! # Ok(()) }
//! ```
//!
//! # Costs
//!
//! Ranges, integers, ellipsis and new axes are views: they are lazy, and reading copies nothing.
//! **Integer arrays are evaluated, and every index is checked on the host**, because MLX reads out
//! of bounds for an invalid index. A list of Rust integers is checked without the device.
//! [`clamped`] indices stay lazy, because the graph limits them to the axis. **Reading with a mask
//! evaluates the mask**, because the shape of the result depends on the number of true values. An
//! assignment of a value that does not depend on that number stays lazy. Inside `compile` and
//! `vmap`, where nothing can be evaluated, use ranges, [`clamped`] indices and such assignments.
//!
//! Wrapping and errors follow NumPy, with one difference: an index out of range is an error even if
//! the result has no elements. If one position is assigned several times, the last value remains on
//! the CPU. On a GPU, any of the values may remain.

mod assign;
mod plan;
mod raw;

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use crate::array::Array;
use crate::operators::Held;

pub use assign::At;

/// One entry of an index. `From` (which [`idx!`](crate::idx!) uses) makes it from
///
/// - integers, negative ones counted from the end;
/// - ranges of integers: `..` for the whole axis; bounds are clamped to the array as in Python;
/// - [`NewAxis`] and [`Ellipsis`];
/// - arrays and lists of integers; boolean arrays and lists, whose shape must be that of the axes
///   that they replace; [`clamped`] arrays;
/// - `true` and `false`, masks without axes.
#[derive(Debug)]
pub struct Index<'a>(Entry<'a>);

#[derive(Debug)]
enum Entry<'a> {
    At(i64),
    Slice(Span),
    Ellipsis,
    NewAxis,
    Array(Held<'a>),
    Clamped(Held<'a>),
    List(Vec<i64>),
    Bools(Vec<bool>),
    Bool(bool),
}

/// A new axis of length one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewAxis;

/// All remaining axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ellipsis;

/// The end of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Before(i64),
    With(i64),
}

/// A range with a step, for [`Index::stepped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    start: Option<i64>,
    end: End,
    step: i64,
}

impl<'a> Index<'a> {
    /// The elements of `range` in steps of `step`. A negative step goes backwards from the start,
    /// which defaults to the last element. So `..; -1` reverses an axis.
    ///
    /// ```
    /// use mlx_rs_core::{array, indexing::Index};
    /// let a = array!([0, 1, 2, 3, 4])?;
    /// assert_eq!(a.get(&[Index::stepped(1.., 2)])?.to_vec::<i32>()?, [1, 3]);
    /// assert_eq!(a.get(&[Index::stepped(.., -1)])?.to_vec::<i32>()?, [4, 3, 2, 1, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn stepped(range: impl Into<Span>, step: i64) -> Self {
        let span = range.into();
        Self(Entry::Slice(Span { step, ..span }))
    }
}

/// Indices that the graph limits to the axis, instead of evaluating and checking them. An index
/// below zero becomes 0, and one beyond the end becomes the last index. Use it for indices that are
/// known to be in range, or where evaluation is not possible.
///
/// ```
/// use mlx_rs_core::{array, idx, indexing::clamped};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let a = array!([10, 20, 30])?;
/// assert_eq!(a.get(idx![clamped(&array!([-5, 1, 7])?)])?.to_vec::<i32>()?, [10, 20, 30]);
/// # Ok(()) }
/// ```
#[must_use]
pub fn clamped(indices: &Array) -> Index<'_> {
    Index(Entry::Clamped(Held::Borrowed(indices)))
}

impl<'a> From<&'a Array> for Index<'a> {
    fn from(array: &'a Array) -> Self {
        Self(Entry::Array(Held::Borrowed(array)))
    }
}

impl From<Array> for Index<'_> {
    fn from(array: Array) -> Self {
        Self(Entry::Array(Held::Owned(array)))
    }
}

impl From<NewAxis> for Index<'_> {
    fn from(_: NewAxis) -> Self {
        Self(Entry::NewAxis)
    }
}

impl From<Ellipsis> for Index<'_> {
    fn from(_: Ellipsis) -> Self {
        Self(Entry::Ellipsis)
    }
}

impl From<Span> for Index<'_> {
    fn from(span: Span) -> Self {
        Self(Entry::Slice(span))
    }
}

impl From<RangeFull> for Span {
    fn from(_: RangeFull) -> Self {
        Self {
            start: None,
            end: End::Open,
            step: 1,
        }
    }
}

impl From<RangeFull> for Index<'_> {
    fn from(range: RangeFull) -> Self {
        Span::from(range).into()
    }
}

impl From<bool> for Index<'_> {
    fn from(value: bool) -> Self {
        Self(Entry::Bool(value))
    }
}

impl From<Vec<bool>> for Index<'_> {
    fn from(mask: Vec<bool>) -> Self {
        Self(Entry::Bools(mask))
    }
}

impl From<&[bool]> for Index<'_> {
    fn from(mask: &[bool]) -> Self {
        Self(Entry::Bools(mask.to_vec()))
    }
}

impl<const N: usize> From<[bool; N]> for Index<'_> {
    fn from(mask: [bool; N]) -> Self {
        Self(Entry::Bools(mask.to_vec()))
    }
}

macro_rules! from_ranges {
    ($t:ty, $($range:ty: |$r:ident| $start:expr, $end:expr;)*) => {
        $(
            impl From<$range> for Span {
                fn from($r: $range) -> Self {
                    Self { start: $start, end: $end, step: 1 }
                }
            }
            impl From<$range> for Index<'_> {
                fn from(range: $range) -> Self {
                    Span::from(range).into()
                }
            }
        )*
    };
}

macro_rules! from_integers {
    ($($t:ty),*) => {
        $(
            impl From<$t> for Index<'_> {
                fn from(at: $t) -> Self {
                    Self(Entry::At(wide(at)))
                }
            }
            impl From<Vec<$t>> for Index<'_> {
                fn from(list: Vec<$t>) -> Self {
                    Self(Entry::List(list.into_iter().map(wide).collect()))
                }
            }
            impl From<&Vec<$t>> for Index<'_> {
                fn from(list: &Vec<$t>) -> Self {
                    list.as_slice().into()
                }
            }
            impl From<&[$t]> for Index<'_> {
                fn from(list: &[$t]) -> Self {
                    Self(Entry::List(list.iter().copied().map(wide).collect()))
                }
            }
            impl<const N: usize> From<[$t; N]> for Index<'_> {
                fn from(list: [$t; N]) -> Self {
                    list.as_slice().into()
                }
            }
            impl<const N: usize> From<&[$t; N]> for Index<'_> {
                fn from(list: &[$t; N]) -> Self {
                    list.as_slice().into()
                }
            }
            from_ranges! { $t,
                Range<$t>: |r| Some(wide(r.start)), End::Before(wide(r.end));
                RangeFrom<$t>: |r| Some(wide(r.start)), End::Open;
                RangeTo<$t>: |r| None, End::Before(wide(r.end));
                RangeInclusive<$t>: |r| Some(wide(*r.start())), End::With(wide(*r.end()));
                RangeToInclusive<$t>: |r| None, End::With(wide(r.end));
            }
        )*
    };
}
from_integers!(i32, i64, isize, u32, u64, usize);

/// A value that does not fit becomes the maximum, which is out of range for any axis.
fn wide<T: TryInto<i64>>(value: T) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}
