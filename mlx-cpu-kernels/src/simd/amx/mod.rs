//! Products for x86-64 with AMX. Tile registers multiply sixteen rows of inputs with sixteen rows
//! of a matrix, pairs of bfloat16 at a time, and sum in float32. An input is the sum of two
//! bfloat16, which keeps sixteen bits of it (`activations.rs`). Subnormal numbers count as zero. Of
//! quantized matrices, packed codes are multiplied (`encoding.rs`), which are exact in bfloat16.
//! Scales multiply the sums of a group (`small_m.rs` up to eight rows, `large_m.rs` for more).
//! bfloat16 matrices are multiplied directly (`bf16.rs`). Scheduling and packing are in
//! `gemm/amx_qgemm.rs` and `gemm/amx_gemm_bf16.rs`.
//!
//! The instructions are written as assembly, since the standard library does not have them yet. The
//! compiler itself never uses tile registers. So they keep their content between two pieces of
//! assembly.

#[macro_use]
mod asm_macros;
mod activations;
mod bf16;
mod encoding;
mod epilogue;
mod large_m;
mod large_m_asm;
mod scales;
mod small_m;
mod small_m_asm;
mod tiles;

use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix};

pub(crate) use activations::{InputTiles, InputTilesWriter};
pub(crate) use bf16::{Bf16Panel, TILES_TOGETHER, products as dense_products};
pub(crate) use epilogue::{Epilogue, store_outputs};
use tiles::TileRow;
pub(crate) use tiles::{OutputRow, TILE_ROWS, TilePair, TileRegisters};

/// What a thread needs for [`products`].
#[derive(Default)]
pub(crate) struct Scratch {
    /// Products of two tiles' outputs.
    sums: Vec<OutputRow>,
    /// For few rows, and for tiles of them.
    small_m: Box<small_m_asm::SmallMScratch>,
    large_m: Box<large_m_asm::LargeMScratch>,
    /// Scales and biases for these.
    factors: Vec<TileRow>,
}

/// The products of all inputs with two tiles' outputs for each of `places`, which `source` names:
/// `done` has them, `[2, padded rows]`.
///
/// # Panics
/// If the outputs do not fit the inputs.
///
/// # Safety
/// The processor must have avx512f, avx512bw and f16c.
pub(crate) unsafe fn products<'a>(
    places: &mut dyn Iterator<Item = usize>,
    source: &dyn Fn(usize) -> TilePair<'a>,
    x: &InputTiles,
    registers: &TileRegisters,
    memory: &mut Scratch,
    done: &mut dyn FnMut(usize, &[OutputRow]),
) {
    let (groups, bits) = x.packing();
    let fits = |b: PackedMatrix<'a>| {
        let numbers = b.row_blocks() * INTERLEAVED_ROWS * x.inputs();
        (1..=2).contains(&b.row_blocks())
            && b.words.len() * 32 == numbers * b.bits as usize
            && b.scales.len() == b.row_blocks() * b.groups * INTERLEAVED_ROWS
            && b.biases.len() == b.scales.len()
            && (b.groups, b.bits) == (groups, bits)
    };
    let source = |place: usize| {
        let two = source(place);
        assert!(two.0.into_iter().all(fits));
        two
    };
    // SAFETY: the lengths are as asserted; features are the caller's promise, the registers are
    // here.
    unsafe {
        if x.is_stacked() {
            let scratch = (&mut *memory.small_m, &mut memory.factors);
            return match bits {
                4 => small_m::run::<4>(places, &source, x, registers, scratch, done),
                _ => small_m::run::<8>(places, &source, x, registers, scratch, done),
            };
        }
        let mut sums = std::mem::take(&mut memory.sums);
        sums.resize(2 * x.padded(), OutputRow::default());
        for place in places {
            let (two, out) = (source(place), &mut sums[..]);
            let scratch = (&mut *memory.large_m, &mut memory.factors);
            match bits {
                4 => large_m::run::<4>(two, x, registers, scratch, out),
                _ => large_m::run::<8>(two, x, registers, scratch, out),
            }
            done(place, &sums);
        }
        memory.sums = sums;
    }
}
