//! At most eight rows of inputs with packed numbers, whose two parts stand in one tile: all groups of a row after another
//! (`steps.rs`), across the outputs that a thread has. The last sums of a place are complete while the first groups of the next one
//! are unpacked.

use super::scales::prepare;
use super::small_m_asm::{Bench, DEEPEST, LATER, Places, ROWS, steps};
use super::{DEEP, LINE, Line, Outputs, Registers, SIDE, Sources, Squares, Two};

/// Outputs `places`, each two tiles' of `source`, which then go to `done`; see [`super::products`].
///
/// # Safety
/// As of [`super::products`]; what `source` gives must fit `x`, which is stacked.
pub(crate) unsafe fn run<'a, const BITS: u32>(
    places: &mut dyn Iterator<Item = usize>,
    source: &dyn Fn(usize) -> Two<'a>,
    x: &Squares,
    _: &Registers,
    (bench, factors): (&mut Bench, &mut Vec<Line>),
    done: &mut dyn FnMut(usize, &[Outputs]),
) {
    let (groups, _) = x.packing();
    let deep = x.blocks() / groups;
    assert!(deep <= DEEPEST && groups >= LATER && x.padded() == ROWS);
    // Of the outputs that are unpacked, and of those before, whose last sums are added meanwhile.
    factors.resize(2 * 4 * groups, Line([0; DEEP]));
    let factors = factors.as_mut_ptr();
    let inputs = x.tiles();
    let sums = x.sums(0, 0).as_ptr();
    bench.at.odd = 0;
    let mut before = None;
    for (turn, place) in places.enumerate() {
        let from = Sources::of(source(place));
        // SAFETY: lines of four factors for each group of two places; blocks and sums of as many groups. What the first ones
        // complete is not looked at.
        unsafe {
            let own = factors.add(turn % 2 * 4 * groups);
            let last = factors.add((turn + 1) % 2 * 4 * groups);
            prepare::<BITS>(&from, groups, own);
            bench.at = Places {
                words: from.words,
                ahead: from.ahead[0] * size_of::<u32>(),
                inputs: inputs.add((groups - 1) * deep * SIDE),
                all_inputs: [inputs, inputs.add(groups * deep * SIDE)],
                sums: sums.add((groups - LATER) * ROWS),
                factors: last.add(4 * (groups - LATER)),
                first_sums: sums,
                first_factors: own,
                left: groups - LATER,
                deep,
                rest: (deep - 1) * 2 * SIDE * LINE,
                odd: bench.at.odd,
            };
            steps::<BITS>(bench, groups);
        }
        bench.at.odd = (bench.at.odd + groups) % 2;
        if let Some(before) = before.replace(place) {
            done(before, &bench.totals);
        }
    }
    if let Some(before) = before {
        // SAFETY: the same again: the first groups of the last place are unpacked once more, and its last ones completed.
        unsafe {
            bench.at.factors = bench.at.first_factors.add(4 * (groups - LATER));
            bench.at.left = 0;
            steps::<BITS>(bench, LATER);
        }
        done(before, &bench.totals);
    }
}
