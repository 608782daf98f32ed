//! Which recurrences our kernels have. How MLX computes them is in `nn/mlstm_cell.rs`, `nn/ssd.rs`
//! and `nn/delta_rule.rs`.

use mlx_rs_core::{Array, DeviceKind, Result, Stream, cpu};

/// A matrix memory as the kernels take it. Other rooms hand these on.
pub use mlx_rs_core::cpu::{Memory, MemoryInputs, MemoryRule};

/// Outputs `[R, L, heads * value_dim]` and the state after them, by the kernel. `None` where MLX
/// computes them: on a device other than the CPU, and where the result must have derivatives.
///
/// # Errors
/// When shapes do not fit.
pub fn scan(
    memory: &Memory,
    positions: &MemoryInputs<'_>,
    state: &[Array],
    differentiated: bool,
) -> Result<Option<(Array, Vec<Array>)>> {
    if differentiated || !available()? {
        return Ok(None);
    }
    memory.scan(positions, state).map(Some)
}

/// Whether the kernels are used, and the current stream is on the CPU.
fn available() -> Result<bool> {
    Ok(cpu::enabled() && Stream::current()?.device().kind() == DeviceKind::Cpu)
}
