//! Representational similarity analysis: Kriegeskorte, Mur and Bandettini (2008).

use serde::{Deserialize, Serialize};

use crate::Matrix;
use crate::error::{Error, Result};

/// The distance between two hidden states, as in scipy's `pdist`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// One minus Pearson's correlation.
    #[default]
    Correlation,
    /// One minus the cosine.
    Cosine,
    /// The Euclidean distance.
    Euclidean,
}

impl std::str::FromStr for Metric {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "correlation" => Ok(Metric::Correlation),
            "cosine" => Ok(Metric::Cosine),
            "euclidean" => Ok(Metric::Euclidean),
            _ => Err(Error::data(format!(
                "metric `{s}` is not one of correlation, cosine, euclidean"
            ))),
        }
    }
}

/// Pearson's correlation; NaN if one side is constant.
pub(crate) fn pearson(
    a: impl Iterator<Item = f64> + Clone,
    b: impl Iterator<Item = f64> + Clone,
) -> f64 {
    let n = a.clone().count() as f64;
    let (ma, mb) = (a.clone().sum::<f64>() / n, b.clone().sum::<f64>() / n);
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.zip(b) {
        ab += (x - ma) * (y - mb);
        aa += (x - ma).powi(2);
        bb += (y - mb).powi(2);
    }
    ab / (aa.sqrt() * bb.sqrt())
}

/// The similarities of all pairs of rows, `1 - distance`: `(0, 1), (0, 2), ..., (1, 2), ...`.
///
/// # Errors
/// [`Error::Data`] for fewer than three rows, and for a row without a direction if the metric needs
/// a direction.
pub fn similarities(rows: &Matrix, metric: Metric) -> Result<Vec<f64>> {
    let n = rows.nrows();
    if n < 3 {
        return Err(Error::data(format!(
            "{n} rows are too few; similarities need at least three"
        )));
    }
    let mut rows = rows.clone();
    if metric == Metric::Correlation {
        for mut row in rows.row_iter_mut() {
            let mean = row.mean();
            row.add_scalar_mut(-mean);
        }
    }
    if metric != Metric::Euclidean {
        for (i, mut row) in rows.row_iter_mut().enumerate() {
            let norm = row.norm();
            if norm <= 0.0 || !norm.is_finite() {
                return Err(Error::data(format!(
                    "row {i} has a norm that is zero or not finite, and cannot be normalized"
                )));
            }
            row /= norm;
        }
    }
    let products = &rows * rows.transpose();
    let mut values = Vec::with_capacity(n * (n - 1) / 2);
    for i in 0..n {
        for j in i + 1..n {
            values.push(match metric {
                // Subtracts first. Computing the distance from dot products would lose the digits
                // of close rows.
                Metric::Euclidean => 1.0 - (rows.row(i) - rows.row(j)).norm(),
                Metric::Cosine | Metric::Correlation => products[(i, j)],
            });
        }
    }
    Ok(values)
}

/// The similarity of two lists of similarities, by Pearson's correlation.
///
/// # Errors
/// [`Error::Data`] for lists of different lengths, and for a list whose values are all equal.
pub fn agreement(a: &[f64], b: &[f64]) -> Result<f64> {
    if a.len() != b.len() {
        return Err(Error::data(format!(
            "similarities of {} pairs and of {}: both sides need the same stimuli",
            a.len(),
            b.len()
        )));
    }
    let value = pearson(a.iter().copied(), b.iter().copied());
    if value.is_nan() {
        return Err(Error::data(
            "all stimuli are equally similar at one of the layers",
        ));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similarities_are_those_of_the_formulas() {
        let rows = Matrix::from_row_slice(3, 2, &[1.0, 0.0, 0.0, 2.0, 3.0, 4.0]);
        let cosine = similarities(&rows, Metric::Cosine).unwrap();
        for (value, expected) in cosine.iter().zip([0.0, 0.6, 0.8]) {
            assert!((value - expected).abs() < 1e-12);
        }
        let euclidean = similarities(&rows, Metric::Euclidean).unwrap();
        assert!((euclidean[0] - (1.0 - 5f64.sqrt())).abs() < 1e-12);
        assert!((agreement(&cosine, &cosine).unwrap() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn what_has_no_direction_is_refused() {
        let rows = Matrix::from_row_slice(3, 2, &[1.0, 1.0, 0.0, 2.0, 3.0, 4.0]);
        let e = similarities(&rows, Metric::Correlation).unwrap_err();
        assert!(e.to_string().contains("row 0"));
        assert!(similarities(&Matrix::zeros(2, 2), Metric::Euclidean).is_err());
        assert!("manhattan".parse::<Metric>().is_err());
    }
}
