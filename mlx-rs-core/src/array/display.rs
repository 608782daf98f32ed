//! Formatting of arrays. `{}` shows the values as MLX does in Python. `{:?}` shows only shape and
//! type, so a log line or a failed assertion never starts a computation.

use std::fmt::{self, Write};

use half::{bf16, f16};
use num_complex::Complex32;

use super::Array;
use crate::dtype::{Dtype, Element};
use crate::error::Result;
use crate::ops::concatenate;

/// The number of values shown at each end of a long axis. An axis is long if it has more than twice
/// this number.
const EDGE: usize = 3;

/// The number of significant digits of a float, which is the default of a C++ stream.
const DIGITS: usize = 6;

impl fmt::Debug for Array {
    /// Prints shape and type, without evaluating. `{:#?}` prints the same as `{}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        write!(f, "Array({:?}, {})", self.shape(), self.dtype())
    }
}

impl fmt::Display for Array {
    /// Evaluates the array, and prints the values as MLX does, without the middle of long axes. If
    /// evaluation fails, prints the error's message instead. A precision (`{:.3}`) sets the number
    /// of significant digits of floats, which is 6 by default.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::array!([[1.0, 0.5], [1e10, -2.25]])?;
    /// assert_eq!(a.to_string(), "array([[1, 0.5],\n       [1e+10, -2.25]], dtype=float32)");
    /// # Ok(()) }
    /// ```
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(DIGITS).clamp(1, 17);
        match self.shown(digits) {
            Ok(values) => write!(f, "array({values}, dtype={})", self.dtype()),
            Err(e) => write!(f, "Array({:?}, {}) <{e}>", self.shape(), self.dtype()),
        }
    }
}

impl Array {
    /// The nested lists of values.
    fn shown(&self, digits: usize) -> Result<String> {
        // MLX computes the whole array even for a slice of it, so this costs nothing extra.
        self.eval()?;
        let corners = self.corners()?;
        let text = match corners.dtype() {
            Dtype::Bool => render::<bool>(&corners, self, digits),
            Dtype::Uint8 => render::<u8>(&corners, self, digits),
            Dtype::Uint16 => render::<u16>(&corners, self, digits),
            Dtype::Uint32 => render::<u32>(&corners, self, digits),
            Dtype::Uint64 => render::<u64>(&corners, self, digits),
            Dtype::Int8 => render::<i8>(&corners, self, digits),
            Dtype::Int16 => render::<i16>(&corners, self, digits),
            Dtype::Int32 => render::<i32>(&corners, self, digits),
            Dtype::Int64 => render::<i64>(&corners, self, digits),
            Dtype::Float16 => render::<f16>(&corners, self, digits),
            Dtype::Float32 => render::<f32>(&corners, self, digits),
            Dtype::Float64 => render::<f64>(&corners, self, digits),
            Dtype::Bfloat16 => render::<bf16>(&corners, self, digits),
            Dtype::Complex64 => render::<Complex32>(&corners, self, digits),
        }?;
        Ok(text)
    }

    /// Returns the first and last values of each long axis only.
    fn corners(&self) -> Result<Array> {
        let mut out = self.clone();
        for axis in 0..self.ndim() {
            let length = self.shape()[axis];
            let edge = EDGE as i32;
            if length > 2 * edge {
                // The number of axes is far below `i32::MAX`.
                let at = axis as i32;
                let head = out.slice_axis(at, 0, edge)?;
                let tail = out.slice_axis(at, length - edge, length)?;
                out = concatenate(&[&head, &tail], at)?;
            }
        }
        Ok(out)
    }
}

fn render<T: Shown>(corners: &Array, full: &Array, digits: usize) -> Result<String> {
    let data = corners.data::<T>()?;
    let mut out = String::new();
    if full.ndim() == 0 {
        data[0].show(digits, &mut out);
        return Ok(out);
    }
    let mut values = data.iter();
    lists(full.shape(), 0, digits, &mut values, &mut out);
    Ok(out)
}

/// Prints one axis: `[a, b, ..., y, z]`. Inner axes are indented under the outer bracket.
fn lists<'a, T: Shown>(
    shape: &[i32],
    depth: usize,
    digits: usize,
    values: &mut impl Iterator<Item = &'a T>,
    out: &mut String,
) {
    // A dimension is never negative.
    let length = shape[depth] as usize;
    let last = depth + 1 == shape.len();
    let between = if last {
        String::from(", ")
    } else {
        // The indentation is as wide as `array(` and the open brackets.
        format!(",\n{}", " ".repeat(7 + depth))
    };
    let cut = length > 2 * EDGE;
    let shown = if cut { 2 * EDGE } else { length };
    out.push('[');
    for i in 0..shown {
        if i > 0 {
            out.push_str(&between);
        }
        if cut && i == EDGE {
            out.push_str("...");
            out.push_str(&between);
        }
        if last {
            if let Some(v) = values.next() {
                v.show(digits, out);
            }
        } else {
            lists(shape, depth + 1, digits, values, out);
        }
    }
    out.push(']');
}

/// Formats one element.
trait Shown: Element {
    fn show(&self, digits: usize, out: &mut String);
}

macro_rules! shown {
    ($($t:ty: |$v:ident, $digits:ident| $text:expr;)*) => {
        $(impl Shown for $t {
            fn show(&self, $digits: usize, out: &mut String) {
                let $v = *self;
                out.push_str(&$text);
            }
        })*
    };
}
shown! {
    bool: |v, _digits| String::from(if v { "True" } else { "False" });
    u8: |v, _digits| v.to_string();
    u16: |v, _digits| v.to_string();
    u32: |v, _digits| v.to_string();
    u64: |v, _digits| v.to_string();
    i8: |v, _digits| v.to_string();
    i16: |v, _digits| v.to_string();
    i32: |v, _digits| v.to_string();
    i64: |v, _digits| v.to_string();
    f16: |v, digits| general(v.to_f64(), digits);
    bf16: |v, digits| general(v.to_f64(), digits);
    f32: |v, digits| general(v.into(), digits);
    f64: |v, digits| general(v, digits);
    Complex32: |v, digits| {
        let im = general(v.im.into(), digits);
        let plus = if im.starts_with('-') { "" } else { "+" };
        format!("{}{plus}{im}j", general(v.re.into(), digits))
    };
}

/// Formats like C's `%g`: fixed or scientific notation, whichever is shorter, with `digits`
/// significant digits and without trailing zeros.
fn general(value: f64, digits: usize) -> String {
    if value.is_nan() {
        return String::from("nan");
    }
    if value.is_infinite() {
        return String::from(if value < 0.0 { "-inf" } else { "inf" });
    }
    // Rounding can carry into the next power of ten, so the exponent is read after rounding.
    let scientific = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..digits as i32).contains(&exponent) {
        // `digits - 1 - exponent` is not negative in this range.
        let decimals = (digits as i32 - 1 - exponent) as usize;
        return trim(&format!("{value:.decimals$}")).to_owned();
    }
    let mut out = trim(mantissa).to_owned();
    let sign = if exponent < 0 { '-' } else { '+' };
    // Writing to a String does not fail.
    let _ = write!(out, "e{sign}{:02}", exponent.unsigned_abs());
    out
}

fn trim(number: &str) -> &str {
    if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_c_prints_them() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.0, "1"),
            (0.1, "0.1"),
            (123_456.789, "123457"),
            (999_999.9, "1e+06"),
            (1_234_567.0, "1.23457e+06"),
            (1e16, "1e+16"),
            (0.0001, "0.0001"),
            (0.000_099_999_99, "0.0001"),
            (0.000_01, "1e-05"),
            (1e-300, "1e-300"),
            (100.0, "100"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (-f64::NAN, "nan"),
        ] {
            assert_eq!(general(value, 6), text);
        }
        assert_eq!(general(0.1, 17), "0.10000000000000001");
        assert_eq!(general(1234.0, 1), "1e+03");
    }
}
