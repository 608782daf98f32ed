//! The synchronization primitives of the pool. `tests/models.rs` replaces this module by the
//! primitives of a model checker.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Builder, JoinHandle, yield_now};

/// Iterations of a spinning worker before it sleeps; about 20 to 50 microseconds.
pub(super) const SPINS: u32 = 4_000;

/// Iterations between two yields of the core; about a microsecond.
pub(super) const YIELD_EVERY: u32 = 64;
