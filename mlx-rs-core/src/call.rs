//! Runs every mlx-c call. This module takes the process-wide lock, and installs the error handler
//! before the first call. It turns mlx-c's three ways to report errors (status, null handle,
//! message slot) into `Result`. Other modules pass each call as a closure.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use mlx_sys as sys;
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::{deadlock, exit, failure, memory, quirks, stream};

/// The process-wide lock. MLX's graph building, streams and transforms share global state without
/// locks. The holder of the guard has exclusive access to that state. The lock is reentrant,
/// because a Rust callback inside an MLX call may call MLX.
static MLX: ReentrantMutex<()> = ReentrantMutex::new(());

/// The number of live array handles, which shows leaks even if memory use looks constant. It is
/// written only under the lock, so no atomic addition is needed.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// Changes the number of live handles. Call with the lock held.
fn count_live(by: i64) {
    LIVE.store(LIVE.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}

thread_local! {
    /// The message of the last failure. mlx-c reports errors on the calling thread, so the slot is
    /// thread-local. It has no destructor, so it stays valid for other destructors of the thread,
    /// which may call MLX. A message in the slot at the end of the thread is leaked.
    static MESSAGE: RefCell<ManuallyDrop<Option<String>>> =
        const { RefCell::new(ManuallyDrop::new(None)) };

    /// Whether the slot may contain a message. Each call reads this flag. It has no destructor, so
    /// the first access on a thread registers nothing.
    static REPORTED: Cell<bool> = const { Cell::new(false) };
}

/// Called by mlx-c with the text of a failure. A panic must not cross into C, so it is caught.
extern "C" fn on_error(message: *const c_char, _data: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let text = if message.is_null() {
            String::from("MLX failed without a message")
        } else {
            // SAFETY: mlx-c passes a NUL-terminated string that lives until this function returns.
            unsafe { CStr::from_ptr(message) }
                .to_string_lossy()
                .into_owned()
        };
        MESSAGE.with(|slot| {
            if let Ok(mut slot) = slot.try_borrow_mut() {
                **slot = Some(text);
                REPORTED.set(true);
            }
        });
    }));
}

/// A guard of the lock.
pub(crate) type Guard = ReentrantMutexGuard<'static, ()>;

/// Takes the lock, for operations that cannot fail: MLX is already loaded, or is not called.
pub(crate) fn lock() -> Guard {
    let guard = MLX.lock();
    // A caller that ignores the result owns a handle, so MLX is loaded.
    let _ = loaded();
    guard
}

/// Takes the lock if it is free, to release an object.
pub(crate) fn try_lock() -> Option<Guard> {
    MLX.try_lock()
}

/// Takes the lock.
///
/// # Errors
/// [`ErrorKind::Deadlock`] when another thread never releases the lock; [`ErrorKind::Unsupported`]
/// when MLX cannot be loaded.
#[inline]
pub(crate) fn enter(op: &'static str) -> Result<Guard> {
    match MLX.try_lock() {
        Some(guard) => ready(op).map(|()| guard),
        None => {
            let guard = wait().ok_or_else(|| deadlock::error(op))?;
            ready(op).map(|()| guard)
        }
    }
}

/// Takes the lock to release an object. Returns `None` on a deadlock; the object is then leaked.
pub(crate) fn lock_to_free() -> Option<Guard> {
    MLX.try_lock().or_else(wait)
}

#[cold]
fn wait() -> Option<Guard> {
    deadlock::wait(|time| MLX.try_lock_for(time))
}

/// Prepares an MLX call. Call with the lock held.
///
/// # Errors
/// [`ErrorKind::Unsupported`] when MLX cannot be loaded.
#[inline]
fn ready(op: &'static str) -> Result<()> {
    match loaded() {
        Ok(()) => Ok(()),
        Err(message) => Err(Error::new(ErrorKind::Unsupported, op, message)),
    }
}

/// Whether MLX is loaded; if not, the reason. The first caller loads MLX and installs the error
/// handler, because the default handler would exit the process.
#[inline]
pub(crate) fn loaded() -> std::result::Result<(), &'static str> {
    static LOADED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let loaded = LOADED.get().unwrap_or_else(|| {
        // The lock is always taken before `LOADED`, because the lock's holder may also wait for
        // `LOADED`.
        let _guard = MLX.lock();
        LOADED.get_or_init(load)
    });
    loaded.as_ref().copied().map_err(String::as_str)
}

#[cold]
fn load() -> std::result::Result<(), String> {
    if let Some(why) = quirks::refusal(std::env::consts::OS, quirks::has_metal_device()) {
        return Err(why.to_owned());
    }
    #[cfg(target_os = "linux")]
    sys::library::load().map_err(ToString::to_string)?;
    // SAFETY: the handler is a plain function that never unwinds and needs no data.
    unsafe { sys::mlx_set_error_handler(Some(on_error), std::ptr::null_mut(), None) };
    exit::prepare();
    Ok(())
}

/// Like [`lock`], but returns `None` after `patience`.
pub(crate) fn lock_for(patience: Duration) -> Option<Guard> {
    MLX.try_lock_for(patience)
}

/// Whether this thread holds the lock. MLX's own threads never hold it.
pub(crate) fn is_locked_here() -> bool {
    MLX.is_owned_by_current_thread()
}

#[inline]
fn clear() {
    if REPORTED.get() {
        take_message();
    }
}

#[cold]
fn take_message() -> Option<String> {
    REPORTED.set(false);
    MESSAGE.with(|slot| slot.try_borrow_mut().ok()?.take())
}

/// The message of the last failure, without the source location that mlx-c appends.
#[cold]
fn take_error(op: &'static str) -> Error {
    let text = take_message().unwrap_or_else(|| String::from("MLX failed without a message"));
    Error::new(kind_of(&text), op, strip_location(&text))
}

/// The kind of a failure with this message of MLX or of the shim.
fn kind_of(message: &str) -> ErrorKind {
    // The system refused memory: the shim's message, MLX's own for each device, and C++'s.
    let refusals = [
        "] the system has no ",
        "Unable to allocate ",
        "[metal::malloc] Attempting to allocate ",
        "cudaErrorMemoryAllocation",
        "std::bad_alloc",
    ];
    match refusals.iter().any(|refusal| message.contains(refusal)) {
        true => ErrorKind::OutOfMemory,
        false => ErrorKind::Mlx,
    }
}

/// Removes ` at FILE:LINE`, which mlx-c appends. It is a line of mlx-c's own source and does not
/// help users.
fn strip_location(text: &str) -> &str {
    match text.rsplit_once(" at ") {
        Some((head, tail)) => match tail.rsplit_once(':') {
            Some((file, line))
                if (file.ends_with(".cpp") || file.ends_with(".h"))
                    && line.bytes().all(|b| b.is_ascii_digit()) =>
            {
                head
            }
            _ => text,
        },
        None => text,
    }
}

/// Runs a call that returns a status.
pub(crate) fn status(op: &'static str, f: impl FnOnce() -> c_int) -> Result<()> {
    let _guard = enter(op)?;
    clear();
    let rc = f();
    exit::after(op);
    if rc == 0 { Ok(()) } else { Err(take_error(op)) }
}

/// Runs a call that evaluates. It also fails if an operation of this crate failed on the current
/// stream since the last evaluation. When it fails, MLX has already started earlier operations, and
/// frees their output buffers as soon as their arrays are dropped. So this function waits for all
/// started operations before it returns the error.
pub(crate) fn evaluation(op: &'static str, f: impl FnOnce() -> c_int) -> Result<()> {
    let _guard = enter(op)?;
    let mut result = deadlock::evaluating(|| status(op, f));
    exit::after_evaluation();
    if result.is_err() || failure::any() {
        let failed = stream::current_index().ok().and_then(failure::take);
        result = result.and(failed.map_or(Ok(()), Err));
    }
    if result.is_err() {
        stream::wait_for_all();
    }
    result
}

/// Runs an operation that returns one array on the current stream.
pub(crate) fn array(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_array, sys::mlx_stream) -> c_int,
) -> Result<Array> {
    let _guard = enter(op)?;
    let stream = stream::current_raw()?;
    adopt_locked(op, |out| f(out, stream))
}

/// Runs a call that fills an array handle and needs no stream.
pub(crate) fn adopt(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_array) -> c_int,
) -> Result<Array> {
    let _guard = enter(op)?;
    adopt_locked(op, f)
}

/// Like [`adopt`], for an existing array. It does not compare the array with the budget, which may
/// have been reduced below the array's size.
pub(crate) fn alias(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_array) -> c_int,
) -> Result<Array> {
    let _guard = enter(op)?;
    alias_locked(op, f)
}

/// Like [`adopt`], for a caller that already has the lock.
fn adopt_locked(op: &'static str, f: impl FnOnce(*mut sys::mlx_array) -> c_int) -> Result<Array> {
    checked(op, alias_locked(op, f)?)
}

/// Returns the result if it fits the budget. An empty result is replaced by an array without
/// inputs, so MLX never reads or differentiates an empty view. MLX's reductions of empty views read
/// uninitialized shapes, and then loop forever or write out of bounds.
fn checked(op: &'static str, array: Array) -> Result<Array> {
    if memory::check(op, &array)? > 0 {
        return Ok(array);
    }
    let shape = array.shape();
    alias_locked(op, |out| {
        // SAFETY: the product of the shape is zero, so no element is read. The shape has the passed
        // number of entries. `out` is writable, and ownership of the new handle moves into it.
        unsafe {
            let (values, ndim) = (std::ptr::dangling::<u64>(), shape.len() as c_int);
            *out =
                sys::mlx_array_new_data(values.cast(), shape.as_ptr(), ndim, array.dtype().raw());
            c_int::from((*out).ctx.is_null())
        }
    })
}

/// Like [`alias`], for a caller that already has the lock.
fn alias_locked(op: &'static str, f: impl FnOnce(*mut sys::mlx_array) -> c_int) -> Result<Array> {
    clear();
    let mut out = OutArray::new();
    let rc = f(&raw mut out.0);
    exit::after(op);
    if rc != 0 {
        return Err(take_error(op));
    }
    out.into_array(op)
}

/// An out-parameter. When dropped, it frees the handle that C wrote, unless the handle was taken
/// out.
struct OutArray(sys::mlx_array);

impl OutArray {
    fn new() -> Self {
        Self(sys::mlx_array {
            ctx: std::ptr::null_mut(),
        })
    }

    fn into_array(mut self, op: &'static str) -> Result<Array> {
        let raw = std::mem::replace(
            &mut self.0,
            sys::mlx_array {
                ctx: std::ptr::null_mut(),
            },
        );
        if raw.ctx.is_null() {
            return Err(Error::new(
                ErrorKind::Mlx,
                op,
                "MLX reported success but returned no array",
            ));
        }
        count_live(1);
        Ok(Array::from_owned(raw))
    }
}

impl Drop for OutArray {
    fn drop(&mut self) {
        if !self.0.ctx.is_null() {
            // SAFETY: the handle is non-null, came from mlx-c and has no other owner.
            unsafe { sys::mlx_array_free(self.0) };
        }
    }
}

/// Frees an array handle. This may walk the graph, so it takes the lock.
pub(crate) fn free(raw: sys::mlx_array) {
    let Some(_guard) = lock_to_free() else {
        return;
    };
    count_live(-1);
    // SAFETY: `raw` is the sole owner of its handle and is not used again.
    unsafe { sys::mlx_array_free(raw) };
}

/// The number of live handles in this process.
pub(crate) fn live() -> i64 {
    LIVE.load(Ordering::Relaxed)
}

/// A vector of arrays for calls that take several, freed on drop.
pub(crate) struct ArrayVec(sys::mlx_vector_array);

impl ArrayVec {
    /// Copies the handles (not the data) of `arrays`.
    pub(crate) fn new<'a>(
        op: &'static str,
        arrays: impl IntoIterator<Item = &'a Array>,
    ) -> Result<Self> {
        let _guard = enter(op)?;
        clear();
        // SAFETY: the call has no arguments. A null context means failure, and is checked.
        let raw = unsafe { sys::mlx_vector_array_new() };
        if raw.ctx.is_null() {
            return Err(take_error(op));
        }
        let vec = Self(raw);
        for a in arrays {
            // SAFETY: both handles are live; the vector stores its own reference.
            if unsafe { sys::mlx_vector_array_append_value(vec.0, a.raw()) } != 0 {
                return Err(take_error(op));
            }
        }
        Ok(vec)
    }

    /// An out-parameter: null until a call fills it.
    pub(crate) fn empty() -> Self {
        Self(sys::mlx_vector_array {
            ctx: std::ptr::null_mut(),
        })
    }

    pub(crate) fn raw(&self) -> sys::mlx_vector_array {
        self.0
    }

    /// The destination for the vector of a call. `self` frees the vector.
    pub(crate) fn out(&mut self) -> *mut sys::mlx_vector_array {
        &raw mut self.0
    }

    /// Transfers ownership to a caller in C.
    pub(crate) fn into_raw(self) -> sys::mlx_vector_array {
        std::mem::ManuallyDrop::new(self).0
    }

    /// The arrays, each as a separate handle.
    pub(crate) fn to_arrays(&self, op: &'static str) -> Result<Vec<Array>> {
        read_vec(op, self.0)
    }
}

/// The arrays of a vector that C owns, each as a separate handle.
pub(crate) fn read_vec(op: &'static str, vec: sys::mlx_vector_array) -> Result<Vec<Array>> {
    let _guard = enter(op)?;
    if vec.ctx.is_null() {
        return Err(Error::new(
            ErrorKind::Mlx,
            op,
            "MLX reported success but returned no arrays",
        ));
    }
    // SAFETY: the vector handle is live and not null.
    let n = unsafe { sys::mlx_vector_array_size(vec) };
    (0..n)
        .map(|i| {
            adopt(op, |res| {
                // SAFETY: `i` is below the size just read; the handle is live.
                unsafe { sys::mlx_vector_array_get(res, vec, i) }
            })
        })
        .collect()
}

impl Drop for ArrayVec {
    fn drop(&mut self) {
        let Some(_guard) = lock_to_free() else {
            return;
        };
        // SAFETY: this is the only owner of the vector.
        unsafe { sys::mlx_vector_array_free(self.0) };
    }
}

/// Runs an operation that returns several arrays on the current stream.
pub(crate) fn arrays(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_vector_array, sys::mlx_stream) -> c_int,
) -> Result<Vec<Array>> {
    let _guard = enter(op)?;
    let stream = stream::current_raw()?;
    let mut out = ArrayVec::new(op, [])?;
    clear();
    let rc = f(&raw mut out.0, stream);
    exit::after(op);
    if rc != 0 {
        return Err(take_error(op));
    }
    out.to_arrays(op)
}

/// Runs a call that returns a handle, or null on failure.
pub(crate) fn handle(op: &'static str, f: impl FnOnce() -> *mut c_void) -> Result<*mut c_void> {
    let _guard = enter(op)?;
    clear();
    let ctx = f();
    exit::after(op);
    if ctx.is_null() {
        Err(take_error(op))
    } else {
        Ok(ctx)
    }
}

/// Runs an operation that returns two arrays on the current stream.
pub(crate) fn pair(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_array, *mut sys::mlx_array, sys::mlx_stream) -> c_int,
) -> Result<(Array, Array)> {
    let _guard = enter(op)?;
    let stream = stream::current_raw()?;
    let mut second = OutArray::new();
    let first = adopt(op, |out| f(out, &raw mut second.0, stream))?;
    Ok((first, checked(op, second.into_array(op)?)?))
}

/// Runs a call that fills a string.
pub(crate) fn string(
    op: &'static str,
    f: impl FnOnce(*mut sys::mlx_string) -> c_int,
) -> Result<String> {
    let _guard = enter(op)?;
    clear();
    // SAFETY: the call has no arguments. Null is checked below through the data pointer.
    let mut out = unsafe { sys::mlx_string_new() };
    let rc = f(&raw mut out);
    exit::after(op);
    let text = if rc == 0 {
        // SAFETY: `out` is a live string handle; its data pointer may be null when it is empty.
        let data = unsafe { sys::mlx_string_data(out) };
        if data.is_null() {
            Some(String::new())
        } else {
            // SAFETY: non-null data is NUL-terminated and lives until the handle is freed below.
            Some(
                unsafe { CStr::from_ptr(data) }
                    .to_string_lossy()
                    .into_owned(),
            )
        }
    } else {
        None
    };
    // SAFETY: the handle is owned here and not used again.
    unsafe { sys::mlx_string_free(out) };
    text.ok_or_else(|| take_error(op))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_is_stripped_only_when_it_is_one() {
        assert_eq!(strip_location("bad shape at /x/ops.cpp:12"), "bad shape");
        assert_eq!(strip_location("look at this: 12"), "look at this: 12");
        assert_eq!(strip_location("plain"), "plain");
    }

    #[test]
    fn refused_memory_has_its_kind() {
        for message in [
            "[HostOp] the system has no 4096 bytes of memory",
            "[malloc] Unable to allocate 4096 bytes.",
            "std::bad_alloc",
        ] {
            assert_eq!(kind_of(message), ErrorKind::OutOfMemory, "{message}");
        }
        assert_eq!(kind_of("[reshape] Cannot reshape"), ErrorKind::Mlx);
    }

    #[test]
    fn the_handler_survives_null_and_invalid_text() {
        on_error(std::ptr::null(), std::ptr::null_mut());
        assert!(take_error("t").message().contains("without a message"));
        let bytes = [0xffu8, 0xfe, 0];
        on_error(bytes.as_ptr().cast(), std::ptr::null_mut());
        assert!(!take_error("t").message().is_empty());
    }

    #[test]
    fn a_panic_inside_the_handler_does_not_cross_into_c() {
        // If the slot is borrowed, the handler cannot store its message. It must neither panic nor
        // abort.
        MESSAGE.with(|slot| {
            let _held = slot.borrow_mut();
            on_error(c"text".as_ptr(), std::ptr::null_mut());
        });
    }

    #[test]
    fn every_error_channel_becomes_an_error() {
        // A status.
        let e = status("status", || 1).unwrap_err();
        assert_eq!((e.kind(), e.op()), (ErrorKind::Mlx, "status"));
        assert!(e.message().contains("without a message"));
        // A null handle with status 0.
        let e = adopt("null", |_| 0).unwrap_err();
        assert!(e.message().contains("no array"));
        // A failing call that returns a string.
        assert!(string("string", |_| 2).is_err());
        // An old message must not appear in a later failure.
        on_error(c"stale".as_ptr(), std::ptr::null_mut());
        assert!(
            !status("later", || 1)
                .unwrap_err()
                .message()
                .contains("stale")
        );
    }

    #[test]
    fn a_result_beside_a_failing_status_is_freed() {
        // Under the lock, no concurrent test creates or frees a handle.
        let _guard = lock();
        let before = live();
        let e = adopt("both", |out| {
            // SAFETY: `out` is writable. The guard under test owns the new handle.
            unsafe { *out = sys::mlx_array_new_int(3) };
            1
        });
        assert!(e.is_err());
        assert_eq!(live(), before);
    }
}
