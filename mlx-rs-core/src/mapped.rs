//! Whether operations are recorded for a function under `vmap`. MLX replaces each recorded
//! operation by an operation on the whole batch, and some replacements are wrong: they forget an
//! argument, count axes without the batch, or assume that both operands have the batch. Under
//! `vmap`, this crate records other operations instead of those (`ops/mapped.rs`).

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While a value of this type exists, this thread's operations are recorded for a mapped function.
pub(crate) struct Recording(());

impl Recording {
    pub(crate) fn start() -> Self {
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        Self(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Whether this thread records a mapped function.
pub(crate) fn inside() -> bool {
    DEPTH.with(|depth| depth.get() > 0)
}
