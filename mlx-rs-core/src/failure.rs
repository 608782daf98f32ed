//! Failures of this crate's operations. MLX runs an operation on the thread of its stream, and has
//! no way to report a failure there. So the failure is recorded by stream, and the next evaluation
//! on this stream returns it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use mlx_cpu_kernels::OutOfMemory;
use parking_lot::Mutex;

use crate::error::{Error, ErrorKind};

/// The failure of an operation on a stream. Later failures on the same stream follow from the first
/// one, and are not kept.
struct Failure {
    stream: i32,
    error: Error,
}

static FAILURES: Mutex<Vec<Failure>> = Mutex::new(Vec::new());

/// Whether [`FAILURES`] has an element. An evaluation reads only this, unless something failed.
static ANY: AtomicBool = AtomicBool::new(false);

/// Records that an operation panicked.
#[cold]
pub(crate) fn record(stream: i32, op: &'static str, panic: &(dyn Any + Send)) {
    let (kind, message) = if let Some(OutOfMemory { bytes }) = panic.downcast_ref() {
        let message = format!("the system has no {bytes} bytes of memory");
        (ErrorKind::OutOfMemory, message)
    } else {
        let message = (panic.downcast_ref::<&str>().copied())
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let message = message.unwrap_or("without a message");
        (ErrorKind::Mlx, format!("a kernel panicked: {message}"))
    };
    let mut failures = FAILURES.lock();
    if failures.iter().all(|failure| failure.stream != stream) {
        let error = Error::new(kind, op, message);
        failures.push(Failure { stream, error });
    }
    ANY.store(true, Ordering::Release);
}

/// Whether any operation failed since the last [`take`].
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// Removes and returns the failure of a stream's operations.
#[cold]
pub(crate) fn take(stream: i32) -> Option<Error> {
    let mut failures = FAILURES.lock();
    let place = failures.iter().position(|failure| failure.stream == stream);
    let failure = place.map(|place| failures.swap_remove(place));
    ANY.store(!failures.is_empty(), Ordering::Release);
    failure.map(|failure| failure.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_of_each_stream_is_returned_once() {
        // No stream has these numbers.
        let (one, other) = (-7, -8);
        assert!(take(one).is_none());
        record(one, "first", &OutOfMemory { bytes: 12 });
        record(one, "second", &"a bound");
        record(other, "third", &String::from("a bound"));
        record(other - 1, "fourth", &3);
        assert!(any());
        let error = take(one).unwrap();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(
            error.to_string(),
            "first: the system has no 12 bytes of memory"
        );
        assert!(take(one).is_none());
        let error = take(other).unwrap();
        assert_eq!(error.kind(), ErrorKind::Mlx);
        assert_eq!(error.to_string(), "third: a kernel panicked: a bound");
        let error = take(other - 1).unwrap();
        assert_eq!(
            error.to_string(),
            "fourth: a kernel panicked: without a message"
        );
    }
}
