//! Matrix multiplication for x86-64 with AMX. Tile registers multiply sixteen input rows with
//! sixteen matrix rows, pairs of bfloat16 at a time, and sum in float32. Each input is the sum of
//! two bfloat16, which keeps sixteen of its bits (`activations.rs`). Subnormal floats count as
//! zero. Packed codes of quantized matrices are multiplied directly, because they are exact in
//! bfloat16 (`encoding.rs`). Scales multiply the sums of a group (`small_m.rs` up to eight rows,
//! `large_m.rs` for more). bfloat16 matrices have no scales (`bf16.rs`). `gemm/amx_qgemm.rs` and
//! `gemm/amx_gemm_bf16.rs` divide the work and pack the inputs.
//!
//! The instructions are written as assembly, because the standard library does not have them yet.
//! The compiler itself never uses tile registers, so they keep their content between two pieces of
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

/// Scratch memory of a thread for [`products`].
#[derive(Default)]
pub(crate) struct Scratch {
    /// Output sums of two tiles.
    sums: Vec<OutputRow>,
    /// Scratch memory of the kernel for at most eight rows, and of the kernel for more rows.
    small_m: Box<small_m_asm::SmallMScratch>,
    large_m: Box<large_m_asm::LargeMScratch>,
    /// Scales and biases of the two tiles.
    factors: Vec<TileRow>,
}

/// Multiplies all inputs with the two output tiles of each of `places`. `source` returns the tiles,
/// and `done` receives the outputs, `[2, padded rows]`.
///
/// # Panics
/// If the tiles do not match the inputs.
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
    // SAFETY: the lengths are asserted, and the registers are configured. The caller guarantees the
    // features.
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
