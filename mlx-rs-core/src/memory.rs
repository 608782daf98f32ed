//! Memory: MLX's limits and statistics, the budget that is checked before allocations, and the
//! number of live array handles.

use std::sync::atomic::{AtomicU64, Ordering};

use mlx_sys as sys;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::{call, closure};

/// The budget in bytes. Zero until it is first read.
static BUDGET: AtomicU64 = AtomicU64::new(0);

/// The memory budget in bytes: the largest array that an operation may return. It is initially the
/// machine's physical memory, or 64 GiB if that cannot be read.
///
/// ```
/// assert!(mlx_rs_core::memory::budget() > 0);
/// ```
#[must_use]
pub fn budget() -> u64 {
    match BUDGET.load(Ordering::Relaxed) {
        0 => {
            // A concurrent `set_budget` wins.
            let _ = BUDGET.compare_exchange(0, machine(), Ordering::Relaxed, Ordering::Relaxed);
            BUDGET.load(Ordering::Relaxed)
        }
        bytes => bytes,
    }
}

/// The machine's memory in bytes, or the assumed one.
fn machine() -> u64 {
    physical_memory().unwrap_or(64 << 30)
}

/// Sets the budget in bytes, and returns the previous one. The budget is at most the machine's
/// memory. An operation whose result exceeds the budget is an error before it is computed. Without
/// the budget, MLX crashes when the system refuses memory.
///
/// ```
/// use mlx_rs_core::{Dtype, ErrorKind, memory, zeros};
/// let before = memory::set_budget(1000);
/// let e = zeros(&[1001], Dtype::Uint8).unwrap_err();
/// assert_eq!(e.kind(), ErrorKind::OutOfMemory);
/// assert_eq!(memory::set_budget(before), 1000);
/// ```
pub fn set_budget(bytes: u64) -> u64 {
    let before = budget();
    BUDGET.store(bytes.clamp(1, machine()), Ordering::Relaxed);
    before
}

/// The size of a result in bytes; an error if the result exceeds the budget. Multiplication is
/// checked, because an overflow would hide a huge size.
#[inline]
pub(crate) fn check(op: &'static str, array: &Array) -> Result<u64> {
    let budget = budget();
    match checked_bytes(array.shape(), array.dtype().size()) {
        Some(bytes) if bytes <= budget => Ok(bytes),
        bytes => Err(too_large(op, array, bytes, budget)),
    }
}

#[cold]
fn too_large(op: &'static str, array: &Array, bytes: Option<u64>, budget: u64) -> Error {
    Error::new(
        ErrorKind::OutOfMemory,
        op,
        format!(
            "a result of shape {:?} ({}) needs {}, more than the budget of {budget} bytes; \
             use smaller shapes or raise the budget with memory::set_budget",
            array.shape(),
            array.dtype(),
            bytes.map_or_else(
                || String::from("more bytes than can be counted"),
                |b| format!("{b} bytes")
            ),
        ),
    )
}

/// The number of bytes of an array; `None` on overflow or for a negative dimension.
pub(crate) fn checked_bytes(shape: &[i32], item: usize) -> Option<u64> {
    let mut bytes = item as u64;
    for &d in shape {
        bytes = bytes.checked_mul(u64::try_from(d).ok()?)?;
    }
    Some(bytes)
}

/// The machine's physical memory in bytes; `None` if the system does not report it.
///
/// ```
/// use mlx_rs_core::memory;
/// if let Some(bytes) = memory::physical_memory() {
///     assert!(bytes > 1 << 20);
/// }
/// ```
#[must_use]
pub fn physical_memory() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        kib.checked_mul(1024)
    }
    #[cfg(target_os = "macos")]
    {
        // MLX's limit is not used, because the program may have changed it.
        let mut bytes = 0u64;
        let mut length = size_of::<u64>();
        // SAFETY: the name ends in NUL. The result has space for `length` bytes, and this value has
        // 64 bits. Nothing is set.
        let status = unsafe {
            libc::sysctlbyname(
                c"hw.memsize".as_ptr(),
                (&raw mut bytes).cast(),
                &raw mut length,
                std::ptr::null_mut(),
                0,
            )
        };
        (status == 0 && length == size_of::<u64>() && bytes > 0).then_some(bytes)
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    {
        // MLX derives its default limit from the device's memory.
        limit().ok().filter(|&b| b > 0).map(|b| b as u64)
    }
}

/// The number of live array handles in this process. If it grows while the bytes are constant, a
/// graph is kept alive.
///
/// ```
/// use mlx_rs_core::{array, memory};
/// let before = memory::live_arrays();
/// let a = array!([1, 2])?;
/// let b = a.clone(); // another handle, the same values
/// assert_eq!(memory::live_arrays() - before, 2);
/// drop((a, b));
/// assert_eq!(memory::live_arrays(), before);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[must_use]
pub fn live_arrays() -> i64 {
    closure::drop_discarded();
    call::live()
}

fn get(op: &'static str, f: impl FnOnce(*mut usize) -> i32) -> Result<usize> {
    closure::drop_discarded();
    let mut out = 0usize;
    call::status(op, || f(&raw mut out))?;
    Ok(out)
}

/// The number of bytes that live arrays use.
///
/// ```
/// use mlx_rs_core::{Dtype, eval, memory, ones};
/// let a = ones(&[1 << 18], Dtype::Float32)?;
/// eval([&a])?;
/// assert!(memory::active()? >= a.nbytes());
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot report it.
#[doc(alias = "mlx_get_active_memory")]
pub fn active() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("active_memory", |out| unsafe {
        sys::mlx_get_active_memory(out)
    })
}

/// The maximum number of bytes in use since the start or the last [`reset_peak`].
///
/// ```
/// use mlx_rs_core::{Dtype, eval, memory, ones};
/// let a = ones(&[1 << 18], Dtype::Float32)?;
/// eval([&a])?;
/// assert!(memory::peak()? >= memory::active()?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot report it.
#[doc(alias = "mlx_get_peak_memory")]
pub fn peak() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("peak_memory", |out| unsafe {
        sys::mlx_get_peak_memory(out)
    })
}

/// Starts a new measurement of [`peak`].
///
/// ```
/// use mlx_rs_core::{Dtype, eval, memory, ones};
/// let a = ones(&[1 << 18], Dtype::Float32)?;
/// eval([&a])?;
/// let peak = memory::peak()?;
/// drop(a);
/// memory::reset_peak()?;
/// assert!(memory::peak()? < peak);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot reset it.
#[doc(alias = "mlx_reset_peak_memory")]
pub fn reset_peak() -> Result<()> {
    // SAFETY: the call has no arguments.
    call::status("reset_peak_memory", || unsafe {
        sys::mlx_reset_peak_memory()
    })
}

/// Lets the process keep up to `bytes` of freed memory for later allocations. Otherwise the system
/// reclaims freed memory each time, and later maps new pages one by one. Blocks larger than
/// `min(bytes / 2, 32 MiB)` cannot use this memory. Returns whether the setting is supported, which
/// requires glibc. This is for CPUs, where MLX itself keeps no memory ([`set_cache_limit`] is for
/// GPUs). The setting affects the whole process, so set it at the start.
///
/// ```
/// use mlx_rs_core::memory;
/// let set = memory::keep_freed(64 << 20);
/// assert_eq!(set, cfg!(all(target_os = "linux", target_env = "gnu")));
/// ```
pub fn keep_freed(bytes: usize) -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // The maximum block size that glibc accepts here.
        const LARGEST: libc::c_int = 32 << 20;
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        let set = |what: libc::c_int, value: libc::c_int| {
            // SAFETY: the call has no pointer arguments. It changes its own settings under its own
            // lock. A thread that allocates at the same time reads either the old value or the new
            // value.
            unsafe { libc::mallopt(what, value) == 1 }
        };
        set(libc::M_TRIM_THRESHOLD, bytes) && set(libc::M_MMAP_THRESHOLD, (bytes / 2).min(LARGEST))
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        let _ = bytes;
        false
    }
}

/// The number of bytes that arrays freed and MLX keeps for reuse.
///
/// ```
/// use mlx_rs_core::memory;
/// memory::clear_cache()?;
/// assert_eq!(memory::cache()?, 0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot report it.
#[doc(alias = "mlx_get_cache_memory")]
pub fn cache() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("cache_memory", |out| unsafe {
        sys::mlx_get_cache_memory(out)
    })
}

/// Returns the memory that MLX keeps for reuse to the system.
///
/// ```
/// use mlx_rs_core::memory;
/// memory::clear_cache()?;
/// assert_eq!(memory::cache()?, 0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot release the memory.
#[doc(alias = "mlx_clear_cache")]
pub fn clear_cache() -> Result<()> {
    closure::drop_discarded();
    // SAFETY: the call has no arguments.
    call::status("clear_cache", || unsafe { sys::mlx_clear_cache() })
}

/// MLX's own memory limit in bytes.
///
/// ```
/// use mlx_rs_core::memory;
/// assert!(memory::limit()? > 0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot report it.
#[doc(alias = "mlx_get_memory_limit")]
pub fn limit() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("memory_limit", |out| unsafe {
        sys::mlx_get_memory_limit(out)
    })
}

/// Sets MLX's memory limit in bytes, and returns the previous one.
///
/// ```
/// use mlx_rs_core::memory;
/// let before = memory::set_limit(8 << 30)?;
/// assert_eq!(memory::set_limit(before)?, 8 << 30);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot set it.
#[doc(alias = "mlx_set_memory_limit")]
pub fn set_limit(bytes: usize) -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("set_memory_limit", |out| unsafe {
        sys::mlx_set_memory_limit(out, bytes)
    })
}

/// Sets the number of freed bytes that MLX keeps for reuse, and returns the previous limit.
///
/// ```
/// use mlx_rs_core::memory;
/// let before = memory::set_cache_limit(1 << 30)?; // keep at most a gigabyte for reuse
/// memory::set_cache_limit(before)?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot set it.
#[doc(alias = "mlx_set_cache_limit")]
pub fn set_cache_limit(bytes: usize) -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("set_cache_limit", |out| unsafe {
        sys::mlx_set_cache_limit(out, bytes)
    })
}

/// Sets the number of bytes that stay resident on a Metal device, and returns the previous limit.
/// On other devices it has no effect.
///
/// ```
/// use mlx_rs_core::memory;
/// let before = memory::set_wired_limit(0)?;
/// memory::set_wired_limit(before)?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When the limit exceeds what the device allows.
#[doc(alias = "mlx_set_wired_limit")]
pub fn set_wired_limit(bytes: usize) -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("set_wired_limit", |out| unsafe {
        sys::mlx_set_wired_limit(out, bytes)
    })
}
