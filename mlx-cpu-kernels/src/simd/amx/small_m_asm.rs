//! What is done for each group of inputs of at most eight rows, as one piece of assembly that goes on to the next groups: while
//! numbers of one come into tiles, those of the group before are multiplied, sums of the one before that leave their registers,
//! and those of a third meet their scales. Each of these would wait for the one before it. It is one piece because the compiler
//! puts totals into memory between several, which takes half as long again.

use std::mem::offset_of;
use std::ptr;

use super::{DEEP, LINE, Line, Outputs, SIDE};

/// Rows of inputs in a tile, with those that fill it.
pub(crate) const ROWS: usize = SIDE / 2;

/// The blocks of inputs of the greatest group.
pub(crate) const DEEPEST: usize = 4;

/// Lines for the numbers of a group. One tile more than the greatest one takes: two of them would meet in the same sets of the first
/// cache.
pub(crate) const SLOT: usize = (2 * DEEPEST + 1) * SIDE;

/// From a group that is unpacked to the one whose sums are added.
pub(crate) const LATER: usize = 3;

/// What the assembly reads and writes, besides inputs and the matrix.
#[repr(C, align(4096))]
pub(crate) struct Bench {
    /// Tiles of sums: of two groups, two each.
    found: [[Line; 2 * SIDE]; 2],
    /// Both tiles' outputs, complete.
    pub totals: [Outputs; 2 * ROWS],
    /// Those that are not yet.
    kept: [Outputs; 2 * ROWS],
    /// Where it begins, and where it goes on.
    pub at: Places,
    /// Numbers of two groups: for each block two tiles.
    matrix: [[Line; SLOT]; 2],
}

impl Default for Bench {
    fn default() -> Self {
        Self {
            found: [[Line([0; DEEP]); 2 * SIDE]; 2],
            totals: [Outputs::default(); 2 * ROWS],
            kept: [Outputs::default(); 2 * ROWS],
            at: Places::default(),
            matrix: [[Line([0; DEEP]); SLOT]; 2],
        }
    }
}

/// Where the assembly begins, and where it goes on.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Places {
    /// Of both tiles' two bands.
    pub words: [[*const u32; 2]; 2],
    /// Bytes on to what is fetched ahead.
    pub ahead: usize,
    /// The inputs of the group before the first that is unpacked.
    pub inputs: *const Line,
    /// Where inputs begin, and end.
    pub all_inputs: [*const Line; 2],
    /// The sums of the inputs of the group [`LATER`] before, and its factors.
    pub sums: *const f32,
    pub factors: *const Line,
    /// Those of the first group.
    pub first_sums: *const f32,
    pub first_factors: *const Line,
    /// How many groups are left when totals are complete.
    pub left: usize,
    /// Blocks of inputs of a group, and bytes of tiles before those of the last one.
    pub deep: usize,
    pub rest: usize,
    /// Whether the next group goes into the second places.
    pub odd: usize,
}

impl Default for Places {
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

/// A row's sums of both tiles, at so many bytes, to its totals.
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

/// A row's sums of a tile, of both parts of the inputs. Beside tiles a multiplication takes as long as two additions.
macro_rules! both_parts {
    ($found:literal, $row:literal, $high:literal, $low:literal) => {
        concat!(
            "vmovaps zmm17, [{bench} + ",
            $found,
            " + ",
            $row,
            " + ",
            $high,
            "]\n",
            "vaddps zmm17, zmm17, [{bench} + ",
            $found,
            " + ",
            $row,
            " + ",
            $low,
            "]\n",
        )
    };
}

/// Tile `tmm5` or `tmm6` of the matrix with a block of inputs.
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

/// A tile of sums to where it is found.
macro_rules! found {
    ($found:literal, $at:literal, $sums:literal) => {
        concat!(
            "tilestored [{bench} + {line}*1 + ",
            $found,
            " + ",
            $at,
            "], ",
            $sums,
            "\n",
        )
    };
}

/// All that is done at a time, for an even group or an odd one. Only the last block of a group is woven into the rest.
macro_rules! step {
    ($bits:tt, $to:literal, $from:literal, [$one:literal, $other:literal], [$out:literal, $too:literal], $found:literal, $before:literal) => {
        concat!(
            "tilezero ",
            $one,
            "\n",
            "tilezero ",
            $other,
            "\n",
            "cmp qword ptr [{bench} + {deep}], 1\n",
            "je 8f\n",
            "mov {n}, [{bench} + {deep}]\n",
            "lea {to}, [{bench} + ",
            $to,
            "]\n",
            "dec {n}\n",
            "3:\n",
            unpack!($bits),
            "dec {n}\n",
            "jnz 3b\n",
            "mov {to}, [{bench} + {deep}]\n",
            "lea {n}, [{bench} + ",
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
            "mov {n}, [{bench} + {rest}]\n",
            "lea {to}, [{bench} + {n} + ",
            $to,
            "]\n",
            "lea {n}, [{bench} + {n} + ",
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
            "cmp {inputs}, [{bench} + {all_inputs} + 8]\n",
            "cmove {inputs}, [{bench} + {all_inputs}]\n",
            "add {factors}, 256\n",
            "add {sums}, 32\n",
            "dec {count}\n",
            "cmp {count}, [{bench} + {left}]\n",
            "jne 7f\n",
            for_totals!(complete),
            "mov {sums}, [{bench} + {first_sums}]\n",
            "mov {factors}, [{bench} + {first_factors}]\n",
            "7:\n",
            "test {count}, {count}\n",
        )
    };
}

/// The same for all totals, whose places are 64 bytes apart.
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

/// Out of its register, which is empty then.
macro_rules! complete {
    ($total:literal, $at:literal) => {
        concat!(
            "vmovaps [{bench} + {totals} + ",
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
        concat!("vmovaps ", $total, ", [{bench} + {kept} + ", $at, "]\n")
    };
}

macro_rules! keep {
    ($total:literal, $at:literal) => {
        concat!("vmovaps [{bench} + {kept} + ", $at, "], ", $total, "\n")
    };
}

/// So many groups, at least one, from where `bench` says.
///
/// # Safety
/// The tile registers must be set up, and the processor must have avx512f and avx512bw; at each place must be what as many
/// groups take; what is fetched ahead need not be there.
pub(crate) unsafe fn steps<const BITS: u32>(bench: &mut Bench, count: usize) {
    const { assert!(BITS == 4 || BITS == 8) };
    let at = bench.at;
    macro_rules! all {
        ($bits:tt) => {
            with_numbers!(
                [
                for_totals!(take),
                "cmp qword ptr [{bench} + {odd}], 0",
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
                bench = in(reg) std::ptr::from_mut(bench),
                a = inout(reg) at.words[0][0] => _,
                b = inout(reg) at.words[0][1] => _,
                c = inout(reg) at.words[1][0] => _,
                d = inout(reg) at.words[1][1] => _,
                ahead = in(reg) at.ahead,
                inputs = inout(reg) at.inputs => _,
                sums = inout(reg) at.sums => _,
                factors = inout(reg) at.factors => _,
                count = inout(reg) count => _,
                line = in(reg) LINE,
                n = out(reg) _,
                to = out(reg) _,
                deep = const offset_of!(Bench, at.deep),
                rest = const offset_of!(Bench, at.rest),
                left = const offset_of!(Bench, at.left),
                all_inputs = const offset_of!(Bench, at.all_inputs),
                first_sums = const offset_of!(Bench, at.first_sums),
                first_factors = const offset_of!(Bench, at.first_factors),
                odd = const offset_of!(Bench, at.odd),
                totals = const offset_of!(Bench, totals),
                kept = const offset_of!(Bench, kept),
                even_matrix = const offset_of!(Bench, matrix),
                odd_matrix = const offset_of!(Bench, matrix) + size_of::<[Line; SLOT]>(),
            )
        };
    }
    // SAFETY: the caller's promises; `Bench` has room for the greatest group.
    unsafe {
        match BITS {
            4 => all!(4),
            _ => all!(8),
        }
    }
}
