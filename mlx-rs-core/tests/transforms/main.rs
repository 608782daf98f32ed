//! Gradients, maps over batches, compiled and exported functions, and functions that fail.

mod callbacks;
mod compile;
mod custom;
mod derivatives;
mod export;
mod mapped;
mod soundness_depth;
mod soundness_vmap;
