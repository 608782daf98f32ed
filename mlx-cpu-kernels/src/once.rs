//! A flag that only the first caller finds unset.

use super::sync::{AtomicBool, Ordering};

/// Of work that a graph may run more than once, but that may happen only the first time.
#[derive(Default)]
pub struct Once(AtomicBool);

impl Once {
    /// Whether this is the first call.
    pub fn first(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}
