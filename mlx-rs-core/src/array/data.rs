//! Reads values back. It evaluates the array, makes it row-contiguous, checks the type, then
//! returns the values.

use std::ops::Deref;

use mlx_sys as sys;

use super::Array;
use crate::call;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};

/// The evaluated values of an array in row-major order, borrowed from it.
#[derive(Debug)]
pub struct Data<'a, T: Element> {
    /// A contiguous copy, if the array itself is a view. The copy owns the memory of `values`.
    _owner: Option<Array>,
    values: &'a [T],
}

impl<T: Element> Deref for Data<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.values
    }
}

impl<'d, T: Element> IntoIterator for &'d Data<'_, T> {
    type Item = &'d T;
    type IntoIter = std::slice::Iter<'d, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.values.iter()
    }
}

impl<T: Element> AsRef<[T]> for Data<'_, T> {
    fn as_ref(&self) -> &[T] {
        self.values
    }
}

impl Array {
    fn expect_dtype<T: Element>(&self, op: &'static str) -> Result<()> {
        if self.dtype() == T::DTYPE {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Dtype,
            op,
            format!(
                "the array holds {}, not {}; convert it with astype first",
                self.dtype(),
                T::DTYPE
            ),
        ))
    }

    fn is_row_contiguous(&self) -> Result<bool> {
        let mut yes = false;
        call::status("data", || {
            // SAFETY: `yes` is a live out-pointer; the handle is live and evaluated by the caller.
            unsafe { sys::_mlx_array_is_row_contiguous(&raw mut yes, self.raw()) }
        })?;
        Ok(yes)
    }

    /// Whether the values are computed. False during computation, and for arrays without values in
    /// a trace.
    pub(crate) fn is_computed(&self) -> Result<bool> {
        let mut yes = false;
        call::status("data", || {
            // SAFETY: `yes` is a live out-pointer; the handle is live.
            unsafe { sys::_mlx_array_is_available(&raw mut yes, self.raw()) }
        })?;
        Ok(yes)
    }

    /// Evaluates the array and borrows its values in row-major order; a view is copied first.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::array!([[1, 2], [3, 4]])?.transpose()?;
    /// let sum: i32 = a.data::<i32>()?.iter().sum();
    /// assert_eq!((sum, &a.data::<i32>()?[..]), (10, &[1, 3, 2, 4][..]));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when `T` is not the array's type; [`ErrorKind::Value`] for a boolean
    /// array whose bytes are not all 0 or 1; MLX's message when evaluation fails.
    pub fn data<T: Element>(&self) -> Result<Data<'_, T>> {
        self.expect_dtype::<T>("data")?;
        let (mut owner, mut pointer, n) = self.row_major("data")?;
        if !pointer.cast::<T>().is_aligned() {
            // No operation of this crate makes an unaligned array, but an operation of MLX may.
            let copy = self.fresh()?;
            (_, pointer, _) = copy.row_major("data")?;
            owner = Some(copy);
        }
        if n == 0 {
            return Ok(Data {
                _owner: None,
                values: &[],
            });
        }
        if T::DTYPE == Dtype::Bool {
            // SAFETY: `n` bytes exist at the address (a bool is one byte). The next note explains
            // their lifetime.
            let bytes = unsafe { std::slice::from_raw_parts(pointer, n) };
            if let Some(at) = bytes.iter().position(|&b| b > 1) {
                return Err(Error::new(
                    ErrorKind::Value,
                    "data",
                    format!(
                        "byte {at} of this boolean array is {}, neither 0 nor 1; compare with zero \
                         (not_equal) to make booleans of other values",
                        bytes[at]
                    ),
                ));
            }
        }
        if !pointer.cast::<T>().is_aligned() {
            let message = format!("MLX has placed values of {} at an odd address", T::DTYPE);
            return Err(Error::new(ErrorKind::Mlx, "data", message));
        }
        // SAFETY: `n` elements of `T` exist at the address in row-major order, aligned as checked
        // above. Every bit pattern is a valid `T` (for bool checked above). While a handle exists,
        // nothing writes them, because MLX reuses a buffer only if it has no other user. The handle
        // is `self`, which is borrowed for 'a, or `_owner`, which is stored with the slice.
        let values = unsafe { std::slice::from_raw_parts(pointer.cast::<T>(), n) };
        Ok(Data {
            _owner: owner,
            values,
        })
    }

    /// Evaluates the array, and borrows its values as row-major bytes in this machine's byte order.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::array!([1, 256]; u16)?;
    /// let expected: Vec<u8> = [1u16, 256].iter().flat_map(|v| v.to_ne_bytes()).collect();
    /// assert_eq!(&a.bytes()?[..], expected);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// MLX's message when evaluation fails.
    pub fn bytes(&self) -> Result<Data<'_, u8>> {
        let (owner, pointer, n) = self.row_major("bytes")?;
        if n == 0 {
            return Ok(Data {
                _owner: None,
                values: &[],
            });
        }
        // SAFETY: `n` elements of `dtype().size()` bytes exist at the address, row-major. Any byte
        // is a valid `u8`. As in `data`, nothing frees or writes them while the owning handle
        // exists.
        let values = unsafe { std::slice::from_raw_parts(pointer, n * self.dtype().size()) };
        Ok(Data {
            _owner: owner,
            values,
        })
    }

    /// Evaluates the array and makes it row-contiguous. Returns three values: a copy, if one was
    /// needed, which then owns the values; the address of the first value, which is null only if
    /// there are none; and the number of values.
    pub(crate) fn row_major(&self, op: &'static str) -> Result<(Option<Array>, *const u8, usize)> {
        let _guard = call::enter(op)?;
        self.eval()?;
        let owner = if self.is_row_contiguous()? {
            None
        } else {
            let copy = self.contiguous()?;
            copy.eval()?;
            Some(copy)
        };
        let source = owner.as_ref().unwrap_or(self);
        let n = source.size();
        if n == 0 {
            return Ok((None, std::ptr::null(), 0));
        }
        // SAFETY: the handle is live and evaluated. The accessor only returns the data pointer,
        // whatever the type.
        let pointer = unsafe { sys::mlx_array_data_uint8(source.raw()) };
        if pointer.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                op,
                "MLX has no data for an evaluated array",
            ));
        }
        Ok((owner, pointer, n))
    }

    /// Evaluates the array and copies its values in row-major order.
    ///
    /// ```
    /// let a = mlx_rs_core::array!([[1, 2], [3, 4]])?;
    /// assert_eq!(a.transpose()?.to_vec::<i32>()?, [1, 3, 2, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::data`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.data::<T>()?.to_vec())
    }

    /// The single value of an array with one element.
    ///
    /// ```
    /// use mlx_rs_core::{All, array};
    /// assert_eq!(array!([1, 2, 3])?.sum(All, false)?.item::<i32>()?, 6);
    /// assert!(array!([1, 2, 3])?.item::<i32>().is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when there is not exactly one element; otherwise as [`Array::data`].
    pub fn item<T: Element>(&self) -> Result<T> {
        if self.size() != 1 {
            return Err(Error::new(
                ErrorKind::Shape,
                "item",
                format!("an array of shape {:?} is not a single value", self.shape()),
            ));
        }
        Ok(self.data::<T>()?[0])
    }

    /// The values as `f32`, converted from any real type.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::array!([1, 2])?.to_f32_vec()?, [1.0, 2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] for complex arrays; MLX's message when evaluation fails.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        match self.dtype() {
            Dtype::Float32 => self.to_vec(),
            Dtype::Complex64 => Err(Error::new(
                ErrorKind::Dtype,
                "to_f32_vec",
                "a complex array has no real values; take its real or imaginary part first",
            )),
            _ => self.astype(Dtype::Float32)?.to_vec(),
        }
    }
}
