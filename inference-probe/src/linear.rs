//! Linear probes: how well a classifier can predict a label from a layer's states, compared with
//! shuffled labels.
//!
//! Selectivity is defined as in Hewitt and Liang, "Designing and Interpreting Probes with Control
//! Tasks" (2019), but divided by the maximum possible gain over the control.

use serde::{Deserialize, Serialize};

use crate::Matrix;
use crate::error::{Error, Result};
use crate::folds::{Fold, shuffled};
use crate::logistic::{LogisticOptions, LogisticRegression, Standardizer};

/// How probes are trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbeOptions {
    /// The options of the regression.
    pub logistic: LogisticOptions,
    /// Number of control runs, each with labels in another random order.
    pub controls: usize,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            logistic: LogisticOptions::default(),
            controls: 5,
        }
    }
}

/// The result of a probe on one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProbeResult {
    /// The fraction of test rows with a correct prediction, averaged over the folds.
    pub accuracy: f64,
    /// The accuracy in each fold.
    pub fold_accuracies: Vec<f64>,
    /// The accuracy with shuffled labels, averaged over the control runs.
    pub control: f64,
    /// The fraction of rows with the most frequent label.
    pub majority: f64,
    /// `(accuracy - control) / (1 - max(control, 1 / labels))`, limited to 0 to 1.
    pub selectivity: f64,
    /// Whether every regression reached its tolerance.
    pub converged: bool,
}

/// The number of different rows. Two bit-identical rows carry no more information than one.
#[must_use]
pub fn distinct_rows(matrix: &Matrix) -> usize {
    let bits = |row: usize| -> Vec<u64> {
        let row = matrix.row(row);
        row.iter().map(|value| value.to_bits()).collect()
    };
    let all: std::collections::HashSet<Vec<u64>> = (0..matrix.nrows()).map(bits).collect();
    all.len()
}

/// Returns reasons to doubt the results of probes: states that occur more than once (`distinct` of
/// `rows`; 0 if unknown), and accuracies that are not clearly higher than the frequency of the most
/// frequent label.
#[must_use]
pub fn doubts(layers: &[ProbeResult], rows: usize, distinct: usize) -> Vec<String> {
    let mut doubts = Vec::new();
    if (1..rows).contains(&distinct) {
        doubts.push(format!("{distinct} distinct states of {rows}"));
    }
    let best = layers.iter().map(|layer| layer.accuracy).reduce(f64::max);
    let majority = layers.first().map(|layer| layer.majority);
    if let (Some(best), Some(majority)) = (best, majority) {
        // Two standard errors of an accuracy that is measured on `rows` rows.
        let error = 2.0 * (majority * (1.0 - majority) / rows.max(1) as f64).sqrt();
        if best <= majority + error {
            doubts.push(format!(
                "best accuracy {best:.2}, as good as the most frequent label ({majority:.2})"
            ));
        }
    }
    doubts
}

fn rows(matrix: &Matrix, which: &[usize]) -> Matrix {
    matrix.select_rows(which)
}

/// The accuracy of each fold, and whether all regressions reached their tolerance.
fn accuracies(
    matrix: &Matrix,
    labels: &[usize],
    classes: usize,
    folds: &[Fold],
    options: &LogisticOptions,
) -> Result<(Vec<f64>, bool)> {
    let mut converged = true;
    let accuracies = folds
        .iter()
        .map(|fold| {
            let train = rows(matrix, &fold.train);
            let scaler = Standardizer::from_rows(&train);
            let train_labels: Vec<usize> = fold.train.iter().map(|r| labels[*r]).collect();
            let fit =
                LogisticRegression::fit(&scaler.apply(&train), &train_labels, classes, options)?;
            converged &= fit.converged;
            let predicted = fit.predict(&scaler.apply(&rows(matrix, &fold.test)))?;
            let right = predicted
                .iter()
                .zip(&fold.test)
                .filter(|(predicted, row)| **predicted == labels[**row])
                .count();
            Ok(right as f64 / fold.test.len() as f64)
        })
        .collect::<Result<Vec<_>>>()?;
    Ok((accuracies, converged))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Trains and tests a probe on the rows of one layer, `[n, width]`.
///
/// # Errors
/// [`Error::Data`] as in [`LogisticRegression::fit`], and for folds with rows that do not exist.
pub fn probe(
    matrix: &Matrix,
    labels: &[usize],
    folds: &[Fold],
    options: &ProbeOptions,
) -> Result<ProbeResult> {
    let n = labels.len();
    if matrix.nrows() != n {
        return Err(Error::data(format!(
            "there are {} rows but {n} labels; give one label for each row",
            matrix.nrows()
        )));
    }
    let named = folds.iter().flat_map(|f| f.train.iter().chain(&f.test));
    if folds.is_empty() || folds.iter().any(|f| f.test.is_empty()) {
        return Err(Error::data("each fold needs a row to test"));
    }
    if let Some(row) = named.copied().find(|row| *row >= n) {
        return Err(Error::data(format!(
            "a fold names row {row}; there are {n} rows, counted from 0"
        )));
    }
    let classes = labels.iter().max().map_or(0, |m| m + 1);
    let (fold_accuracies, mut converged) =
        accuracies(matrix, labels, classes, folds, &options.logistic)?;
    let mut controls = Vec::with_capacity(options.controls);
    for repetition in 0..options.controls {
        let random = shuffled(labels, 31 * repetition as u64 + 7);
        let (values, all) = accuracies(matrix, &random, classes, folds, &options.logistic)?;
        converged &= all;
        controls.push(mean(&values));
    }
    let mut counts = vec![0usize; classes];
    for label in labels {
        counts[*label] += 1;
    }
    let accuracy = mean(&fold_accuracies);
    let control = mean(&controls);
    let bound = control.max(1.0 / classes as f64);
    Ok(ProbeResult {
        accuracy,
        fold_accuracies,
        control,
        majority: counts.iter().max().copied().unwrap_or(0) as f64 / n as f64,
        selectivity: if bound < 1.0 {
            ((accuracy - control) / (1.0 - bound)).clamp(0.0, 1.0)
        } else {
            0.0
        },
        converged,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folds::stratified;

    #[test]
    fn a_readable_label_is_read_and_a_random_one_is_not() {
        let n = 60;
        let labels: Vec<usize> = (0..n).map(|i| i % 3).collect();
        let matrix = Matrix::from_fn(n, 4, |r, c| {
            let noise = ((r * 7 + c * 13) % 11) as f64 / 11.0;
            if c == labels[r] { 3.0 + noise } else { noise }
        });
        let folds = stratified(&labels, 5, 0).unwrap();
        let result = probe(&matrix, &labels, &folds, &ProbeOptions::default()).unwrap();
        assert_eq!(result.accuracy, 1.0);
        assert!(
            result.control < 0.6 && result.selectivity > 0.9,
            "{result:?}"
        );
        assert!((result.majority - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn repeated_states_and_chance_are_told() {
        let matrix = Matrix::from_fn(8, 2, |r, _| (r % 2) as f64);
        assert_eq!(distinct_rows(&matrix), 2);
        assert_eq!(distinct_rows(&Matrix::from_fn(3, 1, |r, _| r as f64)), 3);
        let of = |accuracy| ProbeResult {
            accuracy,
            fold_accuracies: Vec::new(),
            control: 0.5,
            majority: 0.5,
            selectivity: 0.0,
            converged: true,
        };
        let doubts = |best, distinct| doubts(&[of(0.4), of(best)], 100, distinct).join("; ");
        // For these numbers, two standard errors are 0.1.
        assert_eq!(doubts(0.61, 100), "");
        assert_eq!(doubts(0.61, 0), "");
        assert_eq!(doubts(0.9, 12), "12 distinct states of 100");
        let both = doubts(0.6, 12);
        assert!(
            both.contains("12 distinct") && both.contains("accuracy 0.60"),
            "{both}"
        );
    }

    #[test]
    fn folds_beyond_the_rows_are_refused() {
        let matrix = Matrix::zeros(2, 1);
        let fold = Fold {
            train: vec![0],
            test: vec![5],
        };
        let e = probe(&matrix, &[0, 1], &[fold], &ProbeOptions::default()).unwrap_err();
        assert!(e.to_string().contains("row 5; there are 2 rows"));
    }
}
