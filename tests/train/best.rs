//! Tests of the best adapter of a run, and of runs that end early.

use std::path::Path;

use inference::{CancelToken, Interrupt, LoadOptions, Prompt};
use metal_backend::train::config::TrainConfig;
use metal_backend::train::train_log::Entry;
use metal_backend::train::{Event, Run, Start, Summary};

use crate::{config, cpu, json, log, mlx, model, pirate, stderr};

fn run(config: TrainConfig, start: Start) -> (Summary, Vec<String>) {
    let mut run = Run::prepare(&model(), &cpu(), config, start).unwrap();
    let mut told = Vec::new();
    let summary = run
        .train(&CancelToken::new(), &mut |event| match event {
            Event::Best { step, .. } => told.push(format!("best {step}")),
            Event::StoppedEarly { step } => told.push(format!("stopped {step}")),
            _ => {}
        })
        .unwrap();
    (summary, told)
}

fn logits(options: &LoadOptions) -> Vec<f32> {
    let model = inference::load_model(model(), options).unwrap();
    let tokens = model.as_token_model().unwrap();
    let prompt = Prompt::Tokens(vec![5, 17, 99, 4]);
    let output = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
    output.logits
}

/// Losses of the validations after the first step, with their steps.
fn validations(dir: &Path) -> Vec<(u64, f64)> {
    log(dir)
        .iter()
        .filter_map(|entry| match entry {
            Entry::Validation(score) if score.step > 0 => Some((score.step, score.loss)),
            _ => None,
        })
        .collect()
}

/// The model soon memorizes the two training examples, and the loss on other examples rises again.
#[test]
fn the_best_adapter_is_kept_and_patience_ends_a_run() {
    let dirs = tempfile::tempdir().unwrap();
    let [patient, early, data] = ["patient", "early", "data"].map(|name| dirs.path().join(name));
    std::fs::create_dir(&data).unwrap();
    for (name, lines) in [("train.jsonl", 2), ("valid.jsonl", 6)] {
        let all = std::fs::read_to_string(pirate().join(name)).unwrap();
        let first: Vec<&str> = all.lines().take(lines).collect();
        std::fs::write(data.join(name), first.join("\n")).unwrap();
    }
    let of = |dir: &Path, more: &str| TrainConfig {
        data: Some(data.clone()),
        learning_rate: 1e-3,
        val_batches: -1,
        ..config(dir, more)
    };
    let (whole, told) = run(of(&patient, "iters: 60"), Start::Fresh);
    let scores = validations(&patient);
    assert_eq!(scores.len(), 12);
    let lowest = scores.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let best = whole.best.clone().unwrap();
    assert_eq!((best.step, best.loss), *lowest);
    assert_eq!(told.last().unwrap(), &format!("best {}", best.step));
    assert!(!whole.stopped_early && whole.step == 60);
    assert_eq!(best.adapter_path, patient.join("best"));

    // The step after which two validations in sequence were not better than the best one.
    let (mut lowest, mut since, mut expected) = ((0, f64::INFINITY), 0, None);
    for &(step, loss) in &scores {
        since = if loss < lowest.1 { 0 } else { since + 1 };
        if loss < lowest.1 {
            lowest = (step, loss);
        }
        if since == 2 {
            expected = Some(step);
            break;
        }
    }
    let expected = expected.unwrap_or_else(|| panic!("no loss rises twice: {scores:?}"));
    let with_patience = "iters: 60\nearly_stopping_patience: 2";
    let (stopped, told) = run(of(&early, with_patience), Start::Fresh);
    assert!(stopped.stopped_early && !stopped.interrupted);
    assert_eq!(stopped.step, expected, "{scores:?}");
    let best = stopped.best.clone().unwrap();
    assert_eq!((best.step, best.loss), lowest);
    assert_eq!(told.last().unwrap(), &format!("stopped {expected}"));
    let validated = validations(&early);
    assert_eq!(validated, scores[..validated.len()]);
    let read = |name: &str| std::fs::read(early.join(name)).unwrap();
    let numbered = format!("{expected:07}_adapters.safetensors");
    assert!(read("adapters.safetensors") == read(&numbered));
    // The directory has the adapter of the best step, and it works.
    let with = |dir: &Path| logits(&cpu().with_adapter_path(dir));
    assert_ne!(with(&best.adapter_path), with(&early));
    let short = dirs.path().join("short");
    run(of(&short, &format!("iters: {}", best.step)), Start::Fresh);
    assert!(
        read("best/adapters.safetensors")
            == std::fs::read(short.join("adapters.safetensors")).unwrap()
    );
    // A resumed run knows the best validation, and continues at least until its next validation.
    let (again, _) = run(of(&early, with_patience), Start::Resume);
    assert!(again.step >= expected + 5 && again.best.unwrap().loss <= best.loss);
    assert_eq!(validations(&early), scores[..validations(&early).len()]);
    // A new run in the same directory ignores the best validation of the earlier run.
    let config = of(&early, "iters: 2");
    let none = TrainConfig {
        val_batches: 0,
        ..config
    };
    let (fresh, _) = run(none, Start::Overwrite);
    assert!(fresh.best.is_none() && !early.join("best/adapters.safetensors").exists());
}

#[test]
fn the_program_names_the_best_adapter() {
    let dirs = tempfile::tempdir().unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (adapters, data) = (text(&dirs.path().join("a")), text(&pirate()));
    let model = text(&model());
    let fixed = [
        "--model",
        &model,
        "--data",
        &data,
        "--adapter-path",
        &adapters,
        "--backend",
        "cpu",
        "--iters",
        "4",
        "--batch-size",
        "2",
        "--steps-per-eval",
        "2",
        "--val-batches",
        "1",
        "--learning-rate",
        "1e-2",
    ];
    let told = json(&mlx("train", &[&fixed[..], &["--json"]].concat()));
    assert_eq!(told["best"]["step"], 4);
    assert_eq!(told["best"]["loss"], told["validation"]["loss"]);
    assert_eq!(told["best"]["adapter_path"], format!("{adapters}/best"));
    assert_eq!(told["stopped_early"], false);
    let again = mlx("train", &[&fixed[..], &["--overwrite"]].concat());
    let err = stderr(&again);
    assert!(
        err.contains("best so far") && err.contains("the best validation"),
        "{err}"
    );
    for (more, code, what) in [
        (
            &["--early-stopping-patience", "0"][..],
            2,
            "early_stopping_patience",
        ),
        (
            &["--early-stopping-threshold", "0.1"],
            2,
            "early_stopping_patience",
        ),
        (
            &[
                "--early-stopping-threshold",
                "-1",
                "--early-stopping-patience",
                "1",
            ],
            2,
            "early_stopping_threshold",
        ),
    ] {
        let refused = mlx("train", &[&fixed[..], &["--overwrite"], more].concat());
        assert_eq!(refused.status.code(), Some(code), "{more:?}");
        assert!(stderr(&refused).contains(what), "{more:?}");
    }
    std::fs::create_dir(dirs.path().join("data")).unwrap();
    let alone = dirs.path().join("data");
    std::fs::copy(pirate().join("train.jsonl"), alone.join("train.jsonl")).unwrap();
    let mut without = fixed.map(str::to_owned);
    without[3] = text(&alone);
    let mut without: Vec<&str> = without.iter().map(String::as_str).collect();
    without.extend(["--overwrite", "--early-stopping-patience", "1"]);
    let refused = mlx("train", &without);
    assert!(
        stderr(&refused).contains("valid.jsonl"),
        "{}",
        stderr(&refused)
    );
}
