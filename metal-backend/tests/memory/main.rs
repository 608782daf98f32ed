//! Memory of the whole process: each test runs in a process of its own.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod memory_controls;
mod memory_estimate;
mod sampling_stays_lazy;
#[path = "../training_common/mod.rs"]
mod training_common;
mod training_memory;
