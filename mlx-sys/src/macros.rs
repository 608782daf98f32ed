//! `functions!`: declares C functions. On macOS they are linked. On Linux, each function is looked
//! up in the library that `library.rs` loads.

#[cfg(mlx_loaded)]
macro_rules! functions {
    ($(
        $(#[$meta:meta])*
        pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
    )*) => {$(
        $(#[$meta])*
        #[inline]
        pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $result)? {
            static FUNCTION: crate::library::Function =
                crate::library::Function::new(concat!(stringify!($name), "\0"));
            type Signature = unsafe extern "C" fn($($type),*) $(-> $result)?;
            // SAFETY: the library is built from the headers that declare this signature. The caller
            // has the other obligations of the function.
            unsafe {
                let function: Signature = std::mem::transmute(FUNCTION.address());
                function($($arg),*)
            }
        }
    )*};
}

#[cfg(not(mlx_loaded))]
macro_rules! functions {
    ($($declarations:tt)*) => {
        unsafe extern "C" { $($declarations)* }
    };
}
