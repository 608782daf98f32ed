//! The synchronization primitives of the pool. `tests/models.rs` replaces this module by a model
//! checker's.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Builder, JoinHandle, yield_now};

/// Turns of a spinning worker before it sleeps; some 20 to 50 microseconds.
pub(super) const SPINS: u32 = 4_000;

/// Turns between two offers of the core to others; about a microsecond.
pub(super) const YIELD_EVERY: u32 = 64;
