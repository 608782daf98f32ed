//! A flag for work that must happen only once.

use super::sync::{AtomicBool, Ordering};

/// For work that a graph may run several times, but that must take effect only the first time.
#[derive(Default)]
pub struct Once(AtomicBool);

impl Once {
    /// Whether this is the first call.
    pub fn first(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}
