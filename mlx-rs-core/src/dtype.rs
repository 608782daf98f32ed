//! Data types of array elements and the corresponding Rust types.

use std::fmt;

use half::{bf16, f16};
use mlx_sys as sys;
use num_complex::Complex32;

/// The type of an array's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// One byte, false or true.
    Bool,
    /// 8-bit unsigned integer.
    Uint8,
    /// 16-bit unsigned integer.
    Uint16,
    /// 32-bit unsigned integer.
    Uint32,
    /// 64-bit unsigned integer.
    Uint64,
    /// 8-bit signed integer.
    Int8,
    /// 16-bit signed integer.
    Int16,
    /// 32-bit signed integer.
    Int32,
    /// 64-bit signed integer.
    Int64,
    /// IEEE 754 half precision.
    Float16,
    /// IEEE 754 single precision.
    Float32,
    /// IEEE 754 double precision (CPU only).
    Float64,
    /// Brain float: the upper half of a single.
    Bfloat16,
    /// Two singles: real and imaginary part.
    Complex64,
}

impl Dtype {
    /// Every data type, in MLX's order.
    pub const ALL: [Dtype; 14] = [
        Dtype::Bool,
        Dtype::Uint8,
        Dtype::Uint16,
        Dtype::Uint32,
        Dtype::Uint64,
        Dtype::Int8,
        Dtype::Int16,
        Dtype::Int32,
        Dtype::Int64,
        Dtype::Float16,
        Dtype::Float32,
        Dtype::Float64,
        Dtype::Bfloat16,
        Dtype::Complex64,
    ];

    /// Bytes per element.
    ///
    /// ```
    /// use mlx_rs_core::Dtype;
    /// assert_eq!((Dtype::Bfloat16.size(), Dtype::Complex64.size()), (2, 8));
    /// ```
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => 1,
            Dtype::Uint16 | Dtype::Int16 | Dtype::Float16 | Dtype::Bfloat16 => 2,
            Dtype::Uint32 | Dtype::Int32 | Dtype::Float32 => 4,
            Dtype::Uint64 | Dtype::Int64 | Dtype::Float64 | Dtype::Complex64 => 8,
        }
    }

    /// Whether this is a real floating-point type.
    ///
    /// ```
    /// use mlx_rs_core::Dtype;
    /// assert!(Dtype::Float16.is_float() && !Dtype::Complex64.is_float());
    /// ```
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Dtype::Float16 | Dtype::Float32 | Dtype::Float64 | Dtype::Bfloat16
        )
    }

    /// Whether this is an integer type, signed or not; booleans are not.
    ///
    /// ```
    /// use mlx_rs_core::Dtype;
    /// assert!(Dtype::Uint8.is_integer() && !Dtype::Bool.is_integer());
    /// ```
    #[must_use]
    pub const fn is_integer(self) -> bool {
        self.is_signed_integer()
            || matches!(
                self,
                Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64
            )
    }

    /// Whether this is a signed integer type.
    ///
    /// ```
    /// use mlx_rs_core::Dtype;
    /// assert!(Dtype::Int8.is_signed_integer() && !Dtype::Uint8.is_signed_integer());
    /// ```
    #[must_use]
    pub const fn is_signed_integer(self) -> bool {
        matches!(
            self,
            Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64
        )
    }

    pub(crate) const fn raw(self) -> sys::mlx_dtype {
        match self {
            Dtype::Bool => sys::mlx_dtype__MLX_BOOL,
            Dtype::Uint8 => sys::mlx_dtype__MLX_UINT8,
            Dtype::Uint16 => sys::mlx_dtype__MLX_UINT16,
            Dtype::Uint32 => sys::mlx_dtype__MLX_UINT32,
            Dtype::Uint64 => sys::mlx_dtype__MLX_UINT64,
            Dtype::Int8 => sys::mlx_dtype__MLX_INT8,
            Dtype::Int16 => sys::mlx_dtype__MLX_INT16,
            Dtype::Int32 => sys::mlx_dtype__MLX_INT32,
            Dtype::Int64 => sys::mlx_dtype__MLX_INT64,
            Dtype::Float16 => sys::mlx_dtype__MLX_FLOAT16,
            Dtype::Float32 => sys::mlx_dtype__MLX_FLOAT32,
            Dtype::Float64 => sys::mlx_dtype__MLX_FLOAT64,
            Dtype::Bfloat16 => sys::mlx_dtype__MLX_BFLOAT16,
            Dtype::Complex64 => sys::mlx_dtype__MLX_COMPLEX64,
        }
    }

    /// The type for MLX's number; `None` for a number that this crate does not know.
    pub(crate) const fn from_raw(raw: sys::mlx_dtype) -> Option<Self> {
        Some(match raw {
            sys::mlx_dtype__MLX_BOOL => Dtype::Bool,
            sys::mlx_dtype__MLX_UINT8 => Dtype::Uint8,
            sys::mlx_dtype__MLX_UINT16 => Dtype::Uint16,
            sys::mlx_dtype__MLX_UINT32 => Dtype::Uint32,
            sys::mlx_dtype__MLX_UINT64 => Dtype::Uint64,
            sys::mlx_dtype__MLX_INT8 => Dtype::Int8,
            sys::mlx_dtype__MLX_INT16 => Dtype::Int16,
            sys::mlx_dtype__MLX_INT32 => Dtype::Int32,
            sys::mlx_dtype__MLX_INT64 => Dtype::Int64,
            sys::mlx_dtype__MLX_FLOAT16 => Dtype::Float16,
            sys::mlx_dtype__MLX_FLOAT32 => Dtype::Float32,
            sys::mlx_dtype__MLX_FLOAT64 => Dtype::Float64,
            sys::mlx_dtype__MLX_BFLOAT16 => Dtype::Bfloat16,
            sys::mlx_dtype__MLX_COMPLEX64 => Dtype::Complex64,
            _ => return None,
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bool => "bool",
            Dtype::Uint8 => "uint8",
            Dtype::Uint16 => "uint16",
            Dtype::Uint32 => "uint32",
            Dtype::Uint64 => "uint64",
            Dtype::Int8 => "int8",
            Dtype::Int16 => "int16",
            Dtype::Int32 => "int32",
            Dtype::Int64 => "int64",
            Dtype::Float16 => "float16",
            Dtype::Float32 => "float32",
            Dtype::Float64 => "float64",
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Complex64 => "complex64",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be the element of an array. The trait is sealed, because MLX's list of data
/// types is fixed.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static
{
    /// The corresponding data type.
    const DTYPE: Dtype;
}

/// A real floating-point [`Element`].
pub trait FloatElement: Element {}

macro_rules! element {
    ($($t:ty => $d:ident),* $(,)?) => {
        $(impl sealed::Sealed for $t {} impl Element for $t { const DTYPE: Dtype = Dtype::$d; })*
    };
}
element!(
    bool => Bool, u8 => Uint8, u16 => Uint16, u32 => Uint32, u64 => Uint64,
    i8 => Int8, i16 => Int16, i32 => Int32, i64 => Int64,
    f16 => Float16, f32 => Float32, f64 => Float64, bf16 => Bfloat16, Complex32 => Complex64,
);
impl FloatElement for f16 {}
impl FloatElement for bf16 {}
impl FloatElement for f32 {}
impl FloatElement for f64 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_mlx_and_with_rust() {
        for d in Dtype::ALL {
            let _guard = crate::call::lock();
            // SAFETY: the number is one of MLX's own.
            assert_eq!(d.size(), unsafe { sys::mlx_dtype_size(d.raw()) }, "{d}");
            assert_eq!(Dtype::from_raw(d.raw()), Some(d));
        }
        assert_eq!(size_of::<Complex32>(), Dtype::Complex64.size());
        assert_eq!(Dtype::from_raw(999), None);
    }
}
