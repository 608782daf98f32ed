//! Runs those examples that need a model, with a tiny model.

#[path = "../../examples/bench_inference.rs"]
#[allow(dead_code, reason = "its `main` takes a model from the hub")]
mod bench_inference;
#[path = "../../examples/inference_demo.rs"]
#[allow(dead_code, reason = "its `main` takes a model from the hub")]
mod inference_demo;

use crate::common::fixture;
use inference::LoadOptions;

#[test]
fn a_model_is_asked_and_measured() {
    let options = LoadOptions::new().with_backend("cpu");
    let path = fixture("tiny/llama");
    inference_demo::run(&path, "the cat", &options).unwrap();
    bench_inference::run(&path, (12, 4), &options).unwrap();
}
