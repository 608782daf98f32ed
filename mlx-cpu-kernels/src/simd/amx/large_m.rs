//! Multiplies more than eight input rows with a packed matrix, group by group. Each group's codes
//! are decoded once for all input tiles of a chunk. The inner loop is in `large_m_asm.rs`.

use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_storeu_ps};

use super::activations::InputTiles;
use super::large_m_asm::{LargeMArgs, LargeMScratch, PIPELINE_DEPTH, run_groups};
use super::scales::prepare;
use super::tiles::{OutputRow, TILE_K, TILE_ROWS, TilePair, TileRegisters, TileRow, TileSources};

/// See [`super::products`].
///
/// # Safety
/// The obligations of [`super::products`], after its assertions.
pub(crate) unsafe fn run<const BITS: u32>(
    two: TilePair<'_>,
    x: &InputTiles,
    _: &TileRegisters,
    (scratch, factors): (&mut LargeMScratch, &mut Vec<TileRow>),
    out: &mut [OutputRow],
) {
    let from = TileSources::from_pair(two);
    let (groups, _) = x.packing();
    let plane = x.padded();
    assert!(x.tall() == TILE_ROWS && out.len() == 2 * plane);
    // The number of input blocks per group.
    let deep = x.blocks() / groups;
    // Padding lines come before the first group, because the pipeline reads them.
    factors.resize(4 * (groups + 1), TileRow([0; TILE_K]));
    out.fill(OutputRow::default());
    // SAFETY: all operands have this number of groups. The caller guarantees the features.
    unsafe {
        prepare::<BITS>(&from, groups, factors.as_mut_ptr().add(4));
        for (first, count) in x.chunks() {
            let out = &mut out[first * TILE_ROWS..];
            let piece = LargeMArgs {
                words: from.words,
                ahead: from.ahead[0] * size_of::<u32>(),
                inputs: x.tile(first, 0).as_ptr(),
                sums: x.lead(first),
                factors: factors.as_ptr(),
                totals: &mut *out,
                plane,
                sizes: (groups, deep, count),
            };
            run_groups::<BITS>(scratch, piece);
            // The assembly does not add the sums of the last products, so this loop does.
            let all = groups * count;
            for n in all.saturating_sub(PIPELINE_DEPTH)..all {
                let (group, tile) = (n / count, n % count);
                let products = scratch.found[(n + 1) % 2].as_ptr();
                let factors = factors.as_ptr().add(4 * (group + 1));
                let to = out.as_mut_ptr().add(tile * TILE_ROWS);
                let sums = &x.sums(first + tile, group)[..TILE_ROWS];
                add(products, factors, sums, (to, plane));
            }
        }
    }
}

/// Multiplies the sums of a group by its scales, and the input sums by its biases. The results are
/// added to rows of both tiles' outputs, which are `plane` rows apart.
///
/// # Safety
/// The processor must have avx512f. All operands must exist.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
unsafe fn add(
    products: *const TileRow,
    factors: *const TileRow,
    inputs: &[f32],
    (to, plane): (*mut OutputRow, usize),
) {
    for (row, inputs) in inputs.iter().enumerate() {
        let inputs = _mm512_set1_ps(*inputs);
        for i in 0..2 {
            // SAFETY: the caller guarantees avx512f, and that all operands exist.
            unsafe {
                let factor = |at: usize| _mm512_loadu_ps(factors.add(at).cast());
                let products = _mm512_loadu_ps(products.add(i * TILE_ROWS + row).cast());
                let to = to.add(i * plane + row).cast();
                let sum = _mm512_fmadd_ps(factor(2 + i), inputs, _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, _mm512_fmadd_ps(factor(i), products, sum));
            }
        }
    }
}
