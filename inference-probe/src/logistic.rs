//! Logistic regression with an L2 penalty, as scikit-learn's `LogisticRegression` with the solver
//! `lbfgs` defines it: `mean(cross entropy) + |W|^2 / (2 C n)`, without a penalty on intercepts.
//! Two classes have a single row of weights. More classes have one row each (softmax regression).

use serde::{Deserialize, Serialize};

use crate::Matrix;
use crate::error::{Error, Result};
use crate::lbfgs::minimize;

/// Options of the regression.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogisticOptions {
    /// The inverse of the penalty's strength.
    pub c: f64,
    /// The maximum number of steps of the optimizer.
    pub max_iterations: usize,
    /// The optimizer stops if no element of the mean loss's gradient exceeds this value.
    pub tolerance: f64,
}

impl Default for LogisticOptions {
    fn default() -> Self {
        Self {
            c: 1.0,
            max_iterations: 2000,
            tolerance: 1e-4,
        }
    }
}

/// A fitted classifier.
#[derive(Debug, Clone, PartialEq)]
pub struct LogisticRegression {
    classes: usize,
    /// `[1 or classes, features]`.
    pub weights: Matrix,
    /// One intercept for each row of weights.
    pub intercepts: Vec<f64>,
    /// Whether the optimizer reached its tolerance.
    pub converged: bool,
}

impl LogisticRegression {
    /// Fits rows `[n, features]` to labels below `classes`.
    ///
    /// # Errors
    /// [`Error::Data`] for different lengths, fewer than two classes, labels out of range, values
    /// that are not finite, and options that are not positive.
    pub fn fit(
        rows: &Matrix,
        labels: &[usize],
        classes: usize,
        options: &LogisticOptions,
    ) -> Result<Self> {
        let (n, features) = rows.shape();
        if n != labels.len() || n == 0 {
            return Err(Error::data(format!(
                "{n} rows and {} labels: a regression needs one label a row",
                labels.len()
            )));
        }
        if classes < 2 {
            return Err(Error::data("a regression needs two labels that differ"));
        }
        if let Some(label) = labels.iter().find(|label| **label >= classes) {
            return Err(Error::data(format!(
                "label {label} is not below the number of classes, {classes}"
            )));
        }
        if !(options.c > 0.0 && options.c.is_finite() && options.tolerance > 0.0) {
            return Err(Error::data(
                "the penalty's inverse and the tolerance must be positive",
            ));
        }
        if rows.iter().any(|v| !v.is_finite()) {
            return Err(Error::data(
                "the activations hold numbers that are not finite",
            ));
        }
        let outputs = if classes == 2 { 1 } else { classes };
        let penalty = 1.0 / (options.c * n as f64);
        let split = outputs * features;
        let mut x = vec![0.0; split + outputs];
        let outcome = minimize(
            &mut x,
            options.max_iterations,
            options.tolerance,
            &mut |x, gradient| {
                let weights = Matrix::from_column_slice(outputs, features, &x[..split]);
                let mut scores = rows * weights.transpose();
                for (k, mut column) in scores.column_iter_mut().enumerate() {
                    column.add_scalar_mut(x[split + k]);
                }
                let loss = if outputs == 1 {
                    binary_loss(&mut scores, labels)
                } else {
                    softmax_loss(&mut scores, labels)
                };
                // `scores` now contains the derivatives of the summed loss: [n, outputs]
                let slopes = scores.tr_mul(rows);
                let scale = 1.0 / n as f64;
                for ((g, s), w) in gradient[..split].iter_mut().zip(slopes.iter()).zip(x) {
                    *g = s * scale + penalty * w;
                }
                for (g, column) in gradient[split..].iter_mut().zip(scores.column_iter()) {
                    *g = column.sum() * scale;
                }
                loss * scale + 0.5 * penalty * weights.norm_squared()
            },
        );
        Ok(Self {
            classes,
            weights: Matrix::from_column_slice(outputs, features, &x[..split]),
            intercepts: x[split..].to_vec(),
            converged: outcome.converged,
        })
    }

    /// The most likely label of each row.
    ///
    /// # Errors
    /// [`Error::Data`] for rows of another width.
    pub fn predict(&self, rows: &Matrix) -> Result<Vec<usize>> {
        if rows.ncols() != self.weights.ncols() {
            return Err(Error::data(format!(
                "the rows have {} features; the weights have {}",
                rows.ncols(),
                self.weights.ncols()
            )));
        }
        let scores = rows * self.weights.transpose();
        Ok(scores
            .row_iter()
            .map(|row| {
                if self.classes == 2 {
                    return usize::from(row[0] + self.intercepts[0] > 0.0);
                }
                let mut best = (0, f64::NEG_INFINITY);
                for (k, (score, intercept)) in row.iter().zip(&self.intercepts).enumerate() {
                    if score + intercept > best.1 {
                        best = (k, score + intercept);
                    }
                }
                best.0
            })
            .collect())
    }
}

/// The summed loss if each row has one score. Replaces the scores by the loss's derivatives.
fn binary_loss(scores: &mut Matrix, labels: &[usize]) -> f64 {
    let mut loss = 0.0;
    for (score, label) in scores.iter_mut().zip(labels) {
        let s = *score;
        let y = *label as f64;
        // log(1 + exp(s)) - y s, without overflow.
        loss += s.max(0.0) + (-s.abs()).exp().ln_1p() - y * s;
        *score = 1.0 / (1.0 + (-s).exp()) - y;
    }
    loss
}

/// The summed loss if each row has one score per class. Replaces the scores by the loss's
/// derivatives.
fn softmax_loss(scores: &mut Matrix, labels: &[usize]) -> f64 {
    let mut loss = 0.0;
    for (mut row, label) in scores.row_iter_mut().zip(labels) {
        let max = row.max();
        let label_score = row[*label];
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - max).exp();
            sum += *v;
        }
        loss += sum.ln() + max - label_score;
        row /= sum;
        row[*label] -= 1.0;
    }
    loss
}

/// The mean and standard deviation of each column of some rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Standardizer {
    means: Vec<f64>,
    deviations: Vec<f64>,
}

impl Standardizer {
    /// Computes mean and deviation of `rows`. A constant column is not scaled, as in scikit-learn's
    /// `StandardScaler`.
    pub fn from_rows(rows: &Matrix) -> Self {
        let n = rows.nrows().max(1) as f64;
        let (means, deviations) = rows
            .column_iter()
            .map(|column| {
                let mean = column.sum() / n;
                let variance = column.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
                // A deviation that may consist of rounding errors alone is treated as zero.
                let noise = n * f64::EPSILON * variance + (n * mean * f64::EPSILON).powi(2);
                let deviation = if variance <= noise {
                    1.0
                } else {
                    variance.sqrt()
                };
                (mean, deviation)
            })
            .unzip();
        Self { means, deviations }
    }

    /// The standard deviation of each column.
    pub(crate) fn deviations(&self) -> &[f64] {
        &self.deviations
    }

    /// The rows minus the mean, divided by the standard deviation.
    pub fn apply(&self, rows: &Matrix) -> Matrix {
        let mut rows = rows.clone();
        for (mut column, (mean, deviation)) in rows
            .column_iter_mut()
            .zip(self.means.iter().zip(&self.deviations))
        {
            for v in column.iter_mut() {
                *v = (*v - mean) / deviation;
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_be_fitted() {
        let rows = Matrix::from_row_slice(2, 1, &[0.0, 1.0]);
        let fit = |rows: &Matrix, labels: &[usize], classes| {
            LogisticRegression::fit(rows, labels, classes, &LogisticOptions::default())
                .unwrap_err()
                .to_string()
        };
        assert!(fit(&rows, &[0], 2).contains("one label a row"));
        assert!(fit(&rows, &[0, 0], 1).contains("two labels"));
        assert!(fit(&rows, &[0, 2], 2).contains("label 2 is not below"));
        let bad = Matrix::from_row_slice(2, 1, &[0.0, f64::NAN]);
        assert!(fit(&bad, &[0, 1], 2).contains("not finite"));
    }

    #[test]
    fn the_gradient_vanishes_at_the_fit() {
        // One feature, and separable classes. At the minimum, w = C * sum(y - p) x.
        let rows = Matrix::from_row_slice(4, 1, &[-2.0, -1.0, 1.0, 2.0]);
        let labels = [0, 0, 1, 1];
        let options = LogisticOptions {
            tolerance: 1e-12,
            ..LogisticOptions::default()
        };
        let fit = LogisticRegression::fit(&rows, &labels, 2, &options).unwrap();
        let w = fit.weights[(0, 0)];
        let sum: f64 = rows
            .iter()
            .zip(labels)
            .map(|(x, y)| (y as f64 - 1.0 / (1.0 + (-w * x).exp())) * x)
            .sum();
        assert!((w - sum).abs() < 1e-9, "{w} {sum}");
        assert_eq!(fit.predict(&rows).unwrap(), labels);
    }

    #[test]
    fn constant_columns_stay_finite() {
        let rows = Matrix::from_row_slice(3, 2, &[5.0, 0.1, 5.0, 0.1, 5.0, 0.1]);
        let scaled = Standardizer::from_rows(&rows).apply(&rows);
        assert!(scaled.iter().all(|v| v.abs() < 1e-12));
    }
}
