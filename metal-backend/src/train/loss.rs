//! Loss functions on logits. The caller selects the positions that count in the loss.

use mlx_rs_core::{All, Array, Dtype, Error, ErrorKind, Result};

/// Cross-entropy at each position, in nats: `logsumexp(logits) - logits[target]`. Unlike
/// `-log(softmax)`, this formula is numerically stable. Computed in float32.
///
/// `logits` is `[.., vocab]`. `targets` `[..]` are token ids below `vocab`. Returns `[..]`.
///
/// # Errors
/// If the shapes do not match.
pub fn cross_entropy_each(logits: &Array, targets: &Array) -> Result<Array> {
    let leading = logits.shape().split_last().map(|(_, leading)| leading);
    if leading != Some(targets.shape()) {
        return Err(Error::new(
            ErrorKind::Shape,
            "cross_entropy",
            format!(
                "targets {:?} do not fit logits {:?}; they must be the same without the last axis",
                targets.shape(),
                logits.shape()
            ),
        ));
    }
    let logits = logits.astype(Dtype::Float32)?;
    let chosen = logits
        .take_along_axis(&targets.expand_dims(-1)?, -1)?
        .squeeze_axis(-1)?;
    logits.logsumexp(-1, false)?.subtract(&chosen)
}

/// The mean of [`cross_entropy_each`], a scalar.
///
/// # Errors
/// As [`cross_entropy_each`].
pub fn cross_entropy(logits: &Array, targets: &Array) -> Result<Array> {
    cross_entropy_each(logits, targets)?.mean(All, false)
}

/// The mean of [`cross_entropy_each`], weighted by `mask` `[..]`: 1 includes a position, 0 excludes
/// it, and weights between are allowed. Zero if all weights are 0.
///
/// # Errors
/// As [`cross_entropy_each`].
pub fn masked_cross_entropy(logits: &Array, targets: &Array, mask: &Array) -> Result<Array> {
    let mask = mask.astype(Dtype::Float32)?;
    let sum = cross_entropy_each(logits, targets)?
        .multiply(&mask)?
        .sum(All, false)?;
    // Adding 1 to a zero count makes the loss 0 instead of NaN.
    let count = mask.sum(All, false)?;
    let none = count.equal(&count.scalar_like(0.0)?)?;
    sum.divide(&count.add(&none.astype(Dtype::Float32)?)?)
}

/// Mean squared error, a scalar.
///
/// # Errors
/// If the shapes do not match.
pub fn mse(predictions: &Array, targets: &Array) -> Result<Array> {
    predictions.subtract(targets)?.square()?.mean(All, false)
}

/// `log(sigmoid(x))`, in a form that does not overflow.
fn log_sigmoid(x: &Array) -> Result<Array> {
    let zero = x.scalar_like(0.0)?;
    zero.subtract(&zero.logaddexp(&x.negative()?)?)
}

/// Direct preference optimization (Rafailov et al. 2023, equation 7). It compares how strongly the
/// model and the reference prefer `chosen` over `rejected`. Each array is `[pairs]` of summed
/// log-probabilities. `smoothing` is the probability that a label is wrong (the conservative
/// variant in the authors' code); 0 disables it. Returns a scalar.
///
/// # Errors
/// If the shapes do not match.
pub fn dpo(
    (chosen, rejected): (&Array, &Array),
    (base_chosen, base_rejected): (&Array, &Array),
    beta: f32,
    smoothing: f32,
) -> Result<Array> {
    let margin = chosen
        .subtract(rejected)?
        .subtract(&base_chosen.subtract(base_rejected)?)?;
    let scaled = margin.multiply(&margin.scalar_like(beta)?)?;
    let right = log_sigmoid(&scaled)?.multiply(&scaled.scalar_like(smoothing - 1.0)?)?;
    let wrong = log_sigmoid(&scaled.negative()?)?.multiply(&scaled.scalar_like(smoothing)?)?;
    right.subtract(&wrong)?.mean(All, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(x: &[f32]) -> Array {
        Array::vector(x).unwrap()
    }

    fn number(x: &Array) -> f32 {
        x.item::<f32>().unwrap()
    }

    #[test]
    fn cross_entropy_is_stable_and_counts_what_the_mask_says() {
        let logits = [1000.0f32, 0.0, 0.0, 0.0, 0.0, 0.0];
        let logits = Array::from_slice(&logits, &[1, 2, 3]).unwrap();
        let targets = Array::from_slice(&[1u32, 2], &[1, 2]).unwrap();
        let each = cross_entropy_each(&logits, &targets).unwrap();
        let each = each.to_vec::<f32>().unwrap();
        assert!((each[0] - 1000.0).abs() < 1e-3 && (each[1] - 3f32.ln()).abs() < 1e-6);
        let masked = |mask: &[f32]| {
            let mask = Array::from_slice(mask, &[1, 2]).unwrap();
            number(&masked_cross_entropy(&logits, &targets, &mask).unwrap())
        };
        assert!((masked(&[0.0, 1.0]) - 3f32.ln()).abs() < 1e-6);
        assert_eq!(masked(&[0.0, 0.0]), 0.0);
        let mean = number(&cross_entropy(&logits, &targets).unwrap());
        assert!((mean - masked(&[1.0, 1.0])).abs() < 1e-3);
        assert!(cross_entropy(&logits, &targets.flatten(0, -1).unwrap()).is_err());
    }

    #[test]
    fn mse_and_preferences() {
        assert_eq!(number(&mse(&v(&[1.0, 3.0]), &v(&[0.0, 1.0])).unwrap()), 2.5);
        let loss = |chosen: f32, smoothing| {
            let zero = v(&[0.0]);
            number(&dpo((&v(&[chosen]), &zero), (&zero, &zero), 0.5, smoothing).unwrap())
        };
        assert!((loss(0.0, 0.0) - 2f32.ln()).abs() < 1e-6);
        // -ln(sigmoid(1))
        assert!((loss(2.0, 0.0) - 0.313_261_7).abs() < 1e-6);
        assert!((loss(-400.0, 0.0) - 200.0).abs() < 1e-3);
        let mixed = 0.9 * 0.313_261_7 + 0.1 * 1.313_261_7;
        assert!((loss(2.0, 0.1) - mixed).abs() < 1e-6);
    }
}
