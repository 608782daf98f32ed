//! Distances between distributions of next tokens, and between the means of two groups of hidden
//! states.

use crate::Matrix;
use crate::error::{Error, Result};

/// `softmax(logits)`. If no logit is finite, all tokens are equally likely.
pub fn softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits
        .iter()
        .fold(f64::NEG_INFINITY, |m, v| m.max(f64::from(*v)));
    if !max.is_finite() {
        return vec![1.0 / logits.len() as f64; logits.len()];
    }
    let mut values: Vec<f64> = logits.iter().map(|v| (f64::from(*v) - max).exp()).collect();
    let sum: f64 = values.iter().sum();
    for v in &mut values {
        *v /= sum;
    }
    values
}

/// Shannon's entropy in nats.
pub fn entropy(p: &[f64]) -> f64 {
    p.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum()
}

/// The Jensen-Shannon divergence in nats: `H((p + q) / 2) - (H(p) + H(q)) / 2`, from 0 to `ln 2`.
///
/// # Errors
/// [`Error::Data`] for distributions over different numbers of tokens.
pub fn jensen_shannon(p: &[f64], q: &[f64]) -> Result<f64> {
    if p.len() != q.len() {
        return Err(Error::data(format!(
            "the distributions have {} and {} tokens; both need the same vocabulary",
            p.len(),
            q.len()
        )));
    }
    // Computes the sum of two relative entropies, because a difference of entropies would lose
    // precision.
    let value: f64 = p
        .iter()
        .zip(q)
        .map(|(p, q)| {
            let m = 0.5 * (p + q);
            let part = |x: f64| if x > 0.0 { x * (x / m).ln() } else { 0.0 };
            0.5 * (part(*p) + part(*q))
        })
        .sum();
    Ok(value.clamp(0.0, std::f64::consts::LN_2))
}

/// The mean of distributions over the same tokens. Distributions are added one by one.
#[derive(Debug, Clone, Default)]
pub struct MeanDistribution {
    sum: Vec<f64>,
    count: usize,
}

impl MeanDistribution {
    /// Adds a distribution.
    ///
    /// # Errors
    /// [`Error::Data`] if the number of tokens differs from that of the first distribution.
    pub fn add(&mut self, p: &[f64]) -> Result<()> {
        if self.count == 0 {
            self.sum = p.to_vec();
        } else if self.sum.len() == p.len() {
            for (sum, p) in self.sum.iter_mut().zip(p) {
                *sum += p;
            }
        } else {
            return Err(Error::data(format!(
                "the distributions have {} and {} tokens; both need the same vocabulary",
                self.sum.len(),
                p.len()
            )));
        }
        self.count += 1;
        Ok(())
    }

    /// The number of distributions that were added.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The mean; `None` if nothing was added.
    pub fn mean(&self) -> Option<Vec<f64>> {
        (self.count > 0).then(|| self.sum.iter().map(|s| s / self.count as f64).collect())
    }
}

/// The distance between the means of two groups of rows.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MeanDistance {
    /// One minus the cosine.
    pub cosine: f64,
    /// The Euclidean distance.
    pub euclidean: f64,
}

/// The distance between two means: that of the rows for which `group` is true, and that of the
/// other rows.
///
/// # Errors
/// [`Error::Data`] if a group is empty, or if the lengths differ.
pub fn mean_distance(rows: &Matrix, group: &[bool]) -> Result<MeanDistance> {
    if rows.nrows() != group.len() {
        return Err(Error::data(format!(
            "there are {} rows but {} group entries; give one for each row",
            rows.nrows(),
            group.len()
        )));
    }
    let mean = |inside: bool| {
        let which: Vec<usize> = (0..group.len()).filter(|i| group[*i] == inside).collect();
        (!which.is_empty()).then(|| rows.select_rows(&which).row_mean())
    };
    let (Some(a), Some(b)) = (mean(true), mean(false)) else {
        return Err(Error::data("one of the two groups has no stimulus"));
    };
    Ok(MeanDistance {
        cosine: 1.0 - a.dot(&b) / (a.norm() * b.norm()),
        euclidean: (a - b).norm(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_zero_of_the_same_and_ln_2_of_strangers() {
        assert_eq!(jensen_shannon(&[0.3, 0.7], &[0.3, 0.7]).unwrap(), 0.0);
        let far = jensen_shannon(&[1.0, 0.0], &[0.0, 1.0]).unwrap();
        assert!((far - std::f64::consts::LN_2).abs() < 1e-15);
        assert!(jensen_shannon(&[1.0], &[0.5, 0.5]).is_err());
        // The reference is the definition by entropies.
        let (p, q) = ([0.1, 0.2, 0.7], [0.5, 0.25, 0.25]);
        let m: Vec<f64> = p.iter().zip(q).map(|(p, q)| 0.5 * (p + q)).collect();
        let expected = entropy(&m) - 0.5 * (entropy(&p) + entropy(&q));
        assert!((jensen_shannon(&p, &q).unwrap() - expected).abs() < 1e-14);
    }

    #[test]
    fn softmax_of_nothing_finite_is_uniform() {
        assert_eq!(softmax(&[f32::NEG_INFINITY; 4]), vec![0.25; 4]);
        let p = softmax(&[1000.0, 1000.0]);
        assert_eq!(p, vec![0.5, 0.5]);
    }

    #[test]
    fn means_and_their_distances() {
        let mut mean = MeanDistribution::default();
        assert!(mean.mean().is_none());
        mean.add(&[1.0, 0.0]).unwrap();
        mean.add(&[0.0, 1.0]).unwrap();
        assert_eq!(mean.mean().unwrap(), vec![0.5, 0.5]);
        assert!(mean.add(&[1.0]).is_err());

        let rows = Matrix::from_row_slice(2, 2, &[1.0, 0.0, 0.0, 1.0]);
        let distance = mean_distance(&rows, &[true, false]).unwrap();
        assert!((distance.cosine - 1.0).abs() < 1e-12);
        assert!((distance.euclidean - 2f64.sqrt()).abs() < 1e-12);
        assert!(mean_distance(&rows, &[true, true]).is_err());
    }
}
