//! The macros for values and indices: `array!` and `idx!`.

/// Makes an array from a value or nested lists, like `mx.array(...)` in Python.
///
/// Integer literals become `int32`, float literals (and any `f64`) `float32`, and other Rust types
/// their own data type. `; type` selects another type.
///
/// ```
/// use mlx_rs_core::{array, bf16, Dtype};
/// # fn main() -> mlx_rs_core::Result<()> {
/// assert_eq!(array!([[1, 2, 3], [4, 5, 6]])?.shape(), [2, 3]);
/// assert_eq!(array!(2.5)?.dtype(), Dtype::Float32);
/// assert_eq!(array!([1, 2]; bf16)?.dtype(), Dtype::Bfloat16);
/// assert_eq!(array!([true, false])?.dtype(), Dtype::Bool);
/// assert_eq!(array!([]; i64)?.shape(), [0]);
/// let row = vec![0.5f32; 4];
/// assert_eq!(array!([row.clone(), row])?.shape(), [2, 4]);
/// # Ok(()) }
/// ```
///
/// The result is a [`Result`](crate::Result).
///
/// # Errors
/// [`ErrorKind::Shape`](crate::ErrorKind::Shape) when lists of the same level differ in length.
#[macro_export]
macro_rules! array {
    ([] $(,)?) => {
        $crate::Array::from_slice::<f32>(&[], &[0])
    };
    ([]; $t:ty) => {
        $crate::Array::from_slice::<$t>(&[], &[0])
    };
    ($values:expr; $t:ty) => {
        $crate::Array::from_literal(
            &$values,
            ::core::option::Option::Some(<$t as $crate::Element>::DTYPE),
        )
    };
    ($values:expr $(,)?) => {
        $crate::Array::from_literal(&$values, ::core::option::Option::None)
    };
}

/// An index expression with one entry per axis, like the content of the brackets of `a[...]` in
/// Python.
///
/// | Python | `idx!` |
/// |---|---|
/// | `a[1, -1]` | `idx![1, -1]` |
/// | `a[:, 2:5]` | `idx![.., 2..5]` |
/// | `a[:-1, ::2]` | `idx![..-1, ..; 2]` |
/// | `a[::-1]` | `idx![..; -1]` |
/// | `a[..., 0]` | `idx![Ellipsis, 0]` |
/// | `a[:, None]` | `idx![.., NewAxis]` |
/// | `a[ids]`, `a[mask]` | `idx![&ids]`, `idx![&mask]` |
/// | `a[[0, 2]]` | `idx![[0, 2]]` |
///
/// ```
/// use mlx_rs_core::indexing::{Ellipsis, NewAxis};
/// use mlx_rs_core::{arange, idx, Dtype};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let a = arange(0.0, 24.0, 1.0, Dtype::Int32)?.reshape(&[2, 3, 4])?;
/// assert_eq!(a.get(idx![1, .., -1])?.to_vec::<i32>()?, [15, 19, 23]);
/// assert_eq!(a.get(idx![Ellipsis, NewAxis, ..; 2])?.shape(), [2, 3, 1, 2]);
/// # Ok(()) }
/// ```
#[macro_export]
macro_rules! idx {
    ($($entry:expr $(; $step:expr)?),* $(,)?) => {
        &[$($crate::idx!(@entry $entry $(; $step)?)),*][..]
    };
    // Clippy warns that `1..-1` is an empty range. As an index it is not empty.
    (@entry $entry:expr) => {
        $crate::indexing::Index::from(
            #[allow(clippy::reversed_empty_ranges)]
            $entry,
        )
    };
    (@entry $entry:expr; $step:expr) => {
        $crate::indexing::Index::stepped(
            #[allow(clippy::reversed_empty_ranges)]
            $entry,
            $step,
        )
    };
}
