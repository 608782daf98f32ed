//! The inner loop for tiles of sixteen rows, as one piece of assembly. It is software-pipelined
//! with three stages. While tile `i` is multiplied, the sums of tile `i - 1` are stored. Meanwhile,
//! the sums of tile `i - 2` are scaled and added to totals in memory. Between two groups, the next
//! group's codes are decoded. `small_m_asm.rs` explains why the loop is one piece.

use std::mem::offset_of;

use super::small_m_asm::{GROUP_ROWS, MAX_BLOCKS_PER_GROUP};
use super::tiles::{OutputRow, ROW_BYTES, TILE_K, TILE_ROWS, TILES_PER_CHUNK, TileRow};

/// The number of tiles between a multiplication and the addition of its sums to totals.
pub(crate) const PIPELINE_DEPTH: usize = 2;

/// Scratch memory of the assembly.
#[repr(C, align(4096))]
pub(crate) struct LargeMScratch {
    /// Tiles of sums of two products. Each product has two tiles.
    pub found: [[TileRow; 2 * TILE_ROWS]; 2],
    /// Unused totals of both tiles, to which the first steps add.
    nothing: [OutputRow; 2 * PIPELINE_DEPTH * TILE_ROWS],
    at: LoopState,
    /// Decoded codes of two groups. Each block of inputs has two tiles.
    matrix: [[TileRow; GROUP_ROWS]; 2],
}

impl Default for LargeMScratch {
    fn default() -> Self {
        Self {
            found: [[TileRow([0; TILE_K]); 2 * TILE_ROWS]; 2],
            nothing: [OutputRow::default(); 2 * PIPELINE_DEPTH * TILE_ROWS],
            at: LoopState::default(),
            matrix: [[TileRow([0; TILE_K]); GROUP_ROWS]; 2],
        }
    }
}

/// The state of the loop.
#[derive(Default)]
#[repr(C)]
struct LoopState {
    /// The addresses of the decoded codes of this group, and of the next one.
    now: usize,
    next: usize,
    /// The number of input blocks per group, and the number of tiles.
    deep: usize,
    tiles: usize,
    /// The number of remaining groups.
    groups: usize,
    /// Distances in bytes between inputs: from a block to the next block (`across`), and from a
    /// tile's last block to the first block of the adjacent tile (`beside`). `rest` is the distance
    /// from a tile's first block to its last block.
    across: usize,
    beside: isize,
    rest: usize,
    /// The end of the totals in use, and the start and end of all totals.
    end: usize,
    first: usize,
    last: usize,
    /// The distance in bytes between the outputs of the two tiles: of the outputs in use, and of
    /// the totals.
    plane: usize,
    whole: usize,
    /// The address of the factors of the group whose sums are being added.
    factors: usize,
    /// Whether the next product uses the second pair of registers.
    odd: usize,
}

/// The operands of [`run_groups`].
pub(crate) struct LargeMArgs<'a> {
    /// Addresses of the words of both tiles' two row blocks.
    pub words: [[*const u32; 2]; 2],
    /// The prefetch distance in bytes.
    pub ahead: usize,
    /// Input tiles, `[blocks, tiles]`.
    pub inputs: *const TileRow,
    /// The input sums, `[groups, tiles, TILE_ROWS]`, after padding of [`PIPELINE_DEPTH`] tiles.
    pub sums: *const f32,
    /// Four padding lines, then four lines for each group.
    pub factors: *const TileRow,
    /// The totals of one tile, `[tiles, TILE_ROWS]`. Those of the other tile are `plane` rows
    /// later.
    pub totals: &'a mut [OutputRow],
    pub plane: usize,
    /// The number of groups, of input blocks per group, and of tiles.
    pub sizes: (usize, usize, usize),
}

/// Loads a tile of inputs, sums or matrix codes.
macro_rules! load {
    ($tile:literal, $at:literal) => {
        concat!("tileloadd ", $tile, ", [", $at, "]\n")
    };
}

/// Multiplies two tiles and adds to a third.
macro_rules! product {
    ($sums:literal, $inputs:literal, $matrix:literal) => {
        concat!("tdpbf16ps ", $sums, ", ", $inputs, ", ", $matrix, "\n")
    };
}

/// Multiplies both parts of an input block with its matrix tiles, and adds to two tiles of sums.
macro_rules! multiply_both {
    ($one:literal, $other:literal) => {
        concat!(
            load!("tmm6", "{to} + {line}*1"),
            load!("tmm4", "{inputs} + {line}*1"),
            product!($one, "tmm4", "tmm6"),
            load!("tmm7", "{to} + {line}*1 + 1024"),
            product!($other, "tmm4", "tmm7"),
            load!("tmm5", "{inputs} + {line}*1 + 1024"),
            product!($one, "tmm5", "tmm6"),
            product!($other, "tmm5", "tmm7"),
        )
    };
}

/// Adds a row's sums of both tiles to its totals.
macro_rules! add_row {
    ($found:literal, $row:literal, $sum:literal, [$one:literal, $other:literal, $inputs:literal]) => {
        concat!(
            "vmovaps ",
            $one,
            ", [{totals} + ",
            $row,
            "]\n",
            "vmovaps ",
            $other,
            ", [{totals} + {n} + ",
            $row,
            "]\n",
            "vbroadcastss ",
            $inputs,
            ", [{sums} + ",
            $sum,
            "]\n",
            "vfmadd231ps ",
            $one,
            ", zmm30, ",
            $inputs,
            "\n",
            "vfmadd231ps ",
            $other,
            ", zmm31, ",
            $inputs,
            "\n",
            "vfmadd231ps ",
            $one,
            ", zmm28, [{scratch} + ",
            $found,
            " + ",
            $row,
            "]\n",
            "vfmadd231ps ",
            $other,
            ", zmm29, [{scratch} + ",
            $found,
            " + 1024 + ",
            $row,
            "]\n",
            "vmovaps [{totals} + ",
            $row,
            "], ",
            $one,
            "\n",
            "vmovaps [{totals} + {n} + ",
            $row,
            "], ",
            $other,
            "\n",
        )
    };
}

/// Adds the sums of two adjacent rows to totals. The number is the first row.
macro_rules! add_rows {
    ($found:literal, 0) => {
        concat!(
            add_row!($found, "0", "0", ["zmm0", "zmm1", "zmm16"]),
            add_row!($found, "64", "4", ["zmm2", "zmm3", "zmm17"]),
        )
    };
    ($found:literal, 2) => {
        concat!(
            add_row!($found, "128", "8", ["zmm4", "zmm5", "zmm18"]),
            add_row!($found, "192", "12", ["zmm6", "zmm7", "zmm19"]),
        )
    };
    ($found:literal, 4) => {
        concat!(
            add_row!($found, "256", "16", ["zmm8", "zmm9", "zmm16"]),
            add_row!($found, "320", "20", ["zmm10", "zmm11", "zmm17"]),
        )
    };
    ($found:literal, 6) => {
        concat!(
            add_row!($found, "384", "24", ["zmm12", "zmm13", "zmm18"]),
            add_row!($found, "448", "28", ["zmm14", "zmm15", "zmm19"]),
        )
    };
    ($found:literal, 8) => {
        concat!(
            add_row!($found, "512", "32", ["zmm0", "zmm1", "zmm16"]),
            add_row!($found, "576", "36", ["zmm2", "zmm3", "zmm17"]),
        )
    };
    ($found:literal, 10) => {
        concat!(
            add_row!($found, "640", "40", ["zmm4", "zmm5", "zmm18"]),
            add_row!($found, "704", "44", ["zmm6", "zmm7", "zmm19"]),
        )
    };
    ($found:literal, 12) => {
        concat!(
            add_row!($found, "768", "48", ["zmm8", "zmm9", "zmm16"]),
            add_row!($found, "832", "52", ["zmm10", "zmm11", "zmm17"]),
        )
    };
    ($found:literal, 14) => {
        concat!(
            add_row!($found, "896", "56", ["zmm12", "zmm13", "zmm18"]),
            add_row!($found, "960", "60", ["zmm14", "zmm15", "zmm19"]),
        )
    };
}

/// Loads the tiles of a group's last block to `tmm6` and `tmm7`, unless these registers already
/// contain them.
macro_rules! matrix {
    (comes, $tile:literal, $at:literal) => {
        load!($tile, $at)
    };
    (stays, $tile:literal, $at:literal) => {
        ""
    };
}

/// One pipeline step. It multiplies a tile, stores the sums of the previous tile, and adds the sums
/// of the tile before that to totals. The instructions are interleaved, so that no execution unit
/// waits long.
macro_rules! tile {
    ($matrix:tt, [$one:literal, $other:literal], [$out:literal, $too:literal], $found:literal, $before:literal, $odd:literal) => {
        concat!(
            "mov {to}, [{scratch} + {factors}]\n",
            "vmovaps zmm28, [{to}]\n",
            "vmovaps zmm29, [{to} + 64]\n",
            "vmovaps zmm30, [{to} + 128]\n",
            "vmovaps zmm31, [{to} + 192]\n",
            "tilezero ",
            $one,
            "\n",
            "tilezero ",
            $other,
            "\n",
            blocks_before!($matrix, $one, $other),
            "mov {n}, [{scratch} + {plane}]\n",
            matrix!($matrix, "tmm6", "{to} + {line}*1"),
            load!("tmm4", "{inputs} + {line}*1"),
            add_rows!($before, 0),
            product!($one, "tmm4", "tmm6"),
            matrix!($matrix, "tmm7", "{to} + {line}*1 + 1024"),
            add_rows!($before, 2),
            product!($other, "tmm4", "tmm7"),
            add_rows!($before, 4),
            load!("tmm5", "{inputs} + {line}*1 + 1024"),
            add_rows!($before, 6),
            product!($one, "tmm5", "tmm6"),
            add_rows!($before, 8),
            product!($other, "tmm5", "tmm7"),
            add_rows!($before, 10),
            "tilestored [{scratch} + {line}*1 + ",
            $found,
            "], ",
            $out,
            "\n",
            add_rows!($before, 12),
            "tilestored [{scratch} + {line}*1 + ",
            $found,
            " + 1024], ",
            $too,
            "\n",
            add_rows!($before, 14),
            "add {inputs}, [{scratch} + {beside}]\n",
            "add {sums}, 64\n",
            "add {totals}, 1024\n",
            "cmp {totals}, [{scratch} + {end}]\n",
            "jne 7f\n",
            // Wraps around to the next group.
            "mov {totals}, [{scratch} + {first}]\n",
            "mov {n}, [{scratch} + {last}]\n",
            "mov [{scratch} + {end}], {n}\n",
            "mov {n}, [{scratch} + {whole}]\n",
            "mov [{scratch} + {plane}], {n}\n",
            "add qword ptr [{scratch} + {factors}], 256\n",
            "7:\n",
            "mov qword ptr [{scratch} + {odd}], ",
            $odd,
            "\n",
            "dec {count}\n",
        )
    };
}

/// Multiplies all blocks of a group except the last, if there are any.
macro_rules! blocks_before {
    (comes, $one:literal, $other:literal) => {
        concat!(
            "mov {to}, [{scratch} + {now}]\n",
            "mov {n}, [{scratch} + {deep}]\n",
            "dec {n}\n",
            "9:\n",
            multiply_both!($one, $other),
            "add {to}, 2048\n",
            "add {inputs}, [{scratch} + {across}]\n",
            "dec {n}\n",
            "jnz 9b\n",
        )
    };
    (stays, $one:literal, $other:literal) => {
        ""
    };
}

/// Runs all groups. The last [`PIPELINE_DEPTH`] products (each of a tile and a group) are not added
/// to the totals. The sums of product `n` are in `scratch.found[(n + 1) % 2]`.
///
/// # Safety
/// The tile registers must be configured, and the processor must have avx512f and avx512bw. All
/// operands must exist, for at least one group and tile. Prefetched addresses need not be valid.
pub(crate) unsafe fn run_groups<const BITS: u32>(
    scratch: &mut LargeMScratch,
    piece: LargeMArgs<'_>,
) {
    const { assert!(BITS == 4 || BITS == 8) };
    let (groups, deep, tiles) = piece.sizes;
    assert!(
        groups > 0
            && (1..=MAX_BLOCKS_PER_GROUP).contains(&deep)
            && (1..=TILES_PER_CHUNK).contains(&tiles)
    );
    assert!(
        piece.plane >= tiles * TILE_ROWS && piece.totals.len() >= piece.plane + tiles * TILE_ROWS
    );
    let across = tiles * 2 * TILE_ROWS * ROW_BYTES;
    let first = piece.totals.as_mut_ptr();
    let nothing = scratch.nothing.as_mut_ptr();
    scratch.at = LoopState {
        now: scratch.matrix[0].as_mut_ptr().expose_provenance(),
        next: scratch.matrix[1].as_mut_ptr().expose_provenance(),
        deep,
        tiles,
        groups,
        across,
        beside: (2 * TILE_ROWS * ROW_BYTES).cast_signed() - ((deep - 1) * across).cast_signed(),
        rest: (deep - 1) * across,
        end: nothing.expose_provenance() + PIPELINE_DEPTH * TILE_ROWS * ROW_BYTES,
        first: first.expose_provenance(),
        last: first.expose_provenance() + tiles * TILE_ROWS * ROW_BYTES,
        plane: PIPELINE_DEPTH * TILE_ROWS * ROW_BYTES,
        whole: piece.plane * ROW_BYTES,
        factors: piece.factors.expose_provenance(),
        odd: 0,
    };
    macro_rules! all {
        ($bits:tt) => {
            asm_with_codes!(
                [
                "mov {n}, [{scratch} + {deep}]",
                "mov {to}, [{scratch} + {now}]",
                "3:",
                unpack!($bits),
                "dec {n}",
                "jnz 3b",
                "2:",
                "cmp qword ptr [{scratch} + {groups}], 1",
                "je 8f",
                "mov {n}, [{scratch} + {deep}]",
                "mov {to}, [{scratch} + {next}]",
                "3:",
                unpack!($bits),
                "dec {n}",
                "jnz 3b",
                "8:",
                "mov {count}, [{scratch} + {tiles}]",
                "cmp qword ptr [{scratch} + {deep}], 1",
                "jne 3f",
                // With a single block per group, its tiles are loaded once per group and stay in
                // the registers.
                "mov {to}, [{scratch} + {now}]",
                load!("tmm6", "{to} + {line}*1"),
                load!("tmm7", "{to} + {line}*1 + 1024"),
                "cmp qword ptr [{scratch} + {odd}], 0",
                "jne 5f",
                "4:",
                tile!(stays, ["tmm0", "tmm1"], ["tmm2", "tmm3"], "0", "2048", "1"),
                "jz 6f",
                "5:",
                tile!(stays, ["tmm2", "tmm3"], ["tmm0", "tmm1"], "2048", "0", "0"),
                "jnz 4b",
                "jmp 6f",
                "3:",
                "cmp qword ptr [{scratch} + {odd}], 0",
                "jne 5f",
                "4:",
                tile!(comes, ["tmm0", "tmm1"], ["tmm2", "tmm3"], "0", "2048", "1"),
                "jz 6f",
                "5:",
                tile!(comes, ["tmm2", "tmm3"], ["tmm0", "tmm1"], "2048", "0", "0"),
                "jnz 4b",
                "6:",
                "add {inputs}, [{scratch} + {rest}]",
                "mov {n}, [{scratch} + {now}]",
                "mov {to}, [{scratch} + {next}]",
                "mov [{scratch} + {now}], {to}",
                "mov [{scratch} + {next}], {n}",
                "dec qword ptr [{scratch} + {groups}]",
                "jnz 2b",
                "cmp qword ptr [{scratch} + {odd}], 0",
                "je 8f",
                "tilestored [{scratch} + {line}*1 + 2048], tmm0",
                "tilestored [{scratch} + {line}*1 + 3072], tmm1",
                "jmp 9f",
                "8:",
                "tilestored [{scratch} + {line}*1], tmm2",
                "tilestored [{scratch} + {line}*1 + 1024], tmm3",
                "9:",
                ],
                scratch = in(reg) std::ptr::from_mut(scratch),
                a = inout(reg) piece.words[0][0] => _,
                b = inout(reg) piece.words[0][1] => _,
                c = inout(reg) piece.words[1][0] => _,
                d = inout(reg) piece.words[1][1] => _,
                ahead = in(reg) piece.ahead,
                inputs = inout(reg) piece.inputs => _,
                sums = inout(reg) piece.sums => _,
                totals = inout(reg) nothing => _,
                line = in(reg) ROW_BYTES,
                n = out(reg) _,
                to = out(reg) _,
                count = out(reg) _,
                now = const offset_of!(LargeMScratch, at.now),
                next = const offset_of!(LargeMScratch, at.next),
                deep = const offset_of!(LargeMScratch, at.deep),
                tiles = const offset_of!(LargeMScratch, at.tiles),
                groups = const offset_of!(LargeMScratch, at.groups),
                across = const offset_of!(LargeMScratch, at.across),
                beside = const offset_of!(LargeMScratch, at.beside),
                rest = const offset_of!(LargeMScratch, at.rest),
                end = const offset_of!(LargeMScratch, at.end),
                first = const offset_of!(LargeMScratch, at.first),
                last = const offset_of!(LargeMScratch, at.last),
                plane = const offset_of!(LargeMScratch, at.plane),
                whole = const offset_of!(LargeMScratch, at.whole),
                factors = const offset_of!(LargeMScratch, at.factors),
                odd = const offset_of!(LargeMScratch, at.odd),
            )
        };
    }
    // SAFETY: the caller guarantees configured registers, the features, and the operands.
    // `LargeMScratch` has space for the largest group, and for the operands of the first additions.
    unsafe {
        match BITS {
            4 => all!(4),
            _ => all!(8),
        }
    }
}
