//! Kernels of language model decoders on CPUs: multiplication with quantized and dense matrices,
//! attention, recurrences, and sampling from logits. The kernels work on slices, and use no arrays,
//! graphs or files. `mlx-rs-core` adds the kernels to MLX's graphs.
//!
//! | Module | Contents |
//! |---|---|
//! | `gemm`, `attention`, `recurrence`, `sampling` | the operations, each a [`Work`] |
//! | `simd` | kernels by instruction set, and the functions that choose among them |
//! | `layout` | packed matrices, input panels, tiles: types without arithmetic |
//! | `pool`, `partition`, `isa`, `prefill_inputs`, `work`, `memory` | threads, loops, ISA, inputs, buffers |
//!
//! Each module uses only the modules below it in the table. `tests/sources/layering.rs` checks
//! this.
//!
//! The instruction set is chosen at run time: portable, AVX2, AVX-512, AMX or NEON. The environment
//! variable `MLX_CPU_KERNELS` selects a lesser instruction set, and `MLX_NUM_THREADS` fewer
//! threads. `MLX_CPU_PROMPTS` sets the type of prefill inputs: `float32`, `int16` or `int8`.
//!
//! A type that implements [`Work`] documents its inputs. Running it with other inputs is undefined
//! behavior, so [`Work::run`] is `unsafe`.

#![deny(missing_docs)]
mod attention;
mod gemm;
mod isa;
mod layout;
mod memory;
mod once;
mod partition;
mod pool;
#[cfg(test)]
mod pool_tests;
mod prefill_inputs;
mod recurrence;
mod sampling;
mod simd;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod work;

pub use attention::attend::{Around, Attention, AttentionMask, Query};
pub use attention::kv_copy::KvPlane;
pub use attention::kv_packing::KvPacking;
pub use attention::kv_type::KvType;
pub use attention::kv_write::{KvWrite, NewKv, ProjectKeys, TokenPositions, TokenRange};
pub use attention::rope::Rotation;
pub use gemm::column_product::{ColumnMatrix, ColumnPart, ColumnProduct};
pub use gemm::dense::DenseType;
pub use gemm::elementwise::{Elementwise, Function};
pub use gemm::expert_block::{ExpertBlock, ExpertGate};
pub use gemm::experts::{ExpertProduct, ExpertStack, ExpertVjp};
pub use gemm::feature_walk::{FeatureWalk, HeldFloats, HeldProduct, StoredRows};
pub use gemm::gated::Gated;
pub use gemm::gather_rows::{GatherDenseRows, GatherRows};
pub use gemm::greatest::GreatestOutputs;
pub use gemm::layer_norm::LayerNorm;
pub use gemm::product::{
    MAX_PARTS, MatrixFormat, MatrixOwner, MatrixPart, Product, Size, StoredMatrix,
};
pub use gemm::routes::Routing;
pub use gemm::vjp::ProductVjp;
pub use isa::Isa;
pub use layout::blocks::{BlockKind, PackedBlockMut};
pub use layout::packed::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, INTERLEAVED_ROWS, MAX_SCALED_CODE, ScaleFormat,
    TABLE_SUPER_WEIGHTS, symmetric_bias,
};
pub use layout::table::Table;
pub use layout::tile::LANES;
pub use memory::{OutOfMemory, resize};
pub use once::Once;
pub use pool::{drop_payload, with_barrier_hook};
pub use prefill_inputs::PrefillInputs;
pub use recurrence::diagonal::DiagonalMemory;
pub use recurrence::matrix_memory::{MatrixMemory, MemoryRule};
pub use recurrence::scalar_memory::ScalarMemory;
pub use recurrence::selective::SelectiveScan;
pub use sampling::sample::{
    CountPenalties, DrawParams, Pick, RepetitionPenalty, Sample, SampleParams,
};
pub use sampling::top_k::{LogProbs, MAX_ROW_LEN};
pub use simd::pack_blocks::{pack_row_block, packs_row_blocks};
pub use simd::portable::vmath::Gate;
pub use work::{Input, Work, dim};

use std::sync::OnceLock;

/// Whether the kernels are enabled: `MLX_CPU_KERNELS` is not `off` (or `0`, `false`, `no`).
///
/// ```
/// // It says which instructions are used.
/// assert!(!mlx_cpu_kernels::enabled() || !mlx_cpu_kernels::status().is_empty());
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

/// Whether the kernels are compiled with optimization. Unoptimized kernels are many times slower
/// than optimized ones. For debug builds, set `opt-level = 3` in `[profile.dev.package."*"]`.
/// ```
/// if !mlx_cpu_kernels::OPTIMIZED {
///     eprintln!("the kernels are slow in this build");
/// }
/// ```
pub const OPTIMIZED: bool = cfg!(not(unoptimized));

/// The number of threads: `MLX_NUM_THREADS`, or the number of cores available to the process.
/// ```
/// assert!(mlx_cpu_kernels::threads() >= 1);
/// ```
pub fn threads() -> usize {
    pool::threads()
}

/// The instruction set in use, such as `amx`, `avx512`, `avx2`, `neon+dotprod`, `neon` or
/// `portable`.
/// ```
/// assert!(!mlx_cpu_kernels::instruction_set().is_empty());
/// ```
pub fn instruction_set() -> &'static str {
    isa::Isa::detect().name()
}

/// A readable description: the instruction set, the reason why no better one is used, and the
/// number of threads.
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
    let slow = if OPTIMIZED {
        ""
    } else {
        ", built without optimization"
    };
    format!("kernels: {}{why}, {threads}{slow}", isa.name())
}
