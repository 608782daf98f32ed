//! Kernels that the user writes in Metal's or CUDA's C++, and that MLX compiles at their first
//! launch. [`MetalKernel`] and [`CudaKernel`] correspond to `mx.fast.metal_kernel` and
//! `mx.fast.cuda_kernel`. This module checks everything except the code itself, which cannot be
//! checked.
//!
//! A kernel is the body of a function. MLX writes the signature from the names of inputs and
//! outputs, and the types of the arrays. The types of this module exist in every build. A launch
//! without a suitable device is an error of kind [`Unsupported`](ErrorKind::Unsupported).
//!
//! Kernels have no gradient and no rule for `vmap`. Define both with
//! [`CustomFunction`](crate::transforms::CustomFunction).

mod cuda;
mod handle;
mod metal;
mod mlstm;

pub use cuda::CudaKernel;
pub use metal::MetalKernel;
pub use mlstm::{Dialect, MlstmInputs, MlstmMemory, MlstmSource, mlstm};

use std::ffi::CString;

use crate::array::Array;
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::{memory, stream};

/// A compile-time constant of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TemplateArg {
    /// The name of a type.
    Dtype(Dtype),
    /// An integer.
    Int(i32),
    /// A boolean.
    Bool(bool),
}

impl From<Dtype> for TemplateArg {
    fn from(value: Dtype) -> Self {
        TemplateArg::Dtype(value)
    }
}
impl From<i32> for TemplateArg {
    fn from(value: i32) -> Self {
        TemplateArg::Int(value)
    }
}
impl From<bool> for TemplateArg {
    fn from(value: bool) -> Self {
        TemplateArg::Bool(value)
    }
}

/// One launch of a kernel: arrays, threads and constants.
///
/// ```
/// use mlx_rs_core::{Array, Dtype, kernel::Launch};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let x = Array::vector(&[1.0f32, 2.0, 3.0])?;
/// let launch = Launch::new()
///     .input(&x)
///     .output(x.shape(), x.dtype())
///     .grid(x.size() as u32, 1, 1)
///     .thread_group(256, 1, 1)
///     .template("T", x.dtype())
///     .init_value(0.0)
///     .verbose(false);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    inputs: Vec<&'a Array>,
    outputs: Vec<(Vec<i32>, Dtype)>,
    grid: [u32; 3],
    thread_group: [u32; 3],
    template: Vec<(String, TemplateArg)>,
    init_value: Option<f32>,
    verbose: bool,
}

impl Default for Launch<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> Launch<'a> {
    /// A launch with one thread and no arrays.
    #[must_use]
    pub fn new() -> Self {
        Self {
            inputs: Vec::new(),
            outputs: Vec::new(),
            grid: [1; 3],
            thread_group: [1; 3],
            template: Vec::new(),
            init_value: None,
            verbose: false,
        }
    }

    /// Adds an input. Inputs are in the order of the kernel's input names.
    #[must_use]
    pub fn input(mut self, array: &'a Array) -> Self {
        self.inputs.push(array);
        self
    }

    /// Adds an output with this shape and type. Outputs are in the order of the kernel's output
    /// names.
    #[must_use]
    pub fn output(mut self, shape: &[i32], dtype: Dtype) -> Self {
        self.outputs.push((shape.to_vec(), dtype));
        self
    }

    /// The number of threads along three axes (Metal's `dispatchThreads`). With CUDA, whole blocks
    /// run, so the code must reject threads beyond the grid.
    #[must_use]
    pub fn grid(mut self, x: u32, y: u32, z: u32) -> Self {
        self.grid = [x, y, z];
        self
    }

    /// The number of threads per group (with CUDA: block), along three axes; at most 1024 in total.
    #[must_use]
    pub fn thread_group(mut self, x: u32, y: u32, z: u32) -> Self {
        self.thread_group = [x, y, z];
        self
    }

    /// Adds a template argument, a compile-time constant: a type, an integer or a boolean.
    #[must_use]
    pub fn template(mut self, name: &str, value: impl Into<TemplateArg>) -> Self {
        self.template.push((name.to_string(), value.into()));
        self
    }

    /// Fills the outputs with a value before the launch. Without this, elements that the kernel
    /// does not write are undefined.
    #[must_use]
    pub fn init_value(mut self, value: f32) -> Self {
        self.init_value = Some(value);
        self
    }

    /// Prints the source that MLX generates.
    #[must_use]
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }
}

/// The fields that [`MetalKernel`] and [`CudaKernel`] have in common.
#[derive(Debug)]
struct Definition {
    op: &'static str,
    name: String,
    inputs: Vec<CString>,
    outputs: Vec<CString>,
    source: CString,
    header: CString,
    ensure_row_contiguous: bool,
}

impl Definition {
    fn new(
        op: &'static str,
        name: &str,
        inputs: &[&str],
        outputs: &[&str],
        source: &str,
    ) -> Result<Self> {
        let bad = |message: String| Error::new(ErrorKind::Value, op, message);
        if outputs.is_empty() {
            return Err(bad(format!(
                "the kernel {name:?} has no output; it must have at least one"
            )));
        }
        let mut names = Vec::with_capacity(inputs.len() + outputs.len());
        for what in std::iter::once(&name).chain(inputs).chain(outputs) {
            identifier(op, what)?;
        }
        for what in inputs.iter().chain(outputs) {
            if names.contains(what) {
                return Err(bad(format!("the name {what:?} is given twice")));
            }
            names.push(*what);
        }
        let c_names = |names: &[&str]| names.iter().map(|n| text(op, n)).collect::<Result<_>>();
        Ok(Self {
            op,
            name: name.to_string(),
            inputs: c_names(inputs)?,
            outputs: c_names(outputs)?,
            source: text(op, source)?,
            header: CString::default(),
            ensure_row_contiguous: true,
        })
    }

    /// Checks that a launch is valid for the kernel, and that the device is available.
    fn check(&self, launch: &Launch<'_>, available: bool, needs: &str) -> Result<()> {
        let bad = |kind, message: String| Err(Error::new(kind, self.op, message));
        let (inputs, outputs) = (self.inputs.len(), self.outputs.len());
        if launch.inputs.len() != inputs || launch.outputs.len() != outputs {
            return bad(
                ErrorKind::Value,
                format!(
                    "the kernel {:?} has {inputs} inputs and {outputs} outputs, but was launched with {} and {}",
                    self.name,
                    launch.inputs.len(),
                    launch.outputs.len()
                ),
            );
        }
        for (axis, (&grid, &group)) in launch.grid.iter().zip(&launch.thread_group).enumerate() {
            // MLX adds and divides the sizes as 32-bit integers, so they are limited.
            let most = i32::MAX.unsigned_abs() - MAX_THREADS;
            if grid == 0 || grid > most || group == 0 {
                return bad(
                    ErrorKind::Value,
                    format!(
                        "axis {axis} has {grid} threads in groups of {group}; both must be at least 1, \
                         and threads at most {most}"
                    ),
                );
            }
        }
        let group: u64 = launch
            .thread_group
            .iter()
            .map(|&n| u64::from(n))
            .fold(1, u64::saturating_mul);
        if group > u64::from(MAX_THREADS) {
            return bad(
                ErrorKind::Value,
                format!(
                    "a group of {group} threads is more than the {MAX_THREADS} that a group can have"
                ),
            );
        }
        for (i, (name, _)) in launch.template.iter().enumerate() {
            identifier(self.op, name)?;
            if launch.template[..i].iter().any(|(other, _)| other == name) {
                return bad(
                    ErrorKind::Value,
                    format!("the constant {name:?} is given twice"),
                );
            }
        }
        for (shape, dtype) in &launch.outputs {
            let bytes = memory::checked_bytes(shape, dtype.size());
            if bytes.is_none_or(|b| b > memory::budget()) {
                return bad(
                    ErrorKind::Shape,
                    format!(
                        "an output of shape {shape:?} ({dtype}) is not possible within the memory budget"
                    ),
                );
            }
        }
        if !available {
            return bad(
                ErrorKind::Unsupported,
                format!(
                    "the kernel {:?} needs {needs}, which is not there, or not in this build of MLX",
                    self.name
                ),
            );
        }
        if stream::current_id()?.0 != DeviceKind::Gpu {
            return bad(
                ErrorKind::Unsupported,
                format!(
                    "the kernel {:?} runs on the GPU, but the current stream is on the CPU",
                    self.name
                ),
            );
        }
        Ok(())
    }

    /// A unique name for this code. MLX uses the name as the key of compiled code, and the CUDA
    /// backend even on disk. So the name depends on everything that the code depends on.
    fn unique_name(&self, launch: &Launch<'_>, more: u64) -> Result<CString> {
        // FNV-1a has the same result in every process and version.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let mut add = |bytes: &[u8]| {
            for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };
        for part in [&self.source, &self.header]
            .into_iter()
            .chain(&self.inputs)
            .chain(&self.outputs)
        {
            add(part.as_bytes());
        }
        for array in &launch.inputs {
            add(format!("{} {}", array.dtype(), array.ndim()).as_bytes());
        }
        for (_, dtype) in &launch.outputs {
            add(dtype.to_string().as_bytes());
        }
        for (name, value) in &launch.template {
            add(format!("{name} {value:?}").as_bytes());
        }
        add(&[u8::from(self.ensure_row_contiguous)]);
        add(&more.to_le_bytes());
        text(self.op, &format!("{}_{hash:016x}", self.name))
    }
}

/// The maximum group size of all supported GPUs.
const MAX_THREADS: u32 = 1024;

fn text(op: &'static str, text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::new(ErrorKind::Value, op, "the source or a name contains a NUL"))
}

/// Checks a name, because names become a part of the source.
fn identifier(op: &'static str, name: &str) -> Result<()> {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    if name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit()) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Value,
        op,
        format!("{name:?} is not a name in C++: letters, digits and _, and no digit first"),
    ))
}

#[cfg(test)]
mod tests;
