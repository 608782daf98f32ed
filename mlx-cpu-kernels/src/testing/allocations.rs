//! A counting allocator, for tests that bound Rust's allocations. Allocations in C and C++ are not
//! counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static OF_THREAD: Cell<usize> = const { Cell::new(0) };
}

static OF_PROCESS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a counter. Each growth of a vector counts. Tests make it the global
/// allocator of a separate binary.
pub struct CountingAllocator;

impl CountingAllocator {
    /// The number of allocations of this thread, which excludes those of a test harness.
    pub fn of_thread() -> usize {
        OF_THREAD.get()
    }

    /// The number of allocations of all threads.
    pub fn of_process() -> usize {
        OF_PROCESS.load(Ordering::Relaxed)
    }
}

// SAFETY: all calls are forwarded to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        OF_THREAD.set(OF_THREAD.get() + 1);
        OF_PROCESS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantee about the layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantee that the pointer came from here with this layout is passed
        // on.
        unsafe { System.dealloc(ptr, layout) }
    }
}
