//! Waits for the lock, and detects deadlocks. A function passed to a transform runs with the lock
//! held. If it waits for another thread that uses MLX, both threads wait forever. When the function
//! has been idle for some time, the other thread gets an error.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind};

/// The interval at which a waiting thread checks the lock's holder.
const INTERVAL: Duration = Duration::from_millis(50);

const DEFAULT_MILLIS: u64 = 30_000;

static MILLIS: AtomicU64 = AtomicU64::new(DEFAULT_MILLIS);

/// The system's ID of the thread that runs a function of a transform; 0 if there is none.
static INSIDE: AtomicU64 = AtomicU64::new(0);

/// Whether the thread in `INSIDE` waits for MLX to compute.
static EVALUATING: AtomicBool = AtomicBool::new(false);

/// The state of the thread that was last found stuck. While that state is unchanged, further waits
/// end at once.
static STUCK: Mutex<Option<State>> = Mutex::new(None);

/// The ID of a thread inside a function, and its processor time in nanoseconds.
type State = (u64, u64);

/// Sets the time after which a thread that waits for MLX gets an error of kind
/// [`Deadlock`](ErrorKind::Deadlock), and returns the previous time. The default is 30 seconds.
/// Time counts while the thread that uses MLX is inside a function of a transform, uses no
/// processor time, and does not wait for MLX. That thread then waits for something else, probably
/// for another thread. Systems other than Linux do not report the processor time of a thread. On
/// those, all time inside the function counts, and the limit is twenty times as long.
/// ```
/// use std::time::Duration;
/// use mlx_rs_core::transforms::set_deadlock_timeout;
/// let before = set_deadlock_timeout(Duration::from_secs(5));
/// assert_eq!(set_deadlock_timeout(before), Duration::from_secs(5));
/// ```
pub fn set_deadlock_timeout(timeout: Duration) -> Duration {
    let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(MILLIS.swap(millis, Ordering::Relaxed))
}

/// Marks this thread as inside a function of a transform until the guard is dropped. Call with the
/// lock held.
pub(crate) fn inside() -> Inside {
    Inside(INSIDE.swap(this_thread(), Ordering::Relaxed))
}

pub(crate) struct Inside(u64);

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.store(self.0, Ordering::Relaxed);
    }
}

/// Runs an evaluation. Its time does not count as idle. Call with the lock held.
pub(crate) fn evaluating<T>(f: impl FnOnce() -> T) -> T {
    let before = EVALUATING.load(Ordering::Relaxed);
    EVALUATING.store(true, Ordering::Relaxed);
    let result = f();
    EVALUATING.store(before, Ordering::Relaxed);
    result
}

/// Calls `attempt` until it returns the lock. `attempt` waits at most the given time. Returns
/// `None` on a deadlock.
pub(crate) fn wait<T>(mut attempt: impl FnMut(Duration) -> Option<T>) -> Option<T> {
    let mut last: Option<State> = None;
    let mut since = Instant::now();
    loop {
        if let Some(guard) = attempt(INTERVAL) {
            return Some(guard);
        }
        let now = state();
        let Some(state) = now else {
            last = None;
            continue;
        };
        if *STUCK.lock() == Some(state) {
            return None;
        }
        if last != Some(state) {
            last = Some(state);
            since = Instant::now();
        } else if since.elapsed() >= timeout() {
            *STUCK.lock() = Some(state);
            return None;
        }
    }
}

/// The error for a thread that waited for the timeout.
pub(crate) fn error(op: &'static str) -> Error {
    Error::new(
        ErrorKind::Deadlock,
        op,
        "another thread is inside a function given to a transform, which runs with the lock of MLX \
         held, and waits there, probably for this thread; a function given to a transform must not \
         wait for a thread that uses MLX",
    )
}

/// The state of the thread inside a function. `None` if there is none, or if it waits for MLX.
fn state() -> Option<State> {
    let thread = INSIDE.load(Ordering::Relaxed);
    if thread == 0 || EVALUATING.load(Ordering::Relaxed) {
        return None;
    }
    Some((thread, ran(thread)?))
}

fn timeout() -> Duration {
    let millis = MILLIS.load(Ordering::Relaxed);
    let factor = if cfg!(target_os = "linux") { 1 } else { 20 };
    Duration::from_millis(millis.saturating_mul(factor))
}

/// The processor time of a thread of this process, in nanoseconds.
#[cfg(target_os = "linux")]
fn ran(thread: u64) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn ran(_thread: u64) -> Option<u64> {
    Some(0)
}

#[cfg(target_os = "linux")]
fn this_thread() -> u64 {
    thread_local! {
        static ID: u64 = {
            // SAFETY: the call has no arguments and cannot fail.
            let id = unsafe { libc::gettid() };
            u64::try_from(id).unwrap_or(u64::MAX)
        };
    }
    ID.with(|id| *id)
}

#[cfg(not(target_os = "linux"))]
fn this_thread() -> u64 {
    // Any value except 0 works, because systems without processor times do not need the thread's
    // ID.
    1
}
