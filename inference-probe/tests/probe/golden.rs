//! Compares results with scikit-learn, scipy and numpy (`tools/golden/probe.py`) on equal
//! activations.

use inference_probe::activations::Activations;
use inference_probe::cca::{CcaOptions, Components, correlations, held_out, one_hot};
use inference_probe::divergence::{jensen_shannon, mean_distance, softmax};
use inference_probe::folds::Fold;
use inference_probe::linear::{ProbeOptions, probe};
use inference_probe::logistic::{LogisticOptions, LogisticRegression, Standardizer};
use inference_probe::rsa::{Metric, agreement, similarities};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    shape: [usize; 3],
    activations: Vec<f32>,
    logistic: Logistic,
    cca: Cca,
    rsa: std::collections::BTreeMap<String, Rsa>,
    divergence: Divergence,
}

#[derive(Deserialize)]
struct Logistic {
    two: Vec<Fit>,
    three: Vec<Fit>,
}

#[derive(Deserialize)]
struct Fit {
    labels: Vec<usize>,
    folds: Vec<Fold>,
    weights: Vec<Vec<f64>>,
    intercepts: Vec<f64>,
    accuracies: Vec<f64>,
}

#[derive(Deserialize)]
struct Cca {
    sklearn_0_1: Vec<f64>,
    ridge_0_1: Vec<f64>,
    ridge_1_2: Vec<f64>,
    labels_2: Vec<f64>,
    held_out_1_2: Vec<f64>,
}

#[derive(Deserialize)]
struct Rsa {
    first: Vec<f64>,
    matrix: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
struct Divergence {
    logits: Vec<Vec<f32>>,
    pairs: Vec<f64>,
    group: Vec<bool>,
    cosine: f64,
    euclidean: f64,
}

fn golden() -> (Golden, Activations) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/probe.json");
    let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let activations = Activations::new(golden.shape, golden.activations.clone()).unwrap();
    (golden, activations)
}

fn close(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (actual, expected) in actual.iter().zip(expected) {
        assert!(
            (actual - expected).abs() <= tolerance,
            "{what}: {actual} and {expected}"
        );
    }
}

#[test]
fn regressions_have_the_weights_and_accuracies_of_scikit_learn() {
    let (golden, activations) = golden();
    for (classes, fits) in [(2, &golden.logistic.two), (3, &golden.logistic.three)] {
        for (layer, fit) in fits.iter().enumerate() {
            let what = format!("{classes} classes, layer {layer}");
            let rows = activations.layer(layer);
            let options = LogisticOptions {
                tolerance: 1e-10,
                max_iterations: 10_000,
                ..LogisticOptions::default()
            };
            let scaled = Standardizer::from_rows(&rows).apply(&rows);
            let fitted = LogisticRegression::fit(&scaled, &fit.labels, classes, &options).unwrap();
            for (row, expected) in fitted.weights.row_iter().zip(&fit.weights) {
                close(
                    &row.iter().copied().collect::<Vec<_>>(),
                    expected,
                    1e-4,
                    &what,
                );
            }
            close(&fitted.intercepts, &fit.intercepts, 1e-4, &what);
            let result = probe(&rows, &fit.labels, &fit.folds, &ProbeOptions::default()).unwrap();
            assert!(result.converged);
            close(&result.fold_accuracies, &fit.accuracies, 1e-12, &what);
        }
    }
}

#[test]
fn canonical_correlations_are_those_of_numpy_and_scikit_learn() {
    let (golden, activations) = golden();
    let layers: Vec<_> = (0..3).map(|i| activations.layer(i)).collect();
    let of = |i: usize| Components::from_rows(&layers[i]).unwrap();
    let ridge = CcaOptions::default();
    let plain = CcaOptions {
        ridge: 0.0,
        components: 3,
    };
    let actual = correlations(&of(0), &of(1), &plain).unwrap();
    close(&actual, &golden.cca.sklearn_0_1, 1e-6, "scikit-learn");
    let actual = correlations(&of(0), &of(1), &ridge).unwrap();
    close(&actual, &golden.cca.ridge_0_1, 1e-6, "0, 1");
    let actual = correlations(&of(1), &of(2), &ridge).unwrap();
    close(&actual, &golden.cca.ridge_1_2, 1e-6, "1, 2");
    let labels = one_hot(&golden.logistic.three[0].labels, 3);
    let actual = correlations(&of(2), &Components::from_rows(&labels).unwrap(), &ridge).unwrap();
    close(&actual, &golden.cca.labels_2, 1e-6, "labels");

    let four = CcaOptions {
        components: 4,
        ..ridge
    };
    let probabilities: Vec<f64> = golden.logistic.three[0]
        .folds
        .iter()
        .map(|fold| {
            let of = |i: usize| Components::from_rows(&layers[i].select_rows(&fold.train)).unwrap();
            held_out((&of(1), &layers[1]), (&of(2), &layers[2]), fold, &four).unwrap()
        })
        .collect();
    close(&probabilities, &golden.cca.held_out_1_2, 1e-6, "held out");
}

#[test]
fn similarities_are_those_of_scipy() {
    let (golden, activations) = golden();
    for (name, expected) in &golden.rsa {
        let metric: Metric = name.parse().unwrap();
        let actual: Vec<_> = (0..3)
            .map(|i| similarities(&activations.layer(i), metric).unwrap())
            .collect();
        close(&actual[0][..10], &expected.first, 1e-9, name);
        for (a, row) in actual.iter().zip(&expected.matrix) {
            let values: Vec<f64> = actual.iter().map(|b| agreement(a, b).unwrap()).collect();
            close(&values, row, 1e-9, name);
        }
    }
}

#[test]
fn divergences_are_those_of_scipy() {
    let (golden, activations) = golden();
    let p: Vec<_> = golden
        .divergence
        .logits
        .iter()
        .map(|l| softmax(l))
        .collect();
    let actual: Vec<f64> = p
        .windows(2)
        .map(|w| jensen_shannon(&w[0], &w[1]).unwrap())
        .collect();
    close(&actual, &golden.divergence.pairs, 1e-9, "pairs");
    let distance = mean_distance(&activations.layer(1), &golden.divergence.group).unwrap();
    let expected = [golden.divergence.cosine, golden.divergence.euclidean];
    close(
        &[distance.cosine, distance.euclidean],
        &expected,
        1e-9,
        "means",
    );
}
