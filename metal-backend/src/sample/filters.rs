//! Filters of tokens, as functions from logits `[B, V]` to logits `[B, V]`. They set the logits of
//! removed tokens to minus infinity. A filter has one parameter per row, or one for all rows.
//!
//! All operations stay in MLX's graph. `penalties` changes logits; `chain` defines the order of
//! stages and the draw.

use mlx_rs_core::{Array, Dtype, Result, concatenate, where_};

/// Returns the rows' parameters as `[B, 1]`, or one parameter for all rows as `[1, 1]`.
pub(super) fn column(values: &[f32]) -> Result<Array> {
    Array::vector(values)?.expand_dims(1)
}

pub(super) fn minus_infinity() -> Result<Array> {
    Array::scalar(f32::NEG_INFINITY)
}

/// Shifts the logits so that the maximum of each row is 0. This does not change the distribution,
/// and sums of exponentials neither overflow nor lose precision. If a row contains plus infinity,
/// only its tokens with plus infinity stay possible, with equal probabilities. A row of only minus
/// infinity does not change.
pub fn shift(logits: &Array) -> Result<Array> {
    let finite = logits.minimum(&Array::scalar(f32::MAX)?)?;
    let greatest = finite.max(-1, true)?.maximum(&Array::scalar(f32::MIN)?)?;
    finite.subtract(&greatest)
}

/// Keeps the smallest set of most probable tokens whose total probability reaches `p` (Holtzman et
/// al. 2020). The most probable token is always kept. If tokens at the limit are equal, those with
/// greater ids are kept.
pub fn top_p(logits: &Array, p: &[f32]) -> Result<Array> {
    let order = logits.argsort(-1)?; // ascending, stable
    let sorted = logits.take_along_axis(&order, -1)?;
    let cumulative = shift(&sorted)?.softmax(-1, true)?.cumsum(-1, false, true)?;
    let spare: Vec<f32> = p.iter().map(|&p| (1.0 - f64::from(p)) as f32).collect();
    let keep = cumulative.greater(&column(&spare)?)?;
    let nucleus = where_(&keep, &sorted, &minus_infinity()?)?;
    // Due to rounding, even the last sum may be at most 1 - p, so the most probable token is
    // appended.
    let n = logits.dim(-1)?;
    let nucleus = concatenate(
        &[
            &nucleus.slice_axis(-1, 0, n - 1)?,
            &sorted.slice_axis(-1, n - 1, n)?,
        ],
        -1,
    )?;
    logits.put_along_axis(&order, &nucleus, -1)
}

/// Keeps tokens that are at least `p` times as probable as the most probable one (Nguyen et al.
/// 2024).
pub fn min_p(logits: &Array, p: &[f32]) -> Result<Array> {
    let share: Vec<f32> = p.iter().map(|p| p.ln()).collect();
    let least = logits.max(-1, true)?.add(&column(&share)?)?;
    where_(&logits.less(&least)?, &minus_infinity()?, logits)
}

/// Keeps logits that are at most `n` standard deviations below the greatest logit (top-nσ, Tang et
/// al. 2024). The deviation is over all logits above minus infinity.
pub fn top_n_sigma(logits: &Array, n: &[f32]) -> Result<Array> {
    let x = shift(logits)?;
    let zero = Array::scalar(0.0f32)?;
    let possible = x.greater(&minus_infinity()?)?;
    let count = possible.astype(Dtype::Float32)?.sum(-1, true)?;
    let mean = where_(&possible, &x, &zero)?
        .sum(-1, true)?
        .divide(&count)?;
    let from_mean = where_(&possible, &x.subtract(&mean)?, &zero)?;
    let deviation = from_mean.square()?.sum(-1, true)?.divide(&count)?.sqrt()?;
    let below: Vec<f32> = n.iter().map(|n| -n).collect();
    let least = deviation.multiply(&column(&below)?)?;
    where_(&x.less(&least)?, &minus_infinity()?, logits)
}

/// Keeps the tokens whose surprise `-ln q` is nearest to the entropy (locally typical sampling,
/// Meister et al. 2023). Sorts tokens by this distance and keeps the first ones whose total
/// probability reaches `p`, with all tokens at the same distance as the last kept token. The most
/// probable token may be removed.
pub fn typical_p(logits: &Array, p: &[f32]) -> Result<Array> {
    let x = shift(logits)?;
    let probabilities = x.softmax(-1, true)?;
    // Surprise and entropy contain the same log-sum, which cancels. So the distance is `|logit -
    // mean logit|`.
    let zero = Array::scalar(0.0f32)?;
    let possible = probabilities.greater(&zero)?;
    let mean = where_(&possible, &probabilities.multiply(&x)?, &zero)?.sum(-1, true)?;
    let distance = x.subtract(&mean)?.abs()?;
    let order = distance.argsort(-1)?;
    let sorted = distance.take_along_axis(&order, -1)?;
    let before = probabilities
        .take_along_axis(&order, -1)?
        .cumsum(-1, false, false)?;
    let keep = before.less(&column(p)?)?;
    let limit = where_(&keep, &sorted, &zero)?.max(-1, true)?;
    where_(&distance.greater(&limit)?, &minus_infinity()?, logits)
}

/// Exclude top choices (XTC): removes all tokens with a probability above `threshold`, except the
/// least probable of them. If fewer than two tokens are above the threshold, nothing changes.
/// Tokens in `spared` are always kept. Tokens of equal probability are kept or removed together.
/// The caller draws whether to apply XTC.
pub fn xtc(logits: &Array, threshold: &[f32], spared: &[u32]) -> Result<Array> {
    let probabilities = shift(logits)?.softmax(-1, true)?;
    let above = probabilities.greater(&column(threshold)?)?;
    let least = where_(&above, &probabilities, &Array::scalar(f32::INFINITY)?)?.min(-1, true)?;
    let out = where_(&probabilities.greater(&least)?, &minus_infinity()?, logits)?;
    let vocabulary = logits.dim(-1)?;
    let spared: Vec<u32> = spared
        .iter()
        .copied()
        .filter(|&id| i64::from(id) < i64::from(vocabulary))
        .collect();
    if spared.is_empty() {
        return Ok(out);
    }
    let rows = logits.dim(0)?;
    let ids = Array::vector(&spared)?
        .expand_dims(0)?
        .broadcast_to(&[rows, spared.len() as i32])?;
    out.put_along_axis(&ids, &logits.take_along_axis(&ids, -1)?, -1)
}

/// Keeps exactly the `k` greatest logits, even with ties. If `k` is 0 or at least the vocabulary
/// size, keeps all.
pub fn top_k(logits: &Array, k: usize) -> Result<Array> {
    let n = logits.dim(-1)?;
    let drop = i32::try_from(k).ok().map(|k| n - k).filter(|&d| d > 0);
    let Some(drop) = drop.filter(|_| k > 0) else {
        return Ok(logits.clone());
    };
    let least = logits.argpartition(drop - 1, -1)?.slice_axis(-1, 0, drop)?;
    logits.put_along_axis(&least, &minus_infinity()?, -1)
}

/// Divides logits by the temperature `t`, which must be above 0. `1 / t` is limited to the greatest
/// finite value.
pub fn temperature(logits: &Array, t: &[f32]) -> Result<Array> {
    let inverses: Vec<f32> = t.iter().copied().map(inverse).collect();
    logits.multiply(&column(&inverses)?)
}

/// Returns `1 / t`, limited to the greatest finite value.
pub(super) fn inverse(t: f32) -> f32 {
    (1.0 / t).min(f32::MAX)
}

/// Returns the `k` greatest logits of each row in ascending order, and their ids: `[B, k]` each.
pub(super) fn greatest(logits: &Array, k: i32) -> Result<(Array, Array)> {
    let n = logits.dim(-1)?;
    let ids = logits
        .argpartition(n - k, -1)?
        .slice_axis(-1, n - k, n)?
        .astype(Dtype::Uint32)?;
    let values = logits.take_along_axis(&ids, -1)?;
    let order = values.argsort(-1)?;
    Ok((
        values.take_along_axis(&order, -1)?,
        ids.take_along_axis(&order, -1)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    fn row(values: &[f32]) -> Array {
        Array::from_slice(values, &[1, values.len() as i32]).unwrap()
    }

    fn values(a: Result<Array>) -> Vec<f32> {
        a.unwrap().to_vec().unwrap()
    }

    #[test]
    fn top_k_keeps_exactly_k_also_among_equals() {
        let count = |v: &[f32], k| {
            values(top_k(&row(v), k))
                .iter()
                .filter(|x| x.is_finite())
                .count()
        };
        assert_eq!(count(&[1.0, 1.0, 1.0, 1.0], 2), 2);
        assert_eq!(count(&[1.0, 2.0], 5), 2);
        assert_eq!(count(&[1.0, 2.0], 0), 2);
        assert_eq!(
            values(top_k(&row(&[1.0, 5.0, 3.0, 2.0]), 1)),
            [NO, 5.0, NO, NO]
        );
        assert_eq!(count(&[NO, 1.0, NO], 2), 1);
    }

    #[test]
    fn top_p_keeps_the_smallest_sufficient_set() {
        // The probabilities, sorted, are 0.5, 0.3, 0.15, 0.05.
        let logits: Vec<f32> = [0.15f32, 0.5, 0.05, 0.3].iter().map(|p| p.ln()).collect();
        let is_kept = |p| {
            values(top_p(&row(&logits), &[p]))
                .iter()
                .map(|x| x.is_finite())
                .collect::<Vec<_>>()
        };
        assert_eq!(is_kept(0.4), [false, true, false, false]);
        assert_eq!(is_kept(0.7), [false, true, false, true]);
        assert_eq!(is_kept(0.9), [true, true, false, true]);
        assert_eq!(is_kept(0.999), [true, true, true, true]);
        // One token must be kept even for a tiny p.
        assert_eq!(is_kept(1e-12), [false, true, false, false]);
        assert_eq!(values(top_p(&row(&[NO, 2.0, NO]), &[0.5])), [NO, 2.0, NO]);
    }

    #[test]
    fn rows_have_their_own_parameters() {
        let logits: Vec<f32> = [0.6f32, 0.3, 0.1].iter().map(|p| p.ln()).collect();
        let rows = Array::from_slice(&[logits.clone(), logits].concat(), &[2, 3]).unwrap();
        let count = |a: Result<Array>| {
            let finite = |r: &[f32]| r.iter().filter(|x| x.is_finite()).count();
            let v = values(a);
            (finite(&v[..3]), finite(&v[3..]))
        };
        assert_eq!(count(top_p(&rows, &[0.5, 0.95])), (1, 3));
        assert_eq!(count(min_p(&rows, &[0.4, 0.6])), (2, 1));
        assert_eq!(count(xtc(&rows, &[0.05, 0.2], &[])), (1, 2));
        let t = values(temperature(&rows, &[0.5, 2.0]));
        assert!((t[0] - 0.6f32.ln() * 2.0).abs() < 1e-6 && (t[3] - 0.6f32.ln() / 2.0).abs() < 1e-6);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let logits: Vec<f32> = [0.6f32, 0.3, 0.1].iter().map(|p| p.ln()).collect();
        let count = |p| {
            values(min_p(&row(&logits), &[p]))
                .iter()
                .filter(|x| x.is_finite())
                .count()
        };
        assert_eq!(
            (count(0.4), count(0.6), count(0.1), count(1.0)),
            (2, 1, 3, 1)
        );
    }

    #[test]
    fn xtc_leaves_the_least_of_the_top_choices() {
        let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let is_kept = |threshold, spared: &[u32]| {
            values(xtc(&row(&logits), &[threshold], spared))
                .iter()
                .map(|x| x.is_finite())
                .collect::<Vec<_>>()
        };
        assert_eq!(is_kept(0.15, &[]), [false, false, true, true]);
        assert_eq!(is_kept(0.15, &[0, 99]), [true, false, true, true]);
        // If at most one token is above the threshold, nothing must be removed.
        assert_eq!(is_kept(0.35, &[]), [true; 4]);
        assert_eq!(is_kept(0.5, &[]), [true; 4]);
    }

    #[test]
    fn shifting_tames_infinities() {
        assert_eq!(
            values(shift(&row(&[f32::INFINITY, 1.0, NO, f32::INFINITY]))),
            [0.0, f32::MIN, NO, 0.0]
        );
        assert_eq!(values(shift(&row(&[NO, NO]))), [NO, NO]);
        assert_eq!(values(shift(&row(&[3.0, 1.0, NO]))), [0.0, -2.0, NO]);
        let cold = temperature(&shift(&row(&[3.0, 1.0, NO])).unwrap(), &[1e-40]);
        assert_eq!(values(cold)[0], 0.0);
    }
}
