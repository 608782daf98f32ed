//! At most eight rows of inputs with packed numbers: both parts of the inputs stand in one tile, whose sums meet in vector
//! registers. Numbers of the next groups come into tiles, and sums of those before out of them, while tiles are multiplied,
//! across the outputs that follow each other.

use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use super::numbers::{lines, unpack_group};
use super::tiles::{multiply, store};
use super::{DEEP, Group, LINE, Line, Outputs, Registers, SIDE, Scratch, Sources, Squares, Two};

/// Groups that are unpacked or multiplied: as many places as that take turns.
const UNPACKED: usize = 4;

/// Groups that are unpacked before they are multiplied.
const AHEAD: usize = 2;

/// Pairs of tiles whose sums are on their way: what a tile register wrote can be read only some time later.
const LATER: usize = 3;

/// Places for scales and biases: of groups that are unpacked, to those whose sums are added.
const FACTORS: usize = 8;
const _: () = assert!(FACTORS > AHEAD + LATER && UNPACKED > AHEAD);

/// Outputs `places`, each two tiles' of `source`, which then go to `done`; see [`super::products`].
///
/// # Safety
/// As of [`super::products`]; what `source` gives must fit `x`.
pub(super) unsafe fn run<'a, const BITS: u32>(
    places: Range<usize>,
    source: &dyn Fn(usize) -> Two<'a>,
    x: &Squares,
    registers: &Registers,
    room: &mut Scratch,
    done: &mut dyn FnMut(usize, &mut [Outputs]),
) {
    // SAFETY: the caller's promise.
    unsafe {
        match x.tall() {
            1 => rows::<BITS, 1>(places, source, x, registers, room, done),
            2 => rows::<BITS, 2>(places, source, x, registers, room, done),
            3 => rows::<BITS, 3>(places, source, x, registers, room, done),
            4 => rows::<BITS, 4>(places, source, x, registers, room, done),
            5 => rows::<BITS, 5>(places, source, x, registers, room, done),
            6 => rows::<BITS, 6>(places, source, x, registers, room, done),
            7 => rows::<BITS, 7>(places, source, x, registers, room, done),
            8 => rows::<BITS, 8>(places, source, x, registers, room, done),
            _ => unreachable!("at most eight rows"),
        }
    }
}

/// # Safety
/// As of [`run`], with `ROWS` rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
unsafe fn rows<'a, const BITS: u32, const ROWS: usize>(
    places: Range<usize>,
    source: &dyn Fn(usize) -> Two<'a>,
    x: &Squares,
    _: &Registers,
    Scratch {
        matrix,
        found,
        sums,
    }: &mut Scratch,
    done: &mut dyn FnMut(usize, &mut [Outputs]),
) {
    let (groups, _) = x.packing();
    let deep = x.blocks() / groups;
    let size = lines(BITS, deep);
    matrix.resize(UNPACKED * size, Line([0; DEEP]));
    found.resize(LATER * 2 * SIDE, Line([0; DEEP]));
    sums.resize(2 * ROWS, Outputs::default());
    let mut factors: [Group; FACTORS] = [[[_mm512_setzero_ps(); 2]; 2]; FACTORS];
    let mut totals = [[_mm512_setzero_ps(); 2]; ROWS];
    let all = places.len() * groups;
    let mut from: Option<Sources<'a>> = None;
    // The places and groups of what is unpacked, multiplied and added next.
    let (mut next, mut place, mut group) = (0, places.start, 0);
    let mut own = 0;
    let (mut due, mut added) = (places.start, 0);
    for n in 0..all + LATER {
        while next < all.min(n + AHEAD + 1) {
            let sources = match &from {
                Some(sources) if group > 0 => sources,
                _ => from.insert(Sources::of(source(place))),
            };
            // SAFETY: a group that there is, and its place.
            unsafe {
                let to = matrix.as_mut_ptr().add(next % UNPACKED * size);
                factors[next % FACTORS] = unpack_group::<BITS, ROWS>(sources, (group, deep), to);
            }
            next += 1;
            (place, group) = following((place, group), groups);
        }
        if n < all {
            // SAFETY: tiles of inputs that there are, and what was unpacked for this group.
            unsafe {
                let matrix = matrix.as_ptr().add(n % UNPACKED * size);
                let inputs = (x.tile(0, own * deep).as_ptr(), SIDE * LINE);
                multiply::<BITS, true>(n, inputs, matrix, deep);
            }
            own = if own + 1 < groups { own + 1 } else { 0 };
        }
        if let Some(n) = n.checked_sub(1).filter(|n| *n < all) {
            // SAFETY: room for two tiles, of sums that are in registers.
            unsafe { store(n, found.as_mut_ptr().add(n % LATER * 2 * SIDE)) };
        }
        if let Some(n) = n.checked_sub(LATER) {
            let [scales, biases] = &factors[n % FACTORS];
            let inputs = x.sums(0, added);
            for row in 0..ROWS {
                let inputs = _mm512_set1_ps(inputs[row]);
                for i in 0..2 {
                    let mut total = _mm512_fmadd_ps(biases[i], inputs, totals[row][i]);
                    // SAFETY: rows of two tiles that were written before.
                    unsafe {
                        let found = found.as_ptr().add((n % LATER * 2 + i) * SIDE + row);
                        for part in [0, ROWS] {
                            let found = _mm512_loadu_ps(found.add(part).cast());
                            total = _mm512_fmadd_ps(scales[i], found, total);
                        }
                    }
                    totals[row][i] = total;
                }
            }
            let last = due;
            (due, added) = following((due, added), groups);
            if added == 0 {
                for (row, totals) in totals.iter_mut().enumerate() {
                    for (i, total) in totals.iter_mut().enumerate() {
                        // SAFETY: a row of a plane of `ROWS`.
                        unsafe {
                            let to = sums.as_mut_ptr().add(i * ROWS + row);
                            _mm512_storeu_ps(to.cast(), *total);
                        }
                        *total = _mm512_setzero_ps();
                    }
                }
                done(last, sums);
            }
        }
    }
}

/// The next group, or the first of the next place.
fn following((place, group): (usize, usize), groups: usize) -> (usize, usize) {
    if group + 1 < groups {
        (place, group + 1)
    } else {
        (place + 1, 0)
    }
}
