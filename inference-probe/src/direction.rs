//! A direction between two sets of states. Adding it to the residual stream moves a model from one
//! set to the other.

use nalgebra::DVector;

use crate::Matrix;
use crate::cca::Components;
use crate::error::{Error, Result};
use crate::logistic::{LogisticOptions, LogisticRegression, Standardizer};

/// How a direction is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The difference of the means.
    Means,
    /// The weights of a logistic regression between the sets, in the units of the states.
    Probe,
    /// The first principal component of all states together.
    Pca,
}

/// A direction from the negative to the positive states.
#[derive(Debug, Clone, PartialEq)]
pub struct Direction {
    /// The vector, `[width]`. Its length is the distance of the two means along this direction. So
    /// a coefficient of 1 moves one mean to the other one, along the direction.
    pub vector: Vec<f64>,
    /// The length of the vector.
    pub norm: f64,
    /// The fraction of states on the correct side of the midpoint between the two means.
    pub separated: f64,
}

/// The direction from `negative` to `positive` states, each `[n, width]`.
///
/// # Errors
/// [`Error::Data`] for different widths, for fewer than two states in a set, for states that are
/// not finite, and for sets that do not differ along the direction.
pub fn direction(positive: &Matrix, negative: &Matrix, method: Method) -> Result<Direction> {
    let (p, n) = (positive.nrows(), negative.nrows());
    if positive.ncols() != negative.ncols() {
        return Err(Error::data(format!(
            "the two sets have states of {} and {} elements; both need the same width",
            positive.ncols(),
            negative.ncols()
        )));
    }
    if p < 2 || n < 2 {
        return Err(Error::data(format!(
            "{p} positive and {n} negative states; give at least two of each"
        )));
    }
    if positive
        .iter()
        .chain(negative.iter())
        .any(|v| !v.is_finite())
    {
        return Err(Error::data("the states hold numbers that are not finite"));
    }
    let difference = (positive.row_mean() - negative.row_mean()).transpose();
    let axis = match method {
        Method::Means => difference.clone(),
        Method::Probe => {
            let rows = stacked(positive, negative);
            let labels: Vec<usize> = (0..p + n).map(|i| usize::from(i < p)).collect();
            let scale = Standardizer::from_rows(&rows);
            let fitted = scale.apply(&rows);
            let options = LogisticOptions::default();
            let fitted = LogisticRegression::fit(&fitted, &labels, 2, &options)?;
            let weights = fitted.weights.row(0).transpose();
            let scaled = weights.iter().zip(scale.deviations());
            DVector::from_iterator(weights.len(), scaled.map(|(w, d)| w / d))
        }
        Method::Pca => {
            let components = Components::from_rows(&stacked(positive, negative))?;
            components.first()
        }
    };
    let length = axis.norm();
    if length == 0.0 {
        return Err(Error::data("the two sets do not differ"));
    }
    let unit = axis / length;
    // The sign of the axis is arbitrary. The direction must point from the negative to the positive
    // states.
    let apart = unit.dot(&difference);
    if apart == 0.0 {
        return Err(Error::data(
            "the two sets do not differ along the direction",
        ));
    }
    let vector = unit * apart;
    let middle = vector.dot(&((positive.row_mean() + negative.row_mean()).transpose() / 2.0));
    let on = |rows: &Matrix| (rows * &vector).iter().filter(|v| **v > middle).count();
    let right = on(positive) + n - on(negative);
    Ok(Direction {
        norm: vector.norm(),
        vector: vector.iter().copied().collect(),
        separated: right as f64 / (p + n) as f64,
    })
}

fn stacked(a: &Matrix, b: &Matrix) -> Matrix {
    Matrix::from_fn(a.nrows() + b.nrows(), a.ncols(), |row, column| {
        match row.checked_sub(a.nrows()) {
            None => a[(row, column)],
            Some(row) => b[(row, column)],
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sets of states, at -1 and 3 along `axis`. In the other dimensions, the states have noise
    /// of this size.
    fn sets(noise: f64) -> (Matrix, Matrix) {
        let axis = [0.6, 0.0, 0.8];
        let across = [[0.8, 0.0, -0.6], [0.0, 1.0, 0.0]];
        let rows = |at: f64| {
            Matrix::from_fn(8, 3, |i, j| {
                let angle = i as f64 * std::f64::consts::FRAC_PI_4;
                let wobble = [angle.cos(), angle.sin()];
                let noise = noise * (wobble[0] * across[0][j] + wobble[1] * across[1][j]);
                at * axis[j] + noise + if i % 2 == 0 { 0.1 } else { -0.1 } * axis[j]
            })
        };
        (rows(3.0), rows(-1.0))
    }

    #[test]
    fn each_method_finds_the_axis_that_was_planted() {
        let (positive, negative) = sets(0.5);
        for method in [Method::Means, Method::Probe, Method::Pca] {
            let actual = direction(&positive, &negative, method).unwrap();
            assert!((actual.separated - 1.0).abs() < 1e-12);
            let along = actual.vector[0] * 0.6 + actual.vector[2] * 0.8;
            // The penalty of the regression slightly changes the direction of its weights.
            let least = if method == Method::Probe {
                0.95
            } else {
                0.9999
            };
            assert!(
                along > least * actual.norm,
                "{method:?}: {:?}",
                actual.vector
            );
            assert!(
                (actual.norm - 4.0 * along / actual.norm).abs() < 1e-9,
                "{method:?}"
            );
            // Exchanging the sets gives the opposite direction.
            let back = direction(&negative, &positive, method).unwrap();
            for (a, b) in actual.vector.iter().zip(&back.vector) {
                assert!((a + b).abs() < 1e-3, "{method:?}");
            }
        }
        let means = direction(&positive, &negative, Method::Means).unwrap();
        for (v, wanted) in means.vector.iter().zip([2.4, 0.0, 3.2]) {
            assert!((v - wanted).abs() < 1e-12);
        }
    }

    /// If the variance between the sets is not the largest variance, the first component is another
    /// axis.
    #[test]
    fn the_component_follows_the_variance() {
        let (positive, negative) = sets(40.0);
        let means = direction(&positive, &negative, Method::Means).unwrap();
        let pca = direction(&positive, &negative, Method::Pca);
        assert!(pca.is_err() || pca.unwrap().norm < 0.1 * means.norm);
    }

    #[test]
    fn what_has_no_direction_is_an_error() {
        let (positive, negative) = sets(0.5);
        let same = direction(&positive, &positive, Method::Means).unwrap_err();
        assert!(same.to_string().contains("do not differ"), "{same}");
        let narrow = Matrix::zeros(4, 2);
        let wide = direction(&positive, &narrow, Method::Means).unwrap_err();
        assert!(wide.to_string().contains("of 3 and 2 elements"), "{wide}");
        let one = negative.rows(0, 1).into_owned();
        let few = direction(&positive, &one, Method::Pca).unwrap_err();
        assert!(
            few.to_string().contains("8 positive and 1 negative"),
            "{few}"
        );
        let mut odd = negative.clone();
        odd[(1, 1)] = f64::NAN;
        assert!(direction(&positive, &odd, Method::Probe).is_err());
    }
}
