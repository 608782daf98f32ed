//! Tests of model files without arrays: descriptors, headers, footprints and damaged input.

#![forbid(unsafe_code)]

mod documented;
mod families;
mod footprint;
mod fuzz;
mod gguf_summary;
mod map;
