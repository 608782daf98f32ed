//! What a C closure owns, and how it is dropped: once, on a thread that may drop it.

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

/// Functions alive in C or in Rust handles of this module: a leak shows here.
static LIVE: AtomicI64 = AtomicI64::new(0);

pub(crate) fn live() -> i64 {
    let _guard = call::lock();
    drain();
    LIVE.load(Ordering::Relaxed)
}

/// What a C closure owns.
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
    /// Bodies that wait for the one that is being dropped in this thread, if any is.
    static WAITING: RefCell<Option<Vec<Box<dyn Any>>>> = const { RefCell::new(None) };
}

/// Drops a body. If another body owns it and is being dropped, it waits for the end of that drop.
/// So nested functions, however many, take no more stack than one.
fn drop_in_turn(body: Box<dyn Any>) {
    /// Ends the waiting, also when a drop panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            let left = WAITING.try_with(RefCell::take).ok().flatten();
            for body in left.into_iter().flatten() {
                // A second panic would end the process.
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
    // Without the list, in the destructors of a thread, each is dropped inside the one before.
    let _end = waits.is_ok().then_some(End);
    while let Some(next) = body.take() {
        drop(next);
        let pop = |waiting: &RefCell<Option<Vec<_>>>| waiting.borrow_mut().as_mut()?.pop();
        body = WAITING.try_with(pop).ok().flatten();
    }
}

// SAFETY: only the thread that holds the process-wide lock uses `body`, which is what a mutex would
// give. A second use inside the first is on the same thread. `T: Send` lets it change threads.
unsafe impl<T: Send> Sync for Payload<T> {}

/// Payloads that MLX's own threads released.
static ASIDE: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());
static SOME_ASIDE: AtomicBool = AtomicBool::new(false);

/// Drops the payloads that were put aside. Call with the lock held.
pub(crate) fn drain() {
    if SOME_ASIDE.swap(false, Ordering::Acquire) {
        let aside = std::mem::take(&mut *ASIDE.lock());
        for payload in aside {
            drop_quietly(payload);
        }
    }
}

/// Drops the payloads that were put aside, without the lock held or with it.
pub(crate) fn drop_discarded() {
    if SOME_ASIDE.load(Ordering::Acquire) {
        let _guard = call::lock();
        drain();
    }
}

/// Drops a payload inside C. A panic must not leave it, and a pending failure must not be lost.
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
    // SAFETY: the pointer came from `Arc::into_raw` of this type, and C calls this once for it.
    let payload = unsafe { Arc::from_raw(payload.cast::<Payload<T>>().cast_const()) };
    discard(payload);
}

/// Drops what C gives back: at once where that is safe, otherwise later. MLX's own threads must not
/// wait for the lock that the drop of an array takes.
fn discard<T: Send + 'static>(payload: T) {
    if call::is_locked_here() {
        drop_quietly(payload);
    } else {
        ASIDE.lock().push(Box::new(payload));
        SOME_ASIDE.store(true, Ordering::Release);
    }
}

thread_local! {
    /// Whether this thread, which may be one of MLX's, drops what C gave back.
    static FREEING: Cell<bool> = const { Cell::new(false) };
}

/// Drops what C gives back, where arrays in it are [parted with](part_with).
pub(crate) fn free<T>(payload: T) {
    let before = FREEING.replace(true);
    drop(payload);
    FREEING.set(before);
}

/// Drops arrays and nothing of a caller's. A thread of MLX's does it at once where it need not wait
/// for the lock; otherwise the next evaluation or question about memory does it.
pub(crate) fn part_with<T: Send + 'static>(arrays: T) {
    if FREEING.get() {
        match call::try_lock() {
            Some(_guard) => drop_quietly(arrays),
            None => discard(arrays),
        }
    }
}
