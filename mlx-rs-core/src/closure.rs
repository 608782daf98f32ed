//! Rust functions called by MLX: their way into C, and the way of their errors back. `transforms/`
//! uses this.
//!
//! It follows three rules:
//!
//! - **Ownership.** A function is passed to C in one reference-counted box with one destructor. C
//!   frees it exactly once, also if making the closure fails. A function borrowed only for a call
//!   ([`scoped`]) is reached through a slot that is emptied after the call. So if MLX keeps the
//!   closure unexpectedly, a call gives an error, not a dangling pointer.
//! - **Unwinding.** Nothing unwinds through C. The trampoline catches a panic, keeps it on this
//!   thread and reports a failure to MLX. [`run`] resumes it when the C call has returned.
//! - **Errors.** An error value returned by a function is kept the same way, with its type, and
//!   [`run`] returns it. MLX's own "returned a non-zero value" is dropped.
//!
//! Threads: MLX calls closures in the thread that called the transform, which holds the lock. MLX's
//! stream threads never call one. They could release the last reference of a graph node that owns
//! one. Such a payload is set aside, and the next thread that calls MLX drops it. User values must
//! not be dropped on a thread that MLX waits for.

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

/// The error type of functions given to a transform.
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

/// The reason why a function given to MLX failed.
pub(crate) enum Failure {
    Panic(Box<dyn Any + Send>),
    Error(Raised),
}

/// Any standard error.
type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// An error value of an erased type, with a conversion to a standard error.
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

    /// The value itself if the types agree, otherwise wrapped.
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
            // Unreachable: the function was made for the type of the value.
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

/// Whether the caller is a function being traced, where an array may be differentiated.
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

/// Runs a transform on a sufficient stack: `f` calls C, which may call our functions. Their panic
/// is resumed here, and their error is returned, independent of C's result.
pub(crate) fn run<T, E: ClosureError>(
    op: &'static str,
    f: impl FnOnce() -> Result<T>,
) -> Result<T, E> {
    stack::grown(|| run_here(op, f))
}

/// As [`run`], on the current stack, for calls that walk no graph.
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

/// Calls C inside a callback: as [`run`], but passes a failure on.
pub(crate) fn nested<T>(f: impl FnOnce() -> Result<T>) -> Result<T, Failure> {
    swap_failure(None);
    let result = f();
    match swap_failure(None) {
        Some(failure) => Err(failure),
        None => Ok(result?),
    }
}

/// Drops a failure after which the caller tries another way.
pub(crate) fn forget_failure() {
    drop(swap_failure(None));
}

/// Runs a user function; a panic becomes a failure.
pub(crate) fn guarded<T, E: ClosureError>(f: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
    // AssertUnwindSafe: the panic is resumed in the caller of the transform, which sees `f` as
    // after any other panic.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Failure::Error(Raised::new(error))),
        Err(payload) => Err(Failure::Panic(payload)),
    }
}

/// Stores a failure that did not come through C, for the surrounding [`run`] to return. The
/// returned error represents it until then.
pub(crate) fn fail(failure: Failure) -> Error {
    drop(swap_failure(Some(failure)));
    Error::new(ErrorKind::Callback, "closure", "a function failed")
}

/// The end of every trampoline: returns a status to C, and stores the failure for [`run`].
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
    // A failure that is replaced may hold values whose drop panics.
    let replace = AssertUnwindSafe(|| drop(swap_failure(Some(failure))));
    if let Err(payload) = catch_unwind(replace) {
        drop_payload(payload);
    }
    1
}

/// The result of a function for its trampoline.
pub(crate) type Outcome = Result<Vec<Array>, Failure>;

/// A function from arrays to arrays, in the form that C calls.
pub(crate) type Function = Box<dyn Fn(&[Array]) -> Outcome + Send>;

unsafe extern "C" fn call_function(
    res: *mut sys::mlx_vector_array,
    input: sys::mlx_vector_array,
    payload: *mut c_void,
) -> c_int {
    finish(|| {
        // SAFETY: the payload of a closure made by `Closure::new`, alive while the closure is
        // called.
        let payload = unsafe { &*payload.cast::<Payload<Function>>() };
        let inputs = call::read_vec("closure", input)?;
        let outputs = (payload.body)(&inputs)?;
        let vec = ArrayVec::new("closure", &outputs)?;
        // SAFETY: `res` is writable and holds no vector yet; C takes over the one written.
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
        // SAFETY: trampoline and destructor match the payload, whose ownership moves into the
        // closure. When MLX fails it calls the destructor itself.
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

/// A function borrowed for a call, without its lifetime.
type Borrowed = *mut (dyn FnMut(&[Array]) -> Outcome + 'static);

/// A borrowed function behind an address that outlives the borrow.
struct Slot(Cell<Option<Borrowed>>);

// SAFETY: only the thread that filled the slot follows the pointer. `scoped` holds the lock from
// filling to emptying, and closures are called with the lock held.
unsafe impl Send for Slot {}
// SAFETY: as for Send.
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

/// As [`scoped`], for a function that gets arguments followed by the values of `keys`.
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
    // SAFETY: only the lifetime is forgotten, and `Empty` clears the slot before it ends.
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
        // SAFETY: the slot is full, so `scoped` is still running and alone borrows `f`. The slot is
        // empty during the call, so this is the only use.
        let outcome = unsafe { (*pointer)(inputs) };
        slot.0.set(Some(pointer));
        outcome
    });
    body(function)
}
