//! Conversion between arrays and nested Rust values, for `array!`, `From`/`TryFrom` and
//! `from_nested`. `create.rs` copies flat slices, and `managed.rs` takes ownership of vectors.

use half::{bf16, f16};
use num_complex::Complex32;

use super::Array;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};

/// A single element, or rectangular nested lists of elements: arrays, vectors and slices.
///
/// Implemented for every [`Element`] and for `[N; LENGTH]`, `Vec<N>` and `&[N]` of a `Nested` type
/// `N`.
pub trait Nested {
    /// The element type.
    type Elem: Element;

    /// The number of nesting levels.
    const DEPTH: usize;

    /// Appends the length of each level, from the outermost level. An empty list appends zeros for
    /// its inner levels.
    fn lengths(&self, out: &mut Vec<usize>);

    /// Appends the elements in row-major order.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a list's length differs from `shape` at its level.
    fn elements(&self, shape: &[usize], out: &mut Vec<Self::Elem>) -> Result<()>;
}

impl<T: Element> Nested for T {
    type Elem = T;
    const DEPTH: usize = 0;
    fn lengths(&self, _: &mut Vec<usize>) {}
    fn elements(&self, _: &[usize], out: &mut Vec<T>) -> Result<()> {
        out.push(*self);
        Ok(())
    }
}

fn list_lengths<N: Nested>(list: &[N], out: &mut Vec<usize>) {
    out.push(list.len());
    match list.first() {
        Some(first) => first.lengths(out),
        None => out.extend(std::iter::repeat_n(0, N::DEPTH)),
    }
}

fn list_elements<N: Nested>(list: &[N], shape: &[usize], out: &mut Vec<N::Elem>) -> Result<()> {
    // `lengths` appends one entry per level, so `shape` has an entry for this level.
    let (&want, rest) = shape.split_first().unwrap_or((&0, &[]));
    if list.len() != want {
        return Err(Error::new(
            ErrorKind::Shape,
            "from_nested",
            format!(
                "lists side by side differ in length: {} and {want}",
                list.len()
            ),
        ));
    }
    list.iter().try_for_each(|n| n.elements(rest, out))
}

macro_rules! nested_lists {
    ($(($($generics:tt)*) $list:ty;)*) => {
        $(impl<$($generics)*> Nested for $list {
            type Elem = N::Elem;
            const DEPTH: usize = N::DEPTH + 1;
            fn lengths(&self, out: &mut Vec<usize>) {
                list_lengths::<N>(self, out);
            }
            fn elements(&self, shape: &[usize], out: &mut Vec<N::Elem>) -> Result<()> {
                list_elements::<N>(self, shape, out)
            }
        })*
    };
}
nested_lists! {
    (N: Nested, const LENGTH: usize) [N; LENGTH];
    (N: Nested) Vec<N>;
    (N: Nested) &[N];
}

impl Array {
    /// An array with the shape and the element type of nested lists.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Dtype};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = Array::from_nested(&vec![vec![1u8, 2], vec![3, 4], vec![5, 6]])?;
    /// assert_eq!((a.shape(), a.dtype()), (&[3, 2][..], Dtype::Uint8));
    /// assert!(Array::from_nested(&vec![vec![1u8], vec![]]).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when lists of the same level differ in length.
    pub fn from_nested<N: Nested>(values: &N) -> Result<Self> {
        let (flat, shape) = flatten(values)?;
        Self::from_vec(flat, &shape)
    }

    /// Makes the array of [`array!`](crate::array!). Like [`Array::from_nested`], but `f64`, the
    /// type of Rust's float literals, becomes `float32` unless `dtype` is given.
    ///
    /// # Errors
    /// As [`Array::from_nested`]; MLX's message when the device lacks the type.
    #[doc(hidden)]
    pub fn from_literal<N: Nested>(values: &N, dtype: Option<Dtype>) -> Result<Self> {
        let (flat, shape) = flatten(values)?;
        if N::Elem::DTYPE == Dtype::Float64 && dtype != Some(Dtype::Float64) {
            // Values are rounded on the host, because not every device supports `f64`.
            let wide = Self::from_vec(flat, &shape)?;
            let narrow: Vec<f32> = wide.data::<f64>()?.iter().map(|&v| v as f32).collect();
            let array = Self::from_vec(narrow, &shape)?;
            return dtype.map_or_else(|| Ok(array.clone()), |d| array.astype(d));
        }
        let array = Self::from_vec(flat, &shape)?;
        match dtype {
            Some(dtype) if dtype != N::Elem::DTYPE => array.astype(dtype),
            _ => Ok(array),
        }
    }
}

fn flatten<N: Nested>(values: &N) -> Result<(Vec<N::Elem>, Vec<i32>)> {
    let mut lengths = Vec::with_capacity(N::DEPTH);
    values.lengths(&mut lengths);
    let shape = lengths
        .iter()
        .map(|&n| i32::try_from(n))
        .collect::<Result<Vec<i32>, _>>()
        .map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                "from_nested",
                "a list has more values than one axis can count",
            )
        })?;
    let mut flat = Vec::new();
    values.elements(&lengths, &mut flat)?;
    Ok((flat, shape))
}

impl<N: Nested, const LENGTH: usize> TryFrom<[N; LENGTH]> for Array {
    type Error = Error;
    /// As [`Array::from_nested`].
    fn try_from(values: [N; LENGTH]) -> Result<Self> {
        Self::from_nested(&values)
    }
}

impl<N: Nested> TryFrom<Vec<N>> for Array {
    type Error = Error;
    /// As [`Array::from_nested`].
    fn try_from(values: Vec<N>) -> Result<Self> {
        Self::from_nested(&values)
    }
}

impl<N: Nested> TryFrom<&[N]> for Array {
    type Error = Error;
    /// As [`Array::from_nested`].
    fn try_from(values: &[N]) -> Result<Self> {
        Self::from_nested(&values)
    }
}

fn axes(op: &'static str, array: &Array, want: usize) -> Result<()> {
    if array.ndim() == want {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!(
            "lists of {want} levels cannot hold an array of {} axes",
            array.ndim()
        ),
    )
    .with_inputs(&[array]))
}

impl<T: Element> TryFrom<&Array> for Vec<T> {
    type Error = Error;
    /// The values of an array with one axis. [`Array::to_vec`] accepts any number of axes.
    fn try_from(array: &Array) -> Result<Self> {
        axes("to Vec", array, 1)?;
        array.to_vec()
    }
}

/// Splits row-major values into `rows` rows of `length` values. Rows may be empty.
fn rows<T: Element>(values: &[T], rows: usize, length: usize) -> Vec<Vec<T>> {
    (0..rows)
        .map(|i| values[i * length..(i + 1) * length].to_vec())
        .collect()
}

impl<T: Element> TryFrom<&Array> for Vec<Vec<T>> {
    type Error = Error;
    /// The rows of an array with two axes.
    fn try_from(array: &Array) -> Result<Self> {
        axes("to Vec", array, 2)?;
        let shape = array.shape();
        Ok(rows(
            &array.data::<T>()?,
            shape[0] as usize,
            shape[1] as usize,
        ))
    }
}

impl<T: Element> TryFrom<&Array> for Vec<Vec<Vec<T>>> {
    type Error = Error;
    /// The matrices of an array with three axes.
    fn try_from(array: &Array) -> Result<Self> {
        axes("to Vec", array, 3)?;
        let shape: Vec<usize> = array.shape().iter().map(|&d| d as usize).collect();
        let data = array.data::<T>()?;
        let matrix = shape[1] * shape[2];
        Ok((0..shape[0])
            .map(|i| rows(&data[i * matrix..(i + 1) * matrix], shape[1], shape[2]))
            .collect())
    }
}

macro_rules! scalars {
    ($($t:ty),*) => {
        $(
            impl TryFrom<$t> for Array {
                type Error = Error;
                /// An array without axes, with this value.
                fn try_from(value: $t) -> Result<Self> {
                    Self::scalar(value)
                }
            }
            impl TryFrom<&Array> for $t {
                type Error = Error;
                /// As [`Array::item`].
                fn try_from(array: &Array) -> Result<Self> {
                    array.item()
                }
            }
        )*
    };
}
scalars!(
    bool, u8, u16, u32, u64, i8, i16, i32, i64, f16, f32, f64, bf16, Complex32
);
