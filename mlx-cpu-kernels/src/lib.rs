//! Kernels for decoders on CPUs: products with quantized and dense matrices, attention, and choices from
//! long rows of logits. Slices in, slices out: nothing here knows arrays, graphs or files. `mlx-rs-core`
//! puts them into MLX's graphs.
//!
//! The instruction set is found at run time: portable code, AVX2, AVX-512, AMX, NEON. The environment
//! variable `MLX_CPU_KERNELS` asks for a lesser one, `MLX_NUM_THREADS` for fewer threads.
//!
//! A type that implements [`Work`] says which inputs it reads; to run it with others is undefined
//! behavior, so [`Work::run`] is `unsafe`.

#![deny(missing_docs)]
mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod bands;
#[cfg(target_arch = "x86_64")]
mod bricks;
mod choose;
mod dense;
#[cfg(target_arch = "aarch64")]
mod dot;
mod glance;
mod inputs;
mod kernel;
mod many;
#[cfg(target_arch = "aarch64")]
mod neon;
mod nucleus;
mod once;
mod planes;
mod pool;
#[cfg(test)]
mod pool_tests;
mod product;
mod rotation;
mod select;
mod share;
mod singles;
#[cfg(target_arch = "x86_64")]
mod sixteen;
#[cfg(target_arch = "x86_64")]
mod squares;
mod store;
mod sweep;
mod sync;
mod take_rows;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tile;
mod turn;
mod view;
mod vjp;
mod weigh;
#[cfg(target_arch = "x86_64")]
mod whole;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use attention::{Attend, Plan, Query};
pub use bands::BAND;
pub use choose::{Choice, Choose, Count, Filters, Pick, Repeat};
pub use dense::Number;
pub use kernel::Isa;
pub use nucleus::Nucleus;
pub use once::Once;
pub use planes::Plane;
pub use pool::followed_by;
pub use product::{Gate, Held, Kind, MAX_PARTS, Part, Product, Size};
pub use rotation::Rotation;
pub use select::{Draw, LONGEST, Logarithms, Select};
pub use store::{Fresh, Keys, Positions, Store, Tokens};
pub use take_rows::Taken;
pub use tile::LANES;
pub use view::{Input, Work, count};
pub use vjp::Back;

use std::sync::OnceLock;

/// Whether the kernels are used: not when `MLX_CPU_KERNELS` is `off` (or `0`, `false`, `no`).
/// ```
/// if mlx_cpu_kernels::enabled() {
///     println!("{}", mlx_cpu_kernels::status());
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
/// assert!(mlx_cpu_kernels::threads() >= 1);
/// ```
pub fn threads() -> usize {
    pool::threads()
}

/// The instruction set that the kernels use here, such as `amx`, `avx512`, `avx2`, `neon+dotprod`, `neon` or `portable`.
/// ```
/// assert!(!mlx_cpu_kernels::instruction_set().is_empty());
/// ```
pub fn instruction_set() -> &'static str {
    kernel::Isa::detect().name()
}

/// What runs products on this processor, for people: the instruction set, why it is not a better one where
/// the kernels fall back, and the threads.
/// ```
/// // Such as "kernels: avx2, 8 threads".
/// assert!(mlx_cpu_kernels::status().contains("kernels"));
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
