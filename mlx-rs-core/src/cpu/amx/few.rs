//! A few tiles of inputs with packed numbers of a matrix: what they take is mostly to bring numbers into tiles and sums out of
//! them, which goes on while tiles are multiplied.

use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::numbers::{lines, unpack_group};
use super::tiles::{multiply, store};
use super::{DEEP, Group, LINE, Line, Outputs, Registers, SIDE, Scratch, Sources, Squares, Two};

/// Groups that are unpacked before they are multiplied.
const AHEAD: usize = 2;

/// Places for unpacked groups: those ahead, and the one that is multiplied.
const UNPACKED: usize = AHEAD + 1;

/// Pairs of tiles whose sums are on their way: what a tile register wrote can be read only some time later.
const LATER: usize = 4;

/// Places for scales and biases: of groups that are unpacked, to those whose sums are added.
const FACTORS: usize = 8;
const _: () = assert!(FACTORS > AHEAD + LATER);

/// See [`super::products`].
///
/// # Safety
/// As of [`super::products`], with what it asserts.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(super) unsafe fn run<const BITS: u32>(
    two: Two<'_>,
    x: &Squares,
    _: &Registers,
    Scratch { matrix, found, .. }: &mut Scratch,
    out: &mut [Outputs],
) {
    let from = Sources::of(two);
    let (groups, _) = x.packing();
    let (beside, tall, plane) = (x.count(), x.tall(), x.padded());
    // Blocks of inputs of a group.
    let deep = x.blocks() / groups;
    let size = lines(BITS, deep);
    matrix.resize(UNPACKED * size, Line([0; DEEP]));
    found.resize(LATER * 2 * SIDE, Line([0; DEEP]));
    let mut factors: [Group; FACTORS] = [[[_mm512_setzero_ps(); 2]; 2]; FACTORS];
    let all = groups * beside;
    // The group that is unpacked next, and groups and tiles of what is multiplied and added next.
    let (mut next, mut own, mut due) = (0, (0, 0), (0, 0));
    for n in 0..all + LATER {
        while next < groups.min(own.0 + AHEAD + 1) {
            // SAFETY: a group that there is, and its place.
            unsafe {
                let to = matrix.as_mut_ptr().add(next % UNPACKED * size);
                factors[next % FACTORS] = unpack_group::<BITS, 0>(&from, (next, deep), to);
            }
            next += 1;
        }
        if n < all {
            let (group, tile) = own;
            // SAFETY: tiles of inputs that there are, and what was unpacked for this group.
            unsafe {
                let matrix = matrix.as_ptr().add(group % UNPACKED * size);
                let inputs = (
                    x.tile(tile, group * deep).as_ptr(),
                    beside * 2 * SIDE * LINE,
                );
                multiply::<BITS, false>(n, inputs, matrix, deep);
            }
            own = following(own, beside);
        }
        if let Some(n) = n.checked_sub(1).filter(|n| *n < all) {
            // SAFETY: room for two tiles, of sums that are in registers.
            unsafe { store(n, found.as_mut_ptr().add(n % LATER * 2 * SIDE)) };
        }
        if let Some(n) = n.checked_sub(LATER) {
            let (group, tile) = due;
            // SAFETY: rows of two tiles that were written before, and their places in both planes.
            unsafe {
                let from = found.as_ptr().add(n % LATER * 2 * SIDE).cast();
                let to = out.as_mut_ptr().add(tile * tall);
                let sums = x.sums(tile, group);
                add(
                    from,
                    (&factors[group % FACTORS], sums),
                    (to, plane),
                    group > 0,
                );
            }
            due = following(due, beside);
        }
    }
}

/// The next tile, or the next group's first one.
fn following((group, tile): (usize, usize), beside: usize) -> (usize, usize) {
    if tile + 1 < beside {
        (group, tile + 1)
    } else {
        (group + 1, 0)
    }
}

/// The sums of a group times its scales, and those of the inputs times its biases, to rows of both tiles' outputs, `plane`
/// rows apart; they replace what is there, or are added to it.
///
/// # Safety
/// The processor must have avx512f; all must be there.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn add(
    found: *const f32,
    ([scales, biases], inputs): (&Group, &[f32]),
    (to, plane): (*mut Outputs, usize),
    adds: bool,
) {
    for (row, inputs) in inputs.iter().enumerate() {
        let inputs = _mm512_set1_ps(*inputs);
        for i in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                let found = _mm512_loadu_ps(found.add((i * SIDE + row) * SIDE));
                let to = to.add(i * plane + row).cast();
                let before = if adds {
                    _mm512_loadu_ps(to)
                } else {
                    _mm512_setzero_ps()
                };
                let sum = _mm512_fmadd_ps(biases[i], inputs, before);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(scales[i], found, sum));
            }
        }
    }
}
