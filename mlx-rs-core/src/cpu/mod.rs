//! Kernels of our own for CPUs: products with quantized and dense matrices, which MLX computes on
//! one core and without the processor's vector units, and choices from long rows (the greatest, a
//! nucleus, a draw), for which MLX sorts and exponentiates all of them. They enter the graph as an operation (the shim
//! of `mlx-sys`), so laziness, streams and memory stay MLX's.
//!
//! Their derivatives with respect to what is multiplied (and a dense matrix), and batches of it under
//! `vmap`, are computed by MLX's own operations, unless [`Matrix::product_for_gradients`] is asked for; a gradient with respect to a quantized matrix or its
//! scales is an error, and so is one of a fused operation. `MLX_CPU_KERNELS=off` turns the kernels off,
//! `MLX_CPU_KERNELS=portable` keeps them from the processor's wider vectors, `avx2` from AVX-512, `avx512` from AMX.

mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod back;
mod bands;
mod block;
#[cfg(target_arch = "x86_64")]
mod bricks;
mod choose;
mod dense;
#[cfg(target_arch = "aarch64")]
mod dot;
mod glance;
mod heads;
mod host_op;
mod inputs;
mod kernel;
mod many;
mod matrix;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod nucleus;
mod once;
mod pool;
#[cfg(test)]
mod pool_tests;
mod project;
mod quantized;
mod rotation;
mod select;
mod share;
mod singles;
#[cfg(target_arch = "x86_64")]
mod sixteen;
mod slab;
#[cfg(target_arch = "x86_64")]
mod squares;
mod store;
mod sweep;
mod sync;
#[cfg(test)]
mod tests;
mod tile;
mod turn;
mod weigh;
#[cfg(target_arch = "x86_64")]
mod whole;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use block::{Biased, Block, Room, RowNorm};
pub use choose::{Count, Filters, Pick, Repeat, Row, choose};
pub use heads::{HeadNorm, Heads, Lane};
pub use matrix::{DenseMatrix, Matrix};
pub use memory::KvMemory;
pub use nucleus::top_p;
pub use project::{Gate, Projection, Then};
pub use quantized::QuantizedMatrix;
pub use rotation::Rotation;
pub use select::{Greatest, LONGEST, LogProbabilities, draw, greatest, log_probabilities};
pub use store::Tokens;

use std::sync::OnceLock;

/// Whether the kernels are used: not when `MLX_CPU_KERNELS` is `off` (or `0`, `false`, `no`).
/// ```
/// if mlx_rs_core::cpu::enabled() {
///     println!("{}", mlx_rs_core::cpu::status());
/// }
/// ```
pub fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| {
        let value = std::env::var("MLX_CPU_KERNELS").unwrap_or_default();
        !matches!(
            value.to_ascii_lowercase().as_str(),
            "off" | "0" | "false" | "no"
        )
    })
}

/// Whether `MLX_CPU_KERNELS` is the name of this instruction set: the kernels are used, without better ones that the
/// processor has. For tests and comparisons.
fn wanted(name: &str) -> bool {
    std::env::var("MLX_CPU_KERNELS").is_ok_and(|v| v.eq_ignore_ascii_case(name))
}

/// Cores that the kernels use: `MLX_NUM_THREADS`, or as many as the process may use.
/// ```
/// assert!(mlx_rs_core::cpu::threads() >= 1);
/// ```
pub fn threads() -> usize {
    pool::threads()
}

/// The instruction set that the kernels use here, such as `amx`, `avx512`, `avx2`, `neon+dotprod`, `neon` or `portable`.
/// ```
/// assert!(!mlx_rs_core::cpu::instruction_set().is_empty());
/// ```
pub fn instruction_set() -> &'static str {
    kernel::Isa::detect().name()
}

/// What runs products on this processor, for people: the instruction set, why it is not a better one where
/// the kernels fall back, and the threads.
/// ```
/// // Such as "kernels: avx2, 8 threads".
/// assert!(mlx_rs_core::cpu::status().contains("kernels"));
/// ```
pub fn status() -> String {
    let threads = match threads() {
        1 => String::from("1 thread"),
        n => format!("{n} threads"),
    };
    if !enabled() {
        return String::from("kernels off by MLX_CPU_KERNELS: MLX's own products");
    }
    let isa = kernel::Isa::detect();
    let why = match isa.next_needs() {
        None => String::new(),
        Some(_) if isa.has_better() => String::from(" as MLX_CPU_KERNELS says"),
        Some(what) => format!(" for lack of {what}"),
    };
    format!("kernels: {}{why}, {threads}", isa.name())
}
