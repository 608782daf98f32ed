//! Tests that measure the memory of the whole process. Each test runs in a separate process.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod memory_controls;
mod memory_estimate;
mod sampling_stays_lazy;
#[path = "../training_common/mod.rs"]
mod training_common;
mod training_memory;
