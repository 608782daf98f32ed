//! Choosing from long rows: the greatest elements, and a draw by weight. MLX partitions and sorts whole
//! rows, draws a random number for every element, and computes its exponentials one by one; one pass
//! over a row does here what the choice needs.

use std::cell::RefCell;
use std::cmp::Ordering;

use super::host_op::{self, Input, Meaning, Work};
use super::kernel::Isa;
use super::weigh::{self, BLOCK, Scale, depth, peak};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The longest row that is chosen from: an index beyond is not exact as float32, in which results come.
pub const LONGEST: usize = 1 << 24;

/// An element and its place.
pub(super) type Found = (f32, u32);

/// Memory of a thread for what it works on, kept from row to row.
#[derive(Default)]
pub(super) struct Room {
    /// A row that is changed.
    pub row: Vec<f32>,
    /// The greatest of each block of the row.
    pub peaks: Vec<f32>,
    /// The sum of each block's weights.
    pub sums: Vec<f64>,
    /// What is looked at.
    pub found: Vec<Found>,
    /// Its values, and weights.
    pub values: Vec<f32>,
    pub weights: Vec<f32>,
    /// How often each token occurs; zeros between uses.
    pub counts: Vec<u32>,
    /// Whether other threads have rows of their own, so that they cannot help with this one.
    pub crowded: bool,
}

impl Room {
    /// Finds the greatest of each block of a row.
    pub(super) fn find_peaks(&mut self, isa: Isa, row: &[f32]) {
        weigh::peaks(isa, row, &mut self.peaks, !self.crowded);
    }

    /// Weighs each block of a row, whose peaks are here. Returns the sum.
    pub(super) fn find_sums(&mut self, isa: Isa, row: &[f32], scale: Scale) -> f64 {
        weigh::sums(
            isa,
            row,
            (&self.peaks, scale),
            &mut self.sums,
            !self.crowded,
        );
        self.sums.iter().sum()
    }

    /// Works in the memory of this thread.
    pub(super) fn with(work: impl FnOnce(&mut Room)) {
        thread_local! {
            static ROOM: RefCell<Room> = RefCell::default();
        }
        ROOM.with(|room| match room.try_borrow_mut() {
            Ok(mut room) => work(&mut room),
            Err(_) => work(&mut Room::default()),
        });
    }
}

/// By value, and of equals by place.
pub(super) fn ascending(a: &Found, b: &Found) -> Ordering {
    // Adding zero makes -0 the 0 that it equals.
    (a.0 + 0.0).total_cmp(&(b.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// All elements from `least` on, in order of place. What is no number counts as minus infinity.
pub(super) fn gather(row: &[f32], peaks: &[f32], least: f32, found: &mut Vec<Found>) {
    found.clear();
    for (at, (block, &peak)) in (0u32..).zip(row.chunks(BLOCK).zip(peaks)) {
        if peak < least {
            continue;
        }
        // First all comparisons, without branches: which of them hold cannot be foreseen.
        let mut wanted = 0u32;
        for (i, &x) in block.iter().enumerate() {
            let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
            wanted |= u32::from(x >= least) << i;
        }
        while wanted != 0 {
            let i = wanted.trailing_zeros();
            wanted &= wanted - 1;
            let x = block[i as usize];
            let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
            found.push((x, at * BLOCK as u32 + i));
        }
    }
}

/// Weighs what was found, and returns the sum.
pub(super) fn weigh(
    isa: Isa,
    found: &[Found],
    scale: Scale,
    values: &mut Vec<f32>,
    weights: &mut Vec<f32>,
) -> f64 {
    values.clear();
    values.extend(found.iter().map(|f| f.0));
    weigh::weights(isa, values, scale, weights);
    weights.iter().map(|&w| f64::from(w)).sum()
}

/// Leaves the `k` greatest, in no order; of equals those behind.
pub(super) fn most(found: &mut Vec<Found>, k: usize) {
    if k > 0 && k < found.len() {
        found.select_nth_unstable_by(k - 1, |a, b| ascending(b, a));
        found.truncate(k);
    }
}

/// Finds the `k` greatest of a row whose peaks are in `room`, in no order; of equals those behind.
pub(super) fn select(row: &[f32], k: usize, room: &mut Room) {
    // As many blocks have an element from the least of their greatest ones on.
    let mut least = f32::NEG_INFINITY;
    if k > 0 && k <= room.peaks.len() {
        room.values.clear();
        room.values.extend_from_slice(&room.peaks);
        let (_, kth, _) = room
            .values
            .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        least = *kth;
    }
    gather(row, &room.peaks, least, &mut room.found);
    most(&mut room.found, k);
}

/// The sizes of `[rows, n]` in float32, as the kernels here need it.
pub(super) fn size(op: &'static str, logits: &Array) -> Result<(usize, usize)> {
    match *logits.shape() {
        [rows, n] if rows > 0 && n > 0 && logits.dtype() == Dtype::Float32 => {
            let (rows, n) = (rows.unsigned_abs() as usize, n.unsigned_abs() as usize);
            if n <= LONGEST {
                return Ok((rows, n));
            }
        }
        _ => {}
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("needs float32 [rows, n], not empty, n at most {LONGEST}"),
    )
    .with_inputs(&[logits]))
}

/// The greatest elements of each row of `[rows, n]`.
#[derive(Debug, Clone)]
pub struct Greatest {
    /// How far each lies below the greatest of its row, ascending: float32 `[rows, k]`.
    pub values: Array,
    /// Where each stands: uint32 `[rows, k]`.
    pub indices: Array,
    /// `log(sum(exp(x - max)))` of the whole row: float32 `[rows, 1]`. Taken off a value it gives the
    /// logarithm of its probability.
    pub log_total: Array,
}

/// The `k` greatest elements of each row of float32 `[rows, n]`; of equals those behind. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type or shape; [`ErrorKind::Index`] when `k` is 0
/// or more than `n`; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let found = cpu::greatest(&Array::from_slice(&[3.0f32, 7.0, 5.0], &[1, 3])?, 2)?;
///     assert_eq!(found.indices.to_vec::<u32>()?, [2, 1]);
///     assert_eq!(found.values.to_vec::<f32>()?, [-2.0, 0.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn greatest(logits: &Array, k: usize) -> Result<Greatest> {
    const OP: &str = "cpu::greatest";
    let (rows, n) = size(OP, logits)?;
    if k == 0 || k > n {
        return Err(Error::new(
            ErrorKind::Index,
            OP,
            format!("{k} elements of rows of {n}; it must be 1 to {n}"),
        )
        .with_inputs(&[logits]));
    }
    let (rows_i, k_i) = (rows as i32, k as i32); // both were dimensions, or are below one
    let out = host_op::add(
        OP,
        Meaning::Opaque,
        Select { rows, n, k },
        &[logits],
        &[rows_i, 2 * k_i + 1],
    )?;
    Ok(Greatest {
        values: out.slice_axis(1, 0, k_i)?,
        indices: out.slice_axis(1, k_i, 2 * k_i)?.astype(Dtype::Uint32)?,
        log_total: out.slice_axis(1, 2 * k_i, 2 * k_i + 1)?,
    })
}

struct Select {
    rows: usize,
    n: usize,
    k: usize,
}

impl Work for Select {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `greatest` passes one array, of float32.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let width = 2 * self.k + 1;
        let rows = logits.chunks_exact(self.n);
        Room::with(|room| {
            for (row, out) in rows.zip(output.chunks_exact_mut(width)) {
                let (values, rest) = out.split_at_mut(self.k);
                let (indices, total) = rest.split_at_mut(self.k);
                let max = rank(Isa::detect(), row, room, values, indices);
                total[0] = log_total(Isa::detect(), row, max, room);
            }
        });
    }

    fn outputs(&self) -> usize {
        self.rows * (2 * self.k + 1)
    }
}

/// The greatest of a row, as many as there is room for in `values`, ascending: how far they lie below the
/// greatest one, which is returned, and where they stand.
fn rank(isa: Isa, row: &[f32], room: &mut Room, values: &mut [f32], places: &mut [f32]) -> f32 {
    room.find_peaks(isa, row);
    let max = peak(&room.peaks);
    if !values.is_empty() {
        select(row, values.len(), room);
        room.found.sort_unstable_by(ascending);
        for ((&(x, i), value), place) in room.found.iter().zip(values).zip(places) {
            *value = depth(x, max);
            *place = i as f32; // below `LONGEST`
        }
    }
    max
}

/// The logarithm of the sum of the weights of a row with its peaks in `room`.
fn log_total(isa: Isa, row: &[f32], max: f32, room: &mut Room) -> f32 {
    if max == f32::NEG_INFINITY {
        return max;
    }
    room.find_sums(isa, row, Scale { max, by: 1.0 }).ln() as f32
}

/// Logarithms of probabilities under the softmax of rows `[rows, n]`.
#[derive(Debug, Clone)]
pub struct LogProbabilities {
    /// Of one element a row: float32 `[rows]`.
    pub chosen: Array,
    /// Of the greatest, ascending: float32 `[rows, k]`.
    pub values: Array,
    /// Where these stand: uint32 `[rows, k]`.
    pub indices: Array,
}

/// The logarithms of the probabilities of the elements `chosen` (uint32 `[rows]`) of float32 `[rows, n]`, and
/// of the `k` greatest of each row, of equals those behind. An element beyond the row is impossible. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when an array is of another type or shape; [`ErrorKind::Index`] when `k` is more than
/// `n`; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[0.25f32.ln(), 0.75f32.ln()], &[1, 2])?;
///     let found = cpu::log_probabilities(&logits, &Array::vector(&[0u32])?, 1)?;
///     assert!((found.chosen.to_vec::<f32>()?[0].exp() - 0.25).abs() < 1e-6);
///     assert_eq!(found.indices.to_vec::<u32>()?, [1]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn log_probabilities(logits: &Array, chosen: &Array, k: usize) -> Result<LogProbabilities> {
    const OP: &str = "cpu::log_probabilities";
    let (rows, n) = size(OP, logits)?;
    if k > n {
        return Err(Error::new(
            ErrorKind::Index,
            OP,
            format!("{k} elements of rows of {n}"),
        ));
    }
    let (rows_i, k_i) = (rows as i32, k as i32); // both were dimensions, or are below one
    if chosen.dtype() != Dtype::Uint32 || chosen.shape() != [rows_i] {
        return Err(Error::new(
            ErrorKind::Shape,
            OP,
            format!("needs an element of each of {rows} rows: uint32 [{rows}]"),
        )
        .with_inputs(&[chosen]));
    }
    let out = host_op::add(
        OP,
        Meaning::Opaque,
        Logarithms { rows, n, k },
        &[logits, chosen],
        &[rows_i, 2 * k_i + 1],
    )?;
    Ok(LogProbabilities {
        chosen: out.slice_axis(1, 0, 1)?.squeeze_axis(1)?,
        values: out.slice_axis(1, 1, k_i + 1)?,
        indices: out
            .slice_axis(1, k_i + 1, 2 * k_i + 1)?
            .astype(Dtype::Uint32)?,
    })
}

struct Logarithms {
    rows: usize,
    n: usize,
    k: usize,
}

impl Work for Logarithms {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `log_probabilities` passes float32 and then uint32.
        let (logits, chosen): (&[f32], &[u32]) =
            unsafe { (inputs[0].as_slice(), inputs[1].as_slice()) };
        let isa = Isa::detect();
        let rows = logits.chunks_exact(self.n).zip(chosen);
        Room::with(|room| {
            for ((row, &id), out) in rows.zip(output.chunks_exact_mut(2 * self.k + 1)) {
                let (first, rest) = out.split_at_mut(1);
                let (values, places) = rest.split_at_mut(self.k);
                let max = rank(isa, row, room, values, places);
                if max == f32::NEG_INFINITY {
                    first.fill(max);
                    values.fill(max);
                    continue;
                }
                let total = log_total(isa, row, max, room);
                let x = row.get(id as usize).copied();
                first[0] = depth(x.unwrap_or(f32::NEG_INFINITY), max) - total;
                for value in values {
                    *value -= total;
                }
            }
        });
    }

    fn outputs(&self) -> usize {
        self.rows * (2 * self.k + 1)
    }
}

/// One index (uint32 `[rows]`) of each row of float32 `[rows, n]`, drawn with probabilities
/// `softmax(logits * scale)`: the one at which the running sum passes `uniform`, a number in `[0, 1)`.
/// `scale` and `uniform` have one value a row. A row of nothing but minus infinity gives 0. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type or shape, or the parameters are not one a
/// row; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Probabilities of a quarter and three: the running sum passes 0.5 at the second.
///     let logits = Array::from_slice(&[0.25f32.ln(), 0.75f32.ln()], &[1, 2])?;
///     assert_eq!(cpu::draw(&logits, &[1.0], &[0.5])?.to_vec::<u32>()?, [1]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn draw(logits: &Array, scale: &[f32], uniform: &[f64]) -> Result<Array> {
    const OP: &str = "cpu::draw";
    let (rows, n) = size(OP, logits)?;
    if scale.len() != rows || uniform.len() != rows {
        return Err(Error::new(
            ErrorKind::Shape,
            OP,
            format!(
                "{} scales and {} uniform numbers for {rows} rows; each row needs its own",
                scale.len(),
                uniform.len()
            ),
        )
        .with_inputs(&[logits]));
    }
    let work = Draw {
        n,
        scale: scale.to_vec(),
        uniform: uniform.to_vec(),
    };
    host_op::add(OP, Meaning::Opaque, work, &[logits], &[rows as i32])?.astype(Dtype::Uint32)
}

struct Draw {
    n: usize,
    /// Of each row.
    scale: Vec<f32>,
    uniform: Vec<f64>,
}

impl Work for Draw {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `draw` passes one array, of float32.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let isa = Isa::detect();
        let parameters = self.scale.iter().zip(&self.uniform);
        let rows = logits.chunks_exact(self.n).zip(output).zip(parameters);
        Room::with(|room| {
            for ((row, out), (&by, &uniform)) in rows {
                room.find_peaks(isa, row);
                let max = peak(&room.peaks);
                *out = pick(isa, row, Scale { max, by }, uniform, room) as f32;
            }
        });
    }

    fn outputs(&self) -> usize {
        self.scale.len()
    }
}

/// The place at which the running sum of the weights passes `uniform` of their total, in a row with its
/// peaks in `room`.
pub(super) fn pick(isa: Isa, row: &[f32], scale: Scale, uniform: f64, room: &mut Room) -> usize {
    if scale.max == f32::NEG_INFINITY {
        return 0;
    }
    let target = uniform * room.find_sums(isa, row, scale);
    // First the block, then the place in it.
    let (block, before) = pass(room.sums.iter().copied(), 0.0, target);
    let start = block * BLOCK;
    let Some(block) = row.get(start..row.len().min(start + BLOCK)) else {
        return 0;
    };
    weigh::weights(isa, block, scale, &mut room.weights);
    start + pass(room.weights.iter().map(|&w| f64::from(w)), before, target).0
}

/// Where the running sum of `weights`, which begins at `sum`, passes `target`, and what it is before; the
/// last place that weighs anything where rounding keeps it from that.
pub(super) fn pass(weights: impl Iterator<Item = f64>, mut sum: f64, target: f64) -> (usize, f64) {
    let (mut place, mut before) = (0, sum);
    for (i, w) in weights.enumerate() {
        if w > 0.0 {
            (place, before) = (i, sum);
            sum += w;
            if sum > target {
                break;
            }
        }
    }
    (place, before)
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
