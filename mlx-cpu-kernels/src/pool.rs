//! A fork-join pool that runs one job at a time. A job is divided into numbered parts. Each thread
//! owns contiguous parts and steals parts of other threads when idle.
//!
//! This crate uses no thread-pool library, because each token requires hundreds of consecutive jobs
//! of about 50 microseconds. The cost of starting and joining a job would dominate. Before workers
//! sleep, they spin for about as long as the pause between two jobs. The thread that submits the
//! job also works on it.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{OnceLock, PoisonError};

use super::memory::OutOfMemory;
use super::sync::{
    Arc, AtomicBool, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, SPINS,
    YIELD_EVERY, spin_loop, yield_now,
};

/// The maximum number of threads.
const MAX_THREADS: usize = 64;

/// Runs the parts of one thread. The function must exhaust the iterator.
type Run<'a> = dyn Fn(&mut dyn Iterator<Item = usize>) + Sync + 'a;

/// A function that each thread calls before it waits for the other threads; see
/// [`with_barrier_hook`].
type BarrierHook<'a> = dyn Fn(usize) + Sync + 'a;

/// A job: the function that runs the parts, and the barrier hook. Both pointers are to closures
/// that outlive the job.
#[derive(Clone, Copy)]
struct Job {
    run: *const Run<'static>,
    parts: usize,
    hook: Option<*const BarrierHook<'static>>,
}

// SAFETY: the closures are `Sync`, and `Pool::run_iter` keeps them alive until every worker has
// left the job.
unsafe impl Send for Job {}

thread_local! {
    /// The hook for jobs of this thread while [`with_barrier_hook`] runs.
    static BARRIER_HOOK: Cell<Option<*const BarrierHook<'static>>> = const { Cell::new(None) };
}

/// Runs `work`. In each job of `work`, a thread that finds no more parts calls `hook` with its
/// thread index before it waits for other threads. The hook prefetches the thread's next input. If
/// there is nothing to wait for, the hook is not called.
pub fn with_barrier_hook<R>(hook: &BarrierHook<'_>, work: impl FnOnce() -> R) -> R {
    /// Restores the previous hook on exit, even after a panic.
    struct Restore(Option<*const BarrierHook<'static>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BARRIER_HOOK.set(self.0);
        }
    }
    // SAFETY: only the lifetime changes. Only jobs of `work` call the hook. None of them begins
    // before this point, and all threads have left each job when `work` returns. `Restore` removes
    // the pointer before this function returns.
    let hook: &'static BarrierHook<'static> = unsafe { std::mem::transmute(hook) };
    let _restore = Restore(BARRIER_HOOK.replace(Some(hook)));
    work()
}

struct Shared {
    /// The current job, for workers that wake up.
    job: Mutex<Option<Job>>,
    wake: Condvar,
    /// Changes with each job, so that a worker detects a new one. It also changes when the pool
    /// stops.
    generation: AtomicUsize,
    /// The number of sleeping workers; changed under the lock of `job`.
    asleep: AtomicUsize,
    /// For each thread, its next unstarted part.
    next: Vec<PartCounter>,
    /// The number of workers in the current job.
    active: AtomicUsize,
    /// What failed in the current job: [`NOTHING`], [`A_PANIC`], or the size of an allocation that
    /// the system refused.
    failed: AtomicUsize,
    /// Whether workers must exit.
    stopped: AtomicBool,
}

/// The values of [`Shared::failed`] that are not sizes.
const NOTHING: usize = 0;
const A_PANIC: usize = usize::MAX;

/// A part index, aligned to a cache line of its own, so that threads do not contend for one line.
#[repr(align(64))]
struct PartCounter(AtomicUsize);

/// The threads of the process.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// Locked by the running job.
    busy: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

/// The number of threads: `MLX_NUM_THREADS`, or the number of cores available to the process.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        std::env::var("MLX_NUM_THREADS")
            .ok()
            .and_then(|v| v.trim().parse().ok())
            .filter(|n| *n > 0)
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
            .min(MAX_THREADS)
    })
}

/// The pool, started by its first use.
pub(crate) fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(|| Pool::start(threads()))
}

impl Pool {
    pub(crate) fn start(threads: usize) -> Self {
        let counter = |_| PartCounter(AtomicUsize::new(0));
        let shared = Arc::new(Shared {
            job: Mutex::new(None),
            wake: Condvar::new(),
            generation: AtomicUsize::new(0),
            asleep: AtomicUsize::new(0),
            next: (0..threads.max(1)).map(counter).collect(),
            active: AtomicUsize::new(0),
            failed: AtomicUsize::new(NOTHING),
            stopped: AtomicBool::new(false),
        });
        // If a worker cannot be started, the other threads and the caller run its parts.
        let workers = (1..threads)
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                let worker = Builder::new().name(format!("mlx-kernel-{i}"));
                worker.spawn(move || work(&shared, i)).ok()
            })
            .collect();
        Self {
            shared,
            busy: Mutex::new(()),
            workers,
        }
    }

    /// The first of `parts` parts that thread `me` owns.
    pub(crate) fn first_part(&self, parts: usize, me: usize) -> usize {
        self.shared.first_part(parts, me)
    }

    /// All parts of the thread that owns part `i` of `parts`.
    pub(crate) fn owner_parts(&self, parts: usize, i: usize) -> Range<usize> {
        let first = |thread: usize| self.first_part(parts, thread);
        let thread = (0..self.shared.next.len()).find(|&thread| i < first(thread + 1));
        thread.map_or(0..parts, |thread| first(thread)..first(thread + 1))
    }

    /// The number of threads of a job, including the caller.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `run` for each of `0..parts`, spread over the threads; see [`Self::run_iter`].
    pub(crate) fn run(&self, parts: usize, run: &(dyn Fn(usize) + Sync)) {
        self.run_iter(parts, &|indices| indices.for_each(run));
    }

    /// Calls `run` on each thread with an iterator over the thread's parts, mostly adjacent ones.
    /// Together the iterators cover `0..parts`. State that the parts of a thread share can be
    /// created once per call. Returns when all parts are done. A panic in a part is resumed on the
    /// caller, with the payload [`OutOfMemory`] if memory was refused.
    pub(crate) fn run_iter(&self, parts: usize, run: &Run<'_>) {
        if parts <= 1 || self.workers.is_empty() {
            run(&mut (0..parts));
            return;
        }
        let _one = lock(&self.busy);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. A worker uses the pointer only between entering a job
        // (counted in `active`) and leaving it. The code below withdraws the job and waits until
        // every worker has left, before this function returns.
        let run: &'static Run<'static> = unsafe { std::mem::transmute(run) };
        let hook = BARRIER_HOOK.get();
        let job = Job { run, parts, hook };
        for (place, next) in shared.next.iter().enumerate() {
            next.0
                .store(shared.first_part(parts, place), Ordering::Relaxed);
        }
        shared.failed.store(NOTHING, Ordering::Relaxed);
        let asleep = {
            let mut slot = lock(&shared.job);
            *slot = Some(job);
            // Incremented under the lock. Otherwise a worker could read the old count, then go to
            // sleep and miss the wakeup.
            shared.generation.fetch_add(1, Ordering::Release);
            shared.asleep.load(Ordering::Relaxed)
        };
        // Notifying is a system call, and spinning workers do not need it.
        if asleep > 0 {
            shared.wake.notify_all();
        }
        take_parts(shared, job, 0);
        // After this line no worker enters the job. Workers inside it finish their parts.
        *lock(&shared.job) = None;
        let mut spins = 0u32;
        while shared.active.load(Ordering::Acquire) > 0 {
            pause(&mut spins);
        }
        match shared.failed.load(Ordering::Relaxed) {
            NOTHING => {}
            A_PANIC => panic!("a part of a kernel panicked"),
            bytes => OutOfMemory { bytes }.raise(),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _slot = lock(&self.shared.job);
            self.shared.stopped.store(true, Ordering::Relaxed);
            self.shared.generation.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch panics in a job.
            let _ = worker.join();
        }
    }
}

/// Locks a mutex of this crate. A panic in another thread leaves the data usable, so poisoning is
/// ignored. The mutex type is the standard library's, because the model checker has a mutex with
/// the same interface.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The first part that a thread owns. Threads own about equal numbers of adjacent parts, so
    /// each thread reads contiguous memory.
    fn first_part(&self, parts: usize, place: usize) -> usize {
        parts * place / self.next.len().max(1)
    }
}

/// Iterates over the parts of a thread, then over unstarted parts of other threads.
struct Parts<'a> {
    shared: &'a Shared,
    parts: usize,
    /// The thread whose parts are returned now, and the number of threads visited before it.
    of: usize,
    before: usize,
}

impl Iterator for Parts<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let threads = self.shared.next.len();
        while self.before < threads {
            let part = self.shared.next[self.of].0.fetch_add(1, Ordering::Relaxed);
            if part < self.shared.first_part(self.parts, self.of + 1) {
                return Some(part);
            }
            self.of = (self.of + 1) % threads;
            self.before += 1;
        }
        None
    }
}

/// Runs the parts of thread `me`, then unstarted parts of other threads.
fn take_parts(shared: &Shared, job: Job, me: usize) {
    // SAFETY: the caller is the job's owner or is counted in `active`, so the closures are alive.
    let run = unsafe { &*job.run };
    let mut indices = Parts {
        shared,
        parts: job.parts,
        of: me,
        before: 0,
    };
    let all = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(&mut indices);
        if let Some(hook) = job.hook {
            // SAFETY: the hook is alive, because the caller is the job's owner or is counted in
            // `active`.
            unsafe { (*hook)(me) };
        }
    }));
    if let Err(payload) = all {
        let refused = payload.downcast_ref::<OutOfMemory>();
        let failed = refused.map_or(A_PANIC, |refused| refused.bytes.clamp(1, A_PANIC - 1));
        shared.failed.store(failed, Ordering::Relaxed);
        // After a panic, the remaining parts are skipped.
        for next in &shared.next {
            next.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
        drop_payload(payload);
    }
}

/// Drops the payload of a panic. Its destructor may panic, too, and that panic must not unwind from
/// here. Otherwise a worker would never leave the job, or the owner would leave before its workers.
pub fn drop_payload(payload: Box<dyn Any + Send>) {
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(payload)));
    // Dropping the second payload could panic again, and so on without end. So it is leaked.
    if let Err(again) = dropped {
        std::mem::forget(again);
    }
}

/// One iteration of a spin loop; `spins` counts the iterations. Yields the core occasionally,
/// because with more threads than cores the awaited thread may need that core.
fn pause(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(YIELD_EVERY) {
        yield_now();
    } else {
        spin_loop();
    }
}

/// The main loop of worker `me`.
fn work(shared: &Shared, me: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.generation.load(Ordering::Acquire) == seen && spins < SPINS {
            pause(&mut spins);
        }
        let job = {
            let mut slot = lock(&shared.job);
            shared.asleep.fetch_add(1, Ordering::Relaxed);
            while shared.generation.load(Ordering::Acquire) == seen {
                slot = shared
                    .wake
                    .wait(slot)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            shared.asleep.fetch_sub(1, Ordering::Relaxed);
            seen = shared.generation.load(Ordering::Acquire);
            // Workers enter a job under the lock. The owner withdraws the job under the same lock,
            // and then waits for all workers that entered.
            if slot.is_some() {
                shared.active.fetch_add(1, Ordering::Relaxed);
            }
            *slot
        };
        if let Some(job) = job {
            take_parts(shared, job, me);
            shared.active.fetch_sub(1, Ordering::Release);
        } else if shared.stopped.load(Ordering::Relaxed) {
            return;
        }
    }
}
