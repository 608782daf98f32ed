//! Tests of the Python process: its life and its faults.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod life;
