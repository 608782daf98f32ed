//! An allocator that counts, for tests that bound how often Rust allocates. C and C++ have
//! allocators of their own, which nothing counts here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static OF_THREAD: Cell<usize> = const { Cell::new(0) };
}

static OF_PROCESS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts. A list that grows counts each time. Tests make it the
/// global one of a binary of their own.
pub struct CountingAllocator;

impl CountingAllocator {
    /// Allocations of this thread so far: those of a test harness are not among them.
    pub fn of_thread() -> usize {
        OF_THREAD.get()
    }

    /// Allocations of all threads so far.
    pub fn of_process() -> usize {
        OF_PROCESS.load(Ordering::Relaxed)
    }
}

// SAFETY: everything is passed on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        OF_THREAD.set(OF_THREAD.get() + 1);
        OF_PROCESS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise about the layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise that the pointer came from here with this layout is passed
        // on.
        unsafe { System.dealloc(ptr, layout) }
    }
}
