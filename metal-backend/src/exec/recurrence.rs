//! Decides which recurrences our kernels compute. MLX's implementations are in `nn/mlstm_cell.rs`,
//! `nn/ssd.rs`, `nn/delta_rule.rs`, `nn/diagonal_rule.rs`, `nn/mamba.rs` and
//! `nn/slstm.rs`.

use std::ffi::OsStr;

use mlx_rs_core::{DeviceKind, Error, ErrorKind, Result, Stream};

/// The kernels' types. Other modules import these types from here.
pub use mlx_rs_core::cpu::{
    DiagonalMemory, Memory, MemoryInputs, MemoryRule, ScalarMemory, SelectiveScan,
};

/// Calls `scan`, which runs one of our kernels, and returns its result. Returns `None` if the
/// current stream is not on the CPU, or the result needs gradients; the caller then uses MLX.
pub fn by_kernel<T>(differentiated: bool, scan: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    match differentiated || !super::on_kernels()? {
        true => Ok(None),
        false => scan().map(Some),
    }
}

/// Whether GPU kernels compute the mLSTM recurrence: only if the current stream is on a GPU and
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
