//! Tests of `mlx train --method grpo`: rewards from a program and from a function, resumed runs and
//! refusals.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use inference::{CancelToken, Result};
use metal_backend::train::config::TrainConfig;
use metal_backend::train::loss::LossType;
use metal_backend::train::train_log::Entry;
use metal_backend::train::{Completion, Reward, Run, Start};

use crate::{cpu, json, log, mlx, model, stderr};

struct Place {
    dirs: tempfile::TempDir,
    data: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let data = dirs.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let lines = [
            r#"{"prompt": "hi", "answer": "ahoy"}"#,
            r#"{"prompt": [{"role": "user", "content": "who are you"}], "answer": "a pirate"}"#,
            r#"{"prompt": "where", "answer": "at sea"}"#,
        ];
        std::fs::write(data.join("train.jsonl"), lines.join("\n")).unwrap();
        Self { dirs, data }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dirs.path().join(name)
    }

    fn config(&self, adapters: &Path, iters: u64) -> TrainConfig {
        let yaml = format!(
            "method: grpo\ndata: {}\nadapter_path: {}\nbatch_size: 2\nnum_generations: 8\niters: {iters}\n\
             max_completion_length: 8\nsteps_per_report: 1\nlearning_rate: 2e-2\nnum_layers: -1\n\
             lora_parameters: {{dropout: 0.1}}\n",
            self.data.display(),
            adapters.display()
        );
        TrainConfig::from_yaml(&yaml).unwrap()
    }
}

/// The fraction of even ids.
fn even(completions: &[Completion]) -> Result<Vec<f32>> {
    let one = |completion: &Completion| {
        let ids = &completion.ids;
        assert!((1..=8).contains(&ids.len()));
        assert!(!completion.is_truncated || ids.len() == 8);
        assert!(completion.line["answer"].is_string());
        let even = ids.iter().filter(|id| **id % 2 == 0).count();
        even as f32 / ids.len() as f32
    };
    Ok(completions.iter().map(one).collect())
}

fn train(config: TrainConfig, start: Start) -> Vec<(f32, f64)> {
    train_with(config, start, even)
}

fn train_with(config: TrainConfig, start: Start, reward: impl Reward + 'static) -> Vec<(f32, f64)> {
    let dir = config.adapter_path.clone();
    let run = Run::prepare(&model(), &cpu(), config, start).unwrap();
    let mut run = run.with_reward(reward);
    run.train(&CancelToken::new(), &mut |_| {}).unwrap();
    log(&dir)
        .iter()
        .filter_map(|entry| match entry {
            Entry::Train(report) => Some((report.policy.unwrap().reward, report.loss)),
            _ => None,
        })
        .collect()
}

#[test]
fn a_toy_reward_rises() {
    let place = Place::new();
    let mut config = place.config(&place.at("a"), 60);
    (config.learning_rate, config.lora_parameters.scale) = (0.1, 5.0);
    let rewards = train(config, Start::Fresh);
    let mean = |part: &[(f32, f64)]| part.iter().map(|r| r.0).sum::<f32>() / part.len() as f32;
    let (first, last) = (mean(&rewards[..4]), mean(&rewards[56..]));
    // The replies depend on the processor's rounding, and so does the last reward: 0.82 on one
    // with AVX2, above 0.85 on others. The mean of 64 rewards between 0 and 1 has a standard
    // deviation of at most 0.07.
    assert!(
        first < 0.65 && last > first + 0.2,
        "{first} {last}: {rewards:?}"
    );
}

/// Replies depend on the seed and the step only, so a resumed run has the same rewards.
#[test]
fn a_run_with_rewards_goes_on_as_if_it_had_not_been_interrupted() {
    let place = Place::new();
    let (whole, parts) = (place.at("whole"), place.at("parts"));
    let expected = train(place.config(&whole, 6), Start::Fresh);
    train(place.config(&parts, 3), Start::Fresh);
    let resumed = train(place.config(&parts, 6), Start::Resume);
    assert_eq!(resumed, expected);
    assert_ne!(expected[0], expected[1]);
}

/// Replies are judged once for all their updates, also if the run stops between two updates.
#[test]
fn replies_serve_several_updates() {
    let place = Place::new();
    let config = |name: &str, iters| {
        let mut config = place.config(&place.at(name), iters);
        (config.num_iterations, config.epsilon) = (3, 0.05);
        (config.grad_accumulation_steps, config.loss_type) = (2, LossType::Bnpo);
        config
    };
    let rewards = train(config("whole", 12), Start::Fresh);
    // Two batches of prompts, each for three updates, and then two others.
    for (i, (reward, _)) in rewards.iter().enumerate() {
        assert_eq!(*reward, rewards[i / 6 * 6 + i % 2].0, "{i}: {rewards:?}");
    }
    let of_set = |at: usize| [rewards[at].0, rewards[at + 1].0];
    assert_ne!(of_set(0), of_set(6));
    // Each batch of two prompts is judged once.
    let judged = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&judged);
    let reward = move |completions: &[Completion]| {
        counted.fetch_add(completions.len(), Ordering::Relaxed);
        even(completions)
    };
    train_with(config("counted", 12), Start::Fresh, reward);
    assert_eq!(judged.load(Ordering::Relaxed), 4 * 2 * 8);

    let entries = log(&place.at("whole"));
    let clipped = entries.iter().filter_map(|entry| match entry {
        Entry::Train(report) => Some(report.policy.unwrap().clip_ratio.is_some()),
        _ => None,
    });
    let later: Vec<bool> = (0..12).map(|i| i % 6 >= 2).collect();
    assert_eq!(clipped.collect::<Vec<_>>(), later);

    for stop in [4, 6, 8] {
        let name = format!("stop{stop}");
        train(config(&name, stop), Start::Fresh);
        let resumed = train(config(&name, 12), Start::Resume);
        assert_eq!(resumed, rewards, "after {stop} steps");
    }
    let mut other = config("stop4", 12);
    other.num_iterations = 2;
    let error = Run::prepare(&model(), &cpu(), other, Start::Resume)
        .err()
        .unwrap();
    assert!(error.to_string().contains("num_iterations 3"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_program_can_judge() {
    let place = Place::new();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (model, data, adapters) = (text(&model()), text(&place.data), text(&place.at("a")));
    let args = |command: &str, more: &[&str]| {
        let fixed = [
            "--model",
            &model,
            "--data",
            &data,
            "--adapter-path",
            &adapters,
            "--backend",
            "cpu",
            "--method",
            "grpo",
            "--iters",
            "2",
            "--num-generations",
            "2",
            "--batch-size",
            "1",
            "--max-completion-length",
            "4",
            "--steps-per-report",
            "1",
            "--beta",
            "0.1",
            "--report-to",
            "jsonl",
            "--overwrite",
            "--reward-command",
            command,
        ];
        let all = fixed.iter().chain(more);
        all.map(|arg| (*arg).to_owned()).collect::<Vec<String>>()
    };
    let train = |args: &[String]| {
        mlx(
            "train",
            &args.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    };
    // The reward is the number of lines so far, so it shows the order.
    let seen = text(&place.at("seen"));
    let command = format!(
        "n=0; while read -r line; do n=$((n+1)); printf '%s\\n' \"$line\" >> {seen}; echo $n; done"
    );
    let told = json(&train(&args(&command, &["--json"])));
    assert_eq!(told["steps"], 2);
    let lines = std::fs::read_to_string(&seen).unwrap();
    assert_eq!(lines.lines().count(), 4);
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(
            line["completion"].is_string() && line["answer"].is_string(),
            "{line}"
        );
    }
    let metrics = std::fs::read_to_string(place.at("a").join("metrics.jsonl")).unwrap();
    let rewards: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .inspect(|line| assert!(line["kl"].is_number() && line["completion_length"].is_number()))
        .map(|line| line["reward"].as_f64().unwrap())
        .collect();
    assert_eq!(rewards, [1.5, 3.5]);

    for (command, more, code, what) in [
        ("echo no; cat >/dev/null", &[][..], 1, "no finite number"),
        ("exit 3", &[], 1, "exit status: 3"),
        ("cat", &["--num-generations", "1"], 2, "num_generations"),
        ("cat", &["--temperature", "0"], 2, "temperature"),
        ("cat", &["--grad-accumulation-steps", "2"], 2, "bnpo"),
        ("cat", &["--test", "--train"], 2, "grpo has no test"),
        ("cat", &["--pack"], 2, "pack"),
        ("cat", &["--num-iterations", "0"], 2, "num_iterations"),
        ("cat", &["--epsilon-high", "0.3"], 2, "num_iterations"),
    ] {
        let mut all = args(command, &[]);
        for pair in more.chunks(2) {
            if let Some(at) = all.iter().position(|arg| arg == pair[0]) {
                all.drain(at..at + 2);
            }
        }
        all.extend(more.iter().map(|arg| (*arg).to_owned()));
        let output = train(&all);
        let told = stderr(&output);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{command} {more:?}: {told}"
        );
        assert!(told.contains(what), "{command} {more:?}: {told}");
    }
    let mut without = args("cat", &[]);
    without.truncate(without.len() - 2);
    let output = train(&without);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--reward-command"));
}
