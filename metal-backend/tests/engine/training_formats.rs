//! Trains adapters on quantized models with every method. The losses must equal those of a model
//! with the dequantized weights in float32.

use std::path::{Path, PathBuf};

use inference::{ErrorKind, LoraConfig};
use metal_backend::convert::{ConvertOptions, Quantization, convert};
use metal_backend::train::loss::{Grpo, Kto};
use metal_backend::train::{
    AdapterKind, JudgedReply, OptimizerConfig, Preference, Rollout, Sequence, Trainer, Tuning,
};
use mlx_rs_core::Array;

use crate::alone::ran_elsewhere;
use crate::gguf_blocks::{MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, TQ2_0, VOCAB, twins};
use crate::training_common::{at_rate, cpu, distance};

/// The directories of a quantized model and of the same model with dequantized weights.
struct Twins {
    name: String,
    packed: PathBuf,
    plain: PathBuf,
    _dirs: Vec<tempfile::TempDir>,
}

fn all() -> Vec<Twins> {
    let mut all = Vec::new();
    for (name, kind) in [
        ("Q4_0", Q4_0),
        ("Q4_1", Q4_1),
        ("Q8_0", Q8_0),
        ("Q4_K", Q4_K),
        ("Q5_K", Q5_K),
        ("Q6_K", Q6_K),
        ("TQ2_0", TQ2_0),
        ("MXFP4", MXFP4),
    ] {
        let [(first, packed), (second, plain)] = twins(&kind);
        all.push(Twins {
            name: name.to_owned(),
            packed,
            plain,
            _dirs: vec![first, second],
        });
    }
    for (bits, group_size) in [(4, 32), (4, 64), (8, 64), (3, 32)] {
        let [_, (dense, path)] = twins(&Q8_0);
        let dir = tempfile::tempdir().unwrap();
        let (packed, plain) = (dir.path().join("packed"), dir.path().join("plain"));
        let quantized = ConvertOptions::new().with_quantize(Quantization {
            bits: Some(bits),
            group_size: Some(group_size),
            ..Quantization::default()
        });
        convert(&path, &packed, &quantized, &mut |_, _| {}).unwrap();
        let dequantized = ConvertOptions::new().with_dequantize(true);
        convert(&packed, &plain, &dequantized, &mut |_, _| {}).unwrap();
        all.push(Twins {
            name: format!("affine {bits} bits, groups of {group_size}"),
            packed,
            plain,
            _dirs: vec![dense, dir],
        });
    }
    all
}

fn ids(seed: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|i| (seed * 5 + i * i * 7) % VOCAB as u32)
        .collect()
}

/// Returns a reply to one of two prompts. `seed` determines its tokens.
fn reply(prompt: u32, seed: u32) -> Sequence {
    Sequence::new([ids(prompt, 6), ids(seed + 17, 5 + seed)].concat()).with_prompt(6)
}

fn pairs() -> Vec<Preference> {
    let pair = |prompt: u32| Preference {
        chosen: reply(prompt, 2 * prompt),
        rejected: reply(prompt, 2 * prompt + 1),
    };
    (0..2).map(pair).collect()
}

/// Runs one step of a training method, and returns the loss.
type Step = fn(&mut Trainer) -> inference::Result<f32>;

const METHODS: [(&str, Step); 5] = [
    ("sft", |trainer| {
        let batch = [reply(0, 1), reply(1, 2)];
        trainer.step(&batch).map(|report| report.loss)
    }),
    ("dpo", |trainer| {
        let report = trainer.step_by_preference(&pairs(), 0.1, 0.0)?;
        Ok(report.loss)
    }),
    ("orpo", |trainer| {
        let report = trainer.step_by_odds_ratio(&pairs(), 0.1, true)?;
        Ok(report.loss)
    }),
    ("kto", |trainer| {
        let judged = |i: u32| JudgedReply {
            reply: reply(i / 2, i),
            desirable: i.is_multiple_of(2),
        };
        let options = Kto {
            beta: 0.1,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
        };
        let batch: Vec<JudgedReply> = (0..4).map(judged).collect();
        Ok(trainer.step_by_verdict(&batch, options)?.loss)
    }),
    ("grpo", |trainer| {
        let rollout = |i: u32| Rollout {
            reply: reply(i / 2, i),
            advantage: if i.is_multiple_of(2) { 1.0 } else { -0.5 },
            old_logprobs: None,
        };
        let options = Grpo {
            beta: 0.1,
            ..Grpo::default()
        };
        let mut batch: Vec<Rollout> = (0..4).map(rollout).collect();
        Ok(trainer.step_by_policy(&mut batch, options)?.loss)
    }),
];

/// With SGD, rounding differences of the gradients remain small. Adam's first steps depend only on
/// the signs of gradients, which such differences can change.
fn tuning() -> Tuning {
    Tuning {
        optimizer: OptimizerConfig::Sgd {
            momentum: 0.0,
            weight_decay: 0.0,
            dampening: 0.0,
            nesterov: false,
        },
        ..at_rate(5e-2)
    }
}

fn numbers(a: &Array) -> Vec<f32> {
    a.to_f32_vec().unwrap()
}

fn trainer(model: &Path, kind: AdapterKind) -> inference::Result<Trainer> {
    let lora = LoraConfig::new().with_rank(4).with_alpha(32.0);
    Trainer::load(model, &cpu(), &lora, kind, tuning())
}

/// Trains models of every format with every method, and compares them with the models with
/// dequantized weights.
fn every_method_trains_every_format_as_dense_weights(kind: AdapterKind) {
    for twins in all() {
        for (method, step) in METHODS {
            let what = format!("{}, {kind:?}, {method}", twins.name);
            let [packed, plain] = [&twins.packed, &twins.plain].map(|model| {
                let mut trainer = trainer(model, kind).unwrap_or_else(|e| panic!("{what}: {e}"));
                let start = trainer.params();
                let mut next = || step(&mut trainer).unwrap_or_else(|e| panic!("{what}: {e}"));
                let losses = [next(), next(), next(), next()];
                let moved = trainer.params().into_iter().any(|(name, param)| {
                    distance(&numbers(&param), &numbers(&start[&name])) > 1e-5
                });
                assert!(moved, "{what}");
                losses
            });
            for (a, b) in packed.iter().zip(&plain) {
                let bound = 2e-3 * b.abs().max(1.0);
                assert!((a - b).abs() < bound, "{what}: {packed:?} and {plain:?}");
            }
            // In GRPO, each step here takes the current probabilities as the old ones. So all
            // ratios are 1, and the loss need not decrease.
            let fell = packed[3] < packed[0];
            assert!(fell || method == "grpo", "{what}: {packed:?}");
        }
    }
}

#[test]
fn every_method_trains_lora_of_every_format_as_of_dense_weights() {
    if !ran_elsewhere(
        "training_formats::every_method_trains_lora_of_every_format_as_of_dense_weights",
    ) {
        every_method_trains_every_format_as_dense_weights(AdapterKind::Lora);
    }
}

#[test]
fn every_method_trains_dora_of_every_format_as_of_dense_weights() {
    if !ran_elsewhere(
        "training_formats::every_method_trains_dora_of_every_format_as_of_dense_weights",
    ) {
        every_method_trains_every_format_as_dense_weights(AdapterKind::Dora);
    }
}

#[test]
fn full_fine_tuning_of_quantized_weights_is_refused() {
    for twins in all() {
        let error = trainer(&twins.packed, AdapterKind::Full).err().unwrap();
        let name = &twins.name;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
        assert!(error.to_string().contains("quantized"), "{name}: {error}");
        let mut dense = trainer(&twins.plain, AdapterKind::Full).unwrap();
        let (_, step) = METHODS[1];
        assert!(step(&mut dense).unwrap().is_finite(), "{name}");
    }
}
