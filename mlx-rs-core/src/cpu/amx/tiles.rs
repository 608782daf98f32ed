//! What tile registers do for few rows of inputs, as assembly. The sums of products with an even number are in the first two
//! registers, of odd ones in the next two.

use std::arch::asm;

use super::{LINE, Line};

/// Tiles of inputs with two of the matrix, for so many blocks of inputs: product number `n`. The sums stay in registers until
/// [`store`] takes them. Inputs are two parts in one tile where they are `STACKED`, else in two.
///
/// # Safety
/// The registers must be set up. There must be tiles of inputs, each block's `step` bytes after the one before, and tiles
/// of the matrix, as `numbers.rs` leaves them.
#[inline]
pub(super) unsafe fn multiply<const BITS: u32, const STACKED: bool>(
    n: usize,
    (inputs, step): (*const Line, usize),
    matrix: *const Line,
    blocks: usize,
) {
    // For each block of inputs; `size` is what it has of the matrix.
    macro_rules! for_blocks {
        ($one:literal, $other:literal, $size:literal, $($line:expr),*) => {
            asm!(
                concat!("tilezero ", $one),
                concat!("tilezero ", $other),
                "2:",
                $($line,)*
                concat!("add {b}, ", $size),
                "add {a}, {step}",
                "dec {n}",
                "jnz 2b",
                a = inout(reg) inputs => _,
                b = inout(reg) matrix => _,
                n = inout(reg) blocks => _,
                step = in(reg) step,
                line = in(reg) LINE,
                options(nostack, readonly),
            )
        };
    }
    macro_rules! into {
        ($one:literal, $other:literal) => {
            match (BITS, STACKED) {
                (4, true) => for_blocks!(
                    $one,
                    $other,
                    "2048",
                    "tileloadd tmm5, [{b} + {line}*1]",
                    "tileloadd tmm4, [{a} + {line}*1]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm5"),
                    "tileloadd tmm6, [{b} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm6")
                ),
                (_, true) => for_blocks!(
                    $one,
                    $other,
                    "4096",
                    "tileloadd tmm5, [{b} + {line}*1]",
                    "tileloadd tmm4, [{a} + {line}*1]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm5"),
                    "tileloadd tmm6, [{b} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {line}*1 + 2048]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{b} + {line}*1 + 3072]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm5")
                ),
                (4, false) => for_blocks!(
                    $one,
                    $other,
                    "2048",
                    "tileloadd tmm6, [{b} + {line}*1]",
                    "tileloadd tmm4, [{a} + {line}*1]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{a} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $one, ", tmm5, tmm6"),
                    concat!("tdpbf16ps ", $other, ", tmm5, tmm7")
                ),
                (_, false) => for_blocks!(
                    $one,
                    $other,
                    "4096",
                    "tileloadd tmm6, [{b} + {line}*1]",
                    "tileloadd tmm4, [{a} + {line}*1]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{a} + {line}*1 + 1024]",
                    concat!("tdpbf16ps ", $one, ", tmm5, tmm6"),
                    concat!("tdpbf16ps ", $other, ", tmm5, tmm7"),
                    "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                    concat!("tdpbf16ps ", $one, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {line}*1 + 3072]",
                    concat!("tdpbf16ps ", $other, ", tmm4, tmm7"),
                    concat!("tdpbf16ps ", $one, ", tmm5, tmm6"),
                    concat!("tdpbf16ps ", $other, ", tmm5, tmm7")
                ),
            }
        };
    }
    // SAFETY: the caller's promises.
    unsafe {
        if n % 2 == 1 {
            into!("tmm2", "tmm3");
        } else {
            into!("tmm0", "tmm1");
        }
    }
}

/// Writes the sums of product number `n` to memory, one tile after the other. To be asked for when the next product has begun: what follows waits until the sums
/// are there.
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
