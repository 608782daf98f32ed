//! The nucleus of a distribution (top-p) without sorting the vocabulary: only what lies near the greatest
//! is looked at, sums of exponentials in bins by value find where the cut falls, and only the bin of the
//! cut is sorted.

use crate::isa::Isa;
use crate::sampling::softmax_pass::{DEPTH, Scale, depth, peak};
use crate::sampling::top_k::{Found, Room, ascending, gather, weigh};
use crate::work::{Input, Work};

/// How far below the greatest the nucleus is looked for, first near, where it mostly ends.
const REACHES: [f32; 3] = [8.0, 16.0, DEPTH];

const BINS: usize = 1024;

/// Rows of logits in which only the nucleus is left, and everything else is minus infinity. Its input is
/// float32 `[rows, n]`.
pub struct Nucleus {
    /// Elements of a row.
    pub n: usize,
    /// The probability that the nucleus of each row reaches.
    pub p: Vec<f32>,
}

impl Work for Nucleus {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `top_p` passes one array, of float32.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let rows = logits.chunks_exact(self.n);
        let isa = Isa::detect();
        Room::with(|room| {
            for ((row, out), &p) in rows.zip(output.chunks_exact_mut(self.n)).zip(&self.p) {
                room.find_peaks(isa, row);
                let max = peak(&room.peaks);
                if max == f32::NEG_INFINITY || p > 1.0 {
                    out.copy_from_slice(row); // nothing is possible, or all of it stays
                    continue;
                }
                nucleus(isa, row, (max, f32::NEG_INFINITY), p, room);
                out.fill(f32::NEG_INFINITY);
                for &(x, i) in &room.found {
                    out[i as usize] = x;
                }
            }
        });
    }

    fn outputs(&self) -> usize {
        self.n * self.p.len()
    }
}

/// Leaves in `room.found`, in order of place, the nucleus of a row whose greatest is `max`, above minus
/// infinity, and whose peaks are in `room`. Below `least` nothing is wanted, whether it is found or not.
pub(crate) fn nucleus(isa: Isa, row: &[f32], (max, least): (f32, f32), p: f32, room: &mut Room) {
    let share = 1.0 - f64::from(p);
    let scale = Scale { max, by: 1.0 };
    let mut total = None;
    // If the nucleus ends below, all above is in it. Not where that is next to nothing: the greatest has to stay.
    let own = max - least;
    let first = (1.0..REACHES[0]).contains(&own).then_some((own, least));
    for (reach, from) in first.into_iter().chain(REACHES.map(|r| (r, max - r))) {
        gather(row, &room.peaks, from, &mut room.found);
        let mass = weigh(isa, &room.found, scale, &mut room.values, &mut room.weights);
        // What may go: the least probable, as long as their sum stays within what is to spare.
        let (spare, gone) = if reach == DEPTH {
            (share * mass, 0.0)
        } else {
            let total = *total.get_or_insert_with(|| room.find_sums(isa, row, scale));
            (share * total, (total - mass).max(0.0))
        };
        if gone <= spare || reach == DEPTH {
            cut(&mut room.found, &room.weights, (max, reach), spare, gone);
            return;
        }
        if from == least {
            return;
        }
    }
}

/// Takes the least of `found` away, which lie within `reach` of `max`, as long as their weights and what
/// is `gone` already stay within `spare`.
fn cut(
    found: &mut Vec<Found>,
    weights: &[f32],
    (max, reach): (f32, f32),
    spare: f64,
    mut gone: f64,
) {
    let bin = |x: f32| {
        let at = (depth(x, max) + reach) * (BINS as f32 / reach);
        // A conversion from float saturates: what is too far falls into bin 0.
        (at as usize).min(BINS - 1)
    };
    let mut sums = [0.0f64; BINS];
    for (&(x, _), &w) in found.iter().zip(weights) {
        sums[bin(x)] += f64::from(w);
    }
    let mut border = 0;
    while border < BINS - 1 && gone + sums[border] <= spare {
        gone += sums[border];
        border += 1;
    }
    // Everything below the border's bin goes, everything above stays; inside it, one by one.
    let mut inside: Vec<(Found, f32)> = found
        .iter()
        .zip(weights)
        .filter(|((x, _), _)| bin(*x) == border)
        .map(|(&found, &w)| (found, w))
        .collect();
    inside.sort_unstable_by(|a, b| ascending(&a.0, &b.0));
    // The most probable stays whatever p is.
    let last = if border == BINS - 1 { 1 } else { 0 };
    let n = inside.len().saturating_sub(last);
    let mut edge = None;
    for (found, w) in &inside[..n] {
        gone += f64::from(*w);
        if gone > spare {
            break;
        }
        edge = Some(*found);
    }
    found.retain(|found| {
        let at = bin(found.0);
        at > border || (at == border && edge.is_none_or(|e| ascending(found, &e).is_gt()))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_wanted_changes_nothing_of_the_rest() {
        let mut state = 3u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        // From a few probable tokens to nearly equal ones.
        for spread in [40.0f32, 12.0, 6.0, 2.0, 0.5] {
            let row: Vec<f32> = (0..5000).map(|_| next() * spread).collect();
            for p in [0.0, 0.05, 0.5, 0.9, 0.99, 1.0] {
                for min_p in [0.0f32, 1e-4, 0.02, 0.2, 0.5, 1.0] {
                    Room::with(|room| {
                        let isa = Isa::detect();
                        room.find_peaks(isa, &row);
                        let max = peak(&room.peaks);
                        let least = max + min_p.ln();
                        let wanted = |room: &Room| {
                            let all = room.found.iter().copied();
                            all.filter(|f| f.0 >= least).collect::<Vec<_>>()
                        };
                        nucleus(isa, &row, (max, f32::NEG_INFINITY), p, room);
                        let all = wanted(room);
                        nucleus(isa, &row, (max, least), p, room);
                        assert_eq!(wanted(room), all, "{spread} {p} {min_p}");
                        assert!(!all.is_empty());
                    });
                }
            }
        }
    }
}
