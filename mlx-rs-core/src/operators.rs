//! Operators: `+ - * / %`, `& | ^ !`, `<< >>`, negation and the assigning forms, on arrays, and
//! with Rust scalars on either side. **They panic where the methods return an error**, so the
//! library itself never uses them.
//!
//! A scalar gets the type of the array in the same operation, like a number in Python. So `&a *
//! 2.5` stays `bfloat16` for a `bfloat16` array. [`Array::scalar_like`] makes such a scalar for
//! methods.

use std::ops::{
    Add, AddAssign, BitAnd, BitAndAssign, BitOr, BitOrAssign, BitXor, BitXorAssign, Deref, Div,
    DivAssign, Mul, MulAssign, Neg, Not, Rem, RemAssign, Shl, ShlAssign, Shr, ShrAssign, Sub,
    SubAssign,
};

use half::{bf16, f16};
use num_complex::Complex32;

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;
use crate::ops::where_;

/// A borrowed array, or a temporary one.
#[doc(hidden)]
#[derive(Debug)]
pub enum Held<'a> {
    /// A borrowed array.
    Borrowed(&'a Array),
    /// An array made for the operation.
    Owned(Array),
}

impl Deref for Held<'_> {
    type Target = Array;
    fn deref(&self) -> &Array {
        match self {
            Held::Borrowed(a) => a,
            Held::Owned(a) => a,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// An operand: another array, or a Rust scalar that is converted to the array's type.
///
/// A boolean stays a boolean. An integer gets the array's type, or `int32` if the array is boolean.
/// A float gets the array's type if that is a float or complex type, and `float32` otherwise.
pub trait Operand: sealed::Sealed {
    /// Converts this value to an array, for an operation with an array of type `other`.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when an integer does not fit the type.
    #[doc(hidden)]
    fn beside(&self, other: Dtype) -> Result<Held<'_>>;
}

impl sealed::Sealed for Array {}
impl Operand for Array {
    fn beside(&self, _: Dtype) -> Result<Held<'_>> {
        Ok(Held::Borrowed(self))
    }
}

impl sealed::Sealed for &Array {}
impl Operand for &Array {
    fn beside(&self, _: Dtype) -> Result<Held<'_>> {
        Ok(Held::Borrowed(self))
    }
}

/// An integer scalar, for an operation with an array of type `other`.
fn integer(value: i128, other: Dtype) -> Result<Array> {
    fn exact<T: TryFrom<i128> + crate::Element>(value: i128) -> Result<Array> {
        match T::try_from(value) {
            Ok(v) => Array::scalar(v),
            Err(_) => Err(Error::new(
                ErrorKind::Value,
                "scalar",
                format!(
                    "{value} does not fit {}, the type of the array beside it; convert the array \
                     with astype first",
                    T::DTYPE
                ),
            )),
        }
    }
    match other {
        Dtype::Bool => exact::<i32>(value).or_else(|_| exact::<i64>(value)),
        Dtype::Uint8 => exact::<u8>(value),
        Dtype::Uint16 => exact::<u16>(value),
        Dtype::Uint32 => exact::<u32>(value),
        Dtype::Uint64 => exact::<u64>(value),
        Dtype::Int8 => exact::<i8>(value),
        Dtype::Int16 => exact::<i16>(value),
        Dtype::Int32 => exact::<i32>(value),
        Dtype::Int64 => exact::<i64>(value),
        Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float32 | Dtype::Float64 | Dtype::Complex64 => {
            float(value as f64, other)
        }
    }
}

/// A float scalar, for an operation with an array of type `other`.
fn float(value: f64, other: Dtype) -> Result<Array> {
    match other {
        Dtype::Float16 => Array::scalar(f16::from_f64(value)),
        Dtype::Bfloat16 => Array::scalar(bf16::from_f64(value)),
        Dtype::Float64 => Array::scalar(value),
        Dtype::Complex64 => Array::scalar(Complex32::new(value as f32, 0.0)),
        _ => Array::scalar(value as f32),
    }
}

macro_rules! scalar_operands {
    ($($t:ty: |$v:ident, $other:ident| $make:expr;)*) => {
        $(
            impl sealed::Sealed for $t {}
            impl Operand for $t {
                fn beside(&self, $other: Dtype) -> Result<Held<'_>> {
                    let $v = *self;
                    $make.map(Held::Owned)
                }
            }
        )*
    };
}
scalar_operands! {
    bool: |v, _other| Array::scalar(v);
    u8: |v, other| integer(v.into(), other);
    u16: |v, other| integer(v.into(), other);
    u32: |v, other| integer(v.into(), other);
    u64: |v, other| integer(v.into(), other);
    // A `usize` has at most 64 bits on every system that MLX supports.
    usize: |v, other| integer(v as i128, other);
    i8: |v, other| integer(v.into(), other);
    i16: |v, other| integer(v.into(), other);
    i32: |v, other| integer(v.into(), other);
    i64: |v, other| integer(v.into(), other);
    isize: |v, other| integer(v as i128, other);
    f16: |v, other| float(v.to_f64(), other);
    bf16: |v, other| float(v.to_f64(), other);
    f32: |v, other| float(v.into(), other);
    f64: |v, other| float(v, other);
    Complex32: |v, _other| Array::scalar(v);
}

impl Array {
    /// Converts `value` to an array that does not change this array's type in an operation, like a
    /// number in Python. An array is returned unchanged.
    ///
    /// ```
    /// use mlx_rs_core::{array, f16, Dtype};
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = array!([1, 2]; f16)?;
    /// assert_eq!(a.multiply(&a.scalar_like(2.5)?)?.dtype(), Dtype::Float16);
    /// assert_eq!(a.multiply(&array!(2.5)?)?.dtype(), Dtype::Float32);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when an integer does not fit the type of this array.
    pub fn scalar_like(&self, value: impl Operand) -> Result<Array> {
        match value.beside(self.dtype())? {
            Held::Borrowed(a) => Ok(a.clone()),
            Held::Owned(a) => Ok(a),
        }
    }
}

fn bitwise(
    op: &'static str,
    a: &Array,
    b: &Array,
    f: unsafe extern "C" fn(
        *mut mlx_sys::mlx_array,
        mlx_sys::mlx_array,
        mlx_sys::mlx_array,
        mlx_sys::mlx_stream,
    ) -> i32,
) -> Result<Array> {
    let raw = |a: &Array, b: &Array| {
        call::array(op, |out, s| {
            // SAFETY: `f` is one of mlx-c's functions of two arrays; all handles are live.
            unsafe { f(out, a.raw(), b.raw(), s) }
        })
    };
    let result = if mapped::inside() {
        crate::ops::mapped::binary(op, a, b, raw)
    } else {
        raw(a, b)
    };
    result.map_err(|e| e.with_inputs(&[a, b]))
}

fn and(a: &Array, b: &Array) -> Result<Array> {
    a.bitwise_and(b)
}

fn or(a: &Array, b: &Array) -> Result<Array> {
    a.bitwise_or(b)
}

fn xor(a: &Array, b: &Array) -> Result<Array> {
    a.bitwise_xor(b)
}

fn invert(a: &Array) -> Result<Array> {
    if a.dtype() == Dtype::Bool {
        return a.logical_not();
    }
    call::array("bitwise_invert", |out, s| {
        // SAFETY: all handles are live for the length of the call.
        unsafe { mlx_sys::mlx_bitwise_invert(out, a.raw(), s) }
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// Shifts as in numpy: a count that is negative, or at least the width, shifts all bits out. The
/// result is then 0, or -1 for a negative value shifted right. MLX uses the processor's shift,
/// which is undefined for such counts, so these counts never reach MLX.
fn shift(a: &Array, b: &Array, left: bool) -> Result<Array> {
    let op = if left { "left_shift" } else { "right_shift" };
    for x in [a, b] {
        if !x.dtype().is_integer() && x.dtype() != Dtype::Bool {
            return Err(Error::new(
                ErrorKind::Dtype,
                op,
                format!("only integers can be shifted, not {}", x.dtype()),
            ));
        }
    }
    // The type to which MLX promotes both operands.
    let dtype = or(a, b)?.dtype();
    let dtype = if dtype == Dtype::Bool {
        Dtype::Uint8
    } else {
        dtype
    };
    let (a, b) = (a.astype(dtype)?, b.astype(dtype)?);
    let bits = (dtype.size() * 8) as i32;
    let limit = b.scalar_like(bits)?;
    let mut beyond = b.greater_equal(&limit)?;
    if dtype.is_signed_integer() {
        beyond = beyond.logical_or(&b.less(&b.scalar_like(0)?)?)?;
    }
    let raw = |count: &Array| {
        if left {
            bitwise(op, &a, count, mlx_sys::mlx_left_shift)
        } else {
            bitwise(op, &a, count, mlx_sys::mlx_right_shift)
        }
    };
    let highest = b.scalar_like(bits - 1)?;
    let shifted = raw(&and(&b, &highest)?)?;
    let nothing = if left || !dtype.is_signed_integer() {
        a.scalar_like(0)?
    } else {
        raw(&highest)?
    };
    where_(&beyond, &nothing, &shifted)
}

fn left_shift(a: &Array, b: &Array) -> Result<Array> {
    shift(a, b, true)
}

fn right_shift(a: &Array, b: &Array) -> Result<Array> {
    shift(a, b, false)
}

#[track_caller]
fn unwrap(result: Result<Array>) -> Array {
    match result {
        Ok(array) => array,
        Err(e) => {
            panic!("{e} (operators panic; the method of the same name returns this as an error)")
        }
    }
}

/// Converts both operands to arrays. A scalar gets the type of the array.
#[track_caller]
fn apply<A: Operand, B: Operand>(
    a: &A,
    b: &B,
    array: Dtype,
    f: fn(&Array, &Array) -> Result<Array>,
) -> Array {
    unwrap((|| f(&*a.beside(array)?, &*b.beside(array)?))())
}

/// One generic implementation for the array on the left accepts every operand. So the result type
/// is known before the literal's type, and `(&a + 1).shape()` compiles.
macro_rules! operator {
    ($($trait:ident, $method:ident, $assign:ident, $assign_method:ident, $f:expr, [$($t:ty),*];)*) => {
        $(
            operator!(@left $trait, $method, $f, Array);
            operator!(@left $trait, $method, $f, &Array);
            impl<T: Operand> $assign<T> for Array {
                #[track_caller]
                fn $assign_method(&mut self, other: T) {
                    *self = apply(&*self, &other, self.dtype(), $f);
                }
            }
            $(
                operator!(@right $trait, $method, $f, $t, Array);
                operator!(@right $trait, $method, $f, $t, &Array);
            )*
        )*
    };
    (@left $trait:ident, $method:ident, $f:expr, $array:ty) => {
        impl<T: Operand> $trait<T> for $array {
            type Output = Array;
            #[track_caller]
            fn $method(self, other: T) -> Array {
                apply(&self, &other, self.dtype(), $f)
            }
        }
    };
    (@right $trait:ident, $method:ident, $f:expr, $t:ty, $array:ty) => {
        impl $trait<$array> for $t {
            type Output = Array;
            #[track_caller]
            fn $method(self, other: $array) -> Array {
                apply(&self, &other, other.dtype(), $f)
            }
        }
    };
}

operator! {
    Add, add, AddAssign, add_assign, Array::add,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f16, bf16, f32, f64, Complex32];
    Sub, sub, SubAssign, sub_assign, Array::subtract,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f16, bf16, f32, f64, Complex32];
    Mul, mul, MulAssign, mul_assign, Array::multiply,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f16, bf16, f32, f64, Complex32];
    Div, div, DivAssign, div_assign, Array::divide,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f16, bf16, f32, f64, Complex32];
    Rem, rem, RemAssign, rem_assign, Array::remainder,
        [u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f16, bf16, f32, f64];
    BitAnd, bitand, BitAndAssign, bitand_assign, and,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize];
    BitOr, bitor, BitOrAssign, bitor_assign, or,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize];
    BitXor, bitxor, BitXorAssign, bitxor_assign, xor,
        [bool, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize];
    Shl, shl, ShlAssign, shl_assign, left_shift,
        [u8, u16, u32, u64, usize, i8, i16, i32, i64, isize];
    Shr, shr, ShrAssign, shr_assign, right_shift,
        [u8, u16, u32, u64, usize, i8, i16, i32, i64, isize];
}

macro_rules! unary_operator {
    ($($trait:ident, $method:ident, $f:expr;)*) => {
        $(
            impl $trait for Array {
                type Output = Array;
                #[track_caller]
                fn $method(self) -> Array {
                    unwrap($f(&self))
                }
            }
            impl $trait for &Array {
                type Output = Array;
                #[track_caller]
                fn $method(self) -> Array {
                    unwrap($f(self))
                }
            }
        )*
    };
}

unary_operator! {
    Neg, neg, Array::negative;
    Not, not, invert;
}
