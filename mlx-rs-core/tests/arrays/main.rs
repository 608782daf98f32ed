//! Tests of arrays and operations: values against numpy, refused arguments, and files.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod conversions;
mod convolutions;
mod coverage;
mod device_info;
mod display;
mod documented;
#[cfg(target_os = "linux")]
mod emulated_kernels;
mod examples;
mod faults;
mod hazards;
mod indexing;
mod io;
mod linalg;
mod mlx_c_versions;
mod operators;
mod properties;
mod random;
mod soundness_gather;
mod soundness_layouts;
mod soundness_memory;
