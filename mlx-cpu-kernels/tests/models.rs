//! Runs the thread pool and the run-once flag under a model checker (loom). It tries all
//! interleavings with a bounded number of preemptions. Tests with real threads cover only a few of
//! these interleavings.

#![allow(dead_code, reason = "the models use a part of the included files")]

/// Loom's versions of the synchronization primitives that the included files use.
mod sync {
    pub(super) use loom::hint::spin_loop;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use loom::thread::{Builder, JoinHandle, yield_now};

    /// A single iteration is enough, because loom explores all interleavings.
    pub(super) const SPINS: u32 = 1;
    pub(super) const YIELD_EVERY: u32 = 1;
}

#[path = "../src/memory.rs"]
mod memory;
#[path = "../src/once.rs"]
mod once;
#[path = "../src/pool.rs"]
mod pool;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A counter that only one thread at a time may use. Loom checks this.
struct Cell(UnsafeCell<u32>);

// SAFETY: loom fails the model if two threads use the counter at once.
unsafe impl Sync for Cell {}
// SAFETY: see the note for `Sync`.
unsafe impl Send for Cell {}

impl Cell {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn add(&self) {
        // SAFETY: loom checks that this access is exclusive.
        self.0.with_mut(|n| unsafe { *n += 1 });
    }

    fn get(&self) -> u32 {
        // SAFETY: loom checks that no write is concurrent.
        self.0.with(|n| unsafe { *n })
    }
}

/// Each part of each job runs exactly once, and its writes are visible when the job returns.
#[test]
fn jobs_run_all_parts_once_and_end() {
    check(3, || {
        let pool = pool::Pool::start(2);
        for job in 1..=2 {
            let counts = [Cell::new(), Cell::new(), Cell::new()];
            pool.run(3, &|i| {
                counts[i].add();
                if job == 2 {
                    counts[i].add();
                }
            });
            assert!(counts.iter().all(|c| c.get() == job));
        }
    });
}

/// Workers outnumber parts, and jobs follow each other closely. If this fails, a late worker runs
/// parts of a finished job.
#[test]
fn workers_that_come_late_find_nothing() {
    check(2, || {
        let pool = pool::Pool::start(3);
        for _ in 0..2 {
            let counts = [Cell::new(), Cell::new()];
            pool.run(2, &|i| counts[i].add());
            assert!(counts.iter().all(|c| c.get() == 1));
        }
    });
}

/// Dropping a pool wakes its workers, whether they spin, sleep, or are about to sleep.
#[test]
fn a_pool_without_jobs_ends() {
    check(3, || drop(pool::Pool::start(3)));
}

/// A graph with an operation that writes in place is evaluated twice. The second evaluation repeats
/// (replays) the write operation, which then does nothing. A stream runs its operations in order,
/// so the replay comes after the write. Therefore an operation on another stream that waits for the
/// replay also comes after the write.
#[test]
fn replays_of_a_writer_order_what_depends_on_them() {
    check(3, || {
        let memory = Arc::new(Cell::new());
        let write = Arc::new(once::Once::default());
        let done = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let writer = loom::thread::spawn({
            let (memory, write, done) = (memory.clone(), write.clone(), done.clone());
            move || {
                for run in &*done {
                    if write.first() {
                        memory.add();
                    }
                    run.store(true, Ordering::Release);
                }
            }
        });
        // One reader for each of the two evaluations. It reads only after the write operation of
        // its own evaluation.
        let readers = [0, 1].map(|run| {
            let (memory, done) = (memory.clone(), done.clone());
            loom::thread::spawn(move || {
                if done[run].load(Ordering::Acquire) {
                    assert_eq!(memory.get(), 1);
                }
            })
        });
        writer.join().unwrap();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// If several threads call `first` at once, exactly one of them receives `true`.
#[test]
fn one_of_many_is_first() {
    check(3, || {
        let once = Arc::new(once::Once::default());
        let memory = Arc::new(Cell::new());
        let threads = [(); 2].map(|()| {
            let (once, memory) = (once.clone(), memory.clone());
            loom::thread::spawn(move || {
                if once.first() {
                    memory.add();
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(memory.get(), 1);
    });
}
