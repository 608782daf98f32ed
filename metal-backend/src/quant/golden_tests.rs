//! Compares GPTQ and AWQ with numpy (`tools/golden/quantize.py`).

use mlx_rs_core::Array;
use serde::Deserialize;

use super::affine::{Affine, Rounded};
use super::inputs::Moments;
use super::{awq, gptq};
use crate::convert::FloatType;

#[derive(Deserialize)]
struct Case {
    bits: i32,
    group_size: i32,
    damping: f32,
    n_grid: usize,
    inputs: Vec<Vec<f32>>,
    weights: Vec<Vec<Vec<f32>>>,
    gptq: Quantized,
    awq_scales: Vec<f32>,
    awq_clipped: Quantized,
}

#[derive(Deserialize)]
struct Quantized {
    codes: Vec<Vec<f32>>,
    scales: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quantize.json");
    let text = std::fs::read_to_string(path).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn array(rows: &[Vec<f32>]) -> Array {
    let shape = [rows.len() as i32, rows[0].len() as i32];
    Array::from_slice(&rows.concat(), &shape).unwrap()
}

fn close(ours: &Array, theirs: &[Vec<f32>]) -> bool {
    ours.all_close(&array(theirs), 1e-4, 1e-5).unwrap()
}

fn assert_same(ours: &Rounded, theirs: &Quantized) {
    let codes = ours.codes.to_vec::<f32>().unwrap();
    assert_eq!(codes, theirs.codes.concat());
    assert!(close(&ours.scales, &theirs.scales));
    assert!(close(&ours.biases, &theirs.biases));
}

fn affine(case: &Case) -> Affine {
    Affine {
        bits: case.bits,
        group_size: case.group_size,
        factors: FloatType::F32,
    }
}

#[test]
fn gptq_gives_the_codes_of_the_paper() {
    for case in cases() {
        let moments = Moments::of(&array(&case.inputs)).unwrap();
        let weight = array(&case.weights[0]);
        let affine = affine(&case);
        let ours = gptq::quantize(&weight, &moments.products, affine, case.damping).unwrap();
        assert_same(&ours, &case.gptq);
    }
}

#[test]
fn awq_finds_the_best_scales_and_ranges() {
    for case in cases() {
        let affine = affine(&case);
        let moments = Moments::of(&array(&case.inputs)).unwrap();
        let matrices: Vec<(Array, Affine)> =
            case.weights.iter().map(|w| (array(w), affine)).collect();
        let scales = awq::search(&matrices, &moments, case.n_grid).unwrap();
        let expected = Array::vector(&case.awq_scales).unwrap();
        assert!(scales.all_close(&expected, 1e-4, 1e-5).unwrap());
        let (weight, _) = &matrices[0];
        let clipped = awq::clipped(weight, &moments.products, affine, case.n_grid).unwrap();
        assert_same(&clipped, &case.awq_clipped);
    }
}
