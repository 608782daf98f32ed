//! Known faults of MLX on some devices and systems. Each decision depends only on facts: the
//! device, the system, and MLX's version. So tests on any machine can cover the decisions. The
//! faults were found by reading MLX's sources; none was observed on Metal.

use std::sync::OnceLock;

use crate::device::{DeviceKind, metal_is_available};
use crate::error::Result;
use crate::{call, stream};

/// The facts that decisions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Whether the operations run on Metal.
    pub(crate) metal: bool,
    /// [`std::env::consts::OS`].
    pub(crate) os: &'static str,
    /// MLX's version.
    pub(crate) version: [u32; 3],
}

/// The latest version of MLX whose sources were checked.
const READ: [u32; 3] = [0, 32, 2];

/// The first checked version in which Metal scales nvfp4 by groups of 16.
const SCALES_NVFP4: [u32; 3] = [0, 32, 0];

/// The maximum number of queries for which Metal uses its kernel for few queries.
const FEW_QUERIES: i32 = 8;

impl Facts {
    /// The facts for the current stream.
    ///
    /// # Errors
    /// When there is no current stream.
    pub(crate) fn current() -> Result<Self> {
        static METAL: OnceLock<bool> = OnceLock::new();
        // The lock is always taken before `OnceLock`s, because the lock's holder may also wait for
        // them.
        let _guard = call::enter("stream")?;
        let metal =
            *METAL.get_or_init(metal_is_available) && stream::current_id()?.0 == DeviceKind::Gpu;
        Ok(Self {
            metal,
            ..Self::of_machine()
        })
    }

    /// The facts that do not depend on the stream. `metal` is false.
    pub(crate) fn of_machine() -> Self {
        static VERSION: OnceLock<[u32; 3]> = OnceLock::new();
        // The lock is taken first, as in `current`.
        let _guard = call::lock();
        Self {
            metal: false,
            os: std::env::consts::OS,
            version: *VERSION
                .get_or_init(|| parse(&crate::mlx_version().unwrap_or_default()).unwrap_or(READ)),
        }
    }

    /// Whether quantization to nvfp4 uses one scale per 32 values instead of 16.
    pub(crate) fn scales_nvfp4_wrongly(self) -> bool {
        self.metal && self.version < SCALES_NVFP4
    }

    /// Whether MLX may keep the memory of a vector. On macOS, MLX keeps such memory in its
    /// residency set after the vector is freed, if `memory::set_wired_limit` is above 0.
    pub(crate) fn may_take_over(self) -> bool {
        self.os != "macos" || self.version > READ
    }

    /// Whether attention with this number of queries reads a copy of the queries before the copy is
    /// complete. MLX copies queries that are not contiguous, but has no barrier after the copy.
    pub(crate) fn copies_queries_too_late(self, queries: i32) -> bool {
        self.metal && queries <= FEW_QUERIES && self.version <= READ
    }
}

/// The reason why MLX cannot be used at all, if there is one. On macOS, MLX creates the Metal
/// device at its first allocation, even for work on the CPU. Without such a device it aborts the
/// process.
pub(crate) fn refusal(os: &str, has_metal_device: bool) -> Option<&'static str> {
    (os == "macos" && !has_metal_device)
        .then_some("this Mac has no Metal device, which MLX needs on macOS, also for the CPU")
}

/// Whether macOS has a Metal device. On other systems it returns true.
pub(crate) fn has_metal_device() -> bool {
    #[cfg(target_os = "macos")]
    {
        #[link(name = "Metal", kind = "framework")]
        unsafe extern "C" {
            fn MTLCreateSystemDefaultDevice() -> *mut std::ffi::c_void;
        }
        // SAFETY: the function has no arguments. It returns null, or an object that the process
        // keeps.
        !unsafe { MTLCreateSystemDefaultDevice() }.is_null()
    }
    #[cfg(not(target_os = "macos"))]
    {
        true
    }
}

/// Parses `0.30.6`; a build may append more text.
fn parse(version: &str) -> Option<[u32; 3]> {
    let mut parts = version.split('.').map(|part| {
        let end = part
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(part.len());
        part[..end].parse().ok()
    });
    Some([parts.next()??, parts.next()??, parts.next()??])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(metal: bool, os: &'static str, version: [u32; 3]) -> Facts {
        Facts { metal, os, version }
    }

    #[test]
    fn decisions_follow_device_system_and_version() {
        let (read, later) = ([0, 32, 2], [0, 33, 0]);
        for (given, scales, takes, copies) in [
            (facts(true, "macos", [0, 30, 6]), true, false, true),
            (facts(true, "macos", read), false, false, true),
            (facts(true, "macos", [0, 30, 1]), true, false, true),
            (facts(true, "macos", later), false, true, false),
            (facts(false, "macos", read), false, false, false),
            (facts(false, "macos", later), false, true, false),
            (facts(true, "ios", [0, 30, 6]), true, true, true),
            (facts(false, "linux", read), false, true, false),
        ] {
            assert_eq!(given.scales_nvfp4_wrongly(), scales, "{given:?}");
            assert_eq!(given.may_take_over(), takes, "{given:?}");
            assert_eq!(given.copies_queries_too_late(8), copies, "{given:?}");
            assert!(!given.copies_queries_too_late(9), "{given:?}");
        }
    }

    #[test]
    fn a_mac_without_metal_is_refused_before_the_first_call() {
        assert!(refusal("macos", false).is_some_and(|why| why.contains("Metal")));
        assert_eq!(refusal("macos", true), None);
        assert_eq!(refusal("linux", false), None);
        assert!(refusal(std::env::consts::OS, has_metal_device()).is_none());
    }

    #[test]
    fn versions_are_compared_by_numbers() {
        assert_eq!(parse("0.30.6"), Some([0, 30, 6]));
        assert_eq!(parse("0.30.10.dev20260101+abc"), Some([0, 30, 10]));
        assert_eq!(parse("1.2.3rc1"), Some([1, 2, 3]));
        assert!(parse("0.30").is_none() && parse("").is_none());
        assert!(parse("0.30.10") > parse("0.30.6"));
        let here = parse(&crate::mlx_version().unwrap()).unwrap();
        assert_eq!(Facts::of_machine().version, here);
    }
}
