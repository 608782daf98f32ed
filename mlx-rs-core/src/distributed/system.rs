//! The end of MPI, which MLX starts and leaves to the program.

use std::ffi::{CStr, c_int, c_void};

/// Ends MPI if MLX has started it.
pub(super) fn end_mpi() {
    type Query = unsafe extern "C" fn(*mut c_int) -> c_int;
    type End = unsafe extern "C" fn() -> c_int;
    let (Some(started), Some(ended), Some(end)) = (
        symbol(c"MPI_Initialized"),
        symbol(c"MPI_Finalized"),
        symbol(c"MPI_Finalize"),
    ) else {
        return;
    };
    // SAFETY: the MPI standard (5.0, section 11.2) defines these functions with these types.
    let (started, ended, end) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Query>(started),
            std::mem::transmute::<*mut c_void, Query>(ended),
            std::mem::transmute::<*mut c_void, End>(end),
        )
    };
    let (mut is_started, mut is_ended) = (0, 0);
    // SAFETY: both may be called at any time, and write one number through a valid pointer.
    let known = unsafe { started(&raw mut is_started) == 0 && ended(&raw mut is_ended) == 0 };
    if known && is_started != 0 && is_ended == 0 {
        // SAFETY: MPI is started and not ended. The caller has the process-wide lock, so MLX is not
        // inside MPI.
        unsafe { end() };
    }
}

/// The address of a function of a loaded library; `None` if no library has it.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero byte, and the handle is the one for all loaded libraries.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_loaded_libraries_are_found() {
        assert!(symbol(c"strlen").is_some());
        assert!(symbol(c"no_such_function_anywhere").is_none());
        // Without MPI this does nothing.
        end_mpi();
    }
}
