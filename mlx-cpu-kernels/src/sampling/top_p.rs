//! Top-p without sorting the vocabulary. Candidates near the maximum are counted in bins by value.
//! The sums of the bins' weights locate the cut, and only the bin that contains the cut is sorted.

use crate::isa::Isa;
use crate::sampling::softmax_pass::{MIN_RELATIVE_LOGIT, Scale, relative_logit};
use crate::sampling::top_k::{Candidate, Workspace, ascending, candidates_above, softmax_weights};

/// The ranges below the maximum logit that are searched for the nucleus, in this order. The first
/// one usually suffices.
const REACHES: [f32; 3] = [8.0, 16.0, MIN_RELATIVE_LOGIT];

const BINS: usize = 1024;

/// Writes the nucleus of a row to `workspace.candidates`, in index order. `max` is the row's
/// maximum and above minus infinity. `workspace.block_maxima` must be filled. The result may or may
/// not include elements below `least`, because the caller removes them.
pub(crate) fn keep_top_p(
    isa: Isa,
    row: &[f32],
    (max, least): (f32, f32),
    p: f32,
    workspace: &mut Workspace,
) {
    let tail_share = 1.0 - f64::from(p);
    let scale = Scale { max, by: 1.0 };
    let mut total = None;
    // The nucleus may extend below `least`. Then it contains all elements above `least`, and the
    // search can end there. Distances below 1 are not used, because the maximum must stay among the
    // candidates.
    let distance = max - least;
    let first = (1.0..REACHES[0])
        .contains(&distance)
        .then_some((distance, least));
    for (reach, from) in first.into_iter().chain(REACHES.map(|r| (r, max - r))) {
        candidates_above(
            row,
            &workspace.block_maxima,
            from,
            &mut workspace.candidates,
        );
        let mass = softmax_weights(
            isa,
            &workspace.candidates,
            scale,
            &mut workspace.values,
            &mut workspace.weights,
        );
        // Drops the least probable candidates while the sum of dropped weights is at most `spare`.
        let (spare, gone) = if reach == MIN_RELATIVE_LOGIT {
            (tail_share * mass, 0.0)
        } else {
            let total = *total.get_or_insert_with(|| workspace.find_block_sums(isa, row, scale));
            (tail_share * total, (total - mass).max(0.0))
        };
        if gone <= spare || reach == MIN_RELATIVE_LOGIT {
            cut(
                &mut workspace.candidates,
                &workspace.weights,
                (max, reach),
                spare,
                gone,
            );
            return;
        }
        if from == least {
            return;
        }
    }
}

/// Reduces the candidates, whose maximum is `max`, to the nucleus, keeping their order.
pub(crate) fn keep_top_p_of_candidates(isa: Isa, max: f32, p: f32, workspace: &mut Workspace) {
    let mass = softmax_weights(
        isa,
        &workspace.candidates,
        Scale { max, by: 1.0 },
        &mut workspace.values,
        &mut workspace.weights,
    );
    cut(
        &mut workspace.candidates,
        &workspace.weights,
        (max, MIN_RELATIVE_LOGIT),
        (1.0 - f64::from(p)) * mass,
        0.0,
    );
}

/// Drops the smallest of `candidates`, until dropping more would make the total weight of dropped
/// elements exceed `spare`. `gone` is the weight of elements dropped earlier. All candidates are
/// within `reach` of `max`.
fn cut(
    candidates: &mut Vec<Candidate>,
    weights: &[f32],
    (max, reach): (f32, f32),
    spare: f64,
    mut gone: f64,
) {
    let bin = |x: f32| {
        let at = (relative_logit(x, max) + reach) * (BINS as f32 / reach);
        // Conversion from float to integer saturates, so values beyond the range fall into bin 0.
        (at as usize).min(BINS - 1)
    };
    let mut sums = [0.0f64; BINS];
    for (&(x, _), &w) in candidates.iter().zip(weights) {
        sums[bin(x)] += f64::from(w);
    }
    let mut border = 0;
    while border < BINS - 1 && gone + sums[border] <= spare {
        gone += sums[border];
        border += 1;
    }
    // Bins below the border bin are dropped, and bins above it are kept. The elements of the border
    // bin are checked one by one.
    let mut inside: Vec<(Candidate, f32)> = candidates
        .iter()
        .zip(weights)
        .filter(|((x, _), _)| bin(*x) == border)
        .map(|(&candidates, &w)| (candidates, w))
        .collect();
    inside.sort_unstable_by(|a, b| ascending(&a.0, &b.0));
    // The most probable token is always kept.
    let last = if border == BINS - 1 { 1 } else { 0 };
    let n = inside.len().saturating_sub(last);
    let mut edge = None;
    for (candidates, w) in &inside[..n] {
        gone += f64::from(*w);
        if gone > spare {
            break;
        }
        edge = Some(*candidates);
    }
    candidates.retain(|candidates| {
        let at = bin(candidates.0);
        at > border || (at == border && edge.is_none_or(|e| ascending(candidates, &e).is_gt()))
    });
}

#[cfg(test)]
#[path = "top_p_tests.rs"]
mod tests;
