//! Functions in files: export by tracing, and import at the caller's risk.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use inference_formats::atomic::AtomicFile;
use mlx_sys as sys;

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::closure::{
    self, Closure, ClosureError, Failure, Function, KwargsClosure, Outcome, Payload,
};
use crate::error::{Error, ErrorKind, Result};
use crate::stack;

/// Named arguments of an exported function.
pub type Kwargs = BTreeMap<String, Array>;

const EXPORT: &str = "export_function";
const IMPORT: &str = "import_function";

/// Writes the operations of `f` to a file. `f` is traced with arguments of the shapes and types of
/// `args`. Arrays that `f` captures are written as constants. [`ImportedFunction`] (or Python's
/// `mx.import_function`) reads the file. The file is written atomically.
///
/// With `shapeless`, the file supports all shapes with the same number of axes. The caller must
/// then use only shapes for which `f` would succeed. Mirrors `mx.export_function`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{ImportedFunction, export_function}};
/// # fn main() -> Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("square.mlxfn");
/// let x = Array::scalar(3.0f32)?;
/// export_function(&path, |x: &[Array]| -> Result<_> { Ok(vec![x[0].square()?]) }, &[x.clone()], false)?;
/// // SAFETY: the file was written just now, by this version of MLX.
/// let square = unsafe { ImportedFunction::open(&path)? };
/// assert_eq!(square.call(&[x])?[0].item::<f32>()?, 9.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// Errors of `f`; [`ErrorKind::Value`] when the file cannot be written; MLX's message for
/// operations that cannot be exported, such as custom functions and kernels.
#[doc(alias = "mlx_export_function")]
pub fn export_function<F, E>(
    path: impl AsRef<Path>,
    f: F,
    args: &[Array],
    shapeless: bool,
) -> Result<(), E>
where
    F: FnOnce(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let file = Partial::create(path.as_ref())?;
    let mut f = Some(f);
    let mut body = |x: &[Array]| -> Result<Vec<Array>, Failure> {
        let f = f.take().ok_or_else(called_twice)?;
        checked(x, closure::guarded(|| f(x)))
    };
    closure::run::<_, E>(EXPORT, || {
        closure::scoped(&mut body, |function| {
            let args = ArrayVec::new(EXPORT, args)?;
            call::status(EXPORT, || {
                // SAFETY: the path ends in NUL, closure and vector are live.
                unsafe {
                    sys::mlx_export_function(
                        file.c_path.as_ptr(),
                        function.raw(),
                        args.raw(),
                        shapeless,
                    )
                }
            })
        })
    })?;
    Ok(file.keep()?)
}

/// [`export_function`] for a function that also has named arguments.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{ImportedFunction, Kwargs, export_function_kwargs}};
/// # fn main() -> Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("scale.mlxfn");
/// let x = Array::scalar(3.0f32)?;
/// let named = Kwargs::from([("by".to_string(), Array::scalar(2.0f32)?)]);
/// export_function_kwargs(
///     &path,
///     |x: &[Array], named: &Kwargs| -> Result<_> { Ok(vec![x[0].multiply(&named["by"])?]) },
///     &[x.clone()],
///     &named,
///     false,
/// )?;
/// // SAFETY: the file was written just now, by this version of MLX.
/// let scale = unsafe { ImportedFunction::open(&path)? };
/// assert_eq!(scale.call_kwargs(&[x], &named)?[0].item::<f32>()?, 6.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`export_function`]; [`ErrorKind::Value`] for a name that contains a NUL.
#[doc(alias = "mlx_export_function_kwargs")]
pub fn export_function_kwargs<F, E>(
    path: impl AsRef<Path>,
    f: F,
    args: &[Array],
    kwargs: &Kwargs,
    shapeless: bool,
) -> Result<(), E>
where
    F: FnOnce(&[Array], &Kwargs) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let keys = c_keys(EXPORT, kwargs)?;
    let file = Partial::create(path.as_ref())?;
    let mut f = Some(f);
    let mut body = |x: &[Array]| -> Result<Vec<Array>, Failure> {
        let f = f.take().ok_or_else(called_twice)?;
        let (positional, named) = x.split_at(x.len().saturating_sub(kwargs.len()));
        let named: Kwargs = kwargs.keys().cloned().zip(named.iter().cloned()).collect();
        checked(x, closure::guarded(|| f(positional, &named)))
    };
    closure::run::<_, E>(EXPORT, || {
        closure::scoped_kwargs(&mut body, keys.clone(), |function| {
            let args = ArrayVec::new(EXPORT, args)?;
            let map = Map::new(EXPORT, &keys, kwargs)?;
            call::status(EXPORT, || {
                // SAFETY: the path ends in NUL; closure, vector and map are live.
                unsafe {
                    sys::mlx_export_function_kwargs(
                        file.c_path.as_ptr(),
                        KwargsClosure::raw_or_null(Some(function)),
                        args.raw(),
                        map.0,
                        shapeless,
                    )
                }
            })
        })
    })?;
    Ok(file.keep()?)
}

/// Returns the outputs if MLX can walk their graph; otherwise an error.
fn checked(x: &[Array], outputs: Outcome) -> Outcome {
    let outputs = outputs?;
    stack::check(EXPORT, &outputs, x)?;
    Ok(outputs)
}

fn called_twice() -> Error {
    Error::new(
        ErrorKind::Mlx,
        EXPORT,
        "MLX called the function more than once",
    )
}

/// Writes several traces of one function, for arguments with different signatures, to one file.
/// Mirrors `mx.exporter`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{FunctionExporter, ImportedFunction}};
/// # fn main() -> Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("sum.mlxfn");
/// let (one, two) = (Array::vector(&[1.0f32])?, Array::vector(&[1.0f32, 2.0])?);
/// let mut exporter =
///     FunctionExporter::new(&path, |x: &[Array]| -> Result<_> { Ok(vec![x[0].sum(0, false)?]) }, false)?;
/// exporter.export(&[one])?;
/// exporter.export(&[two.clone()])?;
/// exporter.finish()?;
/// // SAFETY: the file was written just now, by this version of MLX.
/// let sum = unsafe { ImportedFunction::open(&path)? };
/// assert_eq!(sum.call(&[two])?[0].item::<f32>()?, 3.0);
/// # Ok(()) }
/// ```
#[doc(alias(
    "mlx_function_exporter_new",
    "mlx_function_exporter_free",
    "mlx_function_exporter_apply"
))]
pub struct FunctionExporter<E> {
    /// Null once it is closed. It is declared before `file`, because its drop writes to that file.
    raw: Exporter,
    file: Partial,
    failed: bool,
    error: PhantomData<fn() -> E>,
}

struct Exporter(sys::mlx_function_exporter);

// SAFETY: the handle is only used and freed with the lock held. The function that it owns is
// `Send`.
unsafe impl Send for Exporter {}

impl Exporter {
    /// Closes the file.
    fn free(&mut self) {
        if !self.0.ctx.is_null() {
            let Some(_guard) = call::lock_to_free() else {
                return;
            };
            // SAFETY: the handle is owned here, and set to null at once.
            unsafe { sys::mlx_function_exporter_free(self.0) };
            self.0.ctx = std::ptr::null_mut();
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.free();
    }
}

impl<E: ClosureError> FunctionExporter<E> {
    /// An exporter of `f` to a new file at `path`. The file exists after [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the file cannot be written.
    pub fn new<F>(path: impl AsRef<Path>, f: F, shapeless: bool) -> Result<Self>
    where
        F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    {
        let file = Partial::create(path.as_ref())?;
        let function: Function = Box::new(move |x| checked(x, closure::guarded(|| f(x))));
        let _guard = call::enter(EXPORT)?;
        let function = Closure::new(Payload::new(function))?;
        let mut raw = sys::mlx_function_exporter {
            ctx: std::ptr::null_mut(),
        };
        call::status(EXPORT, || {
            // SAFETY: the path ends in NUL, and the closure is live. MLX copies both.
            raw = unsafe {
                sys::mlx_function_exporter_new(file.c_path.as_ptr(), function.raw(), shapeless)
            };
            i32::from(raw.ctx.is_null())
        })?;
        Ok(Self {
            raw: Exporter(raw),
            file,
            failed: false,
            error: PhantomData,
        })
    }

    /// Traces the function for arguments with the shapes and types of `args`, and writes the trace.
    ///
    /// # Errors
    /// As [`export_function`]. The file is then unusable, and further calls, including `finish`,
    /// return errors.
    pub fn export(&mut self, args: &[Array]) -> Result<(), E> {
        self.check()?;
        let result = closure::run::<_, E>(EXPORT, || {
            let args = ArrayVec::new(EXPORT, args)?;
            call::status(EXPORT, || {
                // SAFETY: exporter and vector are live.
                unsafe { sys::mlx_function_exporter_apply(self.raw.0, args.raw()) }
            })
        });
        self.failed = result.is_err();
        result
    }

    fn check(&self) -> Result<()> {
        if self.failed {
            return Err(Error::new(
                ErrorKind::Value,
                EXPORT,
                "an export to this file failed before; start again with a new exporter",
            ));
        }
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when an export failed or the file cannot be completed.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        self.raw.free();
        self.file.keep()
    }
}

/// A function read from a file.
///
/// ```no_run
/// use mlx_rs_core::{Array, Result, transforms::ImportedFunction};
/// # fn main() -> Result<()> {
/// // SAFETY: a file of our own build, from the same version of MLX.
/// let f = unsafe { ImportedFunction::open("model.mlxfn")? };
/// let y = f.call(&[Array::scalar(1.0f32)?])?;
/// # Ok(()) }
/// ```
#[doc(alias(
    "mlx_imported_function_new",
    "mlx_imported_function_free",
    "mlx_imported_function_apply",
    "mlx_imported_function_apply_kwargs"
))]
pub struct ImportedFunction(sys::mlx_imported_function);

// SAFETY: the handle is only used and freed with the lock held.
unsafe impl Send for ImportedFunction {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for ImportedFunction {}

impl ImportedFunction {
    /// Reads a file that an export of the same version of MLX wrote. Mirrors `mx.import_function`.
    ///
    /// # Safety
    /// MLX trusts the file: it turns types, shapes, axes, stream numbers and sizes into operations
    /// without checks. So a damaged or forged file causes reads and writes out of bounds when it is
    /// opened or called. The file must be unchanged. It must come from [`export_function`],
    /// [`FunctionExporter`] or Python's counterpart, of this version of MLX, for devices that this
    /// machine has. If it was exported as shapeless, every call must have shapes for which the
    /// exported function would succeed. MLX does not check that either. A matrix product that is
    /// empty only in such a call writes to freed memory. There is no safe variant of this function.
    /// It would have to validate the state of about a hundred kinds of operations, in a format
    /// without a specification.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the file cannot be read, is not an exported function, or is from
    /// another version of MLX; MLX's message when the rest cannot be read.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        check_header(path)?;
        let c_path = c_path(IMPORT, path)?;
        let mut raw = sys::mlx_imported_function {
            ctx: std::ptr::null_mut(),
        };
        call::status(IMPORT, || {
            // SAFETY: the path ends in NUL; the caller guarantees that the content is valid.
            raw = unsafe { sys::mlx_imported_function_new(c_path.as_ptr()) };
            i32::from(raw.ctx.is_null())
        })?;
        Ok(Self(raw))
    }

    /// Calls the function.
    ///
    /// # Errors
    /// MLX's message when the file has no trace for the number, shapes and types of `args`.
    pub fn call(&self, args: &[Array]) -> Result<Vec<Array>> {
        let _guard = call::enter(IMPORT)?;
        let args = ArrayVec::new(IMPORT, args)?;
        let mut out = ArrayVec::empty();
        call::status(IMPORT, || {
            // SAFETY: the result is writable, function and vector are live.
            unsafe { sys::mlx_imported_function_apply(out.out(), self.0, args.raw()) }
        })?;
        out.to_arrays(IMPORT)
    }

    /// Calls the function with named arguments.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::{ImportedFunction, Kwargs, export_function_kwargs}};
    /// # let dir = tempfile::tempdir().unwrap();
    /// let path = dir.path().join("add.mlxfn");
    /// let named = Kwargs::from([("to".to_string(), array!(2.0)?)]);
    /// let add = |x: &[Array], named: &Kwargs| -> Result<Vec<Array>> { Ok(vec![x[0].add(&named["to"])?]) };
    /// export_function_kwargs(&path, add, &[array!(1.0)?], &named, false)?;
    /// // SAFETY: the file was written just now, by this version of MLX.
    /// let add = unsafe { ImportedFunction::open(&path)? };
    /// assert_eq!(add.call_kwargs(&[array!(5.0)?], &named)?[0].item::<f32>()?, 7.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ImportedFunction::call`]; [`ErrorKind::Value`] for a name that contains a NUL.
    pub fn call_kwargs(&self, args: &[Array], kwargs: &Kwargs) -> Result<Vec<Array>> {
        let _guard = call::enter(IMPORT)?;
        let keys = c_keys(IMPORT, kwargs)?;
        let args = ArrayVec::new(IMPORT, args)?;
        let map = Map::new(IMPORT, &keys, kwargs)?;
        let mut out = ArrayVec::empty();
        call::status(IMPORT, || {
            // SAFETY: the result is writable; function, vector and map are live.
            unsafe { sys::mlx_imported_function_apply_kwargs(out.out(), self.0, args.raw(), map.0) }
        })?;
        out.to_arrays(IMPORT)
    }
}

impl Drop for ImportedFunction {
    fn drop(&mut self) {
        let Some(_guard) = call::lock_to_free() else {
            return;
        };
        // SAFETY: the handle is owned here.
        unsafe { sys::mlx_imported_function_free(self.0) };
    }
}

/// Checks that the file begins with this version of MLX: the length of its text as 64 bits, then
/// the text.
fn check_header(path: &Path) -> Result<()> {
    let bad = |why: String| {
        Error::new(
            ErrorKind::Value,
            IMPORT,
            format!("{}: {why}", path.display()),
        )
    };
    let mut file = File::open(path).map_err(|e| bad(e.to_string()))?;
    if !file.metadata().is_ok_and(|m| m.is_file()) {
        return Err(bad(String::from("not a file")));
    }
    let ours = crate::mlx_version()?;
    let mut length = [0; 8];
    let mut version = Vec::new();
    let complete = file.read_exact(&mut length).is_ok() && {
        let length = u64::from_le_bytes(length);
        length <= 64
            && file.take(length).read_to_end(&mut version).is_ok()
            && version.len() as u64 == length
    };
    if !complete || !version.first().is_some_and(u8::is_ascii_digit) || !version.is_ascii() {
        return Err(bad(String::from("not a function exported by MLX")));
    }
    let theirs = String::from_utf8_lossy(&version);
    if theirs != ours.as_str() {
        return Err(bad(format!(
            "exported by MLX {theirs}, but this is MLX {ours}; export it again with this version"
        )));
    }
    Ok(())
}

fn c_path(op: &'static str, path: &Path) -> Result<CString> {
    #[cfg(unix)]
    let bytes = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec();
    #[cfg(not(unix))]
    let bytes = path.to_string_lossy().into_owned().into_bytes();
    CString::new(bytes).map_err(|_| {
        Error::new(
            ErrorKind::Value,
            op,
            format!("the path {path:?} contains a NUL"),
        )
    })
}

fn c_keys(op: &'static str, kwargs: &Kwargs) -> Result<Vec<CString>> {
    kwargs
        .keys()
        .map(|key| {
            CString::new(key.as_str()).map_err(|_| {
                Error::new(
                    ErrorKind::Value,
                    op,
                    format!("the name {key:?} contains a NUL"),
                )
            })
        })
        .collect()
}

/// Named arrays for C, freed on drop. They are always inserted in the order of names. MLX appends
/// the values in the order of a hash map, which depends on the order of insertions.
struct Map(sys::mlx_map_string_to_array);

impl Map {
    fn new(op: &'static str, keys: &[CString], kwargs: &Kwargs) -> Result<Self> {
        let _guard = call::enter(op)?;
        // SAFETY: the call has no arguments. Null is checked.
        let map = Self(unsafe { sys::mlx_map_string_to_array_new() });
        if map.0.ctx.is_null() {
            return Err(Error::new(ErrorKind::Mlx, op, "MLX could not make a map"));
        }
        for (key, value) in keys.iter().zip(kwargs.values()) {
            call::status(op, || {
                // SAFETY: map and array are live, the key ends in NUL; MLX copies both.
                unsafe { sys::mlx_map_string_to_array_insert(map.0, key.as_ptr(), value.raw()) }
            })?;
        }
        Ok(map)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        let Some(_guard) = call::lock_to_free() else {
            return;
        };
        // SAFETY: the handle is owned here.
        unsafe { sys::mlx_map_string_to_array_free(self.0) };
    }
}

/// A file that MLX writes by its path. It gets its final name when it is complete.
struct Partial {
    file: AtomicFile,
    c_path: CString,
}

impl Partial {
    fn create(path: &Path) -> Result<Self> {
        let bad = |why: &dyn std::fmt::Display| {
            Error::new(
                ErrorKind::Value,
                EXPORT,
                format!("cannot write {}: {why}", path.display()),
            )
        };
        crate::io::check_replaceable(path).map_err(|why| bad(&why))?;
        if path.file_name().is_none() {
            return Err(bad(&"it names no file"));
        }
        // The unfinished file has another name, so this is the only check of the final one.
        c_path(EXPORT, path)?;
        // Creating the file reports a problem with the directory before MLX does.
        let file = AtomicFile::create(path).map_err(|e| bad(&e))?;
        let c_path = c_path(EXPORT, file.unfinished())?;
        Ok(Self { file, c_path })
    }

    fn keep(self) -> Result<()> {
        let path = self.file.path().to_owned();
        self.file.commit().map_err(|e| {
            Error::new(
                ErrorKind::Value,
                EXPORT,
                format!("cannot complete {}: {e}", path.display()),
            )
        })
    }
}
