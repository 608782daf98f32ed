//! What MLX leaves to the program: options of its connections, and the end of MPI.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;

/// Turns off the delay of small messages (Nagle's algorithm, RFC 896) for all TCP connections that
/// are made while the value exists. MLX leaves it on. A group sends small messages one after
/// another, and each then waits for the other side's delayed acknowledgement: up to 40 ms on Linux.
#[derive(Debug)]
pub(super) struct NoDelay {
    before: BTreeSet<(c_int, libc::ino_t)>,
}

impl NoDelay {
    pub(super) fn new() -> Self {
        Self {
            before: open_files(),
        }
    }
}

impl Drop for NoDelay {
    fn drop(&mut self) {
        for (file, _) in open_files().difference(&self.before) {
            let on: c_int = 1;
            // SAFETY: the pointer is to a `c_int` that lives during the call, and the length is its
            // size. A number that is no TCP connection, or not open any more, is an error of the
            // call, which changes nothing.
            unsafe {
                libc::setsockopt(
                    *file,
                    libc::IPPROTO_TCP,
                    libc::TCP_NODELAY,
                    (&raw const on).cast::<c_void>(),
                    size_of::<c_int>() as libc::socklen_t,
                );
            }
        }
    }
}

/// The process's open files: their numbers, and what the system calls them. A number may soon be
/// that of another file.
fn open_files() -> BTreeSet<(c_int, libc::ino_t)> {
    let numbers = |entries: std::fs::ReadDir| -> Vec<c_int> {
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    };
    // The list has the directory itself, which is closed when its state is asked for.
    let listed = std::fs::read_dir("/dev/fd").map(numbers);
    let state = |file: c_int| {
        let mut state = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the pointer is to memory of that type. The call only reads about the file with
        // this number, and fails if there is none.
        let read = unsafe { libc::fstat(file, state.as_mut_ptr()) } == 0;
        // SAFETY: a call that succeeds has filled the memory.
        read.then(|| (file, unsafe { state.assume_init() }.st_ino))
    };
    let files = listed.unwrap_or_default().into_iter();
    files.filter_map(state).collect()
}

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

/// The address of a function of a library that is loaded; `None` if there is none.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero byte, and the handle is the one for all loaded libraries.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn new_connections_send_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let earlier = TcpStream::connect(address).unwrap();
        let guard = NoDelay::new();
        let later = TcpStream::connect(address).unwrap();
        drop(guard);
        assert!(later.nodelay().unwrap());
        assert!(!earlier.nodelay().unwrap());
    }

    #[test]
    fn functions_of_loaded_libraries_are_found() {
        assert!(symbol(c"strlen").is_some());
        assert!(symbol(c"no_such_function_anywhere").is_none());
        // Without MPI this does nothing.
        end_mpi();
    }
}
