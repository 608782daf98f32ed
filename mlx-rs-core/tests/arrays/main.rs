//! Arrays and operations: values against numpy, refusals, numbers at their limits, files.

mod conversions;
mod convolutions;
mod coverage;
mod device_info;
mod display;
mod documented;
mod edges;
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
mod soundness_ops;
mod soundness_products;
