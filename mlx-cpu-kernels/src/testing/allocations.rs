//! A counting allocator, for tests that bound the number of Rust's allocations. It does not count
//! allocations in C and C++.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static OF_THREAD: Cell<usize> = const { Cell::new(0) };
}

static OF_PROCESS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a counter. Each growth of a vector counts as an allocation. A test
/// makes it the global allocator of a separate test binary.
pub struct CountingAllocator;

impl CountingAllocator {
    /// The number of allocations of this thread. It excludes allocations that the test harness
    /// makes on other threads.
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
        // SAFETY: the caller guarantees a valid layout, which is passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees that this allocator returned the pointer for this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}
