//! Compares training on generated replies with an independent computation in numpy
//! (`tools/golden/grpo.py`).

use inference::{ErrorKind, LoraConfig};
use metal_backend::train::loss::{Grpo, LossType, group_advantages};
use metal_backend::train::{OptimizerConfig, Params, Rollout, Sequence, Trainer, Tuning};
use mlx_rs_core::Array;
use serde_json::Value;

use crate::training_common::{at_rate, distance, fixtures, floats, fresh, read};

fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

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
    let mut trainer = fresh("llama", &lora, tuning);
    let start: Params = trainer
        .params()
        .into_iter()
        .map(|(name, param)| {
            let numbers = floats(&golden["start"][&name]);
            let start = Array::from_slice(&numbers, param.shape()).unwrap();
            (name, start)
        })
        .collect();
    trainer.restore(&start, Params::new(), 0, 0).unwrap();
    trainer
}

fn rollouts(batch: &Value, advantages: &[f32]) -> Vec<Rollout> {
    let replies = batch["replies"].as_array().unwrap().iter();
    replies
        .zip(advantages)
        .map(|(reply, advantage)| {
            let ids = reply["ids"].as_array().unwrap().iter();
            let ids = ids.map(|id| id.as_u64().unwrap() as u32).collect();
            let from = reply["from"].as_u64().unwrap() as usize;
            Rollout {
                reply: Sequence::new(ids).with_prompt(from),
                advantage: *advantage,
            }
        })
        .collect()
}

#[test]
fn generated_replies_are_learned_as_the_paper_says() {
    let golden = read(&fixtures().join("training/grpo.json"));
    let group = golden["group"].as_u64().unwrap() as usize;
    let runs = golden["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    for run in runs {
        let mut trainer = trainer(&golden);
        let start = trainer.params();
        let loss_type: LossType = serde_json::from_value(run["loss_type"].clone()).unwrap();
        let options = Grpo {
            beta: number(&run["beta"]),
            temperature: number(&run["temperature"]),
            loss_type,
            max_completion_length: golden["max_completion_length"].as_u64().unwrap() as usize,
        };
        let steps = run["steps"].as_array().unwrap();
        for (batch, expected) in golden["batches"].as_array().unwrap().iter().zip(steps) {
            let (advantages, _) = group_advantages(&floats(&batch["rewards"]), group, true);
            assert!(distance(&advantages, &floats(&batch["advantages"])) < 1e-5);
            let report = trainer
                .step_by_policy(&rollouts(batch, &advantages), options)
                .unwrap();
            let policy = report.policy.unwrap();
            let off = (report.loss - number(&expected["loss"])).abs();
            assert!(off < 1e-4, "{loss_type:?}: {} {expected}", report.loss);
            match policy.kl {
                Some(kl) => {
                    let off = (kl - number(&expected["kl"])).abs();
                    assert!(options.beta > 0.0 && off < 1e-4, "{kl} {expected}");
                }
                None => assert_eq!(options.beta, 0.0),
            }
        }
        for (name, param) in trainer.params() {
            let got = param.to_f32_vec().unwrap();
            let (expected, start) = (floats(&run["params"][&name]), &start[&name]);
            let moved = distance(&expected, &start.to_f32_vec().unwrap());
            assert!(moved > 1e-3, "{loss_type:?}: {name} did not move: {moved}");
            let error = distance(&got, &expected);
            assert!(error < 1e-4, "{loss_type:?}: {name}: {error}");
        }
    }
}

#[test]
fn impossible_advantages_are_refused() {
    let golden = read(&fixtures().join("training/grpo.json"));
    let mut trainer = trainer(&golden);
    let options = Grpo {
        beta: 0.0,
        temperature: 1.0,
        loss_type: LossType::Grpo,
        max_completion_length: 8,
    };
    let batch = rollouts(&golden["batches"][0], &[1.0, -1.0, 0.5, -0.5]);
    let mut not_finite = batch.clone();
    not_finite[1].advantage = f32::NAN;
    for (batch, options) in [
        (&batch[..0], options),
        (&not_finite, options),
        (
            &batch,
            Grpo {
                temperature: 0.0,
                ..options
            },
        ),
        (
            &batch,
            Grpo {
                beta: -1.0,
                ..options
            },
        ),
        (
            &batch,
            Grpo {
                max_completion_length: 0,
                ..options
            },
        ),
    ] {
        let error = trainer.step_by_policy(batch, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
}
