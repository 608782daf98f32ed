//! A flag for work that must happen only once.

use super::sync::{AtomicBool, Ordering};

/// A flag for an operation that a graph may run several times, but that must take effect only once.
#[derive(Default)]
pub struct Once(AtomicBool);

impl Once {
    /// Returns `true` on the first call, and `false` on all later calls.
    pub fn first(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}
