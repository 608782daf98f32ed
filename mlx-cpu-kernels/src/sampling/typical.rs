//! Filters relative to all logits of a row: top-n-sigma and typical-p.

use crate::isa::Isa;
use crate::sampling::softmax_pass::{self, Scale, relative_logit};
use crate::sampling::top_k::Workspace;

/// Masks logits more than `n` standard deviations below the maximum (top-nσ, Tang et al. 2024). The
/// deviation is over the logits of all possible tokens, without -inf and NaN.
pub(super) fn mask_below_deviations(row: &mut [f32], max: f32, n: f32) {
    let (mut count, mut sum) = (0u32, 0.0);
    let relative = |x: f32| f64::from(relative_logit(x, max));
    for r in row.iter().map(|&x| relative(x)).filter(|r| r.is_finite()) {
        count += 1;
        sum += r;
    }
    let mean = sum / f64::from(count);
    let mut squares = 0.0;
    for r in row.iter().map(|&x| relative(x)).filter(|r| r.is_finite()) {
        squares += (r - mean) * (r - mean);
    }
    let least = -f64::from(n) * (squares / f64::from(count)).sqrt();
    for x in row {
        let r = relative(*x);
        if r.is_nan() || r < least {
            *x = f32::NEG_INFINITY;
        }
    }
}

/// Masks the tokens of a row that typical-p removes; see [`find_distances`].
pub(super) fn mask_atypical(
    isa: Isa,
    row: &mut [f32],
    max: f32,
    p: f32,
    workspace: &mut Workspace,
) {
    workspace.values.clear();
    workspace.values.extend_from_slice(row);
    let limit = find_distances(isa, max, p, workspace);
    for (x, &distance) in row.iter_mut().zip(&workspace.values) {
        if distance > limit {
            *x = f32::NEG_INFINITY;
        }
    }
}

/// Removes the candidates that typical-p removes; see [`find_distances`]. Returns the maximum of
/// the kept logits.
pub(super) fn keep_typical(isa: Isa, max: f32, p: f32, workspace: &mut Workspace) -> f32 {
    workspace.values.clear();
    let logits = workspace.candidates.iter().map(|candidate| candidate.0);
    workspace.values.extend(logits);
    let limit = find_distances(isa, max, p, workspace);
    let mut distances = workspace.values.iter();
    workspace
        .candidates
        .retain(|_| distances.next().is_some_and(|&distance| distance <= limit));
    let left = workspace.candidates.iter().map(|candidate| candidate.0);
    left.fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces the logits in `workspace.values` by distances, and returns the greatest distance that
/// typical-p keeps (locally typical sampling, Meister et al. 2023). In ascending order of distance,
/// typical-p keeps the first tokens whose total probability reaches `p`, and all tokens with the
/// same distance as the last one.
///
/// The distance is the difference between a token's surprise `-ln q` and the entropy. Both contain
/// the same log-sum. So the distance is also the difference between the logit and the mean logit
/// under `q`.
fn find_distances(isa: Isa, max: f32, p: f32, workspace: &mut Workspace) -> f32 {
    let Workspace {
        values, weights, ..
    } = workspace;
    softmax_pass::weights(isa, values, Scale { max, by: 1.0 }, weights);
    let (mut total, mut mean) = (0.0, 0.0);
    for (x, &w) in values.iter_mut().zip(&*weights) {
        *x = relative_logit(*x, max);
        if w > 0.0 {
            total += f64::from(w);
            mean += f64::from(w) * f64::from(*x);
        }
    }
    mean /= total;
    for x in values.iter_mut() {
        let distance = (f64::from(*x) - mean).abs() as f32;
        *x = if distance.is_nan() {
            f32::INFINITY
        } else {
            distance
        };
    }
    let reach = f64::from(p) * total;
    // Non-negative floats have the same order as their bits. So 32 bisection steps find the least
    // sufficient limit.
    let (mut low, mut high) = (0, f32::INFINITY.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        let limit = f32::from_bits(middle);
        let within = values.iter().zip(&*weights).filter(|(d, _)| **d <= limit);
        match within.map(|(_, &w)| f64::from(w)).sum::<f64>() >= reach {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    f32::from_bits(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    #[test]
    fn deviations_are_those_of_possible_tokens() {
        // The values 0 and 2 have mean 1 and standard deviation 1. Half a deviation below the
        // maximum is 1.5.
        let mut row = [0.0, 2.0, NO, f32::NAN];
        mask_below_deviations(&mut row, 2.0, 0.5);
        assert_eq!(row[..3], [NO, 2.0, NO]);
        assert_eq!(row[3], NO);
        let mut row = [0.0, 2.0, NO];
        mask_below_deviations(&mut row, 2.0, 2.5);
        assert_eq!(row, [0.0, 2.0, NO]);
        let mut infinite = [f32::INFINITY, 1.0];
        mask_below_deviations(&mut infinite, f32::INFINITY, 1.0);
        assert_eq!(infinite, [f32::INFINITY, NO]);
        let mut equal = [3.0; 4];
        mask_below_deviations(&mut equal, 3.0, 0.1);
        assert_eq!(equal, [3.0; 4]);
    }

    #[test]
    fn the_most_probable_token_may_be_atypical() {
        // Probabilities 0.6 once and 0.05 eight times. The surprise of 0.6 is 0.51, that of 0.05 is
        // 3.0, and the entropy is 1.50. So 0.6 is nearest, and the other tokens are equally
        // distant.
        let of = |p: f32| p.ln();
        let row: Vec<f32> = [0.6].iter().chain(&[0.05; 8]).map(|&p| of(p)).collect();
        Workspace::with(|workspace| {
            for (p, left) in [(0.5, 1), (0.61, 9)] {
                let mut x = row.clone();
                mask_atypical(Isa::detect(), &mut x, row[0], p, workspace);
                assert_eq!(x.iter().filter(|x| x.is_finite()).count(), left, "{p}");
            }
            // Probabilities 0.35 once and 0.13 five times. Their surprises are 1.05 and 2.04, and
            // the entropy is 1.69.
            let row: Vec<f32> = [0.35].iter().chain(&[0.13; 5]).map(|&p| of(p)).collect();
            workspace.candidates = row.iter().copied().zip(0..).collect();
            let max = keep_typical(Isa::detect(), row[0], 0.6, workspace);
            assert_eq!((workspace.candidates.len(), max), (5, of(0.13)));
        });
    }
}
