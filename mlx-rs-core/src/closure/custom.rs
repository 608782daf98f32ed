//! C closures for custom transforms, and for functions with named arguments.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use mlx_sys as sys;

use super::{Failure, Function, Outcome, Payload, finish, no_closure, payload::release};
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::error::{Error, ErrorKind, Result};

/// A custom backward pass: `(primals, cotangents, outputs) -> cotangents of the primals`.
pub(crate) type Vjp = Box<dyn Fn(&[Array], &[Array], &[Array]) -> Outcome + Send>;
/// A custom vectorization: `(inputs, axes) -> outputs and their axes`. -1 means no axis.
pub(crate) type Vmap =
    Box<dyn Fn(&[Array], &[i32]) -> Result<(Vec<Array>, Vec<i32>), Failure> + Send>;

unsafe extern "C" fn call_vjp(
    res: *mut sys::mlx_vector_array,
    primals: sys::mlx_vector_array,
    cotangents: sys::mlx_vector_array,
    outputs: sys::mlx_vector_array,
    payload: *mut c_void,
) -> c_int {
    finish(|| {
        // SAFETY: the pointer is the payload of a closure made by `CustomVjp::new`, which lives
        // while it is called.
        let payload = unsafe { &*payload.cast::<Payload<Vjp>>() };
        let primals = call::read_vec("closure", primals)?;
        let cotangents = call::read_vec("closure", cotangents)?;
        let outputs = call::read_vec("closure", outputs)?;
        let grads = (payload.body)(&primals, &cotangents, &outputs)?;
        let vec = ArrayVec::new("closure", &grads)?;
        // SAFETY: `res` is writable and contains no vector yet. C takes ownership of the vector.
        unsafe { *res = vec.into_raw() };
        Ok(())
    })
}

/// The integers that C passes along with the arrays.
///
/// # Safety
/// `data` points to `n` integers, or `n` is zero.
unsafe fn integers(data: *const c_int, n: usize) -> Vec<i32> {
    if n == 0 || data.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller guarantees `n` integers at `data`.
    unsafe { std::slice::from_raw_parts(data, n) }.to_vec()
}

unsafe extern "C" fn call_vmap(
    res: *mut sys::mlx_vector_array,
    res_axes: *mut sys::mlx_vector_int,
    inputs: sys::mlx_vector_array,
    axes: *const c_int,
    n: usize,
    payload: *mut c_void,
) -> c_int {
    finish(|| {
        // SAFETY: the pointer is the payload of a closure made by `CustomVmap::new`, which lives
        // while it is called.
        let payload = unsafe { &*payload.cast::<Payload<Vmap>>() };
        let inputs = call::read_vec("closure", inputs)?;
        // SAFETY: mlx-c passes data and length of the same vector.
        let axes = unsafe { integers(axes, n) };
        let (out, mut out_axes) = (payload.body)(&inputs, &axes)?;
        let vec = ArrayVec::new("closure", &out)?;
        // SAFETY: pointer and length describe the vector, which MLX copies.
        let ints = unsafe { sys::mlx_vector_int_new_data(out_axes.as_mut_ptr(), out_axes.len()) };
        if ints.ctx.is_null() {
            return Err(
                Error::new(ErrorKind::Mlx, "closure", "MLX could not take the axes").into(),
            );
        }
        // SAFETY: both destinations are writable and contain no vector yet. C takes ownership of
        // the vectors.
        unsafe {
            *res = vec.into_raw();
            *res_axes = ints;
        }
        Ok(())
    })
}

/// A function, and the names of its named arguments, which follow the other arguments.
pub(crate) type KwargsFunction = (Function, Vec<CString>);

unsafe extern "C" fn call_kwargs(
    res: *mut sys::mlx_vector_array,
    args: sys::mlx_vector_array,
    kwargs: sys::mlx_map_string_to_array,
    payload: *mut c_void,
) -> c_int {
    finish(|| {
        // SAFETY: the pointer is the payload of a closure made by `KwargsClosure::new`, which lives
        // while it is called.
        let payload = unsafe { &*payload.cast::<Payload<KwargsFunction>>() };
        let (function, keys) = &*payload.body;
        let mut inputs = call::read_vec("closure", args)?;
        for key in keys {
            inputs.push(call::adopt("closure", |out| {
                // SAFETY: `out` is writable, the map is live, the key ends in NUL.
                unsafe { sys::mlx_map_string_to_array_get(out, kwargs, key.as_ptr()) }
            })?);
        }
        let outputs = function(&inputs)?;
        let vec = ArrayVec::new("closure", &outputs)?;
        // SAFETY: `res` is writable and contains no vector yet. C takes ownership of the vector.
        unsafe { *res = vec.into_raw() };
        Ok(())
    })
}

macro_rules! custom_closure {
    ($(#[$doc:meta])* $name:ident, $body:ty, $raw:ident, $new:ident, $free:ident, $call:ident) => {
        $(#[$doc])*
        pub(crate) struct $name(sys::$raw);

        impl $name {
            pub(crate) fn new(body: $body) -> Result<Self> {
                let _guard = call::enter("closure")?;
                let raw = Arc::into_raw(Payload::new(body));
                // SAFETY: trampoline and destructor match the payload. Ownership of the payload
                // moves into the closure. If MLX fails, it calls the destructor itself.
                let cls = unsafe {
                    sys::$new(Some($call), raw.cast_mut().cast(), Some(release::<$body>))
                };
                if cls.ctx.is_null() {
                    return Err(no_closure());
                }
                Ok(Self(cls))
            }

            pub(crate) fn raw_or_null(closure: Option<&Self>) -> sys::$raw {
                closure.map_or(
                    sys::$raw {
                        ctx: std::ptr::null_mut(),
                    },
                    |c| c.0,
                )
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                let Some(_guard) = call::lock_to_free() else {
                    return;
                };
                // SAFETY: the handle is owned here; MLX keeps its own references.
                unsafe { sys::$free(self.0) };
            }
        }
    };
}

custom_closure!(
    /// A C closure that computes cotangents.
    CustomVjp, Vjp, mlx_closure_custom, mlx_closure_custom_new_func_payload, mlx_closure_custom_free,
    call_vjp
);
custom_closure!(
    /// A C closure that computes over a batch.
    CustomVmap, Vmap, mlx_closure_custom_vmap, mlx_closure_custom_vmap_new_func_payload,
    mlx_closure_custom_vmap_free, call_vmap
);
custom_closure!(
    /// A C closure with arguments and named arguments.
    KwargsClosure, KwargsFunction, mlx_closure_kwargs, mlx_closure_kwargs_new_func_payload,
    mlx_closure_kwargs_free, call_kwargs
);
