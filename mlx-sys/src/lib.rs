//! Raw bindings to mlx-c, the C API of Apple's MLX.
//!
//! Do not call any function here without reading mlx-c's headers; `mlx-rs-core` is the safe crate.
//! The build script provisions MLX and mlx-c, builds the C API with CMake, and generates these
//! declarations with bindgen. `build/env.rs` and the project's `docs/building.md` list its
//! settings.
//!
//! mlx-c 0.4.1, 0.5 and 0.7 (the default) are supported. With 0.5 or newer, this crate sets the cfg
//! `mlx_c_0_5`, and dependents get `DEP_MLXC_C_0_5`. With 0.7 there are also `mlx_c_0_7` and
//! `DEP_MLXC_C_0_7`. Build scripts of dependents get further metadata: `DEP_MLXC_VERSION` (of
//! mlx-c), `DEP_MLXC_LIB` (the directory of libmlx) and `DEP_MLXC_INCLUDE` (mlx-c's headers).
//! `DEP_MLXC_MLX_VERSION` and `DEP_MLXC_ROOT` describe the installed MLX.

#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    reason = "generated from C headers"
)]

#[macro_use]
mod macros;

#[cfg(mlx_loaded)]
pub mod library;
#[cfg(mlx_loaded)]
mod own_file;
mod shim;

include!(concat!(env!("OUT_DIR"), "/declarations.rs"));

pub use shim::*;

/// The file with these declarations. A test compares it with the committed copy.
pub const BINDINGS_FILE: &str = env!("MLX_SYS_BINDINGS");
