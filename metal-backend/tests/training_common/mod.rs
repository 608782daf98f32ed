//! Helpers shared by the tests of training: tiny models and batches.
#![allow(dead_code, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};

use inference::{Interrupt, LoadOptions, LoraConfig, Precision, Prompt, TextModel};
use metal_backend::train::{AdapterKind, Params, Schedule, Sequence, Trainer, Tuning};
use mlx_rs_core::{All, Array};
use serde_json::Value;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

pub fn tiny(name: &str) -> PathBuf {
    fixtures().join("tiny").join(name)
}

pub fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub fn floats(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|v| v.as_f64().unwrap() as f32).collect()
}

pub fn sequences(batch: &Value) -> Vec<Sequence> {
    let one = |v: &Value| {
        let ids = v["ids"].as_array().unwrap().iter();
        let ids = ids.map(|id| id.as_u64().unwrap() as u32).collect();
        Sequence::new(ids).with_prompt(v["from"].as_u64().unwrap() as usize)
    };
    batch.as_array().unwrap().iter().map(one).collect()
}

/// Returns loading options with which losses and gradients are computed in float32.
pub fn cpu() -> LoadOptions {
    LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
}

pub fn at_rate(rate: f32) -> Tuning {
    Tuning {
        schedule: Schedule::constant(rate),
        ..Tuning::default()
    }
}

pub fn load(name: &str, config: &LoraConfig, kind: AdapterKind, tuning: Tuning) -> Trainer {
    Trainer::load(&tiny(name), &cpu(), config, kind, tuning)
        .unwrap_or_else(|e| panic!("{name}: {e}"))
}

pub fn fresh(name: &str, config: &LoraConfig, tuning: Tuning) -> Trainer {
    load(name, config, AdapterKind::Lora, tuning)
}

/// Returns `n` sentences from the tiny vocabulary, in order of ascending length.
pub fn batch(n: usize) -> Vec<Sequence> {
    let sentence = |i: u32| {
        (0..9 + i)
            .map(|j| 3 + (i * 37 + j * j * 11) % 290)
            .collect()
    };
    (0..n as u32).map(|i| Sequence::new(sentence(i))).collect()
}

/// Returns the logits of every position of a short prompt.
pub fn logits(model: &dyn TextModel) -> Vec<f32> {
    let prompt = Prompt::Tokens(vec![5, 17, 99, 4]);
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, true, &Interrupt::new())
        .unwrap()
        .logits
}

pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    each.fold(0f32, f32::max)
}

/// Returns the Euclidean norm of all elements.
pub fn length(a: &Array) -> f32 {
    let sum = a.square().unwrap().sum(All, false).unwrap();
    sum.sqrt().unwrap().item::<f32>().unwrap()
}

/// Changes A and B so that neither is zero, and returns all parameters. If one were zero, the other
/// would have no gradient.
pub fn disturb(trainer: &mut Trainer) -> Params {
    let mut params = trainer.params();
    for (i, (part, value)) in params.iter_mut().enumerate() {
        if part.ends_with("lora_a") || part.ends_with("lora_b") {
            let noise: Vec<f32> = (0..value.size())
                .map(|j| ((j * 7 + i) % 13) as f32 * 0.01 - 0.06)
                .collect();
            let noise = Array::from_slice(&noise, value.shape()).unwrap();
            *value = value.add(&noise).unwrap();
        }
    }
    trainer.restore(&params, Params::new(), 0, 0).unwrap();
    params
}

/// Checks that the gradients of the loss equal finite differences. Each parameter is moved along
/// its gradient.
pub fn check_slopes(trainer: &mut Trainer, what: &str, only: impl Fn(&str) -> bool) {
    let params = trainer.params();
    let batch = batch(2);
    let (_, gradients) = trainer.gradients(&batch).unwrap();
    assert_eq!(gradients.len(), params.len());
    let mut checked = 0;
    for (part, gradient) in gradients.iter().filter(|(part, _)| only(part)) {
        // In the direction of the gradient, the slope of the loss equals the gradient's norm.
        let long = length(gradient);
        assert!(long.is_finite(), "{what} {part}");
        let along = match long {
            0.0 => Array::scalar(0.0f32).unwrap(),
            long => Array::scalar(1.0 / long).unwrap(),
        };
        let along = gradient.multiply(&along).unwrap();
        let mut loss = |step: f32| {
            let step = along.multiply(&Array::scalar(step).unwrap()).unwrap();
            let mut all = params.clone();
            all.insert(part.clone(), params[part].add(&step).unwrap());
            trainer.restore(&all, Params::new(), 0, 0).unwrap();
            let evaluation = trainer.evaluate(&batch).unwrap();
            evaluation.loss / evaluation.tokens as f64
        };
        // A steep loss usually has a strong curvature, so its steps are shorter. If a router
        // selects other experts within a step, the loss jumps, and even shorter steps are
        // necessary. For a very steep loss, only few step lengths avoid both curvature and rounding
        // errors.
        let base = loss(0.0);
        let longest = (2e-2 / long.max(1e-6)).clamp(2e-4, 1e-2);
        let estimate = [1.0, 0.3, 0.1, 0.06, 0.03, 0.01].iter().find_map(|share| {
            let step = longest * share;
            let (ahead, behind) = (loss(step) - base, base - loss(-step));
            let step = f64::from(step);
            let agrees = (ahead - behind).abs() < 0.03 * ahead.abs().max(behind.abs()) + 2e-6;
            agrees.then_some(((ahead + behind) / (2.0 * step), 5e-7 / step))
        });
        let Some((slope, noise)) = estimate else {
            panic!("{what} {part}: the loss jumps whatever the step");
        };
        let error = (slope - f64::from(long)).abs();
        assert!(
            error < 2e-3 + 0.02 * f64::from(long) + noise,
            "{what} {part}: {slope} {long}"
        );
        checked += usize::from(long > 1e-4);
    }
    assert!(checked > 0, "{what}: nothing was checked");
    trainer.restore(&params, Params::new(), 0, 0).unwrap();
}
