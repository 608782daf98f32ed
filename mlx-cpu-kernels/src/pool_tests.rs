//! Tests the pool with real threads. `tests/models.rs` checks all interleavings of the threads'
//! steps with a model checker.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::memory::{OutOfMemory, resize};
use super::pool::{Pool, with_barrier_hook};

#[test]
fn every_part_runs_once_whatever_the_width() {
    for threads in [1, 2, 5] {
        let pool = Pool::start(threads);
        for parts in [0, 1, 2, 3, 17, 1000] {
            let counts: Vec<_> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            pool.run(parts, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn callers_take_turns() {
    let pool = Pool::start(3);
    let total = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..200 {
                    pool.run(8, &|i| {
                        total.fetch_add(i, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 28);
}

#[test]
fn what_follows_is_done_by_each_thread_of_a_job_and_no_longer() {
    let pool = Pool::start(2);
    let counts = [const { AtomicUsize::new(0) }; 2];
    let hook = |me: usize| {
        counts[me].fetch_add(1, Ordering::Relaxed);
    };
    let seen = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
    // Neither part ends before the other part has begun, so each of the two threads runs one part.
    let job = || {
        let begun = AtomicUsize::new(0);
        pool.run(2, &|_| {
            begun.fetch_add(1, Ordering::Relaxed);
            while begun.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
        });
    };
    with_barrier_hook(&hook, || pool.run(1, &|_| {}));
    assert_eq!(seen(), [0, 0], "nobody to wait for");
    with_barrier_hook(&hook, || {
        job();
        job();
    });
    assert_eq!(seen(), [2, 2]);
    job();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        with_barrier_hook(&hook, || panic!("in between"));
    }));
    assert!(caught.is_err());
    job();
    assert_eq!(seen(), [2, 2]);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = Pool::start(2);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.run(4, &|i| assert!(i != 2, "part two"));
    }));
    assert!(caught.is_err());
    let done = AtomicUsize::new(0);
    pool.run(4, &|_| {
        done.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(done.load(Ordering::Relaxed), 4);
}

#[test]
fn the_caller_learns_that_memory_was_refused() {
    const TOO_LARGE: usize = isize::MAX as usize / 4;
    let pool = Pool::start(3);
    let payload = |run: &(dyn Fn(usize) + Sync)| {
        let all = std::panic::AssertUnwindSafe(|| pool.run(8, run));
        let payload = std::panic::catch_unwind(all).unwrap_err();
        payload.downcast_ref::<OutOfMemory>().copied()
    };
    let refused = payload(&|part| {
        if part == 5 {
            resize(&mut Vec::<f32>::new(), TOO_LARGE, 0.0);
        }
    });
    let bytes = TOO_LARGE * 4;
    assert_eq!(refused, Some(OutOfMemory { bytes }));
    assert_eq!(payload(&|part| assert!(part < 3, "part three")), None);
    pool.run(8, &|_| ());
}

/// A panic payload whose destructor panics.
struct Relentless;

impl Drop for Relentless {
    fn drop(&mut self) {
        std::panic::panic_any("again");
    }
}

#[test]
fn a_payload_that_panics_when_it_is_dropped_ends_the_job_as_any_other() {
    let pool = Pool::start(2);
    // Each part waits for the other part to begin. So each thread runs one part, and both panic.
    let begun = AtomicUsize::new(0);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.run(2, &|_| {
            begun.fetch_add(1, Ordering::Relaxed);
            while begun.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
            std::panic::panic_any(Relentless);
        });
    }));
    let text = caught.unwrap_err();
    let text = text.downcast_ref::<&str>().copied().map(str::to_owned);
    assert_eq!(text.as_deref(), Some("a part of a kernel panicked"));
    let done = AtomicUsize::new(0);
    pool.run(4, &|_| {
        done.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(done.load(Ordering::Relaxed), 4);
}
