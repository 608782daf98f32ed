//! MLX's allocator: limits and figures, the budget checked before allocations, and the number of
//! live array handles.

use std::sync::atomic::{AtomicU64, Ordering};

use mlx_sys as sys;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::{call, closure};

/// Zero until first requested, then bytes.
static BUDGET: AtomicU64 = AtomicU64::new(0);

/// The largest single array, in bytes, that an operation may describe. Starts as the physical
/// memory of the machine where that can be read, else 64 GiB.
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

/// The bytes of memory that this machine has, or may have.
fn machine() -> u64 {
    physical_memory().unwrap_or(64 << 30)
}

/// Sets the budget in bytes, at most the machine's memory, and returns the one before. MLX crashes
/// when the system refuses memory; an operation whose result exceeds the budget is refused before
/// it is computed.
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

/// The size of a result in bytes. Refuses one that cannot fit. Multiplication is checked, because
/// an overflow is as bad as a huge size.
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

/// Bytes of an array, or `None` on overflow or a negative dimension.
pub(crate) fn checked_bytes(shape: &[i32], item: usize) -> Option<u64> {
    let mut bytes = item as u64;
    for &d in shape {
        bytes = bytes.checked_mul(u64::try_from(d).ok()?)?;
    }
    Some(bytes)
}

/// Physical memory in bytes, where the system says.
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
        // SAFETY: the name ends in NUL; the result has room for `length` bytes, and this value is 64
        // bits wide; nothing is set.
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

/// Array handles alive in this process. A growing number at constant bytes indicates a retained
/// graph.
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

/// Bytes in use by live arrays.
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
/// When MLX cannot say.
#[doc(alias = "mlx_get_active_memory")]
pub fn active() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("active_memory", |out| unsafe {
        sys::mlx_get_active_memory(out)
    })
}

/// The most bytes in use at once since the start or the last [`reset_peak`].
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
/// When MLX cannot say.
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
    // SAFETY: takes nothing.
    call::status("reset_peak_memory", || unsafe {
        sys::mlx_reset_peak_memory()
    })
}

/// Lets the process keep up to `bytes` that it has freed for its next allocations. Otherwise the
/// system reclaims memory each time and hands out new pages one by one. Returns whether this is
/// supported: with glibc. There, blocks of up to half this size, at most 32 MiB, come from the
/// freed memory. It is for CPUs, where MLX itself keeps nothing ([`set_cache_limit`] is for GPUs).
/// The setting affects the whole process; set it at the start.
///
/// ```
/// use mlx_rs_core::memory;
/// let set = memory::keep_freed(64 << 20);
/// assert_eq!(set, cfg!(all(target_os = "linux", target_env = "gnu")));
/// ```
pub fn keep_freed(bytes: usize) -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // glibc's maximum block size.
        const LARGEST: libc::c_int = 32 << 20;
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        let set = |what: libc::c_int, value: libc::c_int| {
            // SAFETY: it takes no pointers. It changes its own settings under its own lock. A
            // thread that allocates meanwhile reads whole numbers, the old or the new one.
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

/// Bytes freed by arrays but kept for reuse.
///
/// ```
/// use mlx_rs_core::memory;
/// memory::clear_cache()?;
/// assert_eq!(memory::cache()?, 0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot say.
#[doc(alias = "mlx_get_cache_memory")]
pub fn cache() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("cache_memory", |out| unsafe {
        sys::mlx_get_cache_memory(out)
    })
}

/// Gives kept bytes back to the system.
///
/// ```
/// use mlx_rs_core::memory;
/// memory::clear_cache()?;
/// assert_eq!(memory::cache()?, 0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot.
#[doc(alias = "mlx_clear_cache")]
pub fn clear_cache() -> Result<()> {
    closure::drop_discarded();
    // SAFETY: takes nothing.
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
/// When MLX cannot say.
#[doc(alias = "mlx_get_memory_limit")]
pub fn limit() -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("memory_limit", |out| unsafe {
        sys::mlx_get_memory_limit(out)
    })
}

/// Sets MLX's memory limit in bytes and returns the one before.
///
/// ```
/// use mlx_rs_core::memory;
/// let before = memory::set_limit(8 << 30)?;
/// assert_eq!(memory::set_limit(before)?, 8 << 30);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot.
#[doc(alias = "mlx_set_memory_limit")]
pub fn set_limit(bytes: usize) -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("set_memory_limit", |out| unsafe {
        sys::mlx_set_memory_limit(out, bytes)
    })
}

/// Sets how many freed bytes MLX keeps for reuse and returns the limit before.
///
/// ```
/// use mlx_rs_core::memory;
/// let before = memory::set_cache_limit(1 << 30)?; // keep at most a gigabyte for reuse
/// memory::set_cache_limit(before)?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot.
#[doc(alias = "mlx_set_cache_limit")]
pub fn set_cache_limit(bytes: usize) -> Result<usize> {
    // SAFETY: the out-pointer is live for the length of the call.
    get("set_cache_limit", |out| unsafe {
        sys::mlx_set_cache_limit(out, bytes)
    })
}

/// Sets how many bytes stay resident on a Metal device, and returns the limit before. Elsewhere it
/// does nothing.
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
