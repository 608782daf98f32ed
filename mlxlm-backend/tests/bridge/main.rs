//! Tests of the Python process: its lifetime and its faults.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod life;
