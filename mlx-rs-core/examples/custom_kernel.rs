//! A custom GPU kernel with a gradient, compared with the same function made of MLX's operations.
//! On a device without Metal and CUDA, MLX's operations replace the kernel, and the gradient is
//! still compared.
//!
//! ```text
//! cargo run -p rust-mlx-core --example custom_kernel
//! ```

use mlx_rs_core::kernel::{CudaKernel, Launch, MetalKernel};
use mlx_rs_core::transforms::{CustomFunction, value_and_grad};
use mlx_rs_core::{All, Array, Error, ErrorKind, Result, cuda_is_available, metal_is_available};

const N: i32 = 1_000;

/// `x * sigmoid(x)` in one pass, as a kernel for the available GPU.
enum Silu {
    Metal(MetalKernel),
    Cuda(CudaKernel),
    /// No kernel: uses MLX's operations.
    Operations,
}

impl Silu {
    fn new() -> Result<Self> {
        if metal_is_available() {
            let source = "uint i = thread_position_in_grid.x; \
                          T v = x[i]; \
                          y[i] = v / (T(1) + metal::exp(-v));";
            return Ok(Silu::Metal(MetalKernel::new(
                "silu",
                &["x"],
                &["y"],
                source,
            )?));
        }
        if cuda_is_available() {
            // Blocks may have more threads than there are elements, so the code checks the index.
            let source = "auto i = cg::this_grid().thread_rank(); \
                          if (i < N) { T v = x[i]; y[i] = v / (T(1) + expf(-v)); }";
            return Ok(Silu::Cuda(CudaKernel::new("silu", &["x"], &["y"], source)?));
        }
        Ok(Silu::Operations)
    }

    fn name(&self) -> &'static str {
        match self {
            Silu::Metal(_) => "a Metal kernel",
            Silu::Cuda(_) => "a CUDA kernel",
            Silu::Operations => "no kernel (this device has neither Metal nor CUDA)",
        }
    }

    fn call(&self, x: &Array) -> Result<Array> {
        let elements = x.size();
        let launch = Launch::new()
            .input(x)
            .output(x.shape(), x.dtype())
            .grid(elements as u32, 1, 1)
            .thread_group(256, 1, 1)
            .template("T", x.dtype())
            .template("N", elements as i32);
        // SAFETY: there is one thread per element, which reads and writes only that element. With
        // CUDA, further threads do nothing.
        let mut outputs = unsafe {
            match self {
                Silu::Metal(kernel) => kernel.launch(&launch)?,
                Silu::Cuda(kernel) => kernel.launch(&launch)?,
                Silu::Operations => vec![x.multiply(&x.sigmoid()?)?],
            }
        };
        outputs
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Mlx, "silu", "the kernel has no output"))
    }
}

pub(crate) fn main() -> Result<()> {
    let kernel = Silu::new()?;
    println!("computed by {}", kernel.name());
    // Kernels have no derivative, so it is defined here: s + x s (1 - s), where s is the logistic
    // function.
    let silu = CustomFunction::new(move |x: &[Array]| -> Result<Vec<Array>> {
        Ok(vec![kernel.call(&x[0])?])
    })
    .with_vjp(|x, cotangents, _| {
        let one = Array::scalar(1.0f32)?;
        let s = x[0].sigmoid()?;
        let slope = s.multiply(&x[0].multiply(&one.subtract(&s)?)?.add(&one)?)?;
        Ok(vec![cotangents[0].multiply(&slope)?])
    });

    let values: Vec<f32> = (0..N).map(|i| (i as f32 / N as f32 - 0.5) * 10.0).collect();
    let x = [Array::vector(&values)?];
    let ours = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![silu.call(x)?[0].sum(All, false)?]) };
    let theirs = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].silu()?.sum(All, false)?]) };
    let (value, grads) = value_and_grad(ours, &[0])(&x)?;
    let (expected, expected_grads) = value_and_grad(theirs, &[0])(&x)?;
    println!(
        "own {:.4}, MLX {:.4}",
        value[0].item::<f32>()?,
        expected[0].item::<f32>()?
    );
    assert!(value[0].all_close(&expected[0], 1e-4, 1e-4)?);
    assert!(grads[0].all_close(&expected_grads[0], 1e-4, 1e-5)?);
    println!("values and gradients agree");
    Ok(())
}
