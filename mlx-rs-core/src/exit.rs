//! The end of the process. MLX's static objects are destroyed then, also while other threads use
//! them. A handler that runs before takes the lock, waits for the work in progress, and keeps the
//! lock.
//!
//! Handlers and destructors run in the reverse order of their registration. MLX makes many static
//! objects at their first use. So the handler is registered again after the first use of each
//! operation, and after the evaluations that follow it.
//!
//! On Linux, MLX's library is loaded at the first call of MLX. A process may end meanwhile. So the
//! handler is also registered when the program starts: it then waits until the library is loaded.
//! What the constructors of the library registered up to that moment runs before it. Nothing
//! prevents that, but it is a matter of microseconds.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use mlx_sys as sys;

use crate::{call, stream};

/// How long the end of the process waits for a thread that uses MLX.
const PATIENCE: Duration = Duration::from_secs(60);

/// Evaluations after the first use of an operation that may make static objects: its own, and one
/// that finds those of another MLX thread.
const EVALUATIONS: u8 = 2;

/// The operations that were used, as bits at hashes of the addresses of their names.
static USED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// Evaluations to come after which the handler is registered again.
static PENDING: AtomicU8 = AtomicU8::new(0);

/// Whether MLX is loaded, with its most used static objects.
static PREPARED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// From the C library.
    fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    // A panic must not cross into C.
    let _ = catch_unwind(|| {
        // Without the lock, the thread that has it may crash. Waiting forever is worse.
        if let Some(guard) = call::lock_for(PATIENCE) {
            if PREPARED.load(Ordering::Acquire) {
                stream::wait_for_all();
            }
            std::mem::forget(guard);
        }
    });
}

fn register() {
    // SAFETY: the handler neither unwinds nor needs data. A failure leaves the process without it.
    unsafe { atexit(at_exit) };
}

/// Registers the handler when the program starts, or when the library that holds this code is
/// loaded.
#[cfg(target_os = "linux")]
extern "C" fn at_start() {
    register();
}

// SAFETY: the loader calls each entry of `.init_array` once, as a C function. This one needs no
// part of Rust's runtime, and the C library is initialized before.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

/// Makes MLX's most used static objects, so that the handler comes after them from the start. Call
/// with the lock held, before any other call of MLX.
pub(crate) fn prepare() {
    // What fails here fails again, with a message, where it is asked for.
    // SAFETY: the handler neither unwinds nor needs data.
    unsafe { sys::rust_mlx_make_statics(at_exit) };
    PREPARED.store(true, Ordering::Release);
}

/// Must follow each call of MLX by the operation `op`. Call with the lock held.
#[inline]
pub(crate) fn after(op: &'static str) {
    let hash = op.as_ptr().addr() >> 2;
    let (word, bit) = (&USED[(hash >> 6) % USED.len()], 1 << (hash % 64));
    if word.load(Ordering::Relaxed) & bit == 0 {
        word.fetch_or(bit, Ordering::Relaxed);
        first_use();
    }
}

#[cold]
fn first_use() {
    PENDING.store(EVALUATIONS, Ordering::Relaxed);
    register();
}

/// Must follow each evaluation. Call with the lock held.
#[inline]
pub(crate) fn after_evaluation() {
    let pending = PENDING.load(Ordering::Relaxed);
    if pending > 0 {
        PENDING.store(pending - 1, Ordering::Relaxed);
        register();
    }
}
