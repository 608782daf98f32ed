//! Compiled functions: they are traced once per argument signature, then replayed. This file also
//! decides where MLX may generate native code.

use std::cell::Cell;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use mlx_sys as sys;
use parking_lot::Mutex;

use super::compile_caches;
use crate::array::Array;
use crate::call;
use crate::closure::{self, Closure, ClosureError, Function, Payload};
use crate::deadlock;
use crate::device::DeviceKind;
use crate::error::{Error, ErrorKind, Result};
use crate::stack;
use crate::stream;

/// The steps that [`compile`] performs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompileMode {
    /// No step. Compiled functions run as if they were not compiled.
    Disabled,
    /// The graph is cached and fused, but not simplified.
    NoSimplify,
    /// The graph is cached and simplified, but not fused. On the CPU this is the effect of all
    /// modes except `Disabled`, unless [`allow_cpu_jit`] was called.
    NoFuse,
    /// The graph is cached and simplified, and element-wise operations are fused into one kernel.
    Enabled,
}

impl CompileMode {
    const ALL: [Self; 4] = [
        Self::Disabled,
        Self::NoSimplify,
        Self::NoFuse,
        Self::Enabled,
    ];

    fn raw(self) -> sys::mlx_compile_mode {
        match self {
            CompileMode::Disabled => sys::mlx_compile_mode__MLX_COMPILE_MODE_DISABLED,
            CompileMode::NoSimplify => sys::mlx_compile_mode__MLX_COMPILE_MODE_NO_SIMPLIFY,
            CompileMode::NoFuse => sys::mlx_compile_mode__MLX_COMPILE_MODE_NO_FUSE,
            CompileMode::Enabled => sys::mlx_compile_mode__MLX_COMPILE_MODE_ENABLED,
        }
    }
}

const UNSET: u8 = u8::MAX;

/// The index in `CompileMode::ALL` of the requested mode.
static MODE: AtomicU8 = AtomicU8::new(UNSET);
static CPU_JIT: AtomicBool = AtomicBool::new(false);
/// The number of traces in progress. It is changed only with the lock held.
static TRACING: AtomicUsize = AtomicUsize::new(0);

/// The requested mode. It is initially [`CompileMode::Enabled`], or [`CompileMode::Disabled`] if
/// the environment variable `MLX_DISABLE_COMPILE` is set, as in MLX.
///
/// ```
/// use mlx_rs_core::transforms::{CompileMode, compile_mode, set_compile_mode};
/// set_compile_mode(CompileMode::NoSimplify);
/// assert_eq!(compile_mode(), CompileMode::NoSimplify);
/// # set_compile_mode(CompileMode::Enabled);
/// ```
#[must_use]
pub fn compile_mode() -> CompileMode {
    match MODE.load(Ordering::Relaxed) {
        UNSET if std::env::var_os("MLX_DISABLE_COMPILE").is_some() => CompileMode::Disabled,
        UNSET => CompileMode::Enabled,
        i => CompileMode::ALL[usize::from(i) % CompileMode::ALL.len()],
    }
}

/// Sets the mode for all functions and threads. Earlier traces stay unchanged until
/// [`compile_clear_cache`].
///
/// ```
/// use mlx_rs_core::transforms::{CompileMode, compile_mode, set_compile_mode};
/// set_compile_mode(CompileMode::NoFuse);
/// assert_eq!(compile_mode(), CompileMode::NoFuse);
/// # set_compile_mode(CompileMode::Enabled);
/// ```
pub fn set_compile_mode(mode: CompileMode) {
    MODE.store(mode as u8, Ordering::Relaxed);
}

/// Turns compilation off: [`set_compile_mode`] with [`CompileMode::Disabled`]. Mirrors
/// `mx.disable_compile`.
///
/// ```
/// use mlx_rs_core::transforms::{CompileMode, compile_mode, disable_compile, enable_compile};
/// disable_compile();
/// assert_eq!(compile_mode(), CompileMode::Disabled);
/// # enable_compile();
/// ```
pub fn disable_compile() {
    set_compile_mode(CompileMode::Disabled);
}

/// Turns compilation on: [`set_compile_mode`] with [`CompileMode::Enabled`]. Mirrors
/// `mx.enable_compile`.
///
/// ```
/// use mlx_rs_core::transforms::{CompileMode, compile_mode, enable_compile};
/// enable_compile();
/// assert_eq!(compile_mode(), CompileMode::Enabled);
/// ```
pub fn enable_compile() {
    set_compile_mode(CompileMode::Enabled);
}

/// Drops all traces, so that every compiled function is traced again at its next call.
///
/// ```
/// mlx_rs_core::transforms::compile_clear_cache()?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] inside a function that is being traced, because the trace in progress would
/// be dropped.
#[doc(alias = "mlx_detail_compile_clear_cache")]
pub fn compile_clear_cache() -> Result<()> {
    const OP: &str = "compile_clear_cache";
    closure::run_here(OP, || {
        if TRACING.load(Ordering::Relaxed) > 0 {
            return Err(Error::new(
                ErrorKind::Value,
                OP,
                "a function is being traced; clear the cache outside of compiled functions",
            ));
        }
        // No trace is in progress, so no entry is in use.
        compile_caches::clear()
    })
}

/// Allows compiled functions to use native code on the CPU, for the rest of the process.
///
/// MLX does this by writing C++ into `mlx/<version>/cpu` below the directory for temporary files.
/// It runs the system's C++ compiler and loads the resulting library, or loads an existing library.
/// If others can write to that directory, this would run their code with your permissions. So this
/// crate does it only on request, and requires a private directory. Start the program with one:
///
/// ```text
/// TMPDIR=$(mktemp -d) program
/// ```
///
/// ```
/// use mlx_rs_core::{ErrorKind, transforms::allow_cpu_jit};
/// // Usually /tmp, which everybody can write to.
/// if let Err(e) = allow_cpu_jit() {
///     assert_eq!(e.kind(), ErrorKind::Value);
/// }
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] unless the directory for temporary files (`TMPDIR`, otherwise `/tmp`)
/// belongs to this user, is inaccessible to others, and is below directories that others cannot
/// change; [`ErrorKind::Unsupported`] where that cannot be determined.
pub fn allow_cpu_jit() -> Result<()> {
    let dir = temporary_directory();
    private(&dir).map_err(|why| {
        Error::new(
            ErrorKind::Value,
            "allow_cpu_jit",
            format!(
                "MLX would load native code from {}, {why}; start the process with TMPDIR set to a \
                 directory of its own, such as mktemp -d makes",
                dir.display()
            ),
        )
    })?;
    CPU_JIT.store(true, Ordering::Relaxed);
    Ok(())
}

/// The temporary directory. Variables are searched in the order of C++'s `temp_directory_path`.
fn temporary_directory() -> PathBuf {
    ["TMPDIR", "TMP", "TEMP", "TEMPDIR"]
        .into_iter()
        .find_map(std::env::var_os)
        .map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

/// Checks that no other user can enter `dir` or replace it; otherwise returns the reason.
#[cfg(unix)]
fn private(dir: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;

    const STICKY: u32 = 0o1000;
    let dir = dir
        .canonicalize()
        .map_err(|e| format!("which cannot be read ({e})"))?;
    let me = own_uid(&dir).map_err(|e| format!("which cannot be written to ({e})"))?;
    let metadata = |path: &Path| {
        path.symlink_metadata()
            .map_err(|e| format!("below {}, which cannot be read ({e})", path.display()))
    };
    let meta = metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != me {
        return Err(String::from("which is not a directory of this user"));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(format!(
            "which others can enter (mode {:o}, must be 700)",
            meta.mode() & 0o7777
        ));
    }
    for parent in dir.ancestors().skip(1) {
        let meta = metadata(parent)?;
        let others_write = meta.mode() & 0o022 != 0 && meta.mode() & STICKY == 0;
        if others_write || (meta.uid() != me && meta.uid() != 0) {
            return Err(format!(
                "below {}, which others can change",
                parent.display()
            ));
        }
    }
    Ok(())
}

/// The ID of the user who owns files created by this process.
#[cfg(unix)]
fn own_uid(dir: &Path) -> std::io::Result<u32> {
    use std::os::unix::fs::MetadataExt;

    let path = dir.join(format!(".rust-mlx-{}", std::process::id()));
    // `create_new` does not follow links.
    let file = std::fs::File::create_new(&path)?;
    let uid = file.metadata().map(|m| m.uid());
    std::fs::remove_file(&path)?;
    uid
}

#[cfg(not(unix))]
fn private(_dir: &Path) -> Result<(), String> {
    Err(String::from(
        "and this system does not say who can change it",
    ))
}

/// Whether fusing is disabled. MLX decides about fusing by stream. So one CPU stream anywhere in
/// the process disables it, because its operations may be part of any graph.
fn hold_back() -> bool {
    stream::cpu_in_use() && !CPU_JIT.load(Ordering::Relaxed)
}

/// The mode in use: the requested one, but without native code for the CPU. `NoSimplify` would
/// fuse, too.
fn effective_mode() -> CompileMode {
    match compile_mode() {
        CompileMode::Disabled => CompileMode::Disabled,
        _ if hold_back() => CompileMode::NoFuse,
        mode => mode,
    }
}

/// Sets the mode in MLX. Call with the lock held.
fn set_raw_mode(mode: CompileMode) -> Result<()> {
    // SAFETY: the argument is a number of the enumeration.
    call::status(OP, || unsafe { sys::mlx_set_compile_mode(mode.raw()) })
}

const OP: &str = "compile";

/// A function that is traced once per argument signature and then replayed; made by [`compile`].
/// Dropping it drops its traces.
#[doc(alias("mlx_detail_compile", "mlx_detail_compile_erase"))]
pub struct Compiled<E> {
    function: Arc<Payload<Function>>,
    shapeless: bool,
    /// One trace per stream, because traced operations contain their stream.
    traces: Mutex<Vec<Arc<Trace>>>,
    error: PhantomData<fn() -> E>,
}

thread_local! {
    /// Whether MLX needs to trace, which needs more stack. It is set during a call on the current
    /// stack.
    static NEEDS_STACK: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Adds an operation after each output that is a scalar constant. MLX merges equal scalars of a
/// graph, and then loses those that are outputs.
fn keep_constants(outputs: &mut [Array]) -> Result<()> {
    for output in outputs.iter_mut().filter(|output| output.ndim() == 0) {
        if output.is_computed()? {
            *output = output.contiguous()?;
        }
    }
    Ok(())
}

/// The compiled closure of one stream. The address of this value is its key in MLX's cache.
struct Trace {
    stream: (DeviceKind, i32),
    busy: AtomicBool,
    closure: Closure,
}

// SAFETY: the closure handle is only used and freed with the lock held.
unsafe impl Send for Trace {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for Trace {}

impl Trace {
    fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn call(&self, args: &[Array]) -> Result<Vec<Array>> {
        compile_caches::prepare()?;
        self.closure.apply(OP, args)
    }

    /// Replays on the current stack, or traces on a stack that is large enough.
    fn apply(&self, args: &[Array]) -> Result<Vec<Array>> {
        let before = NEEDS_STACK.replace(Some(false));
        let mut result = self.call(args);
        if NEEDS_STACK.replace(before) == Some(true) {
            closure::forget_failure();
            // After a failure, MLX keeps an incomplete entry without arguments. Only a call without
            // arguments would find it.
            if args.is_empty() {
                self.erase();
            }
            result = stack::grown(|| {
                let before = NEEDS_STACK.replace(None);
                let result = self.call(args);
                NEEDS_STACK.set(before);
                result
            });
        }
        if result.is_err() {
            // MLX keeps the incomplete entry and would use it, so it is erased.
            self.erase();
        }
        result
    }

    /// Removes this trace's entries from MLX's cache.
    fn erase(&self) {
        let Some(_guard) = call::lock_to_free() else {
            return;
        };
        // If this fails, the entry remains but is never used. A trace in progress borrows `self`,
        // so it is not erased here.
        let _ = compile_caches::erase(self.id());
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.erase();
    }
}

/// Marks a call that may trace. The mark ends with this value.
struct Tracing<'a>(&'a AtomicBool);

impl<'a> Tracing<'a> {
    fn start(busy: &'a AtomicBool) -> Self {
        busy.store(true, Ordering::Relaxed);
        TRACING.fetch_add(1, Ordering::Relaxed);
        Self(busy)
    }
}

impl Drop for Tracing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
        TRACING.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<E: ClosureError> Compiled<E> {
    fn new<F>(f: F, shapeless: bool) -> Self
    where
        F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    {
        let function: Function = Box::new(move |x| {
            let tracing = TRACING.load(Ordering::Relaxed) > 0;
            if tracing && NEEDS_STACK.get() == Some(false) && !stack::is_large() {
                NEEDS_STACK.set(Some(true));
                return Err(Error::new(ErrorKind::Mlx, OP, "a trace needs a larger stack").into());
            }
            let mut outputs = closure::guarded(|| f(x))?;
            if tracing {
                keep_constants(&mut outputs)?;
                stack::check(OP, &outputs, x)?;
            }
            // The function may have been the first to use the CPU. MLX fuses after this point, so
            // the mode is checked again.
            if TRACING.load(Ordering::Relaxed) > 0 && hold_back() {
                set_raw_mode(CompileMode::NoFuse)?;
            }
            Ok(outputs)
        });
        Self {
            function: Payload::new(function),
            shapeless,
            traces: Mutex::new(Vec::new()),
            error: PhantomData,
        }
    }

    /// Calls the function.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::compile};
    /// let f = compile(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) });
    /// assert_eq!(f.call(&[array!(3.0)?])?[0].item::<f32>()?, 9.0); // traced
    /// assert_eq!(f.call(&[array!(4.0)?])?[0].item::<f32>()?, 16.0); // replayed
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the function; MLX's message when it reads values while it is traced. After an
    /// error the trace is dropped, and the next call traces again.
    pub fn call(&self, args: &[Array]) -> Result<Vec<Array>, E> {
        closure::run_here(OP, || {
            // The stream comes first: the call may create the default CPU stream, on which the mode
            // depends.
            let stream = stream::current_id()?;
            let mode = effective_mode();
            if mode == CompileMode::Disabled {
                return self.plainly(args);
            }
            let trace = self.trace(stream)?;
            if trace.busy.load(Ordering::Relaxed) {
                // Inside its own trace, the function runs directly. MLX would otherwise grow a list
                // while it refers to one of the list's entries.
                return self.plainly(args);
            }
            let _tracing = Tracing::start(&trace.busy);
            set_raw_mode(mode)?;
            trace.apply(args)
        })
    }

    /// Runs the function itself, without a trace.
    fn plainly(&self, args: &[Array]) -> Result<Vec<Array>> {
        let _inside = deadlock::inside();
        (self.function.body)(args).map_err(closure::fail)
    }

    /// The trace for `stream`, created at the first call.
    fn trace(&self, stream: (DeviceKind, i32)) -> Result<Arc<Trace>> {
        let mut traces = self.traces.lock();
        if let Some(trace) = traces.iter().find(|t| t.stream == stream) {
            return Ok(Arc::clone(trace));
        }
        let function = Closure::new(Arc::clone(&self.function))?;
        let mut trace = Arc::new(Trace {
            stream,
            busy: AtomicBool::new(false),
            closure: Closure::empty(),
        });
        let id = trace.id();
        // Each call decides the mode. Here MLX must not skip compilation.
        set_raw_mode(CompileMode::NoFuse)?;
        if let Some(trace) = Arc::get_mut(&mut trace) {
            call::status(OP, || {
                // SAFETY: the result is writable and null, the closure is live, and there are no
                // constants. `id` is the address of a value that lives as long as the compiled
                // closure.
                unsafe {
                    sys::mlx_detail_compile(
                        trace.closure.out(),
                        function.raw(),
                        id,
                        self.shapeless,
                        std::ptr::null(),
                        0,
                    )
                }
            })?;
        }
        traces.push(Arc::clone(&trace));
        Ok(trace)
    }
}

/// Returns a function that records the operations of `f` at its first call. Further calls with
/// arguments of equal shapes and types replay the operations, without running `f`.
///
/// `f` must be pure. It runs once per argument signature (and stream), so it prints or counts only
/// then, and its captures become constants of the graph. During the trace, the arguments have no
/// values, so `f` cannot read them. Each new signature adds a trace, which is kept until the
/// compiled function is dropped or [`compile_clear_cache`] is called. Mirrors `mx.compile`.
///
/// On a GPU, element-wise operations are fused into one kernel. On the CPU, fusing would write,
/// compile and load C++ code in the directory for temporary files. So on the CPU the graph is
/// cached and simplified, but not fused, unless [`allow_cpu_jit`] was called. If a process ever
/// used a CPU [`Stream`](crate::Stream), these rules of the CPU apply to it.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::compile};
/// # fn main() -> Result<()> {
/// let gelu = compile(|x: &[Array]| -> Result<Vec<Array>> {
///     let half = Array::scalar(0.5f32)?;
///     let root = Array::scalar(0.5f32.sqrt())?;
///     let cdf = x[0].multiply(&root)?.erf()?.add(&Array::scalar(1.0f32)?)?.multiply(&half)?;
///     Ok(vec![x[0].multiply(&cdf)?])
/// });
/// let x = Array::vector(&[0.0f32, 100.0])?;
/// assert_eq!(gelu.call(&[x])?[0].to_vec::<f32>()?, [0.0, 100.0]);
/// # Ok(()) }
/// ```
pub fn compile<F, E>(f: F) -> Compiled<E>
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    E: ClosureError,
{
    Compiled::new(f, false)
}

/// [`compile`] with one trace for all shapes that have the same number of axes. Mirrors
/// `mx.compile(..., shapeless=True)`.
///
/// # Safety
/// A replay checks nothing. The recorded operations run on the new shapes, with the sizes that the
/// trace contains. Every later call must have shapes for which `f` itself would succeed and record
/// the same operations with the same numbers. Otherwise the replay reads out of bounds: for
/// example, a matrix product whose inner lengths differ, or a gather that was clamped to a length
/// that is now shorter. A matrix product that is empty now, but was not when traced, writes out of
/// bounds.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::compile_shapeless};
/// # fn main() -> Result<()> {
/// // SAFETY: element-wise functions of one argument take every shape.
/// let f = unsafe { compile_shapeless(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].exp()?]) }) };
/// f.call(&[Array::vector(&[0.0f32])?])?;
/// assert_eq!(f.call(&[Array::vector(&[0.0f32, 0.0])?])?[0].to_vec::<f32>()?, [1.0, 1.0]);
/// # Ok(()) }
/// ```
pub unsafe fn compile_shapeless<F, E>(f: F) -> Compiled<E>
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    E: ClosureError,
{
    Compiled::new(f, true)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_a_directory_that_nobody_else_can_enter_or_replace_is_private() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("d");
        std::fs::create_dir(&dir).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        for (bits, private_then) in [
            (0o700, true),
            (0o701, false),
            (0o750, false),
            (0o1777, false),
        ] {
            mode(&dir, bits);
            assert_eq!(private(&dir).is_ok(), private_then, "{bits:o}");
        }
        mode(&dir, 0o700);
        // A user who can rename the parent directory can replace this one.
        mode(root.path(), 0o777);
        assert!(private(&dir).unwrap_err().contains("others can change"));
        mode(root.path(), 0o1777);
        assert_eq!(private(&dir), Ok(()));
        mode(root.path(), 0o700);
        // The target of the link is checked, not the link.
        let link = root.path().join("l");
        symlink(&dir, &link).unwrap();
        assert_eq!(private(&link), Ok(()));
        mode(&dir, 0o755);
        assert!(private(&link).is_err());
        let file = root.path().join("f");
        std::fs::write(&file, "").unwrap();
        assert!(private(&file).is_err());
        assert!(private(&root.path().join("none")).is_err());
        // The check must leave no file.
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }
}
