//! Minimizes a smooth function by L-BFGS with a line search for the strong Wolfe conditions
//! (Nocedal and Wright, "Numerical Optimization", algorithms 7.4, 7.5, 3.5 and 3.6).
//!
//! Existing crates depend on an application-level error type and on an unmaintained macro crate.
//! The functions here are strictly convex, so the plain algorithm suffices.

use std::collections::VecDeque;

/// The number of pairs of steps and gradient changes that approximate the Hessian.
const MEMORY: usize = 10;
/// The constant of the sufficient-decrease condition.
const C1: f64 = 1e-4;
/// The constant of the curvature condition.
const C2: f64 = 0.9;
/// The maximum number of evaluations in a line search.
const SEARCHES: usize = 40;

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    /// Steps taken.
    pub(crate) iterations: usize,
    /// Whether the gradient became small enough.
    pub(crate) converged: bool,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn largest(a: &[f64]) -> f64 {
    a.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// A point on the search line.
#[derive(Clone)]
struct Point {
    step: f64,
    value: f64,
    slope: f64,
    at: Vec<f64>,
    gradient: Vec<f64>,
}

/// Minimizes `f` from the start point `x`. `f` writes its gradient and returns its value. The
/// iteration ends when no element of the gradient exceeds `tolerance`, or after `limit` steps.
pub(crate) fn minimize(
    x: &mut Vec<f64>,
    limit: usize,
    tolerance: f64,
    f: &mut dyn FnMut(&[f64], &mut [f64]) -> f64,
) -> Outcome {
    let mut gradient = vec![0.0; x.len()];
    let mut value = f(x, &mut gradient);
    let mut pairs: VecDeque<(Vec<f64>, Vec<f64>, f64)> = VecDeque::new();
    for iteration in 0..limit {
        if largest(&gradient) <= tolerance {
            return Outcome {
                iterations: iteration,
                converged: true,
            };
        }
        let mut direction = descent(&gradient, &pairs);
        if dot(&direction, &gradient) >= 0.0 {
            // Rounding errors have made the approximation useless, so the plain gradient is used.
            pairs.clear();
            direction = gradient.iter().map(|g| -g).collect();
        }
        let first = if pairs.is_empty() {
            (1.0 / largest(&gradient)).min(1.0)
        } else {
            1.0
        };
        let start = Point {
            step: 0.0,
            value,
            slope: dot(&direction, &gradient),
            at: x.clone(),
            gradient: gradient.clone(),
        };
        let Some(next) = search(&start, &direction, first, f) else {
            // None of the tried steps decreases `f` enough, usually because of rounding errors near
            // the minimum. The gradient still exceeds `tolerance`, so this is not convergence.
            return Outcome {
                iterations: iteration,
                converged: false,
            };
        };
        let moved: Vec<f64> = next.at.iter().zip(&*x).map(|(a, b)| a - b).collect();
        let changed: Vec<f64> = next
            .gradient
            .iter()
            .zip(&gradient)
            .map(|(a, b)| a - b)
            .collect();
        let curvature = dot(&moved, &changed);
        if curvature > f64::EPSILON * dot(&changed, &changed) {
            if pairs.len() == MEMORY {
                pairs.pop_front();
            }
            pairs.push_back((moved, changed, 1.0 / curvature));
        }
        *x = next.at;
        value = next.value;
        gradient = next.gradient;
    }
    Outcome {
        iterations: limit,
        converged: largest(&gradient) <= tolerance,
    }
}

/// The direction of the two-loop recursion.
fn descent(gradient: &[f64], pairs: &VecDeque<(Vec<f64>, Vec<f64>, f64)>) -> Vec<f64> {
    let mut q: Vec<f64> = gradient.iter().map(|g| -g).collect();
    let mut alphas = Vec::with_capacity(pairs.len());
    for (s, y, rho) in pairs.iter().rev() {
        let alpha = rho * dot(s, &q);
        for (q, y) in q.iter_mut().zip(y) {
            *q -= alpha * y;
        }
        alphas.push(alpha);
    }
    if let Some((_, y, rho)) = pairs.back() {
        let scale = 1.0 / (rho * dot(y, y));
        for q in &mut q {
            *q *= scale;
        }
    }
    for ((s, y, rho), alpha) in pairs.iter().zip(alphas.iter().rev()) {
        let beta = rho * dot(y, &q);
        for (q, s) in q.iter_mut().zip(s) {
            *q += (alpha - beta) * s;
        }
    }
    q
}

/// Returns a step along `direction` that satisfies the strong Wolfe conditions. If none is found,
/// returns the step that decreases `f` most.
fn search(
    start: &Point,
    direction: &[f64],
    first: f64,
    f: &mut dyn FnMut(&[f64], &mut [f64]) -> f64,
) -> Option<Point> {
    let mut probe = |step: f64| {
        let at: Vec<f64> = start
            .at
            .iter()
            .zip(direction)
            .map(|(x, d)| x + step * d)
            .collect();
        let mut gradient = vec![0.0; at.len()];
        let value = f(&at, &mut gradient);
        Point {
            step,
            value,
            slope: dot(&gradient, direction),
            at,
            gradient,
        }
    };
    // Near the minimum, the decrease is smaller than rounding errors.
    let slack = 8.0 * f64::EPSILON * start.value.abs();
    let decreases = |p: &Point| p.value <= start.value + C1 * p.step * start.slope + slack;
    let flat = |p: &Point| p.slope.abs() <= -C2 * start.slope;

    let (mut low, mut high) = (start.clone(), None::<Point>);
    let mut step = first;
    for _ in 0..SEARCHES {
        let p = probe(step);
        if !p.value.is_finite() || !decreases(&p) || (low.step > 0.0 && p.value > low.value + slack)
        {
            high = Some(p);
        } else if flat(&p) {
            return Some(p);
        } else {
            // The minimum is between the new point and the end toward which the function decreases.
            let toward = high.as_ref().map_or(1.0, |high| high.step - low.step);
            let before = std::mem::replace(&mut low, p);
            if low.slope * toward >= 0.0 {
                high = Some(before);
            }
        }
        step = match &high {
            None => 2.0 * low.step,
            Some(high) => 0.5 * (low.step + high.step),
        };
    }
    (low.step > 0.0).then_some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_minimum_of_a_quadratic_and_of_rosenbrock() {
        let mut x = vec![3.0, -4.0, 5.0];
        let outcome = minimize(&mut x, 100, 1e-10, &mut |x, g| {
            let scales = [1.0, 100.0, 0.01];
            for i in 0..3 {
                g[i] = scales[i] * (x[i] - i as f64);
            }
            (0..3).map(|i| 0.5 * g[i] * (x[i] - i as f64)).sum()
        });
        assert!(outcome.converged);
        for (i, x) in x.iter().enumerate() {
            assert!((x - i as f64).abs() < 1e-7, "{x}");
        }

        let mut x = vec![-1.2, 1.0];
        let outcome = minimize(&mut x, 500, 1e-9, &mut |x, g| {
            let (a, b) = (1.0 - x[0], x[1] - x[0] * x[0]);
            g[0] = -2.0 * a - 400.0 * x[0] * b;
            g[1] = 200.0 * b;
            a * a + 100.0 * b * b
        });
        assert!(outcome.converged && outcome.iterations < 100);
        assert!((x[0] - 1.0).abs() < 1e-6 && (x[1] - 1.0).abs() < 1e-6);
    }

    #[test]
    fn ends_at_the_limit() {
        let mut x = vec![-1.2, 1.0];
        let outcome = minimize(&mut x, 2, 1e-12, &mut |x, g| {
            let (a, b) = (1.0 - x[0], x[1] - x[0] * x[0]);
            g[0] = -2.0 * a - 400.0 * x[0] * b;
            g[1] = 200.0 * b;
            a * a + 100.0 * b * b
        });
        assert_eq!((outcome.iterations, outcome.converged), (2, false));
    }
}
