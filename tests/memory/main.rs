//! What the whole process holds: each test runs in a process of its own.

#[path = "../common/alone.rs"]
mod alone;
#[path = "../common/mod.rs"]
mod common;
mod flat_memory;
#[cfg(target_os = "linux")]
mod load_memory;
mod rotating_memory;
