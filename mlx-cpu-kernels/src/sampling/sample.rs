//! Chooses one token for each row of logits, in one operation: penalties, biases and bans, then
//! filters, then the draw. `softmax_pass.rs`, `top_k.rs` and `top_p.rs` have the passes over rows.
//!
//! As separate operations, these stages would read and write the whole vocabulary, in about sixty
//! graph nodes per token. This operation copies a row at most once. Penalties touch only penalized
//! tokens, and filters reduce the row to a short list.

use std::sync::Arc;

use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::sampling::softmax_pass::{BLOCK, Scale, max_of, relative_logit};
use crate::sampling::top_k::{
    Workspace, ascending, candidates_above, draw_from, keep_top_k, pass, select_top_k,
    softmax_weights,
};
use crate::sampling::top_p::keep_top_p;
use crate::sampling::typical::{mask_atypical, mask_below_deviations};
use crate::work::{Input, Work};

/// How a row's token is chosen.
#[derive(Debug, Clone)]
pub enum Pick {
    /// This token, independent of the logits.
    Forced(u32),
    /// The maximum; the first one on ties.
    Greedy,
    /// A random draw.
    Draw(DrawParams),
}

/// The filters and parameters of a draw. The order of stages is top-n-sigma, typical-p, top-p,
/// min-p, XTC, top-k, temperature. With a top-k and no XTC, top-p and min-p process only the `k`
/// most probable tokens, with their probabilities in the whole row. With `temperature_first` the
/// order is temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC. Each of these filters
/// uses probabilities renormalized after the previous filter.
#[derive(Debug, Clone)]
pub struct DrawParams {
    /// Keeps logits at most this number of standard deviations below the maximum; 0 keeps all.
    pub top_n_sigma: f32,
    /// Keeps the tokens of most typical surprise whose total probability reaches this value; 1
    /// keeps all.
    pub typical_p: f32,
    /// Keeps the smallest set of most probable tokens whose total probability reaches this value; 1
    /// keeps all.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the highest probability; 0 keeps
    /// all.
    pub min_p: f32,
    /// XTC: a probability threshold and a list of exempt tokens. Of the tokens above the threshold,
    /// XTC removes all but the least probable one and the exempt ones.
    pub xtc: Option<(f32, Arc<[u32]>)>,
    /// Keeps this number of most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// The factor on logits, `1 / temperature`; finite.
    pub scale: f32,
    /// Whether the filters apply after the temperature.
    pub temperature_first: bool,
    /// The number in `[0, 1)` that the cumulative probability must pass.
    pub uniform: f64,
}

impl DrawParams {
    /// No filters, and temperature 1.
    /// ```
    /// use mlx_cpu_kernels::DrawParams;
    /// let nucleus = DrawParams { top_p: 0.9, ..DrawParams::new() };
    /// assert_eq!((nucleus.top_k, nucleus.scale), (0, 1.0));
    /// ```
    pub const fn new() -> Self {
        Self {
            top_n_sigma: 0.0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            xtc: None,
            top_k: 0,
            scale: 1.0,
            temperature_first: false,
            uniform: 0.0,
        }
    }
}

impl Default for DrawParams {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes earlier tokens less probable: divides their positive logits, and multiplies their negative
/// logits.
#[derive(Debug, Clone, Copy)]
pub struct RepetitionPenalty {
    /// The number of most recent tokens that the penalty applies to.
    pub last: usize,
    /// The divisor of positive logits, and the factor on negative ones.
    pub penalty: f32,
}

/// Subtracts `presence` from the logits of tokens that occurred, and `frequency` for each
/// occurrence.
#[derive(Debug, Clone, Copy)]
pub struct CountPenalties {
    /// The number of most recent tokens that the penalties apply to.
    pub last: usize,
    /// Subtracted once from each token that occurred.
    pub presence: f32,
    /// Subtracted for each occurrence of a token.
    pub frequency: f32,
}

/// The operations on one row of logits, in the order of the fields. Token IDs outside the row are
/// ignored.
#[derive(Debug, Clone)]
pub struct SampleParams {
    /// The repetition penalty.
    pub repeat: Option<RepetitionPenalty>,
    /// Presence and frequency penalties.
    pub count: Option<CountPenalties>,
    /// Token IDs, and the values to add to their logits.
    pub bias: Arc<[(u32, f32)]>,
    /// Forbidden tokens.
    pub banned: Arc<[u32]>,
    /// The allowed tokens as bits: token `i` is bit `i % 32` of word `i / 32`. Missing words count
    /// as zero. `None` allows all tokens.
    pub allowed: Option<Vec<u32>>,
    /// How the token is chosen.
    pub pick: Pick,
}

impl SampleParams {
    /// The choice alone, without penalties, biases or bans.
    /// ```
    /// use mlx_cpu_kernels::{Pick, SampleParams};
    /// assert!(SampleParams::new(Pick::Greedy).bias.is_empty());
    /// ```
    pub fn new(pick: Pick) -> Self {
        Self {
            repeat: None,
            count: None,
            bias: Arc::default(),
            banned: Arc::default(),
            allowed: None,
            pick,
        }
    }
}

/// The maximum number of candidates in a list. With more candidates, the filters run on the whole
/// row.
pub const MOST_CANDIDATES: usize = 1024;

/// Chooses one token per row. The first input has the logits, float32 `[rows, n]`. Further inputs
/// are uint32 arrays of earlier tokens. The output is `[rows]`.
pub struct Sample {
    /// Elements of a row.
    pub n: usize,
    /// For each row, its operations and the index of the input with its earlier tokens.
    pub rows: Vec<(SampleParams, Option<usize>)>,
}

impl Work for Sample {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `choose` passes float32 logits first.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let seen = |input: Option<usize>| match input.and_then(|i| inputs.get(i)) {
            // SAFETY: `choose` checked that all inputs after the first are uint32.
            Some(input) => unsafe { input.as_slice::<u32>() },
            None => &[],
        };
        let rows: Vec<(&[f32], &[u32], &SampleParams)> = logits
            .chunks_exact(self.n)
            .zip(&self.rows)
            .map(|(x, (row, input))| (x, seen(*input), row))
            .collect();
        let isa = Isa::detect();
        let out = SharedOutput::new(output);
        // Each element costs about as much as four multiplications.
        parallel_ranges(rows.len(), 4 * logits.len(), &|from, to| {
            Workspace::with(|workspace| {
                workspace.rows_in_parallel = rows.len() > 1;
                for (i, (x, seen, row)) in rows.iter().enumerate().take(to).skip(from) {
                    // SAFETY: each row has a separate element.
                    let token = unsafe { out.slice_mut(i, 1) };
                    token[0] = row.token(isa, x, seen, workspace) as f32; // below `MAX_ROW_LEN`
                }
                workspace.rows_in_parallel = false;
            });
        });
    }

    fn outputs(&self) -> usize {
        self.rows.len()
    }
}

/// The last `n` tokens.
pub fn tail(tokens: &[u32], n: usize) -> &[u32] {
    &tokens[tokens.len().saturating_sub(n)..]
}

impl SampleParams {
    fn token(&self, isa: Isa, logits: &[f32], seen: &[u32], workspace: &mut Workspace) -> u32 {
        if let Pick::Forced(id) = self.pick {
            return id;
        }
        let changes = !(seen.is_empty()
            && self.bias.is_empty()
            && self.banned.is_empty()
            && self.allowed.is_none());
        // The vector is moved out of the workspace, because the filters borrow the rest of the
        // workspace.
        let mut adjusted = std::mem::take(&mut workspace.row);
        if changes {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust_logits(logits, seen, &mut adjusted, &mut workspace.counts);
        }
        let token = match &self.pick {
            Pick::Forced(id) => *id,
            Pick::Greedy => {
                let x = if changes { &adjusted } else { logits };
                workspace.find_block_maxima(isa, x);
                argmax(x, &workspace.block_maxima)
            }
            Pick::Draw(filters) => {
                let writes = filters.changes_row();
                if !changes && writes {
                    adjusted.clear();
                    adjusted.extend_from_slice(logits);
                }
                let all = if changes || writes {
                    Logits::Owned(&mut adjusted)
                } else {
                    Logits::Borrowed(logits)
                };
                filters.token(isa, all, workspace)
            }
        };
        workspace.row = adjusted;
        token
    }

    /// Applies penalties, biases and bans; `x` starts as a copy of `logits`.
    fn adjust_logits(&self, logits: &[f32], seen: &[u32], x: &mut [f32], counts: &mut Vec<u32>) {
        if let Some(RepetitionPenalty { last, penalty }) = self.repeat {
            for &id in tail(seen, last) {
                // The penalty applies to the original logit, so a repeated token is penalized only
                // once.
                if let (Some(&was), Some(x)) = (logits.get(id as usize), x.get_mut(id as usize)) {
                    *x = if was < 0.0 {
                        was * penalty
                    } else {
                        was / penalty
                    };
                }
            }
        }
        if let Some(CountPenalties {
            last,
            presence,
            frequency,
        }) = self.count
        {
            let seen = tail(seen, last);
            if counts.len() < x.len() {
                counts.resize(x.len(), 0);
            }
            for &id in seen {
                if let Some(count) = counts[..x.len()].get_mut(id as usize) {
                    *count += 1;
                }
            }
            for &id in seen {
                let Some(x) = x.get_mut(id as usize) else {
                    continue;
                };
                let count = std::mem::take(&mut counts[id as usize]);
                if count > 0 {
                    *x -= count as f32 * frequency;
                    *x -= presence;
                }
            }
        }
        for &(id, bias) in &*self.bias {
            if let Some(x) = x.get_mut(id as usize) {
                *x += bias;
            }
        }
        for &id in &*self.banned {
            if let Some(x) = x.get_mut(id as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
        if let Some(words) = &self.allowed {
            let mut words = words.iter().copied();
            for part in x.chunks_mut(32) {
                match words.next().unwrap_or(0) {
                    0 => part.fill(f32::NEG_INFINITY),
                    u32::MAX => {}
                    word => {
                        for (i, x) in part.iter_mut().enumerate() {
                            if word >> i & 1 == 0 {
                                *x = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The index of the maximum; the first one on ties, and 0 for NaN.
fn argmax(x: &[f32], block_maxima: &[f32]) -> u32 {
    let max = max_of(block_maxima);
    let start = block_maxima.iter().position(|&p| p == max).unwrap_or(0) * BLOCK;
    let block = x.get(start..).unwrap_or_default();
    (start + block.iter().position(|&x| x == max).unwrap_or(0)) as u32
}

/// The logits of a row, either read-only or mutable.
enum Logits<'a> {
    Borrowed(&'a [f32]),
    Owned(&'a mut [f32]),
}

impl Logits<'_> {
    fn row(&self) -> &[f32] {
        match self {
            Logits::Borrowed(row) => row,
            Logits::Owned(row) => row,
        }
    }
}

impl DrawParams {
    /// Whether a stage changes the row.
    fn changes_row(&self) -> bool {
        let masks = self.top_n_sigma > 0.0 || self.typical_p < 1.0;
        masks || self.xtc.is_some() || self.temperature_first
    }

    fn token(&self, isa: Isa, mut all: Logits<'_>, workspace: &mut Workspace) -> u32 {
        workspace.find_block_maxima(isa, all.row());
        let mut max = max_of(&workspace.block_maxima);
        if max == f32::NEG_INFINITY {
            return 0;
        }
        if let (Logits::Owned(row), true) = (&mut all, self.temperature_first) {
            return self.token_after_temperature(isa, row, max, workspace);
        }
        if let Logits::Owned(row) = &mut all {
            if self.top_n_sigma > 0.0 {
                mask_below_deviations(row, max, self.top_n_sigma);
            }
            if self.typical_p < 1.0 {
                mask_atypical(isa, row, max, self.typical_p, workspace);
            }
            workspace.find_block_maxima(isa, row);
            max = max_of(&workspace.block_maxima);
        }
        let k = self.top_k;
        if k > 0 && k < all.row().len() && k <= MOST_CANDIDATES && self.xtc.is_none() {
            self.draw_from_top_k(isa, all.row(), max, workspace)
        } else {
            self.draw_from_row(isa, all, max, workspace)
        }
    }

    /// Draws with a top-k. The candidates are in ascending order of probability.
    fn draw_from_top_k(&self, isa: Isa, row: &[f32], max: f32, workspace: &mut Workspace) -> u32 {
        let one = Scale { max, by: 1.0 };
        let nucleus_total = (self.top_p < 1.0).then(|| workspace.find_block_sums(isa, row, one));
        select_top_k(row, self.top_k, workspace);
        workspace.candidates.sort_unstable_by(ascending);
        let mut first = 0;
        if let Some(total) = nucleus_total {
            softmax_weights(
                isa,
                &workspace.candidates,
                one,
                &mut workspace.values,
                &mut workspace.weights,
            );
            // Top-p keeps a token if the more probable tokens have a total probability below p.
            let reach = f64::from(self.top_p) * total;
            let mut before = 0.0;
            first = workspace.candidates.len();
            while first > 0 && before < reach {
                first -= 1;
                before += f64::from(workspace.weights[first]);
            }
        }
        if self.min_p > 0.0 {
            let least = self.min_p.ln();
            let passes_min_p = |f: &(f32, u32)| relative_logit(f.0, max) >= least;
            first += workspace.candidates[first..]
                .iter()
                .position(passes_min_p)
                .unwrap_or(0);
        }
        let candidates = &workspace.candidates[first..];
        let scale = Scale {
            max,
            by: self.scale,
        };
        let total = softmax_weights(
            isa,
            candidates,
            scale,
            &mut workspace.values,
            &mut workspace.weights,
        );
        candidate_at(workspace, first, self.uniform * total)
    }

    fn draw_from_row(
        &self,
        isa: Isa,
        mut all: Logits<'_>,
        max: f32,
        workspace: &mut Workspace,
    ) -> u32 {
        // Whether the remaining tokens are the candidates, in index order. If not, they are the
        // whole row.
        let mut candidates = false;
        // The logit threshold of min-p; minus infinity without min-p.
        let least = max + self.min_p.ln();
        if self.top_p < 1.0 {
            keep_top_p(isa, all.row(), (max, least), self.top_p, workspace);
            candidates = true;
        }
        if self.min_p > 0.0 {
            if candidates {
                workspace.candidates.retain(|f| f.0 >= least);
            } else {
                candidates_above(
                    all.row(),
                    &workspace.block_maxima,
                    least,
                    &mut workspace.candidates,
                );
                candidates = true;
            }
        }
        if let Some((threshold, spared)) = &self.xtc {
            match (&mut all, candidates) {
                (Logits::Owned(row), false) => {
                    apply_xtc(isa, row, max, *threshold, spared, workspace);
                }
                _ => apply_xtc_to_candidates(isa, max, *threshold, spared, workspace),
            }
        }
        if self.top_k > 0 && self.top_k < all.row().len() {
            if candidates {
                keep_top_k(&mut workspace.candidates, self.top_k);
            } else {
                select_top_k(all.row(), self.top_k, workspace);
                candidates = true;
            }
            workspace.candidates.sort_unstable_by_key(|f| f.1);
        }
        self.draw_from_rest(isa, all.row(), (candidates, self.scale), workspace)
    }

    /// Draws from the remaining tokens: the candidates if there are any, otherwise the whole
    /// filtered row. `by` is the factor on logits.
    pub(super) fn draw_from_rest(
        &self,
        isa: Isa,
        row: &[f32],
        (candidates, by): (bool, f32),
        workspace: &mut Workspace,
    ) -> u32 {
        if !candidates {
            // XTC may have removed the maximum, so it is computed again.
            let max = max_of(&workspace.block_maxima);
            return draw_from(isa, row, Scale { max, by }, self.uniform, workspace) as u32;
        }
        let values = workspace.candidates.iter().map(|f| f.0);
        let max = values.fold(f32::NEG_INFINITY, f32::max);
        let total = softmax_weights(
            isa,
            &workspace.candidates,
            Scale { max, by },
            &mut workspace.values,
            &mut workspace.weights,
        );
        candidate_at(workspace, 0, self.uniform * total)
    }
}

/// The token at which the cumulative weight passes `target`. The search begins at candidate
/// `first`.
fn candidate_at(workspace: &Workspace, first: usize, target: f64) -> u32 {
    let weights = workspace.weights.iter().map(|&w| f64::from(w));
    let (place, _) = pass(weights, 0.0, target);
    workspace.candidates.get(first + place).map_or(0, |f| f.1)
}

/// The probability of the least probable token above `threshold`; infinity if there is none.
fn least_above(weights: &[f32], total: f64, threshold: f32) -> f32 {
    weights
        .iter()
        .map(|&w| (f64::from(w) / total) as f32)
        .filter(|&p| p > threshold)
        .fold(f32::INFINITY, f32::min)
}

/// Applies XTC to the candidates.
pub(super) fn apply_xtc_to_candidates(
    isa: Isa,
    max: f32,
    threshold: f32,
    spared: &[u32],
    workspace: &mut Workspace,
) {
    let one = Scale { max, by: 1.0 };
    let total = softmax_weights(
        isa,
        &workspace.candidates,
        one,
        &mut workspace.values,
        &mut workspace.weights,
    );
    let least = least_above(&workspace.weights, total, threshold);
    let mut weights = workspace.weights.iter();
    workspace.candidates.retain(|(_, id)| {
        let w = weights.next().copied().unwrap_or(0.0);
        (f64::from(w) / total) as f32 <= least || spared.contains(id)
    });
}

/// Applies XTC to the whole row.
pub(super) fn apply_xtc(
    isa: Isa,
    row: &mut [f32],
    max: f32,
    threshold: f32,
    spared: &[u32],
    workspace: &mut Workspace,
) {
    let one = Scale { max, by: 1.0 };
    let total = workspace.find_block_sums(isa, row, one);
    // The search for tokens above the threshold begins slightly lower, as a margin for rounding.
    let from = (f64::from(threshold) * total).ln() - 1e-3;
    let least = if from.is_finite() {
        (f64::from(max) + from) as f32
    } else {
        f32::NEG_INFINITY
    };
    candidates_above(
        row,
        &workspace.block_maxima,
        least,
        &mut workspace.candidates,
    );
    softmax_weights(
        isa,
        &workspace.candidates,
        one,
        &mut workspace.values,
        &mut workspace.weights,
    );
    let least = least_above(&workspace.weights, total, threshold);
    for (&(_, id), &w) in workspace.candidates.iter().zip(&workspace.weights) {
        if (f64::from(w) / total) as f32 > least && !spared.contains(&id) {
            row[id as usize] = f32::NEG_INFINITY;
            let block = id as usize / BLOCK;
            let end = row.len().min((block + 1) * BLOCK);
            workspace.block_maxima[block] = max_of(&row[block * BLOCK..end]);
        }
    }
}
