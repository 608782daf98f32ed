//! Converts an array to another type: by value, to and from 8-bit floats, or by reinterpreting its
//! bytes.
//!
//! ```
//! use mlx_rs_core::{Dtype, array};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let x = array!([1.5, -2.0])?;
//! assert_eq!(x.astype(Dtype::Int32)?.to_vec::<i32>()?, [1, -2]);
//! assert_eq!(x.view(Dtype::Uint32)?.to_vec::<u32>()?, [0x3fc0_0000, 0xc000_0000]);
//! # Ok(()) }
//! ```

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;

impl Array {
    /// Converts the values to `dtype`. If the array already has this type, it is returned.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// assert_eq!(array!([1.7, -1.7])?.astype(Dtype::Int32)?.to_vec::<i32>()?, [1, -1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the device lacks the type.
    #[doc(alias = "mlx_astype")]
    pub fn astype(&self, dtype: Dtype) -> Result<Array> {
        call::array("astype", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_astype(out, self.raw(), dtype.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Converts the values to 8-bit floats (E4M3), stored as `uint8`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// let x = array!([1.0, 300.0])?.to_fp8()?;
    /// assert_eq!(x.dtype(), Dtype::Uint8);
    /// assert_eq!(x.from_fp8(Dtype::Float32)?.to_vec::<f32>()?, [1.0, 288.0]); // 3 bits of mantissa
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX does not accept the type.
    #[doc(alias = "mlx_to_fp8")]
    pub fn to_fp8(&self) -> Result<Array> {
        // MLX 0.30.6 reads doubles as if they were float32, so doubles are converted first.
        let narrow = (self.dtype() == Dtype::Float64).then(|| self.astype(Dtype::Float32));
        let narrow = narrow.transpose()?;
        let input = narrow.as_ref().unwrap_or(self);
        call::array("to_fp8", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_to_fp8(out, input.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Converts 8-bit floats (E4M3), stored as `uint8`, to `dtype`. The codes `0x7f` and `0xff` are
    /// NaN.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// let one = array!([0x38]; u8)?; // 1.0: exponent 7, the bias, and no mantissa
    /// assert_eq!(one.from_fp8(Dtype::Float32)?.to_vec::<f32>()?, [1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when this is not `uint8`, or `dtype` is not a float.
    #[doc(alias = "mlx_from_fp8")]
    pub fn from_fp8(&self, dtype: Dtype) -> Result<Array> {
        if self.dtype() != Dtype::Uint8 || !dtype.is_float() {
            return Err(Error::new(
                ErrorKind::Dtype,
                "from_fp8",
                format!(
                    "reads uint8 as a float type, not {} as {dtype}",
                    self.dtype()
                ),
            ));
        }
        let numbers = call::array("from_fp8", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_from_fp8(out, self.raw(), dtype.raw(), s) }
        })?;
        // MLX 0.30.6 reads the two NaN codes as -480 and 480, so they are replaced.
        let size = self.bitwise_and(&Array::scalar(0x7f_u8)?)?;
        let no_number = Array::scalar(f32::NAN)?.astype(dtype)?;
        super::where_(&size.equal(&Array::scalar(0x7f_u8)?)?, &no_number, &numbers)
    }

    /// Reinterprets the bytes of the array as another type. If its size differs, the last axis
    /// becomes longer or shorter.
    ///
    /// A view as a wider type usually copies. It does not copy if the values are already computed
    /// and start at an address that is aligned for that type.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// assert_eq!(array!([1.0])?.view(Dtype::Uint32)?.to_vec::<u32>()?, [0x3f80_0000]);
    /// assert_eq!(array!([1.0, 2.0])?.view(Dtype::Uint8)?.shape(), [8]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] for a view as `bool`, because not every byte is a valid `bool`;
    /// [`ErrorKind::Shape`] when the last axis is missing, too long, or not divisible.
    #[doc(alias = "mlx_view")]
    pub fn view(&self, dtype: Dtype) -> Result<Array> {
        let op = "view";
        if dtype == Dtype::Bool && self.dtype() != Dtype::Bool {
            return Err(Error::new(
                ErrorKind::Dtype,
                op,
                "bytes cannot be viewed as bool; compare them with zero",
            ));
        }
        let (from, to) = (self.dtype().size() as i64, dtype.size() as i64);
        let fits = from == to
            || self.shape().last().is_some_and(|&n| {
                let bytes = i64::from(n) * from;
                bytes % to == 0 && bytes / to <= i64::from(i32::MAX)
            });
        if !fits {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "the last axis of {} cannot be counted in elements of {dtype}",
                    self.dtype()
                ),
            )
            .with_inputs(&[self]));
        }
        if align_of_items(dtype) > align_of_items(self.dtype())
            && self.size() > 0
            && !self.begins_at_multiple_of(align_of_items(dtype))?
        {
            return self.fresh()?.view_aligned(dtype);
        }
        self.view_aligned(dtype)
    }

    /// Whether the values are already computed, contiguous, and at an address that is a multiple of
    /// `bytes`. They stay there as long as a graph refers to them. For values that are computed
    /// later, the address is unknown: a slice may begin anywhere, and an operation may reuse the
    /// memory of its argument.
    fn begins_at_multiple_of(&self, bytes: usize) -> Result<bool> {
        if mapped::inside() || !self.is_computed()? {
            return Ok(false);
        }
        let (owner, first, _) = self.row_major("view")?;
        Ok(owner.is_none() && first.addr().is_multiple_of(bytes))
    }

    /// A copy in new memory, at the start of an MLX allocation. It is a gather, the only copy that
    /// never reuses its argument's memory. The layout is arbitrary.
    pub(crate) fn fresh(&self) -> Result<Array> {
        let all = self.expand_dims(0)?;
        all.take_raw("view", &Array::from_slice(&[0u32], &[])?, 0)
    }

    /// [`Array::view`] for values that are aligned for the type.
    fn view_aligned(&self, dtype: Dtype) -> Result<Array> {
        let (from, to) = (self.dtype().size(), dtype.size());
        if from < to && mapped::inside() {
            // MLX would use the last axis of the batch. A reshape moves the batch to the front.
            let (mut shape, parts) = (self.shape().to_vec(), (to / from) as i32);
            if let Some(last) = shape.last_mut() {
                *last /= parts;
            }
            shape.push(parts);
            return self.reshape(&shape)?.viewed(dtype)?.squeeze_axis(-1);
        }
        if from > to && (self.shape().last() == Some(&1) || mapped::inside()) {
            // An axis of one element may have any stride, and MLX uses that stride to step through
            // the bytes. After a reshape, the new last axis has a stride of one, or one for which
            // MLX copies.
            let mut shape = self.shape().to_vec();
            shape.push(1);
            return self.reshape(&shape)?.viewed(dtype)?.flatten(-2, -1);
        }
        self.viewed(dtype)
    }

    /// Calls MLX's `view`. The size of the last axis in bytes must be divisible by the size of
    /// `dtype`, and the memory must be aligned.
    pub(crate) fn viewed(&self, dtype: Dtype) -> Result<Array> {
        call::array("view", |out, s| {
            // SAFETY: all handles are live. `view` has checked that the last axis is divisible.
            unsafe { mlx_sys::mlx_view(out, self.raw(), dtype.raw(), s) }
        })
    }
}

/// The alignment of an element in memory.
pub(crate) fn align_of_items(dtype: Dtype) -> usize {
    match dtype {
        // The type consists of two float32.
        Dtype::Complex64 => 4,
        _ => dtype.size(),
    }
}
