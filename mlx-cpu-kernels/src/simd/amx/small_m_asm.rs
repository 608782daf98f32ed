//! The inner loop for at most eight rows, as one piece of assembly. It is software-pipelined over
//! groups, with four stages at the same time: group `i` is decoded, and group `i - 1` is
//! multiplied. The sums of group `i - 2` are stored, and those of group `i - 3` are scaled. The
//! loop is one piece, because compilers would spill the totals to memory between pieces. That would
//! take 1.5 times as long.

use std::mem::offset_of;
use std::ptr;

use super::tiles::{OutputRow, ROW_BYTES, TILE_K, TILE_ROWS, TileRow};

/// The number of input rows of a tile, including padding.
pub(crate) const SMALL_ROWS: usize = TILE_ROWS / 2;

/// The number of input blocks in the largest group.
pub(crate) const MAX_BLOCKS_PER_GROUP: usize = 4;

/// The number of lines for the codes of a group. It is one tile more than the largest group needs.
/// Otherwise two groups would map to the same sets of the L1 cache.
pub(crate) const GROUP_ROWS: usize = (2 * MAX_BLOCKS_PER_GROUP + 1) * TILE_ROWS;

/// The number of groups between decoding a group and adding its sums.
pub(crate) const PIPELINE_DEPTH: usize = 3;

/// Scratch memory of the assembly.
#[repr(C, align(4096))]
pub(crate) struct SmallMScratch {
    /// Tiles of sums of two groups. Each group has two tiles.
    found: [[TileRow; 2 * TILE_ROWS]; 2],
    /// The finished outputs of both tiles.
    pub totals: [OutputRow; 2 * SMALL_ROWS],
    /// Sums that are not yet added to totals.
    kept: [OutputRow; 2 * SMALL_ROWS],
    /// The state of the loop.
    pub at: LoopState,
    /// Decoded codes of two groups. Each block of inputs has two tiles.
    matrix: [[TileRow; GROUP_ROWS]; 2],
}

impl Default for SmallMScratch {
    fn default() -> Self {
        Self {
            found: [[TileRow([0; TILE_K]); 2 * TILE_ROWS]; 2],
            totals: [OutputRow::default(); 2 * SMALL_ROWS],
            kept: [OutputRow::default(); 2 * SMALL_ROWS],
            at: LoopState::default(),
            matrix: [[TileRow([0; TILE_K]); GROUP_ROWS]; 2],
        }
    }
}

/// The state of the loop. It persists across calls.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct LoopState {
    /// Addresses of the words of both tiles' two row blocks.
    pub words: [[*const u32; 2]; 2],
    /// The prefetch distance in bytes.
    pub ahead: usize,
    /// The inputs of the group before the first group to decode.
    pub inputs: *const TileRow,
    /// The start and the end of all inputs.
    pub all_inputs: [*const TileRow; 2],
    /// The input sums and the factors of the group that is [`PIPELINE_DEPTH`] earlier.
    pub sums: *const f32,
    pub factors: *const TileRow,
    /// The input sums and the factors of the first group.
    pub first_sums: *const f32,
    pub first_factors: *const TileRow,
    /// The number of remaining groups at which the totals of a place are finished.
    pub left: usize,
    /// The number of input blocks per group, and the number of bytes of tiles before the last
    /// block.
    pub deep: usize,
    pub rest: usize,
    /// Whether the next group uses the second buffers.
    pub odd: usize,
}

impl Default for LoopState {
    fn default() -> Self {
        Self {
            words: [[ptr::null(); 2]; 2],
            ahead: 0,
            inputs: ptr::null(),
            all_inputs: [ptr::null(); 2],
            sums: ptr::null(),
            factors: ptr::null(),
            first_sums: ptr::null(),
            first_factors: ptr::null(),
            left: 0,
            deep: 0,
            rest: 0,
            odd: 0,
        }
    }
}

/// Adds a row's sums of both tiles, at this byte offset, to the row's totals.
macro_rules! add {
    ($found:literal, $row:literal, $sum:literal, $one:literal, $other:literal) => {
        concat!(
            "vbroadcastss zmm16, [{sums} + ",
            $sum,
            "]\n",
            "vfmadd231ps ",
            $one,
            ", zmm30, zmm16\n",
            both_parts!($found, $row, "0", "512"),
            "vfmadd231ps ",
            $one,
            ", zmm28, zmm17\n",
            "vfmadd231ps ",
            $other,
            ", zmm31, zmm16\n",
            both_parts!($found, $row, "1024", "1536"),
            "vfmadd231ps ",
            $other,
            ", zmm29, zmm17\n",
        )
    };
}

/// The sums of a row in one tile, from both input parts. While tile instructions run, a
/// multiplication costs as much as two additions.
macro_rules! both_parts {
    ($found:literal, $row:literal, $high:literal, $low:literal) => {
        concat!(
            "vmovaps zmm17, [{scratch} + ",
            $found,
            " + ",
            $row,
            " + ",
            $high,
            "]\n",
            "vaddps zmm17, zmm17, [{scratch} + ",
            $found,
            " + ",
            $row,
            " + ",
            $low,
            "]\n",
        )
    };
}

/// Multiplies matrix tile `tmm5` or `tmm6` with a block of inputs.
macro_rules! product {
    ($sums:literal, $tile:literal, $at:literal) => {
        concat!(
            "tileloadd ",
            $tile,
            ", [{n} + {line}*1 + ",
            $at,
            "]\n",
            "tdpbf16ps ",
            $sums,
            ", tmm4, ",
            $tile,
            "\n",
        )
    };
}

/// Stores a tile of sums.
macro_rules! found {
    ($found:literal, $at:literal, $sums:literal) => {
        concat!(
            "tilestored [{scratch} + {line}*1 + ",
            $found,
            " + ",
            $at,
            "], ",
            $sums,
            "\n",
        )
    };
}

/// One pipeline step, for an even or an odd group. Only the multiplication of a group's last block
/// is interleaved with other instructions.
macro_rules! step {
    ($bits:tt, $to:literal, $from:literal, [$one:literal, $other:literal], [$out:literal, $too:literal], $found:literal, $before:literal) => {
        concat!(
            "tilezero ",
            $one,
            "\n",
            "tilezero ",
            $other,
            "\n",
            "cmp qword ptr [{scratch} + {deep}], 1\n",
            "je 8f\n",
            "mov {n}, [{scratch} + {deep}]\n",
            "lea {to}, [{scratch} + ",
            $to,
            "]\n",
            "dec {n}\n",
            "3:\n",
            unpack!($bits),
            "dec {n}\n",
            "jnz 3b\n",
            "mov {to}, [{scratch} + {deep}]\n",
            "lea {n}, [{scratch} + ",
            $from,
            "]\n",
            "dec {to}\n",
            "4:\n",
            "tileloadd tmm4, [{inputs} + {line}*1]\n",
            product!($one, "tmm5", "0"),
            product!($other, "tmm6", "1024"),
            "add {n}, 2048\n",
            "add {inputs}, 1024\n",
            "dec {to}\n",
            "jnz 4b\n",
            "8:\n",
            "mov {n}, [{scratch} + {rest}]\n",
            "lea {to}, [{scratch} + {n} + ",
            $to,
            "]\n",
            "lea {n}, [{scratch} + {n} + ",
            $from,
            "]\n",
            "vmovaps zmm28, [{factors}]\n",
            "vmovaps zmm29, [{factors} + 64]\n",
            "vmovaps zmm30, [{factors} + 128]\n",
            "vmovaps zmm31, [{factors} + 192]\n",
            quarter!($bits, 0),
            add!($before, "0", "0", "zmm0", "zmm8"),
            add!($before, "64", "4", "zmm1", "zmm9"),
            quarter!($bits, 1),
            add!($before, "128", "8", "zmm2", "zmm10"),
            add!($before, "192", "12", "zmm3", "zmm11"),
            "tileloadd tmm4, [{inputs} + {line}*1]\n",
            product!($one, "tmm5", "0"),
            found!($found, "0", $out),
            quarter!($bits, 2),
            add!($before, "256", "16", "zmm4", "zmm12"),
            add!($before, "320", "20", "zmm5", "zmm13"),
            quarter!($bits, 3),
            add!($before, "384", "24", "zmm6", "zmm14"),
            add!($before, "448", "28", "zmm7", "zmm15"),
            product!($other, "tmm6", "1024"),
            found!($found, "1024", $too),
            next_words!($bits),
            "add {inputs}, 1024\n",
            "cmp {inputs}, [{scratch} + {all_inputs} + 8]\n",
            "cmove {inputs}, [{scratch} + {all_inputs}]\n",
            "add {factors}, 256\n",
            "add {sums}, 32\n",
            "dec {count}\n",
            "cmp {count}, [{scratch} + {left}]\n",
            "jne 7f\n",
            for_totals!(complete),
            "mov {sums}, [{scratch} + {first_sums}]\n",
            "mov {factors}, [{scratch} + {first_factors}]\n",
            "7:\n",
            "test {count}, {count}\n",
        )
    };
}

/// Applies a macro to all totals, which are 64 bytes apart.
macro_rules! for_totals {
    ($one:ident) => {
        concat!(
            $one!("zmm0", "0"),
            $one!("zmm1", "64"),
            $one!("zmm2", "128"),
            $one!("zmm3", "192"),
            $one!("zmm4", "256"),
            $one!("zmm5", "320"),
            $one!("zmm6", "384"),
            $one!("zmm7", "448"),
            $one!("zmm8", "512"),
            $one!("zmm9", "576"),
            $one!("zmm10", "640"),
            $one!("zmm11", "704"),
            $one!("zmm12", "768"),
            $one!("zmm13", "832"),
            $one!("zmm14", "896"),
            $one!("zmm15", "960"),
        )
    };
}

/// Stores a finished total and clears its register.
macro_rules! complete {
    ($total:literal, $at:literal) => {
        concat!(
            "vmovaps [{scratch} + {totals} + ",
            $at,
            "], ",
            $total,
            "\n",
            "vpxord ",
            $total,
            ", ",
            $total,
            ", ",
            $total,
            "\n",
        )
    };
}

macro_rules! take {
    ($total:literal, $at:literal) => {
        concat!("vmovaps ", $total, ", [{scratch} + {kept} + ", $at, "]\n")
    };
}

macro_rules! keep {
    ($total:literal, $at:literal) => {
        concat!("vmovaps [{scratch} + {kept} + ", $at, "], ", $total, "\n")
    };
}

/// Runs `count` groups, at least one, from the state in `scratch`.
///
/// # Safety
/// The tile registers must be configured, and the processor must have avx512f and avx512bw. Each
/// address in `scratch` must have the data of this number of groups. Prefetched addresses need not
/// be valid.
pub(crate) unsafe fn run_groups<const BITS: u32>(scratch: &mut SmallMScratch, count: usize) {
    const { assert!(BITS == 4 || BITS == 8) };
    let at = scratch.at;
    macro_rules! all {
        ($bits:tt) => {
            asm_with_codes!(
                [
                for_totals!(take),
                "cmp qword ptr [{scratch} + {odd}], 0",
                "jne 5f",
                "2:",
                step!($bits, "{even_matrix}", "{odd_matrix}", ["tmm0", "tmm1"], ["tmm2", "tmm3"], "0", "2048"),
                "jz 6f",
                "5:",
                step!($bits, "{odd_matrix}", "{even_matrix}", ["tmm2", "tmm3"], ["tmm0", "tmm1"], "2048", "0"),
                "jnz 2b",
                "6:",
                for_totals!(keep),
                ],
                scratch = in(reg) std::ptr::from_mut(scratch),
                a = inout(reg) at.words[0][0] => _,
                b = inout(reg) at.words[0][1] => _,
                c = inout(reg) at.words[1][0] => _,
                d = inout(reg) at.words[1][1] => _,
                ahead = in(reg) at.ahead,
                inputs = inout(reg) at.inputs => _,
                sums = inout(reg) at.sums => _,
                factors = inout(reg) at.factors => _,
                count = inout(reg) count => _,
                line = in(reg) ROW_BYTES,
                n = out(reg) _,
                to = out(reg) _,
                deep = const offset_of!(SmallMScratch, at.deep),
                rest = const offset_of!(SmallMScratch, at.rest),
                left = const offset_of!(SmallMScratch, at.left),
                all_inputs = const offset_of!(SmallMScratch, at.all_inputs),
                first_sums = const offset_of!(SmallMScratch, at.first_sums),
                first_factors = const offset_of!(SmallMScratch, at.first_factors),
                odd = const offset_of!(SmallMScratch, at.odd),
                totals = const offset_of!(SmallMScratch, totals),
                kept = const offset_of!(SmallMScratch, kept),
                even_matrix = const offset_of!(SmallMScratch, matrix),
                odd_matrix = const offset_of!(SmallMScratch, matrix) + size_of::<[TileRow; GROUP_ROWS]>(),
            )
        };
    }
    // SAFETY: the caller guarantees configured registers, the features, and the data at each
    // address. `SmallMScratch` has space for the largest group.
    unsafe {
        match BITS {
            4 => all!(4),
            _ => all!(8),
        }
    }
}
