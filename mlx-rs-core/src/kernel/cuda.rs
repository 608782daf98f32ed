//! Kernels for NVIDIA GPUs.

use mlx_sys as sys;

use super::handle::{self, Cuda, Strings};
use super::{Definition, Launch, text};
use crate::array::Array;
use crate::device::cuda_is_available;
use crate::error::{Error, ErrorKind, Result};

const OP: &str = "cuda_kernel";

/// A kernel in CUDA's C++. Mirrors `mx.fast.cuda_kernel`.
///
/// Inputs are `const T* name`, outputs `T* name`; `name_shape`, `name_strides` and `name_ndim`
/// exist if the source uses them. The code is in the namespace `mlx::core::cu`, and `cg`
/// abbreviates `cooperative_groups`.
///
/// ```
/// use mlx_rs_core::{Array, Dtype, ErrorKind, cuda_is_available, kernel::{CudaKernel, Launch}};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let exp = CudaKernel::new(
///     "my_exp",
///     &["x"],
///     &["y"],
///     "auto i = cg::this_grid().thread_rank(); if (i < N) { y[i] = helper(x[i]); }",
/// )?
/// .header("__device__ float helper(float v) { return expf(v); }")?
/// .ensure_row_contiguous(true) // and no shared memory: what they are unless said otherwise
/// .shared_memory(0)?;
/// let x = Array::vector(&[0.0f32, 1.0])?;
/// let launch = Launch::new()
///     .input(&x)
///     .output(&[2], Dtype::Float32)
///     .grid(2, 1, 1)
///     .thread_group(256, 1, 1)
///     .template("N", 2);
/// // SAFETY: one thread for each element, which it reads and writes alone; others do nothing.
/// match unsafe { exp.launch(&launch) } {
///     Ok(y) => assert_eq!(y[0].to_vec::<f32>()?[0], 1.0),
///     Err(e) => assert!(e.kind() == ErrorKind::Unsupported && !cuda_is_available()),
/// }
/// # Ok(()) }
/// ```
#[doc(alias(
    "mlx_fast_cuda_kernel_new",
    "mlx_fast_cuda_kernel_free",
    "mlx_fast_cuda_kernel_apply"
))]
#[derive(Debug)]
pub struct CudaKernel {
    definition: Definition,
    shared_memory: i32,
}

impl CudaKernel {
    /// A kernel from its name, the names of its inputs and outputs, and the body of its function.
    ///
    /// # Errors
    /// As [`MetalKernel::new`](super::MetalKernel::new).
    pub fn new(name: &str, inputs: &[&str], outputs: &[&str], source: &str) -> Result<Self> {
        Ok(Self {
            definition: Definition::new(OP, name, inputs, outputs, source)?,
            shared_memory: 0,
        })
    }

    /// Sets source code that comes before the function, such as helper functions.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when it contains a NUL.
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

    /// Sets the number of bytes of shared memory per block, in addition to those that the source
    /// declares (default: 0).
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for more bytes than any device has.
    pub fn shared_memory(mut self, bytes: u32) -> Result<Self> {
        const MOST: u32 = 1 << 20;
        if bytes > MOST {
            return Err(Error::new(
                ErrorKind::Value,
                OP,
                format!(
                    "{bytes} bytes of shared memory are more than any device has; at most {MOST}"
                ),
            ));
        }
        self.shared_memory = bytes as i32;
        Ok(self)
    }

    /// Adds a launch to the graph of the current stream. It runs when an output is evaluated.
    ///
    /// # Safety
    /// The obligations of [`MetalKernel::launch`](super::MetalKernel::launch). They also apply to
    /// threads of blocks that extend beyond the grid.
    ///
    /// # Errors
    /// As [`MetalKernel::launch`](super::MetalKernel::launch), with CUDA instead of Metal.
    #[doc(alias(
        "mlx_fast_cuda_kernel_config_new",
        "mlx_fast_cuda_kernel_config_free",
        "mlx_fast_cuda_kernel_config_add_output_arg",
        "mlx_fast_cuda_kernel_config_set_grid",
        "mlx_fast_cuda_kernel_config_set_thread_group",
        "mlx_fast_cuda_kernel_config_set_init_value",
        "mlx_fast_cuda_kernel_config_set_verbose",
        "mlx_fast_cuda_kernel_config_add_template_arg_dtype",
        "mlx_fast_cuda_kernel_config_add_template_arg_int",
        "mlx_fast_cuda_kernel_config_add_template_arg_bool"
    ))]
    pub unsafe fn launch(&self, launch: &Launch<'_>) -> Result<Vec<Array>> {
        let definition = &self.definition;
        definition.check(launch, cuda_is_available(), "CUDA")?;
        let name = definition.unique_name(launch, u64::from(self.shared_memory.unsigned_abs()))?;
        let inputs = Strings::new(OP, &definition.inputs)?;
        let outputs = Strings::new(OP, &definition.outputs)?;
        handle::launch::<Cuda>(OP, launch, || {
            // SAFETY: all strings end in NUL, the lists are live; MLX copies them.
            unsafe {
                sys::mlx_fast_cuda_kernel_new(
                    name.as_ptr(),
                    inputs.raw(),
                    outputs.raw(),
                    definition.source.as_ptr(),
                    definition.header.as_ptr(),
                    definition.ensure_row_contiguous,
                    self.shared_memory,
                )
            }
        })
    }
}
