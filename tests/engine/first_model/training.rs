//! Compares training on the first model with Python mlx-lm
//! (`tools/golden/training_first_model.py`). An adapter on 4-bit matrices has the gradients and
//! losses of an adapter on the dequantized matrices.

use std::path::{Path, PathBuf};

use inference::{LoadOptions, LoraConfig};
use metal_backend::train::{AdapterKind, OptimizerConfig, Schedule, Sequence, Trainer, Tuning};
use mlx_rs_core::io;
use serde_json::Value;

use super::FIRST;
use crate::common::{fixture, golden};

fn directory() -> PathBuf {
    fixture("training").join("first-model")
}

/// A trainer with the optimizer settings of mlx-lm.
fn trainer(dir: &Path, rate: f64) -> Trainer {
    let tuning = Tuning {
        optimizer: OptimizerConfig::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            bias_correction: false,
        },
        schedule: Schedule::constant(rate as f32),
        ..Tuning::default()
    };
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_adapter_path(dir);
    let unused = LoraConfig::new();
    Trainer::load(&FIRST, &options, &unused, AdapterKind::Lora, tuning).unwrap()
}

fn sequences(batch: &Value) -> Vec<Sequence> {
    let one = |v: &Value| {
        let ids = super::ids(&v["ids"]);
        Sequence::new(ids).with_prompt(usize::try_from(v["from"].as_u64().unwrap()).unwrap())
    };
    batch.as_array().unwrap().iter().map(one).collect()
}

#[test]
fn ten_steps_have_the_gradients_and_losses_of_mlx_lm() {
    if crate::alone::ran_elsewhere(
        "first_model::training::ten_steps_have_the_gradients_and_losses_of_mlx_lm",
    ) {
        return;
    }
    let dir = directory();
    let golden = golden(&dir);
    let rate = golden["rate"].as_f64().unwrap();
    for run in golden["runs"].as_array().unwrap() {
        let mut trainer = trainer(&dir, rate);
        let batches: Vec<_> = run["batches"].as_array().unwrap().iter().collect();
        if batches[0].as_array().unwrap().len() == 4 {
            let (_, gradients) = trainer.gradients(&sequences(batches[0])).unwrap();
            let expected = io::load_safetensors(dir.join("gradients.safetensors")).unwrap();
            assert_eq!(gradients.len(), expected.arrays.len());
            for (part, expected) in &expected.arrays {
                let got = gradients[part].swap_axes(0, 1).unwrap();
                assert!(
                    got.all_close(expected, 1e-3, 1e-4).unwrap(),
                    "{part}: {got} {expected}"
                );
            }
        }
        let losses = run["losses"].as_array().unwrap();
        for (i, (batch, expected)) in batches.iter().zip(losses).enumerate() {
            let loss = trainer.step(&sequences(batch)).unwrap().loss;
            let expected = expected.as_f64().unwrap() as f32;
            assert!(
                (loss - expected).abs() < 1e-3,
                "step {i}: {loss} {expected}"
            );
        }
    }
}
