//! mlx-c would use the text of an error as a printf format. With the shim, the text must stay
//! unchanged.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;

use mlx_sys as sys;

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

extern "C" fn record(message: *const c_char, _: *mut c_void) {
    // SAFETY: mlx-c passes a NUL-terminated string.
    let text = unsafe { CStr::from_ptr(message) }
        .to_string_lossy()
        .into_owned();
    SEEN.lock().unwrap().push(text);
}

#[test]
fn percent_signs_in_every_string_argument_are_only_text() {
    const EVIL: &str = "%n%s%p%d%1000000d%n";
    let evil = CString::new(EVIL).unwrap();
    // SAFETY: the calls receive live handles and valid strings. They are expected to fail.
    unsafe {
        sys::mlx_set_error_handler(Some(record), std::ptr::null_mut(), None);
        let stream = sys::mlx_default_cpu_stream_new();

        let mut out = sys::mlx_array_new();
        assert_ne!(sys::mlx_load(&raw mut out, evil.as_ptr(), stream), 0);

        let mut tensors = sys::mlx_map_string_to_array_new();
        let mut metadata = sys::mlx_map_string_to_string_new();
        let rc =
            sys::mlx_load_safetensors(&raw mut tensors, &raw mut metadata, evil.as_ptr(), stream);
        assert_ne!(rc, 0);
        sys::mlx_map_string_to_array_free(tensors);
        sys::mlx_map_string_to_string_free(metadata);

        let one = sys::mlx_array_new_float(1.0);
        let operands = sys::mlx_vector_array_new_value(one);
        assert_ne!(
            sys::mlx_einsum(&raw mut out, evil.as_ptr(), operands, stream),
            0
        );
        sys::mlx_vector_array_free(operands);

        let none = sys::mlx_optional_int {
            value: 0,
            has_value: false,
        };
        let mut parts = sys::mlx_vector_array_new();
        #[cfg(not(mlx_c_0_7))]
        let rc = sys::mlx_quantize(&raw mut parts, one, none, none, evil.as_ptr(), stream);
        #[cfg(mlx_c_0_7)]
        let rc = sys::mlx_quantize(
            &raw mut parts,
            one,
            none,
            none,
            evil.as_ptr(),
            sys::mlx_array {
                ctx: std::ptr::null_mut(),
            },
            stream,
        );
        assert_ne!(rc, 0);
        sys::mlx_vector_array_free(parts);

        sys::mlx_array_free(one);
        sys::mlx_array_free(out);
        sys::mlx_stream_free(stream);
    }
    let seen = SEEN.lock().unwrap();
    assert_eq!(seen.len(), 4, "{seen:?}");
    assert!(
        seen[..2].iter().all(|m| m.contains(EVIL)),
        "not verbatim: {seen:?}"
    );
    assert!(
        seen.iter().all(|m| m.len() < 2000),
        "a width was obeyed: {seen:?}"
    );
}
