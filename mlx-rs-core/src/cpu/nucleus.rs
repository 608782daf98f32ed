//! The nucleus of a distribution (top-p) without sorting the vocabulary: only what lies near the greatest
//! is looked at, sums of exponentials in bins by value find where the cut falls, and only the bin of the
//! cut is sorted.

use super::host_op::{self, Input, Meaning, Work};
use super::kernel::Isa;
use super::select::{Found, Room, ascending, gather, weigh};
use super::weigh::{DEPTH, Scale, depth, peak};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// How far below the greatest the nucleus is looked for, first near, where it mostly ends.
const REACHES: [f32; 3] = [8.0, 16.0, DEPTH];

const BINS: usize = 1024;

/// `logits` `[.., n]` in which only the smallest set of the most probable whose probability reaches
/// `p` is left, and everything else minus infinity: one `p` a row. Of equal logits at the border the
/// ones behind stay. The most probable stays whatever `p` is. On the CPU, float32.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type, empty, or `p` has another number of rows;
/// MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()], &[1, 3])?;
///     let left = cpu::top_p(&logits, &[0.8])?.to_vec::<f32>()?;
///     assert_eq!(left[0], f32::NEG_INFINITY);
///     assert!(left[1].is_finite() && left[2].is_finite());
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn top_p(logits: &Array, p: &[f32]) -> Result<Array> {
    let n = logits
        .shape()
        .last()
        .map_or(0, |&n| n.unsigned_abs() as usize);
    let rows = logits.size().checked_div(n).unwrap_or(0);
    if logits.dtype() != Dtype::Float32 || rows == 0 || rows != p.len() {
        return Err(Error::new(
            ErrorKind::Shape,
            "cpu::top_p",
            format!("needs float32 [{}, n] for {} values of p", p.len(), p.len()),
        )
        .with_inputs(&[logits]));
    }
    let work = Nucleus { n, p: p.to_vec() };
    host_op::add(
        "cpu::top_p",
        Meaning::Opaque,
        work,
        &[logits],
        logits.shape(),
    )
}

struct Nucleus {
    /// Elements of a row.
    n: usize,
    /// Of each row.
    p: Vec<f32>,
}

impl Work for Nucleus {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
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
pub(super) fn nucleus(isa: Isa, row: &[f32], (max, least): (f32, f32), p: f32, room: &mut Room) {
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
    use crate::{Device, Stream};

    const NO: f32 = f32::NEG_INFINITY;

    /// What the definition says, by sorting everything.
    fn reference(row: &[f32], p: f32) -> Vec<f32> {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[a].total_cmp(&row[b]));
        let max = f64::from(row[order[row.len() - 1]]);
        let weight = |i: usize| (f64::from(row[i]) - max).exp();
        let total: f64 = (0..row.len()).map(weight).sum();
        let mut out = row.to_vec();
        let mut sum = 0.0;
        for &i in &order[..row.len() - 1] {
            sum += weight(i);
            if sum <= (1.0 - f64::from(p)) * total {
                out[i] = NO;
            }
        }
        out
    }

    fn kept(rows: &[Vec<f32>], p: &[f32]) -> Vec<Vec<f32>> {
        let n = rows[0].len();
        let x = Array::from_slice(&rows.concat(), &[rows.len() as i32, n as i32]).unwrap();
        let y = Stream::default_of(Device::cpu())
            .unwrap()
            .scope(|| top_p(&x, p)?.to_vec::<f32>())
            .unwrap();
        y.chunks(n).map(<[f32]>::to_vec).collect()
    }

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

    #[test]
    fn the_nucleus_is_that_of_a_full_sort() {
        let mut state = 1u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        for spread in [0.01, 1.0, 6.0, 30.0, 300.0] {
            for p in [0.05, 0.31, 0.5, 0.9, 0.95, 0.999] {
                let rows: Vec<Vec<f32>> = (0..3)
                    .map(|_| (0..2000).map(|_| (next() - 0.5) * spread).collect())
                    .collect();
                let got = kept(&rows, &[p; 3]);
                for (row, got) in rows.iter().zip(&got) {
                    assert_eq!(got, &reference(row, p), "spread {spread}, p {p}");
                }
            }
        }
    }

    #[test]
    fn the_ends() {
        // Ties at the border: exactly as many as needed, the ones behind.
        assert_eq!(kept(&[vec![1.0; 4]], &[0.5])[0], [NO, NO, 1.0, 1.0]);
        assert_eq!(kept(&[vec![1.0; 4]], &[1e-9])[0], [NO, NO, NO, 1.0]);
        assert_eq!(kept(&[vec![1.0; 4]], &[1.0])[0], [1.0; 4]);
        assert_eq!(kept(&[vec![NO, 2.0, NO]], &[0.9])[0], [NO, 2.0, NO]);
        assert_eq!(kept(&[vec![NO, NO]], &[0.9])[0], [NO, NO]);
        // What is infinite is certain.
        let inf = f32::INFINITY;
        assert_eq!(
            kept(&[vec![inf, 1e38, inf, NO]], &[0.9])[0],
            [inf, NO, inf, NO]
        );
        // Each row has its own p.
        let rows = [vec![0.0, 0.0, 0.0, 9.0], vec![0.0, 0.0, 0.0, 0.0]];
        assert_eq!(
            kept(&rows, &[0.5, 0.75]),
            [vec![NO, NO, NO, 9.0], vec![NO, 0.0, 0.0, 0.0]]
        );
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let x = Array::from_slice(&[1.0f32, 2.0], &[1, 2]).unwrap();
        assert_eq!(top_p(&x, &[0.5, 0.5]).unwrap_err().kind(), ErrorKind::Shape);
        let x = Array::from_slice(&[1i32, 2], &[1, 2]).unwrap();
        assert_eq!(top_p(&x, &[0.5]).unwrap_err().kind(), ErrorKind::Shape);
        let x = Array::from_slice(&[0.0f32; 0], &[1, 0]).unwrap();
        assert!(top_p(&x, &[]).is_err());
    }
}
