//! Canonical correlation analysis on the principal components of each side, with a small ridge
//! term.

use crate::Matrix;
use crate::error::{Error, Result};
use crate::folds::Fold;

/// Options of the analysis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CcaOptions {
    /// The number of correlations to return, beginning with the largest.
    pub components: usize,
    /// The ridge term, as a fraction of the principal components' mean variance.
    pub ridge: f64,
}

impl Default for CcaOptions {
    fn default() -> Self {
        Self {
            components: 10,
            ridge: 1e-4,
        }
    }
}

/// The principal components of some rows.
#[derive(Debug, Clone)]
pub struct Components {
    /// `[width]`.
    mean: nalgebra::RowDVector<f64>,
    /// `[width, rank]`, orthonormal columns.
    axes: Matrix,
    /// `[n, rank]`.
    scores: Matrix,
    /// `[rank]`.
    variances: Vec<f64>,
}

impl Components {
    /// The principal components of `rows`. Components that are only rounding errors are omitted:
    /// those with singular values below `epsilon * max(shape) * largest`.
    ///
    /// # Errors
    /// [`Error::Data`] for fewer than two rows, for values that are not finite, and if all rows are
    /// equal.
    pub fn from_rows(rows: &Matrix) -> Result<Self> {
        let (n, width) = rows.shape();
        if n < 2 {
            return Err(Error::data("a correlation needs two rows"));
        }
        if rows.iter().any(|v| !v.is_finite()) {
            return Err(Error::data(
                "the activations hold numbers that are not finite",
            ));
        }
        let mean = rows.row_mean();
        let mut centered = rows.clone();
        for mut row in centered.row_iter_mut() {
            row -= &mean;
        }
        // For wide rows, the matrix of dot products would be smaller, but its condition number is
        // the square of this one's. An SVD of the transposed matrix would cost the same.
        let svd = nalgebra::linalg::SVD::new(centered.clone(), false, true);
        let Some(right) = svd.v_t else {
            return Err(Error::data(
                "the singular value decomposition did not converge",
            ));
        };
        let values = svd.singular_values;
        let largest = values.max();
        let least = f64::EPSILON * n.max(width) as f64 * largest;
        let mut retained: Vec<usize> = (0..values.len()).filter(|i| values[*i] > least).collect();
        retained.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
        if retained.is_empty() {
            return Err(Error::data(
                "all rows are equal; a correlation needs rows that differ",
            ));
        }
        let axes = right.select_rows(&retained).transpose();
        let scores = &centered * &axes;
        let variances = retained
            .iter()
            .map(|i| values[*i].powi(2) / (n - 1) as f64)
            .collect();
        Ok(Self {
            mean,
            axes,
            scores,
            variances,
        })
    }

    /// The axis of the greatest variance, `[width]`, of length 1.
    pub(crate) fn first(&self) -> nalgebra::DVector<f64> {
        self.axes.column(0).into_owned()
    }

    /// The number of components.
    pub fn rank(&self) -> usize {
        self.variances.len()
    }

    /// `1 / sqrt(variance + ridge)` of each component.
    fn whitening(&self, ridge: f64) -> Vec<f64> {
        let mean = self.variances.iter().sum::<f64>() / self.variances.len() as f64;
        self.variances
            .iter()
            .map(|v| 1.0 / (v + ridge * mean).sqrt())
            .collect()
    }

    /// The scores of other rows on these components.
    fn project(&self, rows: &Matrix) -> Matrix {
        let mut rows = rows.clone();
        for mut row in rows.row_iter_mut() {
            row -= &self.mean;
        }
        rows * &self.axes
    }
}

/// The whitened cross-covariance of two sides, `[rank x, rank y]`.
fn cross(x: &Components, y: &Components, ridge: f64) -> Result<Matrix> {
    if x.scores.nrows() != y.scores.nrows() {
        return Err(Error::data(format!(
            "the sides have {} and {} rows; both need the same number",
            x.scores.nrows(),
            y.scores.nrows()
        )));
    }
    let mut cross = x.scores.tr_mul(&y.scores) / (x.scores.nrows() - 1) as f64;
    for (mut row, w) in cross.row_iter_mut().zip(x.whitening(ridge)) {
        row *= w;
    }
    for (mut column, w) in cross.column_iter_mut().zip(y.whitening(ridge)) {
        column *= w;
    }
    Ok(cross)
}

/// The largest canonical correlations of two sets of features of the same rows. Values are limited
/// to 0 to 1.
///
/// # Errors
/// [`Error::Data`] when the numbers of rows differ.
pub fn correlations(x: &Components, y: &Components, options: &CcaOptions) -> Result<Vec<f64>> {
    let mut values: Vec<f64> = cross(x, y, options.ridge)?
        .singular_values()
        .iter()
        .map(|v| v.clamp(0.0, 1.0))
        .collect();
    values.sort_by(|a, b| b.total_cmp(a));
    values.truncate(options.components);
    Ok(values)
}

/// The mean correlation of the canonical variables on held-out rows. `x` and `y` come from the
/// fold's training rows; `all_x` and `all_y` contain all rows.
///
/// # Errors
/// As [`correlations`].
pub fn held_out(
    (x, all_x): (&Components, &Matrix),
    (y, all_y): (&Components, &Matrix),
    fold: &Fold,
    options: &CcaOptions,
) -> Result<f64> {
    let svd = nalgebra::linalg::SVD::new(cross(x, y, options.ridge)?, true, true);
    let (Some(u), Some(v_t)) = (svd.u, svd.v_t) else {
        return Err(Error::data(
            "the singular value decomposition did not converge",
        ));
    };
    let mut order: Vec<usize> = (0..svd.singular_values.len()).collect();
    order.sort_by(|a, b| svd.singular_values[*b].total_cmp(&svd.singular_values[*a]));
    order.truncate(options.components);
    let whitened = |side: &Components, all: &Matrix| {
        let mut scores = side.project(&all.select_rows(&fold.test));
        for (mut column, w) in scores.column_iter_mut().zip(side.whitening(options.ridge)) {
            column *= w;
        }
        scores
    };
    let a = whitened(x, all_x) * u.select_columns(&order);
    let b = whitened(y, all_y) * v_t.select_rows(&order).transpose();
    let sum: f64 = a
        .column_iter()
        .zip(b.column_iter())
        .map(|(a, b)| crate::rsa::pearson(a.iter().copied(), b.iter().copied()).clamp(0.0, 1.0))
        .sum();
    Ok(sum / order.len().max(1) as f64)
}

/// Labels as features: one column for each class, `[n, classes]`.
pub fn one_hot(labels: &[usize], classes: usize) -> Matrix {
    Matrix::from_fn(labels.len(), classes, |r, c| f64::from(labels[r] == c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize, width: usize, seed: usize) -> Matrix {
        Matrix::from_fn(n, width, |r, c| {
            (((r * 37 + c * 101 + seed * 59) * 2_654_435_761) % 1009) as f64 / 1009.0
        })
    }

    #[test]
    fn a_set_correlates_with_itself_and_with_its_invertible_maps() {
        let x = rows(30, 4, 1);
        let map = Matrix::from_fn(4, 4, |r, c| {
            f64::from(r == c) * 2.0 + ((r + c) % 3) as f64 * 0.3
        });
        let options = CcaOptions {
            ridge: 0.0,
            components: 4,
        };
        let original = Components::from_rows(&x).unwrap();
        for other in [
            Components::from_rows(&x).unwrap(),
            Components::from_rows(&(&x * map)).unwrap(),
        ] {
            for value in correlations(&original, &other, &options).unwrap() {
                assert!((value - 1.0).abs() < 1e-9, "{value}");
            }
        }
    }

    #[test]
    fn held_out_rows_show_what_is_chance() {
        let (x, noise) = (rows(40, 3, 1), rows(40, 3, 9));
        let fold = Fold {
            train: (0..30).collect(),
            test: (30..40).collect(),
        };
        let options = CcaOptions {
            components: 1,
            ..CcaOptions::default()
        };
        let fit = |m: &Matrix| Components::from_rows(&m.select_rows(&fold.train)).unwrap();
        let same = held_out((&fit(&x), &x), (&fit(&x), &x), &fold, &options).unwrap();
        let other = held_out((&fit(&x), &x), (&fit(&noise), &noise), &fold, &options).unwrap();
        assert!(same > 0.999, "{same}");
        assert!(other < 0.9, "{other}");
    }

    #[test]
    fn constant_rows_are_refused() {
        assert!(Components::from_rows(&Matrix::from_element(3, 2, 1.0)).is_err());
        assert!(Components::from_rows(&Matrix::zeros(1, 2)).is_err());
    }
}
