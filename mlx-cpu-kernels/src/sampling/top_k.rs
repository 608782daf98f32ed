//! Finds the greatest elements of long rows, computes log-probabilities, and draws by weight. MLX
//! sorts whole rows and draws a random number for each element. Here a single pass over a row finds
//! the candidates.

use std::cell::RefCell;
use std::cmp::Ordering;

use crate::isa::Isa;
use crate::sampling::softmax_pass::{self, BLOCK, Scale, max_of, relative_logit};
use crate::work::{Input, Work};

/// The maximum row length. Results are float32, which cannot represent all greater indices exactly.
pub const MAX_ROW_LEN: usize = 1 << 24;

/// An element and its index.
pub type Candidate = (f32, u32);

/// A thread's scratch memory, reused between rows.
#[derive(Default)]
pub(crate) struct Workspace {
    /// A modified copy of the row.
    pub row: Vec<f32>,
    /// The maximum of each block of the row.
    pub block_maxima: Vec<f32>,
    /// The sum of each block's weights.
    pub sums: Vec<f64>,
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// The values of the candidates, and their weights.
    pub values: Vec<f32>,
    pub weights: Vec<f32>,
    /// The count of each token; all zero between uses.
    pub counts: Vec<u32>,
    /// Whether other threads process other rows. If so, this thread processes its row alone.
    pub rows_in_parallel: bool,
}

impl Workspace {
    /// Finds the maximum of each block of a row.
    pub(crate) fn find_block_maxima(&mut self, isa: Isa, row: &[f32]) {
        softmax_pass::block_maxima(isa, row, &mut self.block_maxima, !self.rows_in_parallel);
    }

    /// Sums the weights of each block of a row. `block_maxima` must already have the row's maxima.
    /// Returns the total.
    pub(crate) fn find_block_sums(&mut self, isa: Isa, row: &[f32], scale: Scale) -> f64 {
        softmax_pass::sums(
            isa,
            row,
            (&self.block_maxima, scale),
            &mut self.sums,
            !self.rows_in_parallel,
        );
        self.sums.iter().sum()
    }

    /// Runs `work` with this thread's workspace.
    pub(crate) fn with(work: impl FnOnce(&mut Workspace)) {
        thread_local! {
            static WORKSPACE: RefCell<Workspace> = RefCell::default();
        }
        WORKSPACE.with(|workspace| match workspace.try_borrow_mut() {
            Ok(mut workspace) => work(&mut workspace),
            Err(_) => work(&mut Workspace::default()),
        });
    }
}

/// Compares by value, then by index.
pub fn ascending(a: &Candidate, b: &Candidate) -> Ordering {
    // Adding zero turns -0 into 0. `total_cmp` would order -0 before 0, but the two must be equal.
    (a.0 + 0.0).total_cmp(&(b.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// All elements that are `least` or greater, in index order. NaN counts as minus infinity.
pub(crate) fn candidates_above(
    row: &[f32],
    block_maxima: &[f32],
    least: f32,
    candidates: &mut Vec<Candidate>,
) {
    candidates.clear();
    for (at, (block, &max_of)) in (0u32..).zip(row.chunks(BLOCK).zip(block_maxima)) {
        if max_of < least {
            continue;
        }
        // All comparisons of a block come first and have no branches, because their outcomes are
        // unpredictable.
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
            candidates.push((x, at * BLOCK as u32 + i));
        }
    }
}

/// Computes the candidates' weights, and returns their sum.
pub(crate) fn softmax_weights(
    isa: Isa,
    candidates: &[Candidate],
    scale: Scale,
    values: &mut Vec<f32>,
    weights: &mut Vec<f32>,
) -> f64 {
    values.clear();
    values.extend(candidates.iter().map(|f| f.0));
    softmax_pass::weights(isa, values, scale, weights);
    weights.iter().map(|&w| f64::from(w)).sum()
}

/// Keeps the `k` greatest candidates, unordered. Among equal values, those with greater indices are
/// kept.
pub(crate) fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, |a, b| ascending(b, a));
        candidates.truncate(k);
    }
}

/// Finds the `k` greatest elements of a row, unordered. Among equal values, those with greater
/// indices are kept. `workspace.block_maxima` must be filled.
pub(crate) fn select_top_k(row: &[f32], k: usize, workspace: &mut Workspace) {
    // At least `k` blocks have a maximum of at least the `k`th greatest block maximum. So the `k`
    // greatest elements are at least as great.
    let mut least = f32::NEG_INFINITY;
    if k > 0 && k <= workspace.block_maxima.len() {
        workspace.values.clear();
        workspace.values.extend_from_slice(&workspace.block_maxima);
        let (_, kth, _) = workspace
            .values
            .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        least = *kth;
    }
    candidates_above(
        row,
        &workspace.block_maxima,
        least,
        &mut workspace.candidates,
    );
    keep_top_k(&mut workspace.candidates, k);
}

/// Writes the `values.len()` greatest elements of a row in ascending order: their distances to the
/// maximum to `values`, and their indices to `places`. Returns the maximum.
fn rank(
    isa: Isa,
    row: &[f32],
    workspace: &mut Workspace,
    values: &mut [f32],
    places: &mut [f32],
) -> f32 {
    workspace.find_block_maxima(isa, row);
    let max = max_of(&workspace.block_maxima);
    if !values.is_empty() {
        select_top_k(row, values.len(), workspace);
        workspace.candidates.sort_unstable_by(ascending);
        for ((&(x, i), value), place) in workspace.candidates.iter().zip(values).zip(places) {
            *value = relative_logit(x, max);
            *place = i as f32; // below `MAX_ROW_LEN`, so exact
        }
    }
    max
}

/// The logarithm of the sum of a row's weights. `workspace.block_maxima` must be filled.
fn log_total(isa: Isa, row: &[f32], max: f32, workspace: &mut Workspace) -> f32 {
    if max == f32::NEG_INFINITY {
        return max;
    }
    workspace
        .find_block_sums(isa, row, Scale { max, by: 1.0 })
        .ln() as f32
}

/// Log-probabilities of one chosen element per row, and of the row's `k` greatest elements with
/// their indices. The inputs are float32 `[rows, n]` and uint32 `[rows]`. The output is
/// `[rows, 2 k + 1]`.
pub struct LogProbs {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements per row.
    pub n: usize,
    /// The number of greatest elements.
    pub k: usize,
}

impl Work for LogProbs {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `log_probabilities` passes float32 logits, then uint32 indices.
        let (logits, chosen): (&[f32], &[u32]) =
            unsafe { (inputs[0].as_slice(), inputs[1].as_slice()) };
        let isa = Isa::detect();
        let rows = logits.chunks_exact(self.n).zip(chosen);
        Workspace::with(|workspace| {
            for ((row, &id), out) in rows.zip(output.chunks_exact_mut(2 * self.k + 1)) {
                let (first, rest) = out.split_at_mut(1);
                let (values, places) = rest.split_at_mut(self.k);
                let max = rank(isa, row, workspace, values, places);
                if max == f32::NEG_INFINITY {
                    first.fill(max);
                    values.fill(max);
                    continue;
                }
                let total = log_total(isa, row, max, workspace);
                let x = row.get(id as usize).copied();
                first[0] = relative_logit(x.unwrap_or(f32::NEG_INFINITY), max) - total;
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

/// The index at which the cumulative weight passes the fraction `uniform` of the total weight.
/// `workspace.block_maxima` must be filled.
pub(crate) fn draw_from(
    isa: Isa,
    row: &[f32],
    scale: Scale,
    uniform: f64,
    workspace: &mut Workspace,
) -> usize {
    if scale.max == f32::NEG_INFINITY {
        return 0;
    }
    let target = uniform * workspace.find_block_sums(isa, row, scale);
    // The block is found first, then the index in it.
    let (block, before) = pass(workspace.sums.iter().copied(), 0.0, target);
    let start = block * BLOCK;
    let Some(block) = row.get(start..row.len().min(start + BLOCK)) else {
        return 0;
    };
    softmax_pass::weights(isa, block, scale, &mut workspace.weights);
    start
        + pass(
            workspace.weights.iter().map(|&w| f64::from(w)),
            before,
            target,
        )
        .0
}

/// The index at which the cumulative sum of `weights`, starting at `sum`, passes `target`, and the
/// sum before that index. If rounding keeps the sum below `target`, returns the last index with a
/// non-zero weight.
pub(crate) fn pass(weights: impl Iterator<Item = f64>, mut sum: f64, target: f64) -> (usize, f64) {
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
#[path = "top_k_tests.rs"]
mod tests;
