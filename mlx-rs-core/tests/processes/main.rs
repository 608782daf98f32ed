//! Tests properties of a process: its exit, its counters, and its default device. Each test runs in
//! a separate process.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod async_failure;
mod budget;
mod bus_error;
mod closure_leaks;
mod deadlock;
mod devices;
mod distributed;
mod exit;
mod first_call;
mod leaks;
mod streams;
mod stress;
