//! Reading values back: evaluate, make row-contiguous, check the type, then look.

use std::ops::Deref;

use mlx_sys as sys;

use super::Array;
use crate::call;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};

/// The evaluated values of an array in row-major order, borrowed while this lives.
#[derive(Debug)]
pub struct Data<'a, T: Element> {
    /// A contiguous copy when the array itself was a view; it owns what `values` points to.
    _owner: Option<Array>,
    values: &'a [T],
}

impl<T: Element> Deref for Data<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
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

    /// Evaluates the array and borrows its values in row-major order; a view is copied first.
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when `T` is not the array's type; MLX's message when evaluation fails.
    pub fn data<T: Element>(&self) -> Result<Data<'_, T>> {
        self.expect_dtype::<T>("data")?;
        let _guard = call::lock();
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
            return Ok(Data {
                _owner: None,
                values: &[],
            });
        }
        // SAFETY: the handle is live and evaluated; the accessor only returns its data pointer,
        // whatever the type.
        let pointer = unsafe { sys::mlx_array_data_uint8(source.raw()) };
        if pointer.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                "data",
                "MLX has no data for an evaluated array",
            ));
        }
        // SAFETY: `n` elements of `T` lie there row-major (checked above), aligned as MLX's allocator
        // and its item-wise offsets guarantee. They are not written while a handle exists, since MLX
        // reuses a buffer only when nobody else holds it; the handle is `self` (borrowed for 'a) or
        // `_owner`, which lives in the returned value beside the slice.
        let values = unsafe { std::slice::from_raw_parts(pointer.cast::<T>(), n) };
        Ok(Data {
            _owner: owner,
            values,
        })
    }

    /// Evaluates the array and copies its values in row-major order.
    ///
    /// # Errors
    /// As [`Array::data`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.data::<T>()?.to_vec())
    }

    /// The single value of an array of one element.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when there is not exactly one element, else as [`Array::data`].
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

    /// The values as `f32`, converted from whatever real type the array has.
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
