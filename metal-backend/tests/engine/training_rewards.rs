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
                old_logprobs: None,
            }
        })
        .collect()
}

#[test]
fn generated_replies_are_learned_as_the_paper_says() {
    let golden = read(&fixtures().join("training/grpo.json"));
    let group = golden["group"].as_u64().unwrap() as usize;
    let runs = golden["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 6);
    let mut clipped = 0;
    for run in runs {
        let mut trainer = trainer(&golden);
        let start = trainer.params();
        let loss_type: LossType = serde_json::from_value(run["loss_type"].clone()).unwrap();
        let iterations = run["iterations"].as_u64().unwrap() as usize;
        let options = Grpo {
            beta: number(&run["beta"]),
            temperature: number(&run["temperature"]),
            loss_type,
            max_completion_length: golden["max_completion_length"].as_u64().unwrap() as usize,
            epsilon: number(&run["epsilon"]),
            epsilon_high: number(&run["epsilon_high"]),
        };
        let steps: Vec<&Value> = run["steps"].as_array().unwrap().iter().collect();
        let batches = golden["batches"].as_array().unwrap();
        assert_eq!(steps.len(), batches.len() * iterations);
        for (batch, steps) in batches.iter().zip(steps.chunks(iterations)) {
            let (advantages, _) = group_advantages(&floats(&batch["rewards"]), group, true);
            assert!(distance(&advantages, &floats(&batch["advantages"])) < 1e-5);
            let mut batch = rollouts(batch, &advantages);
            for (i, expected) in steps.iter().enumerate() {
                let report = trainer.step_by_policy(&mut batch, options).unwrap();
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
                // At the first update with a batch of replies, all ratios are 1, so no clip ratio
                // is reported.
                assert_eq!(policy.clip_ratio.is_some(), i > 0);
                if let Some(ratio) = policy.clip_ratio {
                    let off = (ratio - number(&expected["clip_ratio"])).abs();
                    assert!(off < 1e-6, "{ratio} {expected}");
                    clipped += usize::from(ratio > 0.0);
                }
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
    assert!(clipped >= 4, "{clipped} steps clip ratios");
}

/// The ratio must be relative to the model that generated the replies, not to the current model.
#[test]
fn later_updates_use_the_log_probabilities_of_the_replies() {
    let golden = read(&fixtures().join("training/grpo.json"));
    let options = Grpo {
        loss_type: LossType::Bnpo,
        epsilon: 0.9,
        epsilon_high: 9.0,
        ..Grpo::default()
    };
    let gains = [1.0, -1.0, 1.0, -1.0];
    let mut batch = rollouts(&golden["batches"][0], &gains);
    let mut first = trainer(&golden);
    first.step_by_policy(&mut batch, options).unwrap();
    let old: Vec<Vec<f32>> = batch
        .iter()
        .map(|one| one.old_logprobs.clone().unwrap())
        .collect();
    first.step_by_policy(&mut batch, options).unwrap();
    // A step must not change the log-probabilities of the replies.
    for (one, old) in batch.iter().zip(&old) {
        assert_eq!(one.old_logprobs.as_ref(), Some(old));
        assert_eq!(old.len(), one.reply.learned());
        assert!(old.iter().all(|p| *p < 0.0));
    }
    // If a reply was half as probable before, its ratio to the unchanged model is 2.
    for one in &mut batch {
        let old = one.old_logprobs.as_mut().unwrap();
        old.iter_mut().for_each(|p| *p -= 2f32.ln());
    }
    let report = trainer(&golden).step_by_policy(&mut batch, options);
    let counts = batch.iter().map(|one| one.reply.learned() as f32);
    let gain: f32 = counts.clone().zip(gains).map(|(n, gain)| n * gain).sum();
    let expected = -2.0 * gain / counts.sum::<f32>();
    let loss = report.unwrap().loss;
    assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
}

#[test]
fn impossible_advantages_are_refused() {
    let golden = read(&fixtures().join("training/grpo.json"));
    let mut trainer = trainer(&golden);
    let options = Grpo::default();
    let batch = rollouts(&golden["batches"][0], &[1.0, -1.0, 0.5, -0.5]);
    let with = |change: &dyn Fn(&mut Vec<Rollout>)| {
        let mut batch = batch.clone();
        change(&mut batch);
        (batch, options)
    };
    let other = |change: &dyn Fn(&mut Grpo)| {
        let mut options = options;
        change(&mut options);
        (batch.clone(), options)
    };
    for (mut batch, options) in [
        with(&|batch| batch.clear()),
        with(&|batch| batch[1].advantage = f32::NAN),
        with(&|batch| batch[1].old_logprobs = Some(vec![-1.0; batch[1].reply.learned()])),
        with(&|batch| {
            for one in batch {
                one.old_logprobs = Some(vec![-1.0; one.reply.learned() + 1]);
            }
        }),
        with(&|batch| {
            for one in batch {
                one.old_logprobs = Some(vec![f32::NAN; one.reply.learned()]);
            }
        }),
        other(&|options| options.temperature = 0.0),
        other(&|options| options.beta = -1.0),
        other(&|options| options.max_completion_length = 0),
        other(&|options| options.epsilon = 0.0),
        other(&|options| options.epsilon_high = f32::INFINITY),
    ] {
        let error = trainer.step_by_policy(&mut batch, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
}
