//! Element-wise gates as one operation. MLX would need several operations, on one core.

use mlx_cpu_kernels::{Gate, Gated, Isa};

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// `gate(x)`, times `y` if it is given, on the CPU and without gradients: float32 of the shape of
/// `x`.
///
/// # Errors
/// [`ErrorKind::Shape`] when types or shapes do not fit; MLX's message when the current stream is
/// not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let x = Array::vector(&[-1.0f32, 2.0])?;
///     let y = Array::vector(&[5.0f32, 3.0])?;
///     assert_eq!(cpu::gated(&x, cpu::Gate::Relu, None)?.to_vec::<f32>()?, [0.0, 2.0]);
///     assert_eq!(cpu::gated(&x, cpu::Gate::Relu, Some(&y))?.to_vec::<f32>()?, [0.0, 6.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn gated(x: &Array, gate: Gate, y: Option<&Array>) -> Result<Array> {
    const OP: &str = "cpu::gated";
    let inputs: Vec<&Array> = std::iter::once(x).chain(y).collect();
    let fits = |a: &&Array| a.dtype() == Dtype::Float32 && a.shape() == x.shape();
    if x.size() == 0 || !inputs.iter().all(fits) {
        let message = "needs float32 arrays of one shape, with elements";
        return Err(Error::new(ErrorKind::Shape, OP, message).with_inputs(&inputs));
    }
    let work = Gated {
        len: x.size(),
        gate,
        isa: Isa::detect(),
    };
    host_op::add(OP, OpKind::Opaque, work, &inputs, x.shape())
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
            let (x, y) = (all.slice_axis(1, 0, 5), all.slice_axis(1, 5, 10));
            let (x, y) = (x.unwrap(), y.unwrap());
            let wanted = x.silu().unwrap().multiply(&y).unwrap();
            let got = gated(&x, Gate::Silu, Some(&y)).unwrap();
            assert_eq!(got.shape(), [2, 5]);
            let got = got.to_vec::<f32>().unwrap();
            for (got, wanted) in got.iter().zip(wanted.to_vec::<f32>().unwrap()) {
                assert!((got - wanted).abs() < 1e-5, "{got} {wanted}");
            }
            let half = x.astype(Dtype::Float16).unwrap();
            let none = zeros(&[0, 5], Dtype::Float32).unwrap();
            for (x, y) in [
                (&half, None),
                (&none, None),
                (&x, Some(&half)),
                (&x, Some(&all)),
            ] {
                let error = gated(x, Gate::Silu, y).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
