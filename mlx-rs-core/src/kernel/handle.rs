//! Creates, fills and frees the C handles of kernels, their configurations, and lists of names.
//! `mod.rs` checks the contents.

use std::ffi::{CString, c_char};

use mlx_sys as sys;

use super::{Launch, TemplateArg};
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::error::{Error, ErrorKind, Result};
use crate::stream;

/// A list of strings for C, freed on drop.
pub(super) struct Strings(sys::mlx_vector_string);

impl Strings {
    pub(super) fn new(op: &'static str, strings: &[CString]) -> Result<Self> {
        let _guard = call::enter(op)?;
        let mut data: Vec<*const c_char> = strings.iter().map(|s| s.as_ptr()).collect();
        // SAFETY: pointer and length describe the list; its strings end in NUL, and MLX copies
        // them.
        let raw = unsafe { sys::mlx_vector_string_new_data(data.as_mut_ptr(), data.len()) };
        if raw.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                op,
                "MLX could not make a list of names",
            ));
        }
        Ok(Self(raw))
    }

    pub(super) fn raw(&self) -> sys::mlx_vector_string {
        self.0
    }
}

impl Drop for Strings {
    fn drop(&mut self) {
        let Some(_guard) = call::lock_to_free() else {
            return;
        };
        // SAFETY: the handle is owned here.
        unsafe { sys::mlx_vector_string_free(self.0) };
    }
}

/// A kind of kernel in mlx-c. The functions of the two kinds differ only in their names.
pub(super) trait Api {
    type Kernel: Copy;
    type Config: Copy;

    /// Whether the handle is null.
    fn is_null(kernel: Self::Kernel) -> bool;
    /// # Safety
    /// The handle must be live and owned by the caller, who must not use it again.
    unsafe fn free(kernel: Self::Kernel);
    fn config() -> Self::Config;
    /// # Safety
    /// The configuration must be live.
    unsafe fn fill(config: Self::Config, launch: &Launch<'_>, names: &[CString]) -> bool;
    /// # Safety
    /// The configuration must be owned by the caller, who must not use it again.
    unsafe fn free_config(config: Self::Config);
    /// # Safety
    /// All handles must be live, and `out` must be writable.
    unsafe fn apply(
        out: *mut sys::mlx_vector_array,
        kernel: Self::Kernel,
        inputs: sys::mlx_vector_array,
        config: Self::Config,
        stream: sys::mlx_stream,
    ) -> i32;
}

macro_rules! api {
    (
        $(#[$doc:meta])* $name:ident: $kernel:ident, $config:ident, $free:ident, $apply:ident, $new_config:ident,
        $free_config:ident, $output:ident, $grid:ident, $group:ident, $init:ident, $verbose:ident, $dtype:ident,
        $int:ident, $bool:ident
    ) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Api for $name {
            type Kernel = sys::$kernel;
            type Config = sys::$config;

            fn is_null(kernel: Self::Kernel) -> bool {
                kernel.ctx.is_null()
            }
            unsafe fn free(kernel: Self::Kernel) {
                // SAFETY: the caller guarantees a live handle that it owns.
                unsafe { sys::$free(kernel) };
            }
            fn config() -> Self::Config {
                // SAFETY: the call has no arguments. A null handle makes every later call fail.
                unsafe { sys::$new_config() }
            }
            unsafe fn fill(config: Self::Config, launch: &Launch<'_>, names: &[CString]) -> bool {
                // SAFETY: the configuration is live; pointers and lengths describe live slices,
                // names end in NUL, numbers were checked to fit.
                unsafe {
                    let mut ok = true;
                    for (shape, dtype) in &launch.outputs {
                        ok &= sys::$output(config, shape.as_ptr(), shape.len(), dtype.raw()) == 0;
                    }
                    let [x, y, z] = launch.grid.map(|n| n as i32);
                    ok &= sys::$grid(config, x, y, z) == 0;
                    let [x, y, z] = launch.thread_group.map(|n| n as i32);
                    ok &= sys::$group(config, x, y, z) == 0;
                    if let Some(value) = launch.init_value {
                        ok &= sys::$init(config, value) == 0;
                    }
                    ok &= sys::$verbose(config, launch.verbose) == 0;
                    for ((_, value), name) in launch.template.iter().zip(names) {
                        ok &= 0 == match *value {
                            TemplateArg::Dtype(d) => sys::$dtype(config, name.as_ptr(), d.raw()),
                            TemplateArg::Int(n) => sys::$int(config, name.as_ptr(), n),
                            TemplateArg::Bool(b) => sys::$bool(config, name.as_ptr(), b),
                        };
                    }
                    ok
                }
            }
            unsafe fn free_config(config: Self::Config) {
                // SAFETY: the caller guarantees that the configuration is owned.
                unsafe { sys::$free_config(config) };
            }
            unsafe fn apply(
                out: *mut sys::mlx_vector_array,
                kernel: Self::Kernel,
                inputs: sys::mlx_vector_array,
                config: Self::Config,
                stream: sys::mlx_stream,
            ) -> i32 {
                // SAFETY: the caller guarantees live handles and a writable result.
                unsafe { sys::$apply(out, kernel, inputs, config, stream) }
            }
        }
    };
}

api!(
    /// Kernels for Metal.
    Metal: mlx_fast_metal_kernel, mlx_fast_metal_kernel_config, mlx_fast_metal_kernel_free,
    mlx_fast_metal_kernel_apply, mlx_fast_metal_kernel_config_new, mlx_fast_metal_kernel_config_free,
    mlx_fast_metal_kernel_config_add_output_arg, mlx_fast_metal_kernel_config_set_grid,
    mlx_fast_metal_kernel_config_set_thread_group, mlx_fast_metal_kernel_config_set_init_value,
    mlx_fast_metal_kernel_config_set_verbose, mlx_fast_metal_kernel_config_add_template_arg_dtype,
    mlx_fast_metal_kernel_config_add_template_arg_int, mlx_fast_metal_kernel_config_add_template_arg_bool
);
api!(
    /// Kernels for CUDA.
    Cuda: mlx_fast_cuda_kernel, mlx_fast_cuda_kernel_config, mlx_fast_cuda_kernel_free,
    mlx_fast_cuda_kernel_apply, mlx_fast_cuda_kernel_config_new, mlx_fast_cuda_kernel_config_free,
    mlx_fast_cuda_kernel_config_add_output_arg, mlx_fast_cuda_kernel_config_set_grid,
    mlx_fast_cuda_kernel_config_set_thread_group, mlx_fast_cuda_kernel_config_set_init_value,
    mlx_fast_cuda_kernel_config_set_verbose, mlx_fast_cuda_kernel_config_add_template_arg_dtype,
    mlx_fast_cuda_kernel_config_add_template_arg_int, mlx_fast_cuda_kernel_config_add_template_arg_bool
);

/// Creates a kernel with `make`, and launches it. MLX keeps its own references in the graph.
pub(super) fn launch<A: Api>(
    op: &'static str,
    launch: &Launch<'_>,
    make: impl FnOnce() -> A::Kernel,
) -> Result<Vec<Array>> {
    struct Owned<A: Api>(A::Kernel, A::Config);
    impl<A: Api> Drop for Owned<A> {
        fn drop(&mut self) {
            // SAFETY: both handles are owned here, and freeing a null handle has no effect.
            unsafe {
                A::free(self.0);
                A::free_config(self.1);
            }
        }
    }

    let names = launch
        .template
        .iter()
        .map(|(name, _)| super::text(op, name))
        .collect::<Result<Vec<_>>>()?;
    let _guard = call::enter(op)?;
    let stream = stream::current_raw()?;
    let inputs = ArrayVec::new(op, launch.inputs.iter().copied())?;
    let mut owned = None;
    call::status(op, || {
        let made = owned.insert(Owned::<A>(make(), A::config()));
        i32::from(A::is_null(made.0))
    })?;
    let Some(owned) = owned else {
        return Err(Error::new(ErrorKind::Mlx, op, "MLX made no kernel"));
    };
    call::status(op, || {
        // SAFETY: the configuration was created above. If it is null, mlx-c reports an error.
        i32::from(!unsafe { A::fill(owned.1, launch, &names) })
    })?;
    let mut out = ArrayVec::empty();
    call::status(op, || {
        // SAFETY: all handles are live, the result is writable.
        unsafe { A::apply(out.out(), owned.0, inputs.raw(), owned.1, stream) }
    })?;
    out.to_arrays(op)
}
