//! Tests of training tiny models through the program and the library: written files, resumed runs
//! and refusals. `metal-backend/tests/engine/training.rs` compares losses with mlx-lm.

mod best;
#[path = "../common/mod.rs"]
mod common;
mod contrastive;
mod flags;
mod fused;
#[cfg(unix)]
mod interrupted;
mod parquet;
mod preferences;
mod rewards;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::fixture;
use inference::{CancelToken, LoadOptions};
use metal_backend::train::config::TrainConfig;
use metal_backend::train::train_log::{Entry, LOG_FILE, PLOT_FILE, TrainReport};
use metal_backend::train::{Event, Run, Start, WEIGHTS_FILE};
use serde_json::Value;

fn model() -> PathBuf {
    fixture("tiny/llama")
}

fn pirate() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/pirate")
}

fn command(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .arg(name)
        .args(args)
        .env_remove("MLX_BACKEND")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

fn mlx(name: &str, args: &[&str]) -> Output {
    command(name, args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A short run on the example data. `more` has further lines of the configuration.
fn config(adapters: &Path, more: &str) -> TrainConfig {
    let yaml = format!(
        "{more}\ndata: {}\nadapter_path: {}\nmask_prompt: true\nbatch_size: 2\nsteps_per_report: 1\n\
         steps_per_eval: 5\nval_batches: 2\nlearning_rate: 5e-3\nlora_parameters: {{dropout: 0.1}}\n",
        pirate().display(),
        adapters.display()
    );
    TrainConfig::from_yaml(&yaml).unwrap()
}

fn cpu() -> LoadOptions {
    LoadOptions::new().with_backend("cpu")
}

/// Trains until the step `stop_after`, or until the end if it is `None`.
fn train(config: TrainConfig, start: Start, stop_after: Option<u64>) -> Vec<Entry> {
    let dir = config.adapter_path.clone();
    let mut run = Run::prepare(&model(), &cpu(), config, start).unwrap();
    let cancel = CancelToken::new();
    let summary = run
        .train(&cancel, &mut |event| {
            if let Event::Step { step, .. } = event
                && Some(*step) == stop_after
            {
                cancel.cancel();
            }
        })
        .unwrap();
    assert_eq!(summary.interrupted, stop_after.is_some());
    log(&dir)
}

fn log(dir: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(dir.join(LOG_FILE)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The values of each log entry that do not depend on the clock.
fn numbers(entries: &[Entry]) -> Vec<(u64, f64, f64)> {
    let number = |entry: &Entry| match entry {
        Entry::Train(TrainReport {
            step,
            loss,
            learning_rate,
            ..
        }) => (*step, *loss, f64::from(*learning_rate)),
        Entry::Validation(score) | Entry::Test(score) => (score.step, score.loss, score.accuracy),
    };
    entries.iter().map(number).collect()
}

#[test]
fn an_interrupted_run_goes_on_as_if_it_had_not_been() {
    // The run has every kind of state: dropout, momentum, accumulated gradients, a schedule, and a
    // shuffled order of batches.
    let more = "iters: 14\nsave_every: 5\ngrad_accumulation_steps: 2\noptimizer: adamw\n\
                lr_schedule: {name: cosine_decay, arguments: [5e-3, 7], warmup: 2}";
    let dirs = tempfile::tempdir().unwrap();
    let (uninterrupted, parts) = (dirs.path().join("whole"), dirs.path().join("parts"));
    let expected = train(config(&uninterrupted, more), Start::Fresh, None);
    assert_eq!(expected.len(), 14 + 4);
    let stopped = train(config(&parts, more), Start::Fresh, Some(5));
    // The gradients of the fifth batch are not applied alone; they wait for the sixth batch.
    assert_eq!(stopped.last().map(Entry::step), Some(6));
    train(config(&parts, more), Start::Resume, Some(8));
    let resumed = train(config(&parts, more), Start::Resume, None);
    assert_eq!(numbers(&resumed), numbers(&expected));
    for file in [WEIGHTS_FILE, "0000014_adapters.safetensors"] {
        let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
        assert!(read(&uninterrupted) == read(&parts), "{file}");
    }
    assert!(parts.join("0000010_adapters.safetensors").is_file());
    let picture = std::fs::read_to_string(parts.join(PLOT_FILE)).unwrap();
    assert!(picture.contains("validation"));
    // The options that the run wrote must be a valid configuration file.
    let again = TrainConfig::read(parts.join("training_config.yaml")).unwrap();
    assert_eq!(again, config(&parts, more));

    // Fused operations round differently. So a compiled run cannot resume an uncompiled one.
    for (other, what) in [
        ("seed: 1", "seed 0, this one has 1"),
        ("compile: on", "compiled absent, this one has true"),
    ] {
        let other = config(&parts, &format!("{more}\n{other}"));
        let Err(error) = Run::prepare(&model(), &cpu(), other, Start::Resume) else {
            panic!("it went on, where {what}");
        };
        assert!(error.to_string().contains(what), "{error}");
    }
    let none = dirs.path().join("none");
    assert!(Run::prepare(&model(), &cpu(), config(&none, more), Start::Resume).is_err());
    // A run with more steps and otherwise equal settings may resume.
    let longer = train(
        config(&parts, &more.replace("iters: 14", "iters: 16")),
        Start::Resume,
        None,
    );
    assert_eq!(longer.last().map(Entry::step), Some(16));
}

#[test]
fn so_does_one_that_trains_the_weights_themselves() {
    let more = "iters: 4\nfine_tune_type: full\nnum_layers: 2\ngrad_checkpoint: true";
    let dirs = tempfile::tempdir().unwrap();
    let (uninterrupted, parts) = (dirs.path().join("whole"), dirs.path().join("parts"));
    let expected = train(config(&uninterrupted, more), Start::Fresh, None);
    train(config(&parts, more), Start::Fresh, Some(2));
    let resumed = train(config(&parts, more), Start::Resume, None);
    assert_eq!(numbers(&resumed), numbers(&expected));
    let read = |dir: &Path| std::fs::read(dir.join(WEIGHTS_FILE)).unwrap();
    assert!(read(&uninterrupted) == read(&parts));
}

/// The tiny model learns a reply. The program must print the reply only with the adapter.
#[test]
fn what_was_learned_is_said() {
    let dirs = tempfile::tempdir().unwrap();
    let data = dirs.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let line = "{\"prompt\": \"hi\", \"completion\": \"ahoy\"}\n";
    std::fs::write(data.join("train.jsonl"), line.repeat(4)).unwrap();
    std::fs::write(data.join("valid.jsonl"), line).unwrap();
    std::fs::write(data.join("test.jsonl"), line).unwrap();
    let (model, adapters, fused) = (model(), dirs.path().join("a"), dirs.path().join("fused"));
    let [model, data, adapters, fused] =
        [&model, &data, &adapters, &fused].map(|p| p.to_str().unwrap());
    let output = mlx(
        "train",
        &[
            "--model",
            model,
            "--data",
            data,
            "--adapter-path",
            adapters,
            "--backend",
            "cpu",
            "--mask-prompt",
            "--iters",
            "60",
            "--learning-rate",
            "1e-2",
            "--max-grad-norm",
            "1",
            // The random head of a tiny model cannot produce high probabilities, so the run also
            // trains the head.
            "--keys",
            "mlp.up_proj,lm_head",
            "--lr-schedule",
            "linear",
            "--train",
            "--test",
            "--json",
        ],
    );
    let told = json(&output);
    let loss = |part: &str| told[part]["loss"].as_f64().unwrap();
    assert!(loss("validation") < 0.5 * loss("base"), "{told}");
    assert_eq!(told["steps"], 60);
    assert_eq!(told["interrupted"], false);
    assert!(told["test"]["accuracy"].as_f64().unwrap() > 0.9, "{told}");
    let err = stderr(&output);
    assert!(
        err.contains("step 60: loss ") && err.contains("validation loss"),
        "{err}"
    );

    let say = |more: &[&str]| {
        let args = [
            &[
                "--backend",
                "cpu",
                "--prompt",
                "hi",
                "--system",
                "",
                "-n",
                "8",
                "--quiet",
            ],
            more,
        ]
        .concat();
        String::from_utf8(mlx("generate", &args).stdout).unwrap()
    };
    let learned = say(&["--model", model, "--adapter-path", adapters]);
    assert_eq!(learned.trim(), "ahoy");
    assert_ne!(say(&["--model", model]).trim(), "ahoy");

    let judged = |more: &[&str]| {
        let args = [
            &[
                "--backend",
                "cpu",
                "--data",
                data,
                "--mask-prompt",
                "--json",
            ],
            more,
        ]
        .concat();
        json(&mlx("evaluate", &args))
    };
    let with = judged(&["--model", model, "--adapter-path", adapters]);
    assert_eq!(with["loss"], told["test"]["loss"]);
    assert_eq!(with["examples"], 1);
    let without = judged(&["--model", model])["loss"].as_f64().unwrap();
    // An adapter disables the fusion of some operations, even an adapter without effect. So the
    // sums are equal except for their order.
    assert!((without - loss("base")).abs() < 1e-5, "{without} {told}");

    let args = [
        "--model",
        model,
        "--adapter-path",
        adapters,
        "--output",
        fused,
        "--json",
    ];
    let made = json(&mlx("fuse", &args));
    assert_eq!(made["fused_tensors"], 4);
    let output = mlx("fuse", &args);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("exists already"));
    let loss = judged(&["--model", fused])["loss"].as_f64().unwrap();
    assert!((loss - with["loss"].as_f64().unwrap()).abs() < 1e-4);
    assert_eq!(say(&["--model", fused]).trim(), "ahoy");
}

#[test]
fn what_cannot_be_is_told_before_anything_is_written() {
    let dirs = tempfile::tempdir().unwrap();
    let data = dirs.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(
        data.join("train.jsonl"),
        "{\"text\": \"a b c\"}\n{\"text\": 3}\n[]\n",
    )
    .unwrap();
    let (model, adapters) = (model(), dirs.path().join("a"));
    let [model, data, path] = [&model, &data, &adapters].map(|p| p.to_str().unwrap());
    let train = |more: &[&str]| {
        let args = [
            &["--model", model, "--adapter-path", path, "--backend", "cpu"],
            &["--overwrite"][..],
            more,
        ]
        .concat();
        let output = mlx("train", &args);
        (output.status.code(), stderr(&output))
    };
    let (code, text) = train(&["--data", data, "--batch-size", "1"]);
    assert_eq!(code, Some(1));
    for what in [
        "train.jsonl",
        "2 bad lines",
        "line 2: \"text\" is not a text",
        "line 3",
    ] {
        assert!(text.contains(what), "{what}: {text}");
    }
    assert!(!adapters.join(WEIGHTS_FILE).exists());
    let (code, text) = train(&[
        "--data",
        data,
        "--batch-size",
        "1",
        "--skip-bad-lines",
        "--iters",
        "2",
        "--val-batches",
        "0",
    ]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("2 bad lines are left out, the first is line 2"),
        "{text}"
    );

    let file = dirs.path().join("run.toml");
    std::fs::write(&file, "iters = 2\nlora_parameters = { alpha = 3.0 }\n").unwrap();
    let file = file.to_str().unwrap();
    for (args, what) in [
        (&["--data", data, "--iters", "0"][..], "iters is 0"),
        (&["--data", data, "--iters", "x"], "--iters"),
        (&["--data", data, "--optimizer", "adamx"], "adamw"),
        (&["--data", data, "-c", file], "alpha / rank"),
        (&[], "--data is missing"),
    ] {
        let (code, text) = train(args);
        assert_eq!(code, Some(2), "{args:?}: {text}");
        assert!(text.contains(what), "{args:?}: {text}");
    }
    for (args, what) in [
        (&["--data", "nowhere"][..], "no such directory"),
        (&["--data", data, "--skip-bad-lines"], "smaller batch_size"),
        (
            &[
                "--data",
                data,
                "--skip-bad-lines",
                "--batch-size",
                "1",
                "--keys",
                "what_proj",
            ],
            "q_proj",
        ),
        (
            &["--data", data, "--train", "--test", "--skip-bad-lines"],
            "test.jsonl is missing",
        ),
        (
            &[
                "--data",
                data,
                "--resume-adapter-file",
                "nowhere.safetensors",
            ],
            "adapter_config.json",
        ),
    ] {
        let (code, text) = train(args);
        assert_eq!(code, Some(1), "{args:?}: {text}");
        assert!(text.contains(what), "{args:?}: {text}");
    }
}

/// A run may start from an adapter of an earlier run, including one that was saved under a step
/// number.
#[test]
fn a_run_begins_with_another_s_adapter() {
    let dirs = tempfile::tempdir().unwrap();
    let (first, second) = (dirs.path().join("first"), dirs.path().join("second"));
    let entries = train(
        config(&first, "iters: 4\nsave_every: 2"),
        Start::Fresh,
        None,
    );
    let last = numbers(&entries).last().copied().unwrap();
    for (file, loss) in [
        ("0000004_adapters.safetensors", Some(last.1)),
        ("0000002_adapters.safetensors", None),
    ] {
        let more = format!(
            "iters: 1\nresume_adapter_file: {}",
            first.join(file).display()
        );
        let begun = numbers(&train(config(&second, &more), Start::Overwrite, None));
        match loss {
            // The validation loss before the first step must equal the last validation loss of the
            // earlier run.
            Some(loss) => assert_eq!(begun[0].1, loss),
            None => assert_ne!(begun[0].1, last.1),
        }
    }
}
