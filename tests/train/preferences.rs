//! Tests of `mlx train --method dpo`, `orpo` and `kto`: training, evaluation and reports.

use std::path::Path;

use serde_json::Value;

use crate::{command, json, mlx, model, stderr};

const LINES: [&str; 4] = [
    r#"{"prompt": "hi", "chosen": "ahoy", "rejected": "hello there"}"#,
    r#"{"prompt": "who are you", "chosen": "a pirate", "rejected": "a model"}"#,
    r#"{"prompt": "where", "chosen": "at sea", "rejected": "in a computer"}"#,
    r#"{"prompt": [{"role": "user", "content": "hi"}], "chosen": [{"role": "assistant", "content": "ahoy"}],
        "rejected": [{"role": "assistant", "content": "no"}]}"#,
];

/// The lines of `LINES` as replies with verdicts.
const VERDICTS: [&str; 6] = [
    r#"{"prompt": "hi", "completion": "ahoy", "label": true}"#,
    r#"{"prompt": "hi", "completion": "hello there", "label": false}"#,
    r#"{"prompt": "who are you", "completion": "a pirate", "label": true}"#,
    r#"{"prompt": "who are you", "completion": "a model", "label": false}"#,
    r#"{"prompt": "where", "completion": "at sea", "label": true}"#,
    r#"{"prompt": [{"role": "user", "content": "where"}], "completion": [{"role": "assistant", "content": "in a computer"}], "label": false}"#,
];

struct Place {
    _dirs: tempfile::TempDir,
    model: String,
    data: String,
    adapters: std::path::PathBuf,
    method: &'static str,
}

impl Place {
    fn new() -> Self {
        Self::with(&LINES.map(|line| line.replace('\n', "")), "dpo")
    }

    fn with(lines: &[impl AsRef<str>], method: &'static str) -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let data = dirs.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
        let text = lines.join("\n");
        for name in ["train.jsonl", "valid.jsonl", "test.jsonl"] {
            std::fs::write(data.join(name), &text).unwrap();
        }
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        Self {
            model: text(&model()),
            data: text(&data),
            adapters: dirs.path().join("a"),
            method,
            _dirs: dirs,
        }
    }

    fn args<'a>(&'a self, adapters: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
        let adapters = adapters.to_str().unwrap();
        let fixed = [
            "--model",
            &self.model,
            "--data",
            &self.data,
            "--adapter-path",
            adapters,
        ];
        let how = [
            "--backend",
            "cpu",
            "--method",
            self.method,
            "--batch-size",
            "2",
            "--num-layers",
            "-1",
        ];
        let rate = [
            "--learning-rate",
            "1e-2",
            "--steps-per-report",
            "4",
            "--steps-per-eval",
            "12",
        ];
        [&fixed[..], &how, &rate, more].concat()
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn the_better_replies_are_learned() {
    let place = Place::new();
    let more = [
        "--iters",
        "24",
        "--train",
        "--test",
        "--json",
        "--report-to",
        "jsonl,tensorboard",
    ];
    let output = mlx("train", &place.args(&place.adapters, &more));
    let told = json(&output);
    let loss = |part: &str| told[part]["loss"].as_f64().unwrap();
    // A new adapter does not change the model, so every reward is 0 and the loss is ln 2.
    assert!((loss("base") - f64::ln(2.0)).abs() < 1e-5, "{told}");
    // Rounding errors change the course of the training, so the bound is wide. Without training,
    // the loss would equal the base model's.
    assert!(loss("validation") < 0.95 * loss("base"), "{told}");
    assert_eq!(told["validation"]["pairs"], 4);
    assert!(told["test"]["accuracy"].as_f64().unwrap() >= 0.75, "{told}");
    assert_eq!(loss("test"), loss("validation"));
    let err = stderr(&output);
    assert!(err.contains("% of 4 pairs told right"), "{err}");
    assert!(err.contains("rewards "), "{err}");

    let metrics = lines(&place.adapters.join("metrics.jsonl"));
    let steps: Vec<u64> = metrics
        .iter()
        .map(|m| m["iteration"].as_u64().unwrap())
        .collect();
    // Reports follow every fourth step. Validations run before the first step, after step 12 and
    // after the last step. The last entry is the test.
    assert_eq!(steps, [0, 4, 8, 12, 12, 16, 20, 24, 24, 24]);
    assert!(metrics[1]["train_loss"].is_number() && metrics[1]["chosen_reward"].is_number());
    assert_eq!(metrics[0]["val_loss"], told["base"]["loss"]);
    assert_eq!(metrics[9]["test_loss"], told["test"]["loss"]);
    let events = std::fs::read_dir(&place.adapters).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_str().unwrap().starts_with("events.out.tfevents.")
    });
    assert_eq!(events.count(), 1);

    // `--test` without `--train` measures the model with and without the adapter.
    let alone = json(&mlx(
        "train",
        &place.args(&place.adapters, &["--test", "--json"]),
    ));
    assert_eq!(alone["loss"], told["test"]["loss"]);
    assert_eq!(
        (&alone["pairs"], &alone["examples"]),
        (&4.into(), &4.into())
    );
}

#[test]
fn replies_are_learned_by_odds_and_by_verdicts() {
    let lines = LINES.map(|line| line.replace('\n', ""));
    let verdicts = VERDICTS.map(str::to_owned);
    for (method, lines) in [("orpo", &lines[..]), ("kto", &verdicts)] {
        let place = Place::with(lines, method);
        let more = ["--iters", "60", "--train", "--test", "--json"];
        let told = json(&mlx("train", &place.args(&place.adapters, &more)));
        let loss = |part: &str| told[part]["loss"].as_f64().unwrap();
        // Rounding errors change the course of the training, so the bounds are wide. Without
        // training, the loss would equal the base model's.
        assert!(loss("validation") < 0.9 * loss("base"), "{method}: {told}");
        assert_eq!(told["validation"]["pairs"], lines.len());
        if method == "kto" {
            // A new adapter changes nothing, so each value is sigmoid(0).
            assert!((loss("base") - 0.5).abs() < 1e-5, "{told}");
        }
        assert!(told["test"]["accuracy"].as_f64().unwrap() >= 0.6, "{told}");
        let alone = mlx("train", &place.args(&place.adapters, &["--test", "--json"]));
        assert_eq!(json(&alone)["loss"], told["test"]["loss"]);
        // The run resumes only with the same parameters.
        let more = ["--iters", "62", "--resume", "--json"];
        let resumed = json(&mlx("train", &place.args(&place.adapters, &more)));
        assert_eq!(resumed["steps"], 62);
        let other = [&more[..], &["--beta", "0.5"]].concat();
        let refused = mlx("train", &place.args(&place.adapters, &other));
        assert!(stderr(&refused).contains(method), "{}", stderr(&refused));
    }
    // Prompts count in orpo's cross-entropy, unless they are masked.
    let place = Place::with(&lines, "orpo");
    let base = |name: &str, more: &[&str]| {
        let more = [&["--iters", "1", "--json"], more].concat();
        let adapters = place.adapters.with_file_name(name);
        let told = json(&mlx("train", &place.args(&adapters, &more)));
        told["base"]["loss"].as_f64().unwrap()
    };
    assert!((base("all", &[]) - base("masked", &["--mask-prompt"])).abs() > 1e-3);
}

/// A run that is interrupted after a save and then resumed must have bit-identical losses.
#[test]
fn a_run_of_pairs_goes_on_as_if_it_had_not_been_interrupted() {
    let place = Place::new();
    let uninterrupted = place.adapters.with_file_name("whole");
    let more = [
        "--iters",
        "8",
        "--save-every",
        "4",
        "--dropout",
        "0.1",
        "--json",
        "--report-to",
        "jsonl",
    ];
    let straight = json(&mlx("train", &place.args(&uninterrupted, &more)));
    let mut half = more;
    half[1] = "4";
    json(&mlx("train", &place.args(&place.adapters, &half)));
    let resumed = [&more[..], &["--resume"]].concat();
    let resumed = json(&mlx("train", &place.args(&place.adapters, &resumed)));
    assert_eq!(straight["train_loss"], resumed["train_loss"]);
    assert_eq!(
        straight["validation"]["loss"],
        resumed["validation"]["loss"]
    );
    // With another `--beta` the run is a different one, so it cannot be resumed.
    let other = [&more[..], &["--resume", "--beta", "0.5"]].concat();
    let refused = mlx("train", &place.args(&place.adapters, &other));
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("dpo"), "{}", stderr(&refused));
}

#[test]
fn flags_that_mean_nothing_together_are_refused() {
    let place = Place::new();
    for more in [
        &["--batch-order", "mlx-lm"][..],
        &["--pack"],
        &["--mask-prompt"],
        &["--beta", "0"],
        &["--desirable-weight", "2"],
        &["--method", "kto", "--batch-size", "1"],
        &["--method", "kto", "--undesirable-weight", "-1"],
        &["--method", "kto", "--mask-prompt"],
        &["--method", "orpo", "--label-smoothing", "0.1"],
        &["--method", "sft", "--beta", "0.2"],
        &["--report-to", "wandb"],
        &["--batch-order", "file", "--keep-order"],
    ] {
        let mut args = place.args(&place.adapters, &[]);
        if more[0] == "--method" {
            let at = args.iter().position(|arg| *arg == "--method").unwrap();
            args.drain(at..at + 2);
            if more.contains(&"--batch-size") {
                let at = args.iter().position(|arg| *arg == "--batch-size").unwrap();
                args.drain(at..at + 2);
            }
        }
        args.extend(more);
        let output = command("train", &args).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(2),
            "{more:?}: {}",
            stderr(&output)
        );
    }
    assert!(!place.adapters.exists());
}
