//! Functions whose names or arguments changed in mlx-c 0.7, with the signatures of 0.4 and 0.5.
//! Arguments that 0.7 added get the values that older versions always use.
//!
//! Every function here has the safety requirements of its original in mlx-c: live handles, and
//! pointers valid for their lengths.

#[cfg(not(mlx_c_0_7))]
pub(crate) use mlx_sys::{
    mlx_cummax, mlx_cummin, mlx_cumprod, mlx_cumsum, mlx_dequantize, mlx_distributed_group_split,
    mlx_distributed_init, mlx_distributed_is_available, mlx_fast_scaled_dot_product_attention,
    mlx_fft_fft, mlx_fft_fft2, mlx_fft_fftn, mlx_fft_ifft, mlx_fft_ifft2, mlx_fft_ifftn,
    mlx_fft_irfft, mlx_fft_irfft2, mlx_fft_irfftn, mlx_fft_rfft, mlx_fft_rfft2, mlx_fft_rfftn,
    mlx_logcumsumexp, mlx_qqmm, mlx_quantize, mlx_trace,
};

#[cfg(mlx_c_0_7)]
pub(crate) use mlx_sys::{
    mlx_cummax_axis as mlx_cummax, mlx_cummin_axis as mlx_cummin,
    mlx_logcumsumexp_axis as mlx_logcumsumexp, mlx_trace_axes as mlx_trace,
};

#[cfg(mlx_c_0_7)]
pub(crate) use new::*;

#[cfg(mlx_c_0_7)]
#[expect(clippy::too_many_arguments, reason = "as mlx-c has them")]
mod new {
    use std::ffi::{c_char, c_int};
    use std::ptr::{null, null_mut};

    use mlx_sys as sys;

    type Out = *mut sys::mlx_array;

    /// The null handle, which means no array.
    const NONE: sys::mlx_array = sys::mlx_array { ctx: null_mut() };
    /// The normalization of older versions: the inverse transform divides by the length.
    const NORM: sys::mlx_fft_norm = sys::mlx_fft_norm__MLX_FFT_NORM_BACKWARD;
    /// Lets the input determine the result type.
    const SAME: sys::mlx_optional_dtype = sys::mlx_optional_dtype {
        value: sys::mlx_dtype__MLX_BOOL,
        has_value: false,
    };

    /// Defines functions that forward their arguments, with one added argument before the stream.
    macro_rules! with_one_more {
        ($($name:ident($($arg:ident: $t:ty),*), $more:expr => $new:ident;)*) => {
            $(
                pub(crate) unsafe fn $name(res: Out, $($arg: $t,)* s: sys::mlx_stream) -> c_int {
                    // SAFETY: the requirements are those of the mlx-c function.
                    unsafe { sys::$new(res, $($arg,)* $more, s) }
                }
            )*
        };
    }

    with_one_more! {
        mlx_cumsum(a: sys::mlx_array, axis: c_int, reverse: bool, inclusive: bool), SAME
            => mlx_cumsum_axis;
        mlx_cumprod(a: sys::mlx_array, axis: c_int, reverse: bool, inclusive: bool), SAME
            => mlx_cumprod_axis;
        mlx_fast_scaled_dot_product_attention(
            queries: sys::mlx_array, keys: sys::mlx_array, values: sys::mlx_array, scale: f32,
            mask_mode: *const c_char, mask: sys::mlx_array, sinks: sys::mlx_array
        ), false => mlx_fast_scaled_dot_product_attention;
    }

    macro_rules! transforms {
        ($($one:ident, $two:ident, $many:ident;)*) => {
            with_one_more! {
                $(
                    $one(a: sys::mlx_array, n: c_int, axis: c_int), NORM => $one;
                    $two(
                        a: sys::mlx_array, n: *const c_int, n_num: usize,
                        axes: *const c_int, axes_num: usize
                    ), NORM => $two;
                    $many(
                        a: sys::mlx_array, n: *const c_int, n_num: usize,
                        axes: *const c_int, axes_num: usize
                    ), NORM => $many;
                )*
            }
        };
    }

    transforms! {
        mlx_fft_fft, mlx_fft_fft2, mlx_fft_fftn;
        mlx_fft_ifft, mlx_fft_ifft2, mlx_fft_ifftn;
        mlx_fft_rfft, mlx_fft_rfft2, mlx_fft_rfftn;
        mlx_fft_irfft, mlx_fft_irfft2, mlx_fft_irfftn;
    }

    pub(crate) unsafe fn mlx_distributed_is_available() -> bool {
        // SAFETY: null means any backend.
        unsafe { sys::mlx_distributed_is_available(null()) }
    }

    /// The group, or null after a failure.
    pub(crate) unsafe fn mlx_distributed_init(strict: bool) -> sys::mlx_distributed_group {
        // SAFETY: the result is writable; null means any backend.
        group(|out| unsafe { sys::mlx_distributed_init(out, strict, null()) })
    }

    /// A subgroup, or null after a failure.
    pub(crate) unsafe fn mlx_distributed_group_split(
        parent: sys::mlx_distributed_group,
        color: c_int,
        key: c_int,
    ) -> sys::mlx_distributed_group {
        // SAFETY: the result is writable; the requirements are those of the mlx-c function.
        group(|out| unsafe { sys::mlx_distributed_group_split(out, parent, color, key) })
    }

    fn group(
        fill: impl FnOnce(*mut sys::mlx_distributed_group) -> c_int,
    ) -> sys::mlx_distributed_group {
        // SAFETY: makes an empty handle.
        let mut made = unsafe { sys::mlx_distributed_group_new() };
        if fill(&raw mut made) != 0 {
            // SAFETY: the handle is owned here.
            unsafe { sys::mlx_distributed_group_free(made) };
            made.ctx = null_mut();
        }
        made
    }

    pub(crate) unsafe fn mlx_quantize(
        res: *mut sys::mlx_vector_array,
        w: sys::mlx_array,
        group_size: sys::mlx_optional_int,
        bits: sys::mlx_optional_int,
        mode: *const c_char,
        s: sys::mlx_stream,
    ) -> c_int {
        // SAFETY: the requirements are those of the mlx-c function.
        unsafe { sys::mlx_quantize(res, w, group_size, bits, mode, NONE, s) }
    }

    pub(crate) unsafe fn mlx_dequantize(
        res: Out,
        w: sys::mlx_array,
        scales: sys::mlx_array,
        biases: sys::mlx_array,
        group_size: sys::mlx_optional_int,
        bits: sys::mlx_optional_int,
        mode: *const c_char,
        dtype: sys::mlx_optional_dtype,
        s: sys::mlx_stream,
    ) -> c_int {
        // SAFETY: the requirements are those of the mlx-c function.
        unsafe {
            sys::mlx_dequantize(
                res, w, scales, biases, group_size, bits, mode, NONE, dtype, s,
            )
        }
    }

    pub(crate) unsafe fn mlx_qqmm(
        res: Out,
        x: sys::mlx_array,
        w: sys::mlx_array,
        w_scales: sys::mlx_array,
        group_size: sys::mlx_optional_int,
        bits: sys::mlx_optional_int,
        mode: *const c_char,
        s: sys::mlx_stream,
    ) -> c_int {
        // SAFETY: the requirements are those of the mlx-c function.
        unsafe { sys::mlx_qqmm(res, x, w, w_scales, group_size, bits, mode, NONE, NONE, s) }
    }
}
