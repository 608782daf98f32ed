//! Compares training on preferences with independent computations in numpy
//! (`tools/golden/dpo.py`, `orpo_kto.py`): losses, rewards and parameters after each step.

use inference::{ErrorKind, LoraConfig};
use metal_backend::train::loss::Kto;
use metal_backend::train::{
    JudgedReply, OptimizerConfig, Params, Preference, Sequence, StepReport, Trainer, Tuning,
};
use mlx_rs_core::Array;
use serde_json::Value;

use crate::training_common::{at_rate, distance, fixtures, floats, fresh, read};

fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

fn sequence(ids: &Value, from: &Value) -> Sequence {
    let ids = ids.as_array().unwrap().iter();
    let ids = ids.map(|id| id.as_u64().unwrap() as u32).collect();
    Sequence::new(ids).with_prompt(from.as_u64().unwrap() as usize)
}

fn pairs(batch: &Value) -> Vec<Preference> {
    let pair = |pair: &Value| Preference {
        chosen: sequence(&pair["chosen"], &pair["from"]),
        rejected: sequence(&pair["rejected"], &pair["from"]),
    };
    batch.as_array().unwrap().iter().map(pair).collect()
}

fn verdicts(batch: &Value) -> Vec<JudgedReply> {
    let one = |one: &Value| JudgedReply {
        reply: sequence(&one["ids"], &one["from"]),
        desirable: one["desirable"].as_bool().unwrap(),
    };
    batch.as_array().unwrap().iter().map(one).collect()
}

/// Creates a trainer of the tiny llama with an adapter on its last block.
fn trainer(golden: &Value) -> Trainer {
    let (rank, scale) = (golden["rank"].as_u64().unwrap(), number(&golden["scale"]));
    let lora = LoraConfig::new()
        .with_rank(rank as usize)
        .with_alpha(scale * rank as f32)
        .with_num_layers(1)
        .with_targets(["self_attn.q_proj", "self_attn.v_proj"]);
    let tuning = Tuning {
        optimizer: OptimizerConfig::Sgd {
            momentum: 0.0,
            weight_decay: 0.0,
            dampening: 0.0,
            nesterov: false,
        },
        ..at_rate(number(&golden["rate"]))
    };
    fresh("llama", &lora, tuning)
}

/// Repeats the steps of every run in a file, and compares losses, rewards and parameters.
fn against_numpy(file: &str, step: impl Fn(&mut Trainer, &Value, &Value) -> StepReport) {
    let golden = read(&fixtures().join("training").join(file));
    let runs = golden["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        let mut trainer = trainer(&golden);
        let start: Params = trainer
            .params()
            .into_iter()
            .map(|(name, param)| {
                let numbers = floats(&golden["start"][&name]);
                let start = Array::from_slice(&numbers, param.shape()).unwrap();
                (name, start)
            })
            .collect();
        assert_eq!(start.len(), golden["start"].as_object().unwrap().len());
        trainer.restore(&start, Params::new(), 0, 0).unwrap();
        let steps = run["steps"].as_array().unwrap();
        for (batch, expected) in golden["batches"].as_array().unwrap().iter().zip(steps) {
            let report = step(&mut trainer, batch, run);
            let rewards = report.preference.unwrap();
            for (got, name) in [
                (report.loss, "loss"),
                (rewards.chosen, "chosen"),
                (rewards.rejected, "rejected"),
                (rewards.accuracy, "accuracy"),
            ] {
                let expected = number(&expected[name]);
                assert!((got - expected).abs() < 1e-4, "{name}: {got} {expected}");
            }
        }
        for (name, param) in trainer.params() {
            let got = param.to_f32_vec().unwrap();
            let (expected, start) = (floats(&run["params"][&name]), &start[&name]);
            let moved = distance(&expected, &start.to_f32_vec().unwrap());
            assert!(moved > 1e-3, "{name} did not move: {moved}");
            let error = distance(&got, &expected);
            assert!(error < 1e-4, "{name}: {error}");
        }
    }
}

fn beta() -> f32 {
    number(&read(&fixtures().join("training/dpo.json"))["beta"])
}

#[test]
fn preferences_are_learned_as_the_paper_says() {
    let beta = beta();
    against_numpy("dpo.json", |trainer, batch, run| {
        let smoothing = number(&run["smoothing"]);
        let batch = pairs(batch);
        trainer.step_by_preference(&batch, beta, smoothing).unwrap()
    });
}

#[test]
fn odds_ratios_are_learned_as_the_paper_says() {
    let beta = beta();
    against_numpy("orpo.json", |trainer, batch, run| {
        let learn_prompt = run["learn_prompt"].as_bool().unwrap();
        let batch = pairs(batch);
        trainer
            .step_by_odds_ratio(&batch, beta, learn_prompt)
            .unwrap()
    });
}

#[test]
fn verdicts_are_learned_as_the_paper_says() {
    let beta = beta();
    against_numpy("kto.json", |trainer, batch, run| {
        let options = Kto {
            beta,
            desirable_weight: number(&run["desirable_weight"]),
            undesirable_weight: number(&run["undesirable_weight"]),
        };
        trainer.step_by_verdict(&verdicts(batch), options).unwrap()
    });
}

#[test]
fn impossible_preferences_are_refused() {
    let golden = read(&fixtures().join("training/kto.json"));
    let mut trainer = trainer(&golden);
    let before = trainer.params();
    let batch = verdicts(&golden["batches"][0]);
    let options = Kto {
        beta: 0.1,
        desirable_weight: 1.0,
        undesirable_weight: 1.0,
    };
    let all = [
        (&batch[..1], options),
        (&batch[..0], options),
        (
            &batch,
            Kto {
                beta: 0.0,
                ..options
            },
        ),
        (
            &batch,
            Kto {
                desirable_weight: -1.0,
                ..options
            },
        ),
        (
            &batch,
            Kto {
                undesirable_weight: f32::NAN,
                ..options
            },
        ),
    ];
    for (batch, options) in all {
        let error = trainer.step_by_verdict(batch, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
    let golden = read(&fixtures().join("training/orpo.json"));
    let batch = pairs(&golden["batches"][0]);
    for (batch, beta) in [(&batch[..0], 0.1), (&batch, 0.0), (&batch, f32::INFINITY)] {
        let error = trainer.step_by_odds_ratio(batch, beta, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
    for (name, param) in trainer.params() {
        assert!(param.all_close(&before[&name], 0.0, 0.0).unwrap(), "{name}");
    }
}
