//! The values that C closures own. Each is dropped once, on a suitable thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use mlx_cpu_kernels::drop_payload;
use parking_lot::Mutex;

use super::swap_failure;
use crate::call;

/// The number of functions that C or handles of this module keep alive. It shows leaks.
static LIVE: AtomicI64 = AtomicI64::new(0);

pub(crate) fn live() -> i64 {
    let _guard = call::lock();
    drain();
    LIVE.load(Ordering::Relaxed)
}

/// The value that a C closure owns.
pub(crate) struct Payload<T: 'static> {
    pub(crate) body: ManuallyDrop<T>,
}

impl<T> Payload<T> {
    pub(crate) fn new(body: T) -> Arc<Self> {
        LIVE.fetch_add(1, Ordering::Relaxed);
        let body = ManuallyDrop::new(body);
        Arc::new(Self { body })
    }
}

impl<T> Drop for Payload<T> {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: nothing uses the body after this.
        let body = unsafe { ManuallyDrop::take(&mut self.body) };
        drop_in_turn(Box::new(body));
    }
}

thread_local! {
    /// The values to drop after the one that this thread is dropping; `None` if it is dropping
    /// none.
    static WAITING: RefCell<Option<Vec<Box<dyn Any>>>> = const { RefCell::new(None) };
}

/// Drops a value. If this happens during the drop of another value, it is deferred to the end of
/// that drop. So nested functions need no more stack than a single one.
fn drop_in_turn(body: Box<dyn Any>) {
    /// Clears the list, even if a drop panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            let left = WAITING.try_with(RefCell::take).ok().flatten();
            for body in left.into_iter().flatten() {
                // A second panic would abort the process.
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(body))) {
                    drop_payload(payload);
                }
            }
        }
    }
    let mut body = Some(body);
    let waits = WAITING.try_with(|waiting| match &mut *waiting.borrow_mut() {
        Some(list) => {
            list.extend(body.take());
            true
        }
        none => {
            *none = Some(Vec::new());
            false
        }
    });
    if matches!(waits, Ok(true)) {
        return;
    }
    // During thread shutdown the list does not exist, and then drops are nested.
    let _end = waits.is_ok().then_some(End);
    while let Some(next) = body.take() {
        drop(next);
        let pop = |waiting: &RefCell<Option<Vec<_>>>| waiting.borrow_mut().as_mut()?.pop();
        body = WAITING.try_with(pop).ok().flatten();
    }
}

// SAFETY: only the thread that holds the process-wide lock uses `body`, as with a mutex. A use
// inside another use is on the same thread. `T: Send` permits use on different threads.
unsafe impl<T: Send> Sync for Payload<T> {}

/// Payloads that MLX's own threads released.
static ASIDE: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());
static SOME_ASIDE: AtomicBool = AtomicBool::new(false);

/// Drops the payloads in [`ASIDE`]. Call with the lock held.
pub(crate) fn drain() {
    if SOME_ASIDE.swap(false, Ordering::Acquire) {
        let aside = std::mem::take(&mut *ASIDE.lock());
        for payload in aside {
            drop_quietly(payload);
        }
    }
}

/// Drops the payloads in [`ASIDE`], with or without the lock.
pub(crate) fn drop_discarded() {
    if SOME_ASIDE.load(Ordering::Acquire) {
        let _guard = call::lock();
        drain();
    }
}

/// Drops a payload inside C. A panic must not escape, and the drop must not replace a pending
/// failure.
fn drop_quietly<T>(payload: T) {
    let failure = swap_failure(None);
    if let Err(thrown) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        drop_payload(thrown);
    }
    if failure.is_some() {
        swap_failure(failure);
    }
}

/// The destructor of every payload.
pub(super) unsafe extern "C" fn release<T: Send + 'static>(payload: *mut c_void) {
    // SAFETY: the pointer came from `Arc::into_raw` for this type, and C calls this function once
    // for it.
    let payload = unsafe { Arc::from_raw(payload.cast::<Payload<T>>().cast_const()) };
    discard(payload);
}

/// Drops a value that C releases: now if that is safe, otherwise later. The drop of an array takes
/// the lock, and MLX's own threads must not wait for the lock.
fn discard<T: Send + 'static>(payload: T) {
    if call::is_locked_here() {
        drop_quietly(payload);
    } else {
        ASIDE.lock().push(Box::new(payload));
        SOME_ASIDE.store(true, Ordering::Release);
    }
}

thread_local! {
    /// Whether this thread is inside [`free`], which drops a value that C no longer needs. The
    /// thread may be one of MLX's own.
    static FREEING: Cell<bool> = const { Cell::new(false) };
}

/// Drops a value that C released. Arrays in the value are dropped by [`part_with`].
pub(crate) fn free<T>(payload: T) {
    let before = FREEING.replace(true);
    drop(payload);
    FREEING.set(before);
}

/// Drops arrays that contain no user values. A thread of MLX drops them now if the lock is free.
/// Otherwise the next evaluation or memory query drops them.
pub(crate) fn part_with<T: Send + 'static>(arrays: T) {
    if FREEING.get() {
        match call::try_lock() {
            Some(_guard) => drop_quietly(arrays),
            None => discard(arrays),
        }
    }
}
