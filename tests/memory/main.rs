//! Tests that measure the whole process. Each runs in a separate process.

mod adapters;
#[path = "../common/alone.rs"]
mod alone;
#[path = "../common/mod.rs"]
mod common;
mod flat_memory;
#[cfg(target_os = "linux")]
mod load_memory;
mod out_of_memory;
mod rotating_memory;
