//! Multiplies at most eight input rows with a packed matrix. Both bfloat16 parts of the inputs are
//! in one tile. The pipeline of `small_m_asm.rs` continues from one output tile of a thread to the
//! next: while the first groups of the next tile are decoded, the last sums of the previous tile
//! are finished.

use super::activations::InputTiles;
use super::scales::prepare;
use super::small_m_asm::{
    LoopState, MAX_BLOCKS_PER_GROUP, PIPELINE_DEPTH, SMALL_ROWS, SmallMScratch, run_groups,
};
use super::tiles::{
    OutputRow, ROW_BYTES, TILE_K, TILE_ROWS, TilePair, TileRegisters, TileRow, TileSources,
};

/// Computes the outputs of `places` and passes them to `done`; see [`super::products`]. `source`
/// returns the two tiles of each place.
///
/// # Safety
/// The obligations of [`super::products`]. The tiles from `source` must match `x`, which must be
/// stacked.
pub(crate) unsafe fn run<'a, const BITS: u32>(
    places: &mut dyn Iterator<Item = usize>,
    source: &dyn Fn(usize) -> TilePair<'a>,
    x: &InputTiles,
    _: &TileRegisters,
    (scratch, factors): (&mut SmallMScratch, &mut Vec<TileRow>),
    done: &mut dyn FnMut(usize, &[OutputRow]),
) {
    let (groups, _) = x.packing();
    let deep = x.blocks() / groups;
    assert!(deep <= MAX_BLOCKS_PER_GROUP && groups >= PIPELINE_DEPTH && x.padded() == SMALL_ROWS);
    // The factors of the place that is being decoded, and of the previous place, whose last sums
    // are added at the same time.
    factors.resize(2 * 4 * groups, TileRow([0; TILE_K]));
    let factors = factors.as_mut_ptr();
    let inputs = x.tiles();
    let sums = x.sums(0, 0).as_ptr();
    scratch.at.odd = 0;
    let mut before = None;
    for (turn, place) in places.enumerate() {
        let from = TileSources::from_pair(source(place));
        // SAFETY: each group of two places has four lines of factors, and blocks and sums have this
        // number of groups. The first iterations finish sums that belong to no place and are never
        // read.
        unsafe {
            let group_factors = factors.add(turn % 2 * 4 * groups);
            let last = factors.add((turn + 1) % 2 * 4 * groups);
            prepare::<BITS>(&from, groups, group_factors);
            scratch.at = LoopState {
                words: from.words,
                ahead: from.ahead[0] * size_of::<u32>(),
                inputs: inputs.add((groups - 1) * deep * TILE_ROWS),
                all_inputs: [inputs, inputs.add(groups * deep * TILE_ROWS)],
                sums: sums.add((groups - PIPELINE_DEPTH) * SMALL_ROWS),
                factors: last.add(4 * (groups - PIPELINE_DEPTH)),
                first_sums: sums,
                first_factors: group_factors,
                left: groups - PIPELINE_DEPTH,
                deep,
                rest: (deep - 1) * 2 * TILE_ROWS * ROW_BYTES,
                odd: scratch.at.odd,
            };
            run_groups::<BITS>(scratch, groups);
        }
        scratch.at.odd = (scratch.at.odd + groups) % 2;
        if let Some(before) = before.replace(place) {
            done(before, &scratch.totals);
        }
    }
    if let Some(before) = before {
        // SAFETY: addresses and lengths are those of the last place, as in the loop above. The
        // first groups of the last place are decoded again while its last groups are finished.
        unsafe {
            scratch.at.factors = scratch.at.first_factors.add(4 * (groups - PIPELINE_DEPTH));
            scratch.at.left = 0;
            run_groups::<BITS>(scratch, PIPELINE_DEPTH);
        }
        done(before, &scratch.totals);
    }
}
