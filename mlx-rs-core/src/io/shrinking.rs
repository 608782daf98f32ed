//! Handles reads of mapped files that shrink while they are mapped.
//!
//! A read past the end of a mapped file raises the signal SIGBUS, which would end the process. The
//! handler here maps zeros from the missing byte to the end of the mapping, and marks the mapping.
//! The owner of the mapping then reports an error
//! ([`MappedFile::check`](super::MappedFile::check)). Other causes of the signal are passed to the
//! previously installed handler; without one, they end the process.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// The signature of a handler with the flag SA_SIGINFO.
type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The maximum number of files that are mapped at the same time.
pub(super) const MAX: usize = 1024;

/// A range of addresses. A signal handler may neither lock nor allocate, so ranges are atomic
/// integers in static memory.
#[derive(Debug)]
struct Slot {
    taken: AtomicBool,
    /// The address; 0 if the slot is free.
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

impl Slot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }
}

static SLOTS: [Slot; MAX] = [const { Slot::new() }; MAX];
/// The number of bytes of a page.
static PAGE: AtomicUsize = AtomicUsize::new(0);
static INSTALLED: Once = Once::new();
/// The signal's action before this handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A watched mapping. The watch must be dropped before the mapping.
#[derive(Debug)]
pub(super) struct Watch(&'static Slot);

impl Watch {
    /// Watches a mapping. `None` if [`MAX`] mappings are already watched.
    ///
    /// # Safety
    /// `bytes` must be a whole private mapping that is only read.
    pub(super) unsafe fn new(bytes: &[u8]) -> Option<Self> {
        INSTALLED.call_once(install);
        let free = |slot: &&Slot| {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            let swapped = slot.taken.compare_exchange(false, true, acquire, relaxed);
            swapped.is_ok()
        };
        let slot = SLOTS.iter().find(free)?;
        let start = bytes.as_ptr().addr();
        slot.lost.store(false, Ordering::Relaxed);
        slot.end.store(start + bytes.len(), Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Some(Self(slot))
    }

    /// Whether a read found that bytes are missing.
    pub(super) fn lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.end.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

fn install() {
    // SAFETY: `sysconf` reads a constant. The action is complete, because zeros are valid for all
    // its fields. The handler has the signature that SA_SIGINFO requires, and uses only functions
    // and memory that a signal handler may use.
    unsafe {
        let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(0);
        PAGE.store(page, Ordering::Release);
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut previous: libc::sigaction = std::mem::zeroed();
        let handler: Handler = on_bus_error;
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        if libc::sigaction(libc::SIGBUS, &raw const action, &raw mut previous) == 0 {
            let _ = PREVIOUS.set(previous);
        }
    }
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes the information about this signal.
    let address = unsafe { (*info).si_addr() }.addr();
    if !zeros_from(address) {
        pass_on(signal, info, context);
    }
}

/// Maps zeros from the page of a missing byte to the end of its mapping. Returns `false` if the
/// address is in no watched mapping.
fn zeros_from(address: usize) -> bool {
    let page = PAGE.load(Ordering::Acquire);
    for slot in &SLOTS {
        let start = slot.start.load(Ordering::Acquire);
        let end = slot.end.load(Ordering::Acquire);
        if start == 0 || page == 0 || !(start..end).contains(&address) {
            continue;
        }
        slot.lost.store(true, Ordering::Release);
        let from = address - address % page;
        // SAFETY: the pages belong to the watched mapping, which exists because a thread is reading
        // it. They are private to this process and only read, and their owner checks the mark.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(from),
                end.next_multiple_of(page) - from,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        return mapped != libc::MAP_FAILED;
    }
    false
}

/// Passes the signal to the previously installed handler. Without one, the default action is
/// restored. The read then runs again and ends the process.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    let address = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    // SAFETY: `sigaction` returned the address as that of a function for this signal, and the flags
    // say which of the two signatures it has. The default action needs no function.
    unsafe {
        match previous {
            Some(previous) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&address) => {
                if previous.sa_flags & libc::SA_SIGINFO == 0 {
                    let handler = std::mem::transmute::<usize, extern "C" fn(c_int)>(address);
                    handler(signal);
                } else {
                    let handler = std::mem::transmute::<usize, Handler>(address);
                    handler(signal, info, context);
                }
            }
            _ => {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, std::ptr::null_mut());
            }
        }
    }
}
