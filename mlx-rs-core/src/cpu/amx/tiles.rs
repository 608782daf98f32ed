//! What tile registers do for few rows of inputs besides `steps.rs` and `tall.rs`.

use std::arch::asm;

use super::{LINE, Line};

/// Writes the sums of product number `n` to memory, one tile after the other: of an even one those in the first two registers, of an
/// odd one in the next two.
///
/// # Safety
/// The registers must be set up, and there must be room for two tiles.
#[inline]
pub(super) unsafe fn store(n: usize, to: *mut Line) {
    // SAFETY: the caller's promise.
    unsafe {
        if n % 2 == 1 {
            asm!(
                "tilestored [{to} + {line}*1], tmm2",
                "tilestored [{to} + {line}*1 + 1024], tmm3",
                to = in(reg) to,
                line = in(reg) LINE,
                options(nostack),
            );
        } else {
            asm!(
                "tilestored [{to} + {line}*1], tmm0",
                "tilestored [{to} + {line}*1 + 1024], tmm1",
                to = in(reg) to,
                line = in(reg) LINE,
                options(nostack),
            );
        }
    }
}
