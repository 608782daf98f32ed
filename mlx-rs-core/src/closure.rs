//! Rust functions that MLX calls: how they are passed to C, and how their errors come back.
//! `transforms/` uses this module.
//!
//! It follows three rules:
//!
//! - **Ownership.** A function is passed to C in one reference-counted box with one destructor. C
//!   frees it exactly once, also if creating the closure fails. A function that is borrowed only
//!   for a call ([`scoped`]) is reached through a slot that is emptied after the call. If MLX keeps
//!   the closure longer, calling it is an error instead of a use of a dangling pointer.
//! - **Unwinding.** Nothing unwinds through C. The trampoline catches a panic, stores it for this
//!   thread and reports a failure to MLX. [`run`] resumes the panic when the C call has returned.
//! - **Errors.** An error that a function returns is stored in the same way, with its type, and
//!   [`run`] returns it. MLX's own message "returned a non-zero value" is dropped.
//!
//! Threads: MLX calls closures on the thread that called the transform, which has the lock. MLX's
//! stream threads never call a closure, but may drop the last reference to a graph node that owns
//! one. User values must not be dropped on a thread that MLX waits for. So such a payload is set
//! aside, and the next thread that calls MLX drops it.

mod custom;
mod payload;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use mlx_cpu_kernels::drop_payload;
use mlx_sys as sys;

pub(crate) use custom::{CustomVjp, CustomVmap, KwargsClosure, Vjp, Vmap};
use payload::release;
pub(crate) use payload::{Payload, drain, drop_discarded, free, live, part_with};

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::deadlock;
use crate::error::{Error, ErrorKind, Result};
use crate::stack;

/// The error type of functions that are passed to a transform.
///
/// Implemented for every type that converts from [`Error`](crate::Error) and into a boxed standard
/// error. Examples are [`Error`](crate::Error) itself, `Box<dyn Error + Send + Sync>`,
/// `anyhow::Error`, and error enums with a variant for this crate's error.
pub trait ClosureError:
    From<Error> + Into<Box<dyn std::error::Error + Send + Sync>> + 'static
{
}

impl<E> ClosureError for E where
    E: From<Error> + Into<Box<dyn std::error::Error + Send + Sync>> + 'static
{
}

/// The reason why a function passed to MLX failed.
pub(crate) enum Failure {
    Panic(Box<dyn Any + Send>),
    Error(Raised),
}

/// Any standard error.
type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// An error value whose type is erased, with a conversion to a standard error.
pub(crate) struct Raised {
    value: Box<dyn Any>,
    boxed: fn(Box<dyn Any>) -> Option<BoxedError>,
}

impl Raised {
    fn new<E: ClosureError>(error: E) -> Self {
        Self {
            value: Box::new(error),
            boxed: |value| value.downcast::<E>().ok().map(|e| (*e).into()),
        }
    }

    /// Returns the error value if it has type `E`; otherwise wraps it in an error of type `E`.
    fn surface<E: ClosureError>(self, op: &'static str) -> E {
        let value = match self.value.downcast::<E>() {
            Ok(error) => return *error,
            Err(value) => value,
        };
        let value = match value.downcast::<Error>() {
            Ok(error) => return E::from(*error),
            Err(value) => value,
        };
        match (self.boxed)(value) {
            Some(source) => E::from(Error::callback(op, source)),
            // Unreachable, because the function's error type is that of the value.
            None => E::from(Error::new(ErrorKind::Callback, op, "a function failed")),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Error(Raised::new(error))
    }
}

thread_local! {
    /// The failure of the innermost function, until the surrounding C call returns.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

thread_local! {
    /// The nesting depth of transform functions on this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Whether the caller is inside a traced function, where an array may be differentiated.
pub(crate) fn inside() -> bool {
    DEPTH.get() > 0
}

fn swap_failure(new: Option<Failure>) -> Option<Failure> {
    // The slot may already be destroyed during thread shutdown.
    FAILURE
        .try_with(|slot| {
            slot.try_borrow_mut()
                .ok()
                .and_then(|mut s| std::mem::replace(&mut *s, new))
        })
        .ok()
        .flatten()
}

/// Runs a transform with enough stack space. `f` calls C, which may call user functions. If a user
/// function panicked, the panic is resumed here; if it failed, its error is returned, whatever C
/// returned.
pub(crate) fn run<T, E: ClosureError>(
    op: &'static str,
    f: impl FnOnce() -> Result<T>,
) -> Result<T, E> {
    stack::grown(|| run_here(op, f))
}

/// Like [`run`], but on the current stack, for calls that walk no graph.
pub(crate) fn run_here<T, E: ClosureError>(
    op: &'static str,
    f: impl FnOnce() -> Result<T>,
) -> Result<T, E> {
    let _guard = call::enter(op)?;
    drain();
    swap_failure(None);
    let result = f();
    match swap_failure(None) {
        Some(Failure::Panic(payload)) => {
            drop(result);
            resume_unwind(payload)
        }
        Some(Failure::Error(raised)) => Err(raised.surface(op)),
        None => result.map_err(E::from),
    }
}

/// Calls C inside a callback. Like [`run`], but returns a failure instead of resuming it.
pub(crate) fn nested<T>(f: impl FnOnce() -> Result<T>) -> Result<T, Failure> {
    swap_failure(None);
    let result = f();
    match swap_failure(None) {
        Some(failure) => Err(failure),
        None => Ok(result?),
    }
}

/// Drops the stored failure, because the caller tries another way.
pub(crate) fn forget_failure() {
    drop(swap_failure(None));
}

/// Runs a user function. A panic becomes a failure.
pub(crate) fn guarded<T, E: ClosureError>(f: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
    // AssertUnwindSafe: the panic is resumed in the caller of the transform, so `f` is in the same
    // state as after any other panic.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Failure::Error(Raised::new(error))),
        Err(payload) => Err(Failure::Panic(payload)),
    }
}

/// Stores a failure that did not pass through C, so that the surrounding [`run`] returns it.
/// Returns a placeholder error that callers propagate up to that [`run`].
pub(crate) fn fail(failure: Failure) -> Error {
    drop(swap_failure(Some(failure)));
    Error::new(ErrorKind::Callback, "closure", "a function failed")
}

/// Ends every trampoline: returns a status to C, and stores the failure for [`run`].
fn finish(f: impl FnOnce() -> Result<(), Failure>) -> c_int {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _leave = Leave;
    let _inside = deadlock::inside();
    let failure = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(payload) => Failure::Panic(payload),
    };
    // The replaced failure may contain values whose drop panics.
    let replace = AssertUnwindSafe(|| drop(swap_failure(Some(failure))));
    if let Err(payload) = catch_unwind(replace) {
        drop_payload(payload);
    }
    1
}

/// The result of a function, as trampolines need it.
pub(crate) type Outcome = Result<Vec<Array>, Failure>;

/// A function from arrays to arrays, in the form that C calls.
pub(crate) type Function = Box<dyn Fn(&[Array]) -> Outcome + Send>;

unsafe extern "C" fn call_function(
    res: *mut sys::mlx_vector_array,
    input: sys::mlx_vector_array,
    payload: *mut c_void,
) -> c_int {
    finish(|| {
        // SAFETY: the pointer is the payload of a closure made by `Closure::new`, which lives while
        // it is called.
        let payload = unsafe { &*payload.cast::<Payload<Function>>() };
        let inputs = call::read_vec("closure", input)?;
        let outputs = (payload.body)(&inputs)?;
        let vec = ArrayVec::new("closure", &outputs)?;
        // SAFETY: `res` is writable and contains no vector yet. C takes ownership of the vector.
        unsafe { *res = vec.into_raw() };
        Ok(())
    })
}

/// A C closure from arrays to arrays.
pub(crate) struct Closure(sys::mlx_closure);

impl Closure {
    pub(crate) fn new(payload: Arc<Payload<Function>>) -> Result<Self> {
        let _guard = call::enter("closure")?;
        let raw = Arc::into_raw(payload);
        // SAFETY: trampoline and destructor match the payload. Ownership of the payload moves into
        // the closure. If MLX fails, it calls the destructor itself.
        let cls = unsafe {
            sys::mlx_closure_new_func_payload(
                Some(call_function),
                raw.cast_mut().cast(),
                Some(release::<Function>),
            )
        };
        Self::checked(cls)
    }

    /// An out-parameter: null until a call fills it.
    pub(crate) fn empty() -> Self {
        Self(sys::mlx_closure {
            ctx: std::ptr::null_mut(),
        })
    }

    fn checked(cls: sys::mlx_closure) -> Result<Self> {
        if cls.ctx.is_null() {
            return Err(no_closure());
        }
        Ok(Self(cls))
    }

    pub(crate) fn raw(&self) -> sys::mlx_closure {
        self.0
    }

    pub(crate) fn out(&mut self) -> *mut sys::mlx_closure {
        &raw mut self.0
    }

    /// Calls the closure.
    pub(crate) fn apply(&self, op: &'static str, args: &[Array]) -> Result<Vec<Array>> {
        let args = ArrayVec::new(op, args)?;
        let mut out = ArrayVec::empty();
        call::status(op, || {
            // SAFETY: `out` is writable, closure and vector are live.
            unsafe { sys::mlx_closure_apply(out.out(), self.0, args.raw()) }
        })?;
        out.to_arrays(op)
    }
}

impl Drop for Closure {
    fn drop(&mut self) {
        if !self.0.ctx.is_null() {
            let Some(_guard) = call::lock_to_free() else {
                return;
            };
            // SAFETY: the handle is owned here; MLX keeps its own references.
            unsafe { sys::mlx_closure_free(self.0) };
        }
    }
}

fn no_closure() -> Error {
    Error::new(ErrorKind::Mlx, "closure", "MLX could not make a closure")
}

/// A function borrowed for a call, with its lifetime erased.
type Borrowed = *mut (dyn FnMut(&[Array]) -> Outcome + 'static);

/// A borrowed function, at an address that stays valid after the borrow ends.
struct Slot(Cell<Option<Borrowed>>);

// SAFETY: only the thread that filled the slot dereferences the pointer. `scoped` holds the lock
// from the time it fills the slot until it empties the slot, and closures are called only with the
// lock held.
unsafe impl Send for Slot {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for Slot {}

/// Makes `f` callable from C during `body`.
pub(crate) fn scoped<R>(
    f: &mut dyn FnMut(&[Array]) -> Outcome,
    body: impl FnOnce(&Closure) -> Result<R>,
) -> Result<R> {
    scoped_function(f, |function| {
        let closure = Closure::new(Payload::new(function))?;
        body(&closure)
    })
}

/// Like [`scoped`], for a function whose arguments are followed by the values of `keys`.
pub(crate) fn scoped_kwargs<R>(
    f: &mut dyn FnMut(&[Array]) -> Outcome,
    keys: Vec<CString>,
    body: impl FnOnce(&KwargsClosure) -> Result<R>,
) -> Result<R> {
    scoped_function(f, |function| {
        let closure = KwargsClosure::new((function, keys))?;
        body(&closure)
    })
}

fn scoped_function<R>(
    f: &mut dyn FnMut(&[Array]) -> Outcome,
    body: impl FnOnce(Function) -> Result<R>,
) -> Result<R> {
    struct Empty(Arc<Slot>);
    impl Drop for Empty {
        fn drop(&mut self) {
            self.0.0.set(None);
        }
    }
    let _guard = call::enter("closure")?;
    let pointer: *mut (dyn FnMut(&[Array]) -> Outcome + '_) = f;
    // SAFETY: only the lifetime is erased. `Empty` clears the slot before the lifetime ends.
    let pointer = unsafe {
        std::mem::transmute::<*mut (dyn FnMut(&[Array]) -> Outcome + '_), Borrowed>(pointer)
    };
    let slot = Arc::new(Slot(Cell::new(Some(pointer))));
    let empty = Empty(slot);
    let slot = Arc::clone(&empty.0);
    let function: Function = Box::new(move |inputs| {
        let slot: &Slot = &slot;
        let Some(pointer) = slot.0.take() else {
            return Err(Error::new(
                ErrorKind::Value,
                "closure",
                "the function was called again inside itself, or after its transform",
            )
            .into());
        };
        // SAFETY: the slot is full, so `scoped` is still running and `f` is borrowed only there.
        // The slot is empty during the call, so this is the only use of `f`.
        let outcome = unsafe { (*pointer)(inputs) };
        slot.0.set(Some(pointer));
        outcome
    });
    body(function)
}
