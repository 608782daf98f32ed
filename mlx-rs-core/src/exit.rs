//! Makes the end of the process safe. At that point MLX's static objects are destroyed, even while
//! other threads use them. An exit handler runs before this. It takes the lock, waits for the work
//! in progress, and keeps the lock.
//!
//! Exit handlers and destructors run in the reverse order of their registration. MLX creates many
//! static objects at their first use. So the handler is registered again after the first use of
//! each operation, and after the evaluations that follow it.
//!
//! On Linux, the first call of MLX loads MLX's library, and the process may end during that load.
//! So the handler is also registered at program start. It then waits until the library is loaded.
//! Handlers that the library's constructors registered up to that moment still run before it. This
//! cannot be prevented, but the window is only microseconds.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use mlx_sys as sys;

use crate::{call, stream};

/// The maximum time that the end of the process waits for a thread that uses MLX.
const PATIENCE: Duration = Duration::from_secs(60);

/// The number of evaluations after which all static objects of a new operation exist. The first may
/// create the operation's own objects, and the second those of another MLX thread.
const EVALUATIONS: u8 = 2;

/// The operations used so far. Each sets a bit at the hash of its name's address.
static USED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// The number of evaluations that remain before the handler is registered again.
static PENDING: AtomicU8 = AtomicU8::new(0);

/// Whether MLX is loaded and its most used static objects exist.
static PREPARED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// The function of the C library.
    fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    // A panic must not cross into C.
    let _ = catch_unwind(|| {
        // Without the lock, the thread that has it may crash at exit. Waiting forever would be
        // worse.
        if let Some(guard) = call::lock_for(PATIENCE) {
            if PREPARED.load(Ordering::Acquire) {
                stream::wait_for_all();
            }
            std::mem::forget(guard);
        }
    });
}

fn register() {
    // SAFETY: the handler never unwinds and needs no data. If registration fails, the process has
    // no handler.
    unsafe { atexit(at_exit) };
}

/// Registers the handler when the program starts, or when the library with this code is loaded.
#[cfg(target_os = "linux")]
extern "C" fn at_start() {
    register();
}

// SAFETY: the loader calls each entry of `.init_array` once, as a C function. The function uses
// nothing of Rust's runtime, and the C library is already initialized.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

/// Creates MLX's most used static objects, so that the handler is registered after them. Call with
/// the lock held, before any other call of MLX.
pub(crate) fn prepare() {
    // A failure here occurs again, with a message, where the object is needed. SAFETY: the handler
    // never unwinds and needs no data.
    unsafe { sys::rust_mlx_make_statics(at_exit) };
    PREPARED.store(true, Ordering::Release);
}

/// Must be called after each MLX call of the operation `op`. Call with the lock held.
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

/// Registers the handler again if necessary. Call after each evaluation, with the lock held.
#[inline]
pub(crate) fn after_evaluation() {
    let pending = PENDING.load(Ordering::Relaxed);
    if pending > 0 {
        PENDING.store(pending - 1, Ordering::Relaxed);
        register();
    }
}
