//! Layer norms, computed by our kernels or by MLX. RMS norms are fused with the following matrix
//! multiplication (`matrix.rs`).

use mlx_rs_core::{Array, Dtype, Result, cpu, fast};

/// Normalizes `x` `[.., k]` to zero mean and unit variance over the last axis, multiplies by
/// `weight` `[k]` and adds `bias` `[k]`. `on_cpu` says whether the current stream is on a CPU,
/// `differentiated` whether the result needs gradients.
///
/// # Errors
/// If weight or bias do not match the last axis.
pub fn layer_norm(
    x: &Array,
    (weight, bias, eps): (&Array, Option<&Array>, f32),
    on_cpu: bool,
    differentiated: bool,
) -> Result<Array> {
    let float = [Some(x), Some(weight), bias].into_iter().flatten();
    let float = float.clone().all(|a| a.dtype() == Dtype::Float32);
    if on_cpu && float && !differentiated && cpu::enabled() {
        cpu::layer_norm(x, weight, bias, eps)
    } else {
        fast::layer_norm(x, Some(weight), bias, eps)
    }
}
