//! MLX's caches of compiled functions: one for the process, or from mlx-c 0.7 on, one for each
//! thread. A removal must apply to all caches.

use mlx_sys as sys;

use crate::call;
use crate::error::Result;

const OP: &str = "compile";

/// Removes the entry of a compiled function by its ID. Call with the lock held.
pub(super) fn erase(id: usize) -> Result<()> {
    #[cfg(not(mlx_c_0_7))]
    // SAFETY: the argument is a number, and an unknown one is ignored.
    return call::status(OP, || unsafe { sys::mlx_detail_compile_erase(id) });
    #[cfg(mlx_c_0_7)]
    threads::each(|cache| {
        // SAFETY: the handle is live; an unknown number is ignored.
        call::status(OP, || unsafe { sys::mlx_detail_compile_erase(cache, id) })
    })
}

/// Removes all entries. Call with the lock held.
pub(super) fn clear() -> Result<()> {
    #[cfg(not(mlx_c_0_7))]
    // SAFETY: the call has no arguments. The caller holds the lock.
    return call::status(OP, || unsafe { sys::mlx_detail_compile_clear_cache() });
    #[cfg(mlx_c_0_7)]
    threads::each(|cache| {
        // SAFETY: the handle is live.
        call::status(OP, || unsafe { sys::mlx_detail_compile_clear_cache(cache) })
    })
}

/// Must be called before a compiled function is called in this thread. Call with the lock held.
pub(super) fn prepare() -> Result<()> {
    #[cfg(mlx_c_0_7)]
    threads::register()?;
    Ok(())
}

#[cfg(mlx_c_0_7)]
mod threads {
    use std::cell::OnceCell;
    use std::thread::ThreadId;

    use mlx_sys as sys;
    use parking_lot::Mutex;

    use super::OP;
    use crate::call;
    use crate::error::Result;

    /// A weak reference to the cache of a thread.
    struct Cache(sys::mlx_compile_cache);

    // SAFETY: the handle is a heap copy of a weak pointer whose count is atomic. Only the holder of
    // the process-wide lock uses it.
    unsafe impl Send for Cache {}

    impl Drop for Cache {
        fn drop(&mut self) {
            if let Some(_guard) = call::lock_to_free() {
                // SAFETY: the handle is owned here.
                unsafe { sys::mlx_compile_cache_free(self.0) };
            }
        }
    }

    /// The caches of all live threads that called compiled functions.
    static ALL: Mutex<Vec<(ThreadId, Cache)>> = Mutex::new(Vec::new());

    /// Removes a thread's cache from the list when the thread ends.
    struct Registered(ThreadId);

    impl Drop for Registered {
        fn drop(&mut self) {
            let mut all = ALL.lock();
            let place = all.iter().position(|(thread, _)| *thread == self.0);
            let gone = place.map(|place| all.swap_remove(place));
            // Dropping the cache takes another lock, so this lock is released first.
            drop(all);
            drop(gone);
        }
    }

    thread_local! {
        static HERE: OnceCell<Registered> = const { OnceCell::new() };
    }

    pub(super) fn register() -> Result<()> {
        if !matches!(HERE.try_with(|here| here.get().is_some()), Ok(false)) {
            return Ok(());
        }
        // SAFETY: the call creates an empty handle.
        let mut cache = Cache(unsafe { sys::mlx_compile_cache_new() });
        call::status(OP, || {
            // SAFETY: the result is writable.
            unsafe { sys::mlx_detail_compile_cache(&raw mut cache.0) }
        })?;
        let thread = std::thread::current().id();
        ALL.lock().push((thread, cache));
        // A thread that is ending skips this, because MLX is about to drop its cache.
        let _ = HERE.try_with(|here| here.set(Registered(thread)));
        Ok(())
    }

    /// Calls `f` for every cache. Returns the first failure.
    pub(super) fn each(f: impl Fn(sys::mlx_compile_cache) -> Result<()>) -> Result<()> {
        // The list is copied first. Erased entries may own functions whose drop erases more
        // entries.
        let handles: Vec<_> = ALL.lock().iter().map(|(_, cache)| cache.0).collect();
        handles.into_iter().map(f).fold(Ok(()), Result::and)
    }
}
