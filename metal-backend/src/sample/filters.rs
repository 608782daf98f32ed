//! The stages of the sampling chain as plain functions from logits to logits `[1, vocab]`.
//! A token that is filtered out gets minus infinity.

use mlx_rs_core::{Array, Result, concatenate, where_};

fn minus_infinity() -> Result<Array> {
    Array::scalar(f32::NEG_INFINITY)
}

/// Lowers the logits of the tokens in `history` `[1, n]`: positive ones are divided by `penalty`,
/// negative ones multiplied (Keskar et al. 2019, CTRL). A token counts once however often it stands.
///
/// # Errors
/// When shapes do not fit.
pub fn repeat_penalty(logits: &Array, history: &Array, penalty: f32) -> Result<Array> {
    let seen = logits.take_along_axis(history, -1)?;
    let by = Array::scalar(penalty)?;
    let lowered = where_(
        &seen.less(&Array::scalar(0.0f32)?)?,
        &seen.multiply(&by)?,
        &seen.divide(&by)?,
    )?;
    // Equal ids carry equal values, so writing them twice is harmless.
    logits.put_along_axis(history, &lowered, -1)
}

/// Keeps the smallest set of most probable tokens whose probability exceeds `p` (Holtzman et al.
/// 2020), and always the most probable one.
///
/// # Errors
/// When shapes do not fit.
pub fn top_p(logits: &Array, p: f32) -> Result<Array> {
    let order = logits.argsort(-1)?; // ascending
    let sorted = logits.take_along_axis(&order, -1)?;
    let cumulative = sorted.softmax(-1, true)?.cumsum(-1, false, true)?;
    let keep = cumulative.greater(&Array::scalar(1.0 - p)?)?;
    let kept = where_(&keep, &sorted, &minus_infinity()?)?;
    // Rounding may leave even the last sum below 1 - p.
    let n = logits.dim(-1)?;
    let kept = concatenate(
        &[
            &kept.slice_axis(-1, 0, n - 1)?,
            &sorted.slice_axis(-1, n - 1, n)?,
        ],
        -1,
    )?;
    logits.put_along_axis(&order, &kept, -1)
}

/// Keeps tokens at least `p` times as probable as the most probable one (Nguyen et al. 2024).
///
/// # Errors
/// When shapes do not fit.
pub fn min_p(logits: &Array, p: f32) -> Result<Array> {
    let least = logits.max(-1, true)?.add(&Array::scalar(p.ln())?)?;
    where_(&logits.less(&least)?, &minus_infinity()?, logits)
}

/// Keeps the `k` greatest logits; `k` of the vocabulary or more keeps all.
///
/// # Errors
/// When shapes do not fit.
pub fn top_k(logits: &Array, k: usize) -> Result<Array> {
    let n = logits.dim(-1)?;
    let Some(drop) = i32::try_from(k).ok().map(|k| n - k).filter(|&d| d > 0) else {
        return Ok(logits.clone());
    };
    // Ranks 0..drop are the least: exactly k survive, also among equals.
    let least = logits.argpartition(drop - 1, -1)?.slice_axis(-1, 0, drop)?;
    logits.put_along_axis(&least, &minus_infinity()?, -1)
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
        let kept = |v: &[f32], k| {
            values(top_k(&row(v), k))
                .iter()
                .filter(|x| x.is_finite())
                .count()
        };
        assert_eq!(kept(&[1.0, 1.0, 1.0, 1.0], 2), 2);
        assert_eq!(kept(&[1.0, 2.0], 5), 2);
        assert_eq!(
            values(top_k(&row(&[1.0, 5.0, 3.0, 2.0]), 1)),
            [NO, 5.0, NO, NO]
        );
        assert_eq!(kept(&[NO, 1.0, NO], 2), 1);
    }

    #[test]
    fn top_p_keeps_the_smallest_sufficient_set() {
        // Probabilities 0.5, 0.3, 0.15, 0.05.
        let logits: Vec<f32> = [0.15f32, 0.5, 0.05, 0.3].iter().map(|p| p.ln()).collect();
        let kept = |p| {
            values(top_p(&row(&logits), p))
                .iter()
                .map(|x| x.is_finite())
                .collect::<Vec<_>>()
        };
        assert_eq!(kept(0.4), [false, true, false, false]);
        assert_eq!(kept(0.7), [false, true, false, true]);
        assert_eq!(kept(0.9), [true, true, false, true]);
        assert_eq!(kept(0.999), [true, true, true, true]);
        // However small p is, one token stays.
        assert_eq!(kept(1e-12), [false, true, false, false]);
        assert_eq!(values(top_p(&row(&[NO, 2.0, NO]), 0.5)), [NO, 2.0, NO]);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let logits: Vec<f32> = [0.6f32, 0.3, 0.1].iter().map(|p| p.ln()).collect();
        let kept = |p| {
            values(min_p(&row(&logits), p))
                .iter()
                .filter(|x| x.is_finite())
                .count()
        };
        assert_eq!((kept(0.4), kept(0.6), kept(0.1), kept(1.0)), (2, 1, 3, 1));
    }

    #[test]
    fn the_penalty_follows_the_sign_and_counts_once() {
        let history = Array::from_slice(&[1u32, 0, 1], &[1, 3]).unwrap();
        let out = values(repeat_penalty(&row(&[-1.0, 2.0, 3.0]), &history, 2.0));
        assert_eq!(out, [-2.0, 1.0, 3.0]);
    }
}
