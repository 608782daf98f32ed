//! Macros that declare methods with one or two arrays.

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
