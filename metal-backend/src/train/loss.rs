//! Loss functions on logits. The caller selects the positions that count in the loss.

use mlx_rs_core::{All, Array, Dtype, Error, ErrorKind, Result, arange};
use serde::{Deserialize, Serialize};

/// Returns the cross-entropy at each position in nats: `logsumexp(logits) - logits[target]`. Unlike
/// `-log(softmax)`, this formula is numerically stable. The computation is in float32.
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

/// Returns the mean of [`cross_entropy_each`], a scalar.
///
/// # Errors
/// The errors of [`cross_entropy_each`].
pub fn cross_entropy(logits: &Array, targets: &Array) -> Result<Array> {
    cross_entropy_each(logits, targets)?.mean(All, false)
}

/// The mean of [`cross_entropy_each`], weighted by `mask` `[..]`: 1 includes a position, 0 excludes
/// it, and weights between are allowed. Zero if all weights are 0.
///
/// # Errors
/// The errors of [`cross_entropy_each`].
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

/// Returns the mean squared error, a scalar.
///
/// # Errors
/// If the shapes do not match.
pub fn mse(predictions: &Array, targets: &Array) -> Result<Array> {
    predictions.subtract(targets)?.square()?.mean(All, false)
}

/// Returns `log(sigmoid(x))` without overflow.
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

/// Odds ratio preference (Hong et al. 2024, arXiv:2403.07691, equation 7):
/// `-log(sigmoid(log_odds(chosen) - log_odds(rejected)))`, where the odds of a probability `p` are
/// `p / (1 - p)`. Each array is `[pairs]` of mean log-probabilities per token. Returns `[pairs]`.
///
/// # Errors
/// If the shapes do not match.
pub fn odds_ratio(chosen: &Array, rejected: &Array) -> Result<Array> {
    let log_odds = |x: &Array| {
        // A probability of exactly 1 would have infinite odds.
        let below = x.minimum(&x.scalar_like(-1e-6)?)?;
        x.subtract(&below.expm1()?.negative()?.log()?)
    };
    log_sigmoid(&log_odds(chosen)?.subtract(&log_odds(rejected)?)?)?.negative()
}

/// The parameters of [`kto`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kto {
    /// The penalty on deviation from the base model; above 0, usually 0.1.
    pub beta: f32,
    /// The weight of desirable replies.
    pub desirable_weight: f32,
    /// The weight of undesirable replies.
    pub undesirable_weight: f32,
}

impl Kto {
    /// Returns an error if a value is out of range.
    ///
    /// # Errors
    /// A message with the name, the value and the range.
    pub fn check(&self) -> std::result::Result<(), String> {
        if !(self.beta.is_finite() && self.beta > 0.0) {
            return Err(format!(
                "beta is {}; it must be a number above 0",
                self.beta
            ));
        }
        let weights = [
            ("desirable_weight", self.desirable_weight),
            ("undesirable_weight", self.undesirable_weight),
        ];
        match weights.iter().find(|(_, w)| !(w.is_finite() && *w >= 0.0)) {
            None => Ok(()),
            Some((name, w)) => Err(format!("{name} is {w}; it must be a number from 0")),
        }
    }
}

/// Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8): `weight *
/// (1 - value)`. The value is `sigmoid(beta * (ratio - reference))` for a desirable reply, and
/// `sigmoid(beta * (reference - ratio))` for an undesirable reply.
///
/// `ratios` `[replies]` are log-probabilities relative to the base model. `reference` is the
/// estimated divergence from the base model. Returns `[replies]`.
///
/// # Errors
/// If the shapes do not match.
pub fn kto(ratios: &Array, reference: f32, desirable: &[bool], options: Kto) -> Result<Array> {
    let sign = |desirable: &bool| {
        if *desirable {
            options.beta
        } else {
            -options.beta
        }
    };
    let weight = |desirable: &bool| match desirable {
        true => options.desirable_weight,
        false => options.undesirable_weight,
    };
    let signs: Vec<f32> = desirable.iter().map(sign).collect();
    let weights: Vec<f32> = desirable.iter().map(weight).collect();
    let gains = ratios
        .subtract(&ratios.scalar_like(reference)?)?
        .multiply(&Array::vector(&signs)?)?;
    // 1 - sigmoid(x) = sigmoid(-x)
    gains
        .negative()?
        .sigmoid()?
        .multiply(&Array::vector(&weights)?)
}

/// How the losses of tokens are reduced to one loss, with TRL's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// The mean over replies of the mean over their tokens (Shao et al. 2024).
    Grpo,
    /// The mean over all tokens of the batch.
    Bnpo,
    /// The sum over tokens, divided by `replies * max_completion_length` (Liu et al. 2025,
    /// arXiv:2503.20783).
    DrGrpo,
    /// The mean over all tokens of all batches of an update (Yu et al. 2025, arXiv:2503.14476).
    #[default]
    Dapo,
}

/// The parameters of group relative policy optimization, with TRL's names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grpo {
    /// The penalty on deviation from the base model; 0 for none.
    pub beta: f32,
    /// The temperature at which replies are drawn; above 0.
    pub temperature: f32,
    /// How the losses of tokens are reduced to one loss.
    pub loss_type: LossType,
    /// The maximum number of tokens in a reply.
    pub max_completion_length: usize,
    /// The probability ratio of a token is clipped below at `1 - epsilon`; above 0.
    pub epsilon: f32,
    /// The probability ratio of a token is clipped above at `1 + epsilon_high`; above 0.
    pub epsilon_high: f32,
}

impl Default for Grpo {
    /// The default values of the library TRL.
    fn default() -> Self {
        Self {
            beta: 0.0,
            temperature: 1.0,
            loss_type: LossType::default(),
            max_completion_length: 256,
            epsilon: 0.2,
            epsilon_high: 0.2,
        }
    }
}

impl Grpo {
    /// Returns an error if a value is out of range.
    ///
    /// # Errors
    /// A message with the name, the value and the range.
    pub fn check(&self) -> std::result::Result<(), String> {
        if !(self.beta.is_finite() && self.beta >= 0.0) {
            return Err(format!("beta is {}; it must be a number from 0", self.beta));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return Err(format!(
                "temperature is {}; it must be a number above 0",
                self.temperature
            ));
        }
        if self.max_completion_length == 0 {
            return Err(String::from(
                "max_completion_length is 0; it must be at least 1",
            ));
        }
        let ranges = [
            ("epsilon", self.epsilon),
            ("epsilon_high", self.epsilon_high),
        ];
        match ranges.iter().find(|(_, e)| !(e.is_finite() && *e > 0.0)) {
            None => Ok(()),
            Some((name, e)) => Err(format!("{name} is {e}; it must be a number above 0")),
        }
    }
}

/// Advantages of replies in groups of `group`, which answer the same prompt (Shao et al. 2024,
/// arXiv:2402.03300, section 4.1.2): `reward - mean(group)`. With `scaled`, this is divided by the
/// group's standard deviation plus 1e-4, as in TRL.
///
/// The second result is the mean over groups of the standard deviation, with the divisor `n - 1`
/// for `n` rewards.
#[must_use]
pub fn group_advantages(rewards: &[f32], group: usize, scaled: bool) -> (Vec<f32>, f32) {
    let (mut advantages, mut deviations) = (Vec::with_capacity(rewards.len()), Vec::new());
    for group in rewards.chunks(group.max(1)) {
        let n = group.len() as f64;
        let mean = group.iter().map(|r| f64::from(*r)).sum::<f64>() / n;
        let square = |r: &f32| (f64::from(*r) - mean).powi(2);
        let variance = group.iter().map(square).sum::<f64>() / (n - 1.0).max(1.0);
        let deviation = variance.sqrt();
        let divisor = if scaled { deviation + 1e-4 } else { 1.0 };
        advantages.extend(
            group
                .iter()
                .map(|r| ((f64::from(*r) - mean) / divisor) as f32),
        );
        deviations.push(deviation);
    }
    let mean = deviations.iter().sum::<f64>() / deviations.len().max(1) as f64;
    (advantages, mean as f32)
}

/// The results of [`policy`] for each token, `[1, T]`.
pub struct PolicyLoss {
    /// The losses.
    pub losses: Array,
    /// Estimated divergences from the base model, without gradient; `None` without a base model.
    pub kl: Option<Array>,
    /// 1 where the ratio is clipped, else 0, without gradient; `None` without old
    /// log-probabilities.
    pub clipped: Option<Array>,
}

/// Computes the loss of each token of generated replies (Shao et al. 2024, arXiv:2402.03300,
/// equation 3): `-(min(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantage) -
/// beta * kl)`. `ratio` is the token's probability divided by its probability under the model that
/// generated it. The separate upper bound follows Yu et al. 2025, arXiv:2503.14476. The divergence
/// from the base model is estimated as `kl = exp(d) - d - 1`, where `d = base - each` (Schulman
/// 2020).
///
/// `each`, `old`, `base` and `advantages` are `[1, T]`; the first three are log-probabilities.
/// `None` for `old` means that the current model generated the replies: the ratio is 1 and only has
/// a gradient.
///
/// # Errors
/// If the shapes do not match.
pub fn policy(
    each: &Array,
    old: Option<&Array>,
    base: Option<&Array>,
    advantages: &Array,
    options: Grpo,
) -> Result<PolicyLoss> {
    let ratio = match old {
        Some(old) => each.subtract(old)?.exp()?,
        None => each.subtract(&each.stop_gradient()?)?.exp()?,
    };
    let gains = ratio.multiply(advantages)?;
    let (gains, clipped) = match old {
        None => (gains, None),
        Some(_) => {
            let low = ratio.scalar_like(1.0 - options.epsilon)?;
            let high = ratio.scalar_like(1.0 + options.epsilon_high)?;
            let bounded = ratio.maximum(&low)?.minimum(&high)?.multiply(advantages)?;
            let clipped = bounded.less(&gains)?.astype(Dtype::Float32)?;
            (gains.minimum(&bounded)?, Some(clipped.stop_gradient()?))
        }
    };
    let losses = gains.negative()?;
    let Some(base) = base else {
        return Ok(PolicyLoss {
            losses,
            kl: None,
            clipped,
        });
    };
    let difference = base.subtract(each)?;
    let kl = difference.expm1()?.subtract(&difference)?;
    let penalty = kl.multiply(&kl.scalar_like(options.beta)?)?;
    Ok(PolicyLoss {
        losses: losses.add(&penalty)?,
        kl: Some(kl.stop_gradient()?),
        clipped,
    })
}

/// Contrastive loss with in-batch negatives (InfoNCE, van den Oord et al. 2018, arXiv:1807.03748;
/// multiple negatives ranking, Henderson et al. 2017, arXiv:1705.00652): for each anchor, the
/// cross-entropy of its positive among all candidates. A logit is `scale` times the cosine
/// similarity.
///
/// `anchors` `[n, d]` and `candidates` `[m, d]` have length one. Candidate `i` is the positive of
/// anchor `i`; the others are negatives. `bias` `[n, m]`, if given, is added to the logits.
/// Returns the losses `[n]` and the logits `[n, m]`.
///
/// # Errors
/// If the shapes do not match.
pub fn contrastive(
    anchors: &Array,
    candidates: &Array,
    scale: f32,
    bias: Option<&Array>,
) -> Result<(Array, Array)> {
    let similarities = anchors.matmul(&candidates.swap_axes(0, 1)?)?;
    let mut logits = similarities.multiply(&similarities.scalar_like(scale)?)?;
    if let Some(bias) = bias {
        logits = logits.add(bias)?;
    }
    let targets = arange(0.0, f64::from(anchors.dim(0)?), 1.0, Dtype::Uint32)?;
    Ok((cross_entropy_each(&logits, &targets)?, logits))
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
    fn advantages_are_relative_to_the_group() {
        let rewards = [1.0, 3.0, 5.0, 5.0];
        let (plain, deviation) = group_advantages(&rewards, 2, false);
        assert_eq!(plain, [-1.0, 1.0, 0.0, 0.0]);
        // The deviations are the square root of 2, and 0.
        assert!((deviation - 2f32.sqrt() / 2.0).abs() < 1e-6);
        let (scaled, _) = group_advantages(&rewards, 2, true);
        let expected = 1.0 / (2f32.sqrt() + 1e-4);
        assert!((scaled[1] - expected).abs() < 1e-6 && scaled[2] == 0.0);
    }

    #[test]
    fn ratios_are_clipped_where_they_would_gain() {
        let options = Grpo {
            beta: 0.5,
            epsilon: 0.1,
            epsilon_high: 0.3,
            ..Grpo::default()
        };
        let (each, gain) = (v(&[-1.0]), v(&[2.0]));
        let got = policy(&each, None, Some(&v(&[-0.5])), &gain, options).unwrap();
        let expected = 0.5f32.exp() - 0.5 - 1.0;
        assert!((number(&got.kl.unwrap()) - expected).abs() < 1e-6);
        assert!((number(&got.losses) - (0.5 * expected - 2.0)).abs() < 1e-6);
        assert!(got.clipped.is_none());

        let ratios = [0.5f32, 0.95, 1.2, 1.5, 0.5, 0.95, 1.2, 1.5];
        let each = v(&ratios.map(f32::ln));
        let gains = v(&[2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0]);
        let got = policy(&each, Some(&v(&[0.0; 8])), None, &gains, options).unwrap();
        // A positive advantage limits the ratio above, a negative one below.
        let expected = [-1.0, -1.9, -2.4, -2.6, 1.8, 1.9, 2.4, 3.0];
        for (got, expected) in got.losses.to_f32_vec().unwrap().iter().zip(expected) {
            assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        }
        let clipped = got.clipped.unwrap().to_f32_vec().unwrap();
        assert_eq!(clipped, [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn odds_and_verdicts() {
        let losses = |chosen: f32, rejected: f32| {
            number(&odds_ratio(&v(&[chosen.ln()]), &v(&[rejected.ln()])).unwrap())
        };
        // The odds are 3 and 1/3, so the loss is -ln(sigmoid(ln 9)) = ln(10 / 9).
        assert!((losses(0.75, 0.25) - (10.0f32 / 9.0).ln()).abs() < 1e-5);
        assert!((losses(0.25, 0.75) - 10f32.ln()).abs() < 1e-5);
        assert!(losses(1.0, 1.0).is_finite() && losses(1e-30, 1.0).is_finite());

        let options = Kto {
            beta: 0.5,
            desirable_weight: 2.0,
            undesirable_weight: 3.0,
        };
        let losses = kto(&v(&[3.0, 3.0, 1.0]), 1.0, &[true, false, true], options).unwrap();
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let expected = [2.0 * sigmoid(-1.0), 3.0 * sigmoid(1.0), 1.0];
        for (got, expected) in losses.to_f32_vec().unwrap().iter().zip(expected) {
            assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn positives_compete_with_all_other_candidates() {
        let anchors = Array::from_slice(&[1.0f32, 0.0, 0.0, 1.0], &[2, 2]).unwrap();
        let candidates = [1.0f32, 0.0, 0.0, 1.0, 0.6, 0.8];
        let candidates = Array::from_slice(&candidates, &[3, 2]).unwrap();
        let losses = |bias: Option<&Array>| {
            let (losses, logits) = contrastive(&anchors, &candidates, 2.0, bias).unwrap();
            assert_eq!(logits.shape(), [2, 3]);
            losses.to_f32_vec().unwrap()
        };
        // ln(e^2 + e^0 + e^1.2) - 2 and ln(e^0 + e^2 + e^1.6) - 2
        let expected = [0.460_373, 0.590_924];
        for (got, expected) in losses(None).iter().zip(expected) {
            assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        }
        let hide = [0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY];
        let hide = Array::from_slice(&hide, &[2, 3]).unwrap();
        for got in losses(Some(&hide)) {
            // ln(1 + e^-2)
            assert!((got - 0.126_928).abs() < 1e-5, "{got}");
        }
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
