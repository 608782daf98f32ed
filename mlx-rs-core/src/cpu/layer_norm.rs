//! Layer norms as one operation. MLX would need about ten operations, on one core.

use mlx_cpu_kernels::{Isa, LayerNorm, dim};

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// [`fast::layer_norm`](crate::fast::layer_norm) on the CPU, without gradients: normalizes float32
/// `[.., k]` to zero mean and unit variance over the last axis, times `weight` `[k]`, plus `bias`
/// `[k]`.
///
/// # Errors
/// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream is
/// not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let x = Array::from_slice(&[1.0f32, 3.0], &[1, 2])?;
///     let (weight, bias) = (Array::vector(&[1.0f32, 2.0])?, Array::vector(&[10.0f32, 0.0])?);
///     let y = cpu::layer_norm(&x, &weight, Some(&bias), 0.0)?;
///     assert_eq!(y.to_vec::<f32>()?, [9.0, 2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn layer_norm(x: &Array, weight: &Array, bias: Option<&Array>, eps: f32) -> Result<Array> {
    const OP: &str = "cpu::layer_norm";
    let fault = |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&[x]);
    let Some(k) = x.shape().last().copied().filter(|&k| k > 0) else {
        return Err(fault(String::from("needs rows with elements")));
    };
    let vectors = std::iter::once(weight).chain(bias);
    for vector in vectors.clone() {
        if vector.dtype() != Dtype::Float32 || vector.shape() != [k] {
            return Err(fault(format!("weight and bias must be float32 [{k}]")));
        }
    }
    if x.dtype() != Dtype::Float32 {
        return Err(fault(format!("needs float32 [.., {k}]")));
    }
    let k = dim(k);
    let work = LayerNorm {
        rows: x.size() / k,
        k,
        eps,
        bias: bias.is_some(),
        isa: Isa::detect(),
    };
    let inputs: Vec<&Array> = std::iter::once(x).chain(vectors).collect();
    host_op::add(OP, OpKind::Opaque, work, &inputs, x.shape())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Stream, fast};

    fn array(values: &[f32], shape: &[i32]) -> Array {
        Array::from_slice(values, shape).unwrap()
    }

    #[test]
    fn rows_equal_mlx_and_wrong_inputs_are_errors() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let values: Vec<f32> = (0..210)
                .map(|i| ((i * 37) % 101) as f32 * 0.1 + 3.0)
                .collect();
            let x = array(&values, &[2, 3, 35]);
            let (weight, bias) = (array(&values[..35], &[35]), array(&values[40..75], &[35]));
            for bias in [None, Some(&bias)] {
                let ours = layer_norm(&x, &weight, bias, 1e-5).unwrap();
                let mlx = fast::layer_norm(&x, Some(&weight), bias, 1e-5).unwrap();
                assert!(ours.all_close(&mlx, 1e-5, 1e-5).unwrap());
            }
            let empty = array(&[], &[0, 35]);
            assert_eq!(
                layer_norm(&empty, &weight, None, 1e-5).unwrap().shape(),
                [0, 35]
            );
            let half = x.astype(Dtype::Float16).unwrap();
            let short = array(&values[..34], &[34]);
            let scalar = Array::scalar(1.0f32).unwrap();
            let half_weight = weight.astype(Dtype::Float16).unwrap();
            let column = array(&values[..35], &[35, 1]);
            for (x, weight, bias) in [
                (&half, &weight, None),
                (&x, &short, None),
                (&x, &weight, Some(&short)),
                (&x, &half_weight, None),
                (&x, &column, None),
                (&scalar, &weight, None),
                (&array(&[], &[3, 0]), &array(&[], &[0]), None),
            ] {
                let error = layer_norm(x, weight, bias, 1e-5).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
            }
        });
    }
}
