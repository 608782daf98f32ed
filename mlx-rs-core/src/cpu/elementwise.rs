//! Element-wise functions on all cores. MLX uses only one core, and computes exponentials without
//! vector instructions.

use mlx_cpu_kernels::{Elementwise, Function};

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// `function(x)`, on the CPU and without gradients: float32 of the shape of `x`.
///
/// # Errors
/// [`ErrorKind::Shape`] for another type than float32, or no elements; MLX's message when the
/// current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let x = Array::vector(&[0.0f32, 200.0])?;
///     let y = cpu::elementwise(&x, cpu::Function::Sigmoid)?;
///     assert_eq!(y.to_vec::<f32>()?, [0.5, 1.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn elementwise(x: &Array, function: Function) -> Result<Array> {
    const OP: &str = "cpu::elementwise";
    if x.size() == 0 || x.dtype() != Dtype::Float32 {
        let message = "needs float32 with elements";
        return Err(Error::new(ErrorKind::Shape, OP, message).with_inputs(&[x]));
    }
    let work = Elementwise {
        len: x.size(),
        function,
    };
    host_op::add(OP, OpKind::Opaque, work, &[x], x.shape())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Stream, zeros};

    #[test]
    fn views_are_copied_and_wrong_inputs_are_errors() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let values: Vec<f32> = (0..24).map(|i| i as f32 - 12.0).collect();
            let all = Array::from_slice(&values, &[2, 12]).unwrap();
            let x = all.slice_axis(1, 3, 8).unwrap();
            for (function, wanted) in [
                (Function::Sigmoid, x.sigmoid().unwrap()),
                (Function::Tanh, x.tanh().unwrap()),
            ] {
                let got = elementwise(&x, function).unwrap();
                assert_eq!(got.shape(), [2, 5]);
                assert!(got.all_close(&wanted, 0.0, 1e-6).unwrap(), "{function:?}");
            }
            let half = x.astype(Dtype::Float16).unwrap();
            let none = zeros(&[0, 5], Dtype::Float32).unwrap();
            for x in [&half, &none] {
                let error = elementwise(x, Function::Sigmoid).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
