//! Kernels for Apple GPUs.

use mlx_sys as sys;

use super::handle::{self, Metal, Strings};
use super::{Definition, Launch, text};
use crate::array::Array;
use crate::device::metal_is_available;
use crate::error::Result;

const OP: &str = "metal_kernel";

/// A kernel in Metal's C++. Mirrors `mx.fast.metal_kernel`.
///
/// Inputs are `const device T* name` (inputs without axes are `const constant T& name`), and
/// outputs are `device T* name`. `name_shape`, `name_strides` and `name_ndim` exist if the source
/// uses them. Metal's attributes, such as `thread_position_in_grid`, also exist if the source uses
/// them.
///
/// ```
/// use mlx_rs_core::{Array, Dtype, ErrorKind, kernel::{Launch, MetalKernel}, metal_is_available};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let exp = MetalKernel::new(
///     "my_exp",
///     &["x"],
///     &["y"],
///     "uint i = thread_position_in_grid.x; y[i] = helper(x[i]);",
/// )?
/// .header("inline float helper(float v) { return metal::exp(v); }")?
/// .ensure_row_contiguous(true) // and no atomics: what they are unless said otherwise
/// .atomic_outputs(false);
/// let x = Array::vector(&[0.0f32, 1.0])?;
/// let launch = Launch::new().input(&x).output(&[2], Dtype::Float32).grid(2, 1, 1);
/// // SAFETY: one thread for each element, which it reads and writes alone.
/// match unsafe { exp.launch(&launch) } {
///     Ok(y) => assert_eq!(y[0].to_vec::<f32>()?[0], 1.0),
///     Err(e) => assert!(e.kind() == ErrorKind::Unsupported && !metal_is_available()),
/// }
/// # Ok(()) }
/// ```
#[doc(alias(
    "mlx_fast_metal_kernel_new",
    "mlx_fast_metal_kernel_free",
    "mlx_fast_metal_kernel_apply"
))]
#[derive(Debug)]
pub struct MetalKernel {
    pub(super) definition: Definition,
    atomic_outputs: bool,
}

impl MetalKernel {
    /// A kernel from its name, the names of its inputs and outputs, and the body of its function.
    ///
    /// # Errors
    /// [`ErrorKind::Value`](crate::ErrorKind::Value) when a name is not a C++ identifier or is
    /// repeated, there is no output, or the source contains a NUL. Metal reports other faults of
    /// the source when the result of a launch is evaluated.
    pub fn new(name: &str, inputs: &[&str], outputs: &[&str], source: &str) -> Result<Self> {
        Ok(Self {
            definition: Definition::new(OP, name, inputs, outputs, source)?,
            atomic_outputs: false,
        })
    }

    /// Sets source code that comes before the function, such as helper functions.
    ///
    /// # Errors
    /// [`ErrorKind::Value`](crate::ErrorKind::Value) when it contains a NUL.
    pub fn header(mut self, header: &str) -> Result<Self> {
        self.definition.header = text(OP, header)?;
        Ok(self)
    }

    /// Whether inputs that are not row-contiguous are copied (default: yes). If not, the source
    /// must use the strides.
    #[must_use]
    pub fn ensure_row_contiguous(mut self, ensure: bool) -> Self {
        self.definition.ensure_row_contiguous = ensure;
        self
    }

    /// Whether outputs have the type `device atomic<T>*` (default: no).
    #[must_use]
    pub fn atomic_outputs(mut self, atomic: bool) -> Self {
        self.atomic_outputs = atomic;
        self
    }

    /// Adds a launch to the graph of the current stream. It runs when an output is evaluated.
    ///
    /// # Safety
    /// Nothing checks the code. With this launch's arrays, grid and constants, every thread must
    /// read and write only elements that exist, and threads must not race. Output elements that are
    /// read later must be written by the kernel, or filled with [`Launch::init_value`].
    ///
    /// # Errors
    /// [`ErrorKind::Value`](crate::ErrorKind::Value) or
    /// [`ErrorKind::Shape`](crate::ErrorKind::Shape) when the launch does not match the kernel, or
    /// exceeds the limits of all GPUs; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)
    /// without Metal, or if the current stream is on the CPU.
    #[doc(alias(
        "mlx_fast_metal_kernel_config_new",
        "mlx_fast_metal_kernel_config_free",
        "mlx_fast_metal_kernel_config_add_output_arg",
        "mlx_fast_metal_kernel_config_set_grid",
        "mlx_fast_metal_kernel_config_set_thread_group",
        "mlx_fast_metal_kernel_config_set_init_value",
        "mlx_fast_metal_kernel_config_set_verbose",
        "mlx_fast_metal_kernel_config_add_template_arg_dtype",
        "mlx_fast_metal_kernel_config_add_template_arg_int",
        "mlx_fast_metal_kernel_config_add_template_arg_bool"
    ))]
    pub unsafe fn launch(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        let definition = &self.definition;
        definition.check(launch, metal_is_available(), "Metal")?;
        let name = definition.unique_name(launch, u64::from(self.atomic_outputs))?;
        let inputs = Strings::new(OP, &definition.inputs)?;
        let outputs = Strings::new(OP, &definition.outputs)?;
        handle::launch::<Metal>(OP, launch, || {
            // SAFETY: all strings end in NUL, the lists are live; MLX copies them.
            unsafe {
                sys::mlx_fast_metal_kernel_new(
                    name.as_ptr(),
                    inputs.raw(),
                    outputs.raw(),
                    definition.source.as_ptr(),
                    definition.header.as_ptr(),
                    definition.ensure_row_contiguous,
                    self.atomic_outputs,
                )
            }
        })
    }
}
