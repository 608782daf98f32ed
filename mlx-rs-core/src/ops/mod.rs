//! Operations on arrays, grouped as MLX's documentation groups them. All are lazy and run on the
//! calling thread's current stream.

mod arrange;
mod binary;
mod composed;
mod conv;
mod create;
mod dequantized;
mod einsum_path;
mod index;
pub(crate) mod mapped;
mod matrix;
mod pad;
mod products;
mod quantized;
mod reduce;
mod scan;
mod scatter;
mod shape;
mod sort;
mod types;
mod unary;

pub use arrange::{GridIndexing, broadcast_arrays, concatenate_flat, depends, meshgrid};
pub use binary::where_;
pub(crate) use composed::frequencies;
pub use composed::{Side, bartlett, blackman, hamming, hanning};
pub use conv::Conv;
pub use create::{arange, eye, full, identity, linspace, ones, tri, zeros};
pub use pad::Pad;
pub use products::{IndexArg, MatrixIndices, einsum};
pub use quantized::{QuantMode, Quantized};
pub use reduce::{All, Axes};
pub use scatter::ScatterMode;
pub use shape::{concatenate, stack};
pub(crate) use types::align_of_items;

/// Declares methods that map one array to one array.
macro_rules! unary_ops {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => {
        impl $crate::Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// MLX's message when the data type does not fit.
                pub fn $name(&self) -> $crate::Result<$crate::Array> {
                    $crate::call::array(stringify!($name), |out, s| {
                        // SAFETY: all handles are live for the length of the call.
                        unsafe { mlx_sys::$c(out, self.raw(), s) }
                    })
                    .map_err(|e| e.with_inputs(&[self]))
                }
            )*
        }
    };
}

/// Declares methods that map two arrays to one array. The two arrays broadcast.
macro_rules! binary_ops {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => {
        impl $crate::Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// MLX's message when the shapes do not broadcast or the types do not fit.
                pub fn $name(&self, other: &$crate::Array) -> $crate::Result<$crate::Array> {
                    let raw = |a: &$crate::Array, b: &$crate::Array| {
                        $crate::call::array(stringify!($name), |out, s| {
                            // SAFETY: all handles are live for the length of the call.
                            unsafe { mlx_sys::$c(out, a.raw(), b.raw(), s) }
                        })
                    };
                    let result = if let Some(other) = self.of_booleans(stringify!($name), other) {
                        other
                    } else if $crate::mapped::inside() {
                        $crate::ops::mapped::binary(stringify!($name), self, other, raw)
                    } else {
                        raw(self, other)
                    };
                    result.map_err(|e| e.with_inputs(&[self, other]))
                }
            )*
        }
    };
}

pub(crate) use {binary_ops, unary_ops};
