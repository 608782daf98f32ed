//! Decides which recurrences our kernels compute. MLX's implementations are in `nn/mlstm_cell.rs`,
//! `nn/ssd.rs`, `nn/delta_rule.rs`, `nn/diagonal_rule.rs`, `nn/mamba.rs`
//! and `nn/slstm.rs`.

use std::ffi::OsStr;

use mlx_rs_core::{Array, DeviceKind, Error, ErrorKind, Result, Stream};

/// The kernels' types of a matrix memory. Other modules import these types from here.
pub use mlx_rs_core::cpu::{
    DiagonalMemory, Memory, MemoryInputs, MemoryRule, ScalarMemory, SelectiveScan,
};

/// Computes outputs `[R, L, heads * value_dim]` and the state after them, with the kernel. `None`
/// if the current stream is not on the CPU, or the result needs gradients; the caller then uses
/// MLX.
pub fn scan(
    memory: &Memory,
    positions: &MemoryInputs<'_>,
    state: &[Array],
    differentiated: bool,
) -> Result<Option<(Array, Vec<Array>)>> {
    if differentiated || !super::on_kernels()? {
        return Ok(None);
    }
    memory.scan(positions, state).map(Some)
}

/// As [`scan`], for states of channels: outputs `[R, L, channels]`, and the state after them.
pub fn selective(
    positions: &SelectiveScan<'_>,
    state: &Array,
    differentiated: bool,
) -> Result<Option<(Array, Array)>> {
    if differentiated || !super::on_kernels()? {
        return Ok(None);
    }
    positions.scan(state).map(Some)
}

/// As [`scan`], for memories with a forget gate for each row: outputs `[R, L, heads * value_dim]`,
/// and the memory after them.
pub fn diagonal(
    positions: &DiagonalMemory<'_>,
    memory: &Array,
    differentiated: bool,
) -> Result<Option<(Array, Array)>> {
    if differentiated || !super::on_kernels()? {
        return Ok(None);
    }
    positions.scan(memory).map(Some)
}

/// As [`scan`], for the cells of sLSTM: outputs `[R, L, heads, dim]`, and the state after them.
pub fn scalar(
    positions: &ScalarMemory<'_>,
    state: &[Array; 4],
    differentiated: bool,
) -> Result<Option<(Array, [Array; 4])>> {
    if differentiated || !super::on_kernels()? {
        return Ok(None);
    }
    positions.scan(state).map(Some)
}

/// Whether GPU kernels compute the mLSTM recurrence. They do if the current stream is on a GPU and
/// `MLX_GPU_RECURRENCE` is `on`. These kernels have not run on a GPU yet, so MLX's operations are
/// the default.
///
/// # Errors
/// If the variable is neither `on` nor `off`.
pub fn uses_gpu_kernels(differentiated: bool) -> Result<bool> {
    if differentiated || Stream::current()?.device().kind() == DeviceKind::Cpu {
        return Ok(false);
    }
    asked(std::env::var_os(GPU_KERNELS).as_deref())
}

const GPU_KERNELS: &str = "MLX_GPU_RECURRENCE";

fn asked(value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_str) {
        None | Some(Some("" | "off")) => Ok(false),
        Some(Some("on")) => Ok(true),
        Some(_) => {
            let message = format!("{GPU_KERNELS} must be `on` or `off`");
            Err(Error::new(ErrorKind::Value, "mlstm", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_a_gpu_are_used_on_request() {
        let of = |value: &str| asked(Some(OsStr::new(value)));
        assert!(!asked(None).unwrap() && !of("").unwrap() && !of("off").unwrap());
        assert!(of("on").unwrap());
        assert!(of("yes").unwrap_err().to_string().contains("`on` or `off`"));
        // On a CPU, the variable must have no effect.
        let cpu = Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
        assert!(!cpu.scope(|| uses_gpu_kernels(false)).unwrap());
    }
}
