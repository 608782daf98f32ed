//! The C functions. All unsafe code of the crate is in this file; `work.rs` does the work in safe
//! code.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use inference::kit::panic_text;
use inference::{Error, ErrorKind, Result, TextModel};

use crate::status::Status;
use crate::work::{self, Asked};

/// A loaded model. Several threads may call it at the same time. `rust_mlx_model_free` frees it.
pub struct Model(Box<dyn TextModel>);

/// A function that receives each piece of a reply. `text` has `length` bytes of UTF-8, then a zero
/// byte; it is valid during the call only, and may be empty. `token` is the piece's token.
/// `user_data` is the pointer that the caller passed. The reply continues if the function returns
/// `true`, and ends if it returns `false`. The function must return: it must not throw an exception
/// or jump out.
pub type Piece = Option<
    unsafe extern "C" fn(
        text: *const c_char,
        length: usize,
        token: u32,
        user_data: *mut c_void,
    ) -> bool,
>;

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"",
    };

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// The pointers that C passed to one call. Its methods read the arguments and write the results.
///
/// [`Call::new`] is unsafe, and states the caller's obligations once; the methods rely on them.
struct Call {
    error: *mut *mut c_char,
}

impl Call {
    /// # Safety
    /// Until the call returns, for each pointer that C passed, and that is not null:
    ///
    /// - a text ends with a zero byte, and does not change;
    /// - an array has the given number of initialized elements, which do not change;
    /// - a place for a result can be written, and is aligned;
    /// - a model is one that [`rust_mlx_load`] returned, and is not freed.
    unsafe fn new(error: *mut *mut c_char) -> Self {
        Self { error }
    }

    /// Runs the call. An error and a panic become a status and a message.
    fn run(&self, work: impl FnOnce() -> Result<()>) -> Status {
        self.put(self.error, std::ptr::null_mut());
        let (status, message) = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return Status::Ok,
            Ok(Err(e)) => (Status::from(e.kind()), format!("{e:#}")),
            Err(panic) => (Status::Panic, panic_message(panic.as_ref())),
        };
        if !self.error.is_null() {
            // Messages escape control characters, so none has a zero byte.
            let message = CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default();
            self.put(self.error, message.into_raw());
        }
        status
    }

    /// Writes a result to `place`, unless the pointer is null.
    fn put<T>(&self, place: *mut T, value: T) {
        if !place.is_null() {
            // SAFETY: by the contract of `Call::new`, a pointer that is not null is aligned and can
            // be written.
            unsafe { place.write(value) }
        }
    }

    /// Writes the initial value `start` to `place`, where the result will be. Refuses a null
    /// pointer.
    fn place<T>(&self, name: &str, place: *mut T, start: T) -> Result<()> {
        if place.is_null() {
            return Err(invalid(format!(
                "{name} is NULL; it must point to a place for the result"
            )));
        }
        self.put(place, start);
        Ok(())
    }

    /// A text, or `None` for a null pointer.
    fn optional_text(&self, name: &str, text: *const c_char) -> Result<Option<&str>> {
        if text.is_null() {
            return Ok(None);
        }
        // SAFETY: by the contract of `Call::new`, the text ends with a zero byte and does not
        // change during the call. The result does not outlive `self`, which does not outlive the
        // call.
        let text = unsafe { CStr::from_ptr(text) };
        let text = text
            .to_str()
            .map_err(|e| invalid(format!("{name} is not UTF-8")).with_source(e))?;
        Ok(Some(text))
    }

    fn text(&self, name: &str, text: *const c_char) -> Result<&str> {
        self.optional_text(name, text)?
            .ok_or_else(|| invalid(format!("{name} is NULL; it must be a text")))
    }

    /// The options as JSON, where a null pointer means the defaults.
    fn options(&self, options: *const c_char) -> Result<&str> {
        Ok(self.optional_text("options", options)?.unwrap_or_default())
    }

    fn model(&self, model: *const Model) -> Result<&dyn TextModel> {
        // SAFETY: `Call::new`: a model that is not null was returned by `rust_mlx_load` and is not
        // freed during the call; the result does not outlive `self`.
        let model = unsafe { model.as_ref() };
        model
            .map(|model| model.0.as_ref())
            .ok_or_else(|| invalid(String::from("model is NULL; rust_mlx_load returns a model")))
    }

    fn ids(&self, ids: *const u32, count: usize) -> Result<&[u32]> {
        if count == 0 {
            return Ok(&[]);
        }
        if ids.is_null() {
            return Err(invalid(format!("ids is NULL, and count is {count}")));
        }
        if !ids.is_aligned() || count > isize::MAX as usize / size_of::<u32>() {
            return Err(invalid(format!("ids is no array of {count} integers")));
        }
        // SAFETY: `Call::new`: the array has `count` initialized elements and does not change; the
        // pointer is aligned, the size is within `isize`, and the result does not outlive `self`.
        Ok(unsafe { std::slice::from_raw_parts(ids, count) })
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    match panic_text(panic) {
        Some(text) => format!("a fault of the library: it panicked: {text}"),
        None => String::from("a fault of the library: it panicked"),
    }
}

fn c_text(what: &str, text: String) -> Result<*mut c_char> {
    let text = CString::new(text).map_err(|e| {
        invalid(format!(
            "{what} has a zero byte at position {}, which a text of C cannot have",
            e.nul_position()
        ))
    })?;
    Ok(text.into_raw())
}

/// Moves values to memory that C owns. No values are a null pointer.
fn c_array<T>(values: Vec<T>) -> *mut T {
    if values.is_empty() {
        return std::ptr::null_mut();
    }
    Box::into_raw(values.into_boxed_slice()).cast()
}

/// Frees what [`c_array`] returned.
///
/// # Safety
/// `c_array` returned `values` for `count` values, and nothing freed them since.
unsafe fn free_array<T>(values: *mut T, count: usize) {
    if !values.is_null() {
        let slice = std::ptr::slice_from_raw_parts_mut(values, count);
        // SAFETY: the caller's obligation: this is the box that `c_array` made.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// The version of this library, such as `0.1.0`. The text is static; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn rust_mlx_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Lists the backends as a JSON array of objects with `name`, `available`, `default`, `reason` (why
/// the backend is unavailable, or `null`), `device` and `capabilities`.
///
/// `out` receives the text; free it with `rust_mlx_string_free`. If `error` is not NULL, it
/// receives the message of an error, which is to be freed in the same way, or NULL. This holds for
/// `out` and `error` of all functions.
///
/// # Safety
/// `out` and `error` must be NULL or point to a place that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_backends(
    out: *mut *mut c_char,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        call.put(out, c_text("the list", work::backends()?)?);
        Ok(())
    })
}

/// Loads a model. `model` is a directory, a .gguf file, a known name, or `owner/name` of the
/// Hugging Face Hub; a model that is not on this machine is downloaded. `backend` is a backend's
/// name; with NULL, the best available one is chosen. `options` is a JSON object of load options,
/// such as `{"context_len": 4096, "kv_bits": 8}`, or NULL.
///
/// `out` receives the model; free it with `rust_mlx_model_free`.
///
/// # Safety
/// Texts must end with a zero byte; `out` and `error` must be NULL or point to a place that can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_load(
    model: *const c_char,
    backend: *const c_char,
    options: *const c_char,
    out: *mut *mut Model,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        let name = call.text("model", model)?;
        let backend = call.optional_text("backend", backend)?;
        let model = work::load(name, backend, call.options(options)?)?;
        call.put(out, Box::into_raw(Box::new(Model(model))));
        Ok(())
    })
}

/// Frees a model. NULL is ignored.
///
/// # Safety
/// `model` must be NULL or a model of `rust_mlx_load` that was not freed, and that no call uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_model_free(model: *mut Model) {
    if !model.is_null() {
        // SAFETY: the caller's obligation: `rust_mlx_load` made this box, and nothing uses it.
        let model = unsafe { Box::from_raw(model) };
        // A panic of a backend must not leave the function. The function has no place for its
        // message.
        drop(catch_unwind(AssertUnwindSafe(|| drop(model))));
    }
}

/// Describes a model as a JSON object: architecture, sizes, types, device.
///
/// # Safety
/// `model` must be NULL or a model that is not freed; `out` and `error` as for `rust_mlx_backends`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_model_info(
    model: *const Model,
    out: *mut *mut c_char,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        let info = work::info(call.model(model)?)?;
        call.put(out, c_text("the description", info)?);
        Ok(())
    })
}

/// Converts text to token ids. `add_special` adds the special tokens that the model expects around
/// a text. `out` receives the ids, and `count` their number; free them with `rust_mlx_tokens_free`.
///
/// # Safety
/// As for `rust_mlx_model_info`; `text` must end with a zero byte, and `count` must be NULL or
/// point to a place that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_tokenize(
    model: *const Model,
    text: *const c_char,
    add_special: bool,
    out: *mut *mut u32,
    count: *mut usize,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        call.place("count", count, 0)?;
        let text = call.text("text", text)?;
        let ids = work::tokenize(call.model(model)?, text, add_special)?;
        call.put(count, ids.len());
        call.put(out, c_array(ids));
        Ok(())
    })
}

/// Converts `count` token ids to text, without special tokens. A text with a zero byte is an error.
///
/// # Safety
/// As for `rust_mlx_model_info`; `ids` must be an array of `count` ids.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_detokenize(
    model: *const Model,
    ids: *const u32,
    count: usize,
    out: *mut *mut c_char,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        let text = work::detokenize(call.model(model)?, call.ids(ids, count)?)?;
        call.put(out, c_text("the text", text)?);
        Ok(())
    })
}

/// Continues a text, without a chat template. `options` is a JSON object of generation options,
/// such as `{"max_tokens": 64, "temperature": 0.7, "stop": ["\n"]}`, or NULL. `on_piece` receives
/// each piece of the text, and may end the reply; with NULL, only the whole reply is returned.
///
/// `out` receives the reply as a JSON object with `text`, `tokens`, `finish_reason` (`stop`,
/// `length`, or `cancelled` if `on_piece` ended it), `stop`, `logprobs` if requested, and `metrics`
/// with `prompt_tokens`, `generated_tokens` and times.
///
/// # Safety
/// As for `rust_mlx_model_info`; texts must end with a zero byte, and `on_piece` must be NULL or a
/// function of this type, which may be called with `user_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_generate(
    model: *const Model,
    prompt: *const c_char,
    options: *const c_char,
    on_piece: Piece,
    user_data: *mut c_void,
    out: *mut *mut c_char,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        let asked = Asked::Text(call.text("prompt", prompt)?);
        reply(&call, model, &asked, options, (on_piece, user_data), out)
    })
}

/// Answers a conversation, with the model's chat template. `messages` is JSON: an array of
/// messages, such as `[{"role": "user", "content": "Hello"}]`, or an object with `messages` and
/// optionally `tools`, `chat_template_kwargs` and `continue_final_message`. A JSON string or an
/// array of token ids is a prompt without a template. The other arguments are those of
/// `rust_mlx_generate`.
///
/// # Safety
/// As for `rust_mlx_generate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_chat(
    model: *const Model,
    messages: *const c_char,
    options: *const c_char,
    on_piece: Piece,
    user_data: *mut c_void,
    out: *mut *mut c_char,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        let asked = Asked::Json(call.text("messages", messages)?);
        reply(&call, model, &asked, options, (on_piece, user_data), out)
    })
}

fn reply(
    call: &Call,
    model: *const Model,
    asked: &Asked<'_>,
    options: *const c_char,
    (on_piece, user_data): (Piece, *mut c_void),
    out: *mut *mut c_char,
) -> Result<()> {
    call.place("out", out, std::ptr::null_mut())?;
    let (model, options) = (call.model(model)?, call.options(options)?);
    let mut bytes = Vec::new();
    let reply = work::generate(model, asked, options, |token| {
        let Some(on_piece) = on_piece else {
            return true;
        };
        bytes.clear();
        bytes.extend_from_slice(token.text.as_bytes());
        bytes.push(0);
        // SAFETY: the caller's obligation: the function is of this type and takes `user_data`. The
        // text is valid during the call, and has the given length and a zero byte after it.
        unsafe { on_piece(bytes.as_ptr().cast(), token.text.len(), token.id, user_data) }
    })?;
    call.put(out, c_text("the reply", reply)?);
    Ok(())
}

/// Embeds texts. `texts` is a JSON array of texts (or arrays of token ids). `options` is a JSON
/// object such as `{"dimensions": 256, "prompt_name": "query"}`, or NULL.
///
/// `out` receives `rows` vectors of `dimensions` elements, one after another; free them with
/// `rust_mlx_floats_free` and their number, `rows * dimensions`.
///
/// # Safety
/// As for `rust_mlx_model_info`; texts must end with a zero byte, and `rows` and `dimensions` must
/// be NULL or point to a place that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_embed(
    model: *const Model,
    texts: *const c_char,
    options: *const c_char,
    out: *mut *mut f32,
    rows: *mut usize,
    dimensions: *mut usize,
    error: *mut *mut c_char,
) -> Status {
    // SAFETY: the caller's obligations.
    let call = unsafe { Call::new(error) };
    call.run(|| {
        call.place("out", out, std::ptr::null_mut())?;
        call.place("rows", rows, 0)?;
        call.place("dimensions", dimensions, 0)?;
        let (model, texts) = (call.model(model)?, call.text("texts", texts)?);
        let (values, count, width) = work::embed(model, texts, call.options(options)?)?;
        call.put(rows, count);
        call.put(dimensions, width);
        call.put(out, c_array(values));
        Ok(())
    })
}

/// Frees a text that a function of this library returned. NULL is ignored.
///
/// # Safety
/// `text` must be NULL or a text of this library that was not freed or changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's obligation: `CString::into_raw` returned the pointer, and the zero
        // byte at its end is where it was.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Frees the `count` ids that `rust_mlx_tokenize` returned. NULL is ignored.
///
/// # Safety
/// `ids` must be NULL or ids of `rust_mlx_tokenize` that were not freed, and `count` their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_tokens_free(ids: *mut u32, count: usize) {
    // SAFETY: the caller's obligation: `c_array` returned these ids.
    unsafe { free_array(ids, count) }
}

/// Frees the `count` numbers that `rust_mlx_embed` returned. NULL is ignored.
///
/// # Safety
/// `values` must be NULL or numbers of `rust_mlx_embed` that were not freed, and `count` their
/// number: rows times dimensions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rust_mlx_floats_free(values: *mut f32, count: usize) {
    // SAFETY: the caller's obligation: `c_array` returned these numbers.
    unsafe { free_array(values, count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status_with_a_message() {
        let mut error = std::ptr::null_mut();
        // SAFETY: the place is a variable that lives longer than the call; there is no other
        // argument.
        let call = unsafe { Call::new(&raw mut error) };
        assert_eq!(call.run(|| panic!("no {}", "luck")), Status::Panic);
        // SAFETY: `run` wrote a text, which is not freed yet.
        let text = unsafe { CStr::from_ptr(error) }.to_str().unwrap();
        assert!(text.ends_with("it panicked: no luck"), "{text}");
        // SAFETY: the text is of `run`, and is freed once.
        unsafe { rust_mlx_string_free(error) };
        // The next call begins without a message.
        assert_eq!(call.run(|| Ok(())), Status::Ok);
        assert!(error.is_null());
    }

    #[test]
    fn a_text_with_a_zero_byte_is_refused() {
        let error = c_text("the text", String::from("ab\0c")).unwrap_err();
        assert!(error.message().contains("position 2"), "{error}");
    }
}
