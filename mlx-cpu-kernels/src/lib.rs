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
mod attention;
mod gemm;
mod isa;
mod layout;
mod once;
mod partition;
mod pool;
#[cfg(test)]
mod pool_tests;
mod sampling;
mod simd;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod work;

pub use attention::attend::{Attend, Plan, Query};
pub use attention::kv_copy::Plane;
pub use attention::kv_write::{Fresh, Keys, Positions, Store, Tokens};
pub use attention::rope::Rotation;
pub use gemm::dense::Number;
pub use gemm::gather_rows::Taken;
pub use gemm::product::{Held, Kind, MAX_PARTS, Part, Product, Size};
pub use gemm::vjp::Back;
pub use isa::Isa;
pub use layout::packed::BAND;
pub use layout::tile::LANES;
pub use once::Once;
pub use pool::followed_by;
pub use sampling::sample::{Choice, Choose, Count, Filters, Pick, Repeat};
pub use sampling::top_k::{Draw, LONGEST, Logarithms, Select};
pub use sampling::top_p::Nucleus;
pub use simd::portable::vmath::Gate;
pub use work::{Input, Work, count};

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
    isa::Isa::detect().name()
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
    let isa = isa::Isa::detect();
    let why = match isa.next_needs() {
        None => String::new(),
        Some(_) if isa.has_better() => String::from(" as MLX_CPU_KERNELS says"),
        Some(what) => format!(" for lack of {what}"),
    };
    format!("kernels: {}{why}, {threads}", isa.name())
}
