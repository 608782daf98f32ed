//! A fork-join pool that runs one job at a time. A job is divided into numbered parts: each thread
//! owns contiguous ones and steals from others when idle.
//!
//! Why not a library: each token takes hundreds of consecutive jobs of about 50 microseconds. So
//! the cost of starting and joining a job dominates. Workers spin for about as long as the pause
//! between two jobs before they sleep. The thread that submits the job works on it, too.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{OnceLock, PoisonError};

use super::sync::{
    Arc, AtomicBool, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, SPINS,
    YIELD_EVERY, spin_loop, yield_now,
};

/// The maximum number of threads.
const MAX_THREADS: usize = 64;

/// Runs parts of a thread; must exhaust the iterator.
type Run<'a> = dyn Fn(&mut dyn Iterator<Item = usize>) + Sync + 'a;

/// Called by each thread before it waits for the others; see [`with_barrier_hook`].
type BarrierHook<'a> = dyn Fn(usize) + Sync + 'a;

/// A job: `run` for the parts, and `hook`. The pointers are to closures that outlive the job.
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

/// Runs `work`. Each thread of its jobs that finds no more parts calls `hook` with its number
/// before it waits for others. The hook prefetches its next input. It is called only if there is
/// something to wait for.
pub fn with_barrier_hook<R>(hook: &BarrierHook<'_>, work: impl FnOnce() -> R) -> R {
    /// Restores the previous hook on exit, even after a panic.
    struct Restore(Option<*const BarrierHook<'static>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BARRIER_HOOK.set(self.0);
        }
    }
    // SAFETY: only the lifetime changes. Only jobs of `work` call the hook: none has begun earlier,
    // and all threads have left a job when it returns. The pointer is gone when this returns.
    let hook: &'static BarrierHook<'static> = unsafe { std::mem::transmute(hook) };
    let _restore = Restore(BARRIER_HOOK.replace(Some(hook)));
    work()
}

struct Shared {
    /// The current job, for workers that wake up.
    job: Mutex<Option<Job>>,
    wake: Condvar,
    /// The number of jobs, by which a worker detects a new one.
    generation: AtomicUsize,
    /// The number of sleeping workers; changed under the lock of `job`.
    asleep: AtomicUsize,
    /// The next part of each thread.
    next: Vec<PartCounter>,
    /// The number of workers in the current job.
    active: AtomicUsize,
    /// Whether a part panicked.
    failed: AtomicBool,
    /// Whether workers must exit.
    stopped: AtomicBool,
}

/// Aligned to a separate cache line.
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
            failed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        // If a worker cannot be started, the others and the caller do its work.
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

    /// Calls `run` on each thread with an iterator over its parts, mostly adjacent; together they
    /// cover `0..parts`. State shared by the parts of a thread is created once per thread. Returns
    /// when all are done. A panic in a part is resumed on the caller.
    pub(crate) fn run_iter(&self, parts: usize, run: &Run<'_>) {
        if parts <= 1 || self.workers.is_empty() {
            run(&mut (0..parts));
            return;
        }
        let _one = lock(&self.busy);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer only between entering
        // (`active`) and leaving a job. Below, the job is withdrawn, and every worker has left
        // before this returns.
        let run: &'static Run<'static> = unsafe { std::mem::transmute(run) };
        let hook = BARRIER_HOOK.get();
        let job = Job { run, parts, hook };
        for (place, next) in shared.next.iter().enumerate() {
            next.0
                .store(shared.first_part(parts, place), Ordering::Relaxed);
        }
        shared.failed.store(false, Ordering::Relaxed);
        let asleep = {
            let mut slot = lock(&shared.job);
            *slot = Some(job);
            // Incremented under the lock. Otherwise a worker that has just read the old count and
            // is about to sleep would miss the wakeup.
            shared.generation.fetch_add(1, Ordering::Release);
            shared.asleep.load(Ordering::Relaxed)
        };
        // A system call, which spinning workers do not need.
        if asleep > 0 {
            shared.wake.notify_all();
        }
        take_parts(shared, job, 0);
        // No worker enters from here on; those inside finish their parts.
        *lock(&shared.job) = None;
        let mut spins = 0u32;
        while shared.active.load(Ordering::Acquire) > 0 {
            pause(&mut spins);
        }
        assert!(
            !shared.failed.load(Ordering::Relaxed),
            "a part of a kernel panicked"
        );
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

/// Locks a mutex of this crate. A panic elsewhere leaves its data usable, so poisoning is ignored.
/// The type is the standard library's, because the model checker has one with the same interface.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The first part of a thread. Each thread has an equal number of adjacent parts, so that it
    /// reads contiguous memory.
    fn first_part(&self, parts: usize, place: usize) -> usize {
        parts * place / self.next.len().max(1)
    }
}

/// Iterates over the parts of a thread, then over unstarted parts of others.
struct Parts<'a> {
    shared: &'a Shared,
    parts: usize,
    /// The thread whose parts are taken, and the number of threads before it.
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

/// Runs the parts of thread `me`, then unstarted parts of others.
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
            // SAFETY: as above.
            unsafe { (*hook)(me) };
        }
    }));
    if let Err(payload) = all {
        shared.failed.store(true, Ordering::Relaxed);
        // The remaining parts are skipped.
        for next in &shared.next {
            next.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
        drop_payload(payload);
    }
}

/// Drops the payload of a panic. Its destructor may panic, which must not unwind from here: a
/// worker would never leave the job, or the owner would leave before its workers.
pub fn drop_payload(payload: Box<dyn Any + Send>) {
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(payload)));
    // The next payload could panic again, endlessly.
    if let Err(again) = dropped {
        std::mem::forget(again);
    }
}

/// One iteration of a spin loop; `spins` counts them. Yields the core occasionally. With more
/// threads than cores, the awaited thread may need it.
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
            // Workers enter under the lock, because the owner withdraws the job under it and then
            // waits for all that entered.
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
