//! Tests of `mlx train` on encoders: training, evaluation, adapters in `mlx embed`, resumed runs
//! and refusals.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::fixture;
use crate::{command, json, mlx, model, stderr};

const LINES: [&str; 6] = [
    r#"{"anchor": "Where does water go?", "positive": "Rivers carry water to the sea."}"#,
    r#"{"anchor": "What is bread made of?", "positive": "flour, water, salt and yeast"}"#,
    r#"{"anchor": "the capital of France", "positive": "Paris", "negative": "Rome"}"#,
    r#"{"anchor": "Who sleeps?", "positive": "A cat", "negative": ["a fox", "a dog"]}"#,
    r#"{"anchor": "quick", "positive": "the brown fox", "negative_1": "lazy"}"#,
    r#"{"anchor": "sort", "positive": "a list of numbers in a program"}"#,
];

struct Place {
    dirs: tempfile::TempDir,
    model: String,
    data: String,
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

impl Place {
    fn new(encoder: &str) -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let data = dirs.path().join("data");
        std::fs::create_dir(&data).unwrap();
        for name in ["train.jsonl", "valid.jsonl", "test.jsonl"] {
            std::fs::write(data.join(name), LINES.join("\n")).unwrap();
        }
        Self {
            model: text(&fixture("encoders").join(encoder)),
            data: text(&data),
            dirs,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dirs.path().join(name)
    }

    fn args(&self, adapters: &Path, more: &[&str]) -> Vec<String> {
        let fixed = [
            ("--model", self.model.as_str()),
            ("--data", &self.data),
            ("--adapter-path", &text(adapters)),
            ("--backend", "cpu"),
            ("--batch-size", "3"),
            ("--num-layers", "-1"),
            ("--learning-rate", "1e-3"),
            ("--scale", "2"),
            ("--steps-per-report", "4"),
            ("--steps-per-eval", "12"),
        ]
        .map(|(flag, value)| [flag.to_owned(), value.to_owned()]);
        let more = more.iter().map(|arg| (*arg).to_owned());
        fixed.into_iter().flatten().chain(more).collect()
    }

    fn train(&self, adapters: &Path, more: &[&str]) -> std::process::Output {
        let args = self.args(adapters, more);
        mlx(
            "train",
            &args.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    }

    fn embed(&self, model: &Path, more: &[&str]) -> Vec<Vec<f64>> {
        let input = self.at("texts");
        std::fs::write(&input, "\"Where does water go?\"\n\"Paris\"\n").unwrap();
        let (model, input) = (text(model), text(&input));
        let fixed = [
            "--model",
            model.as_str(),
            "--backend",
            "cpu",
            "--input",
            input.as_str(),
        ];
        let output = mlx("embed", &[&fixed[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let lines = String::from_utf8(output.stdout).unwrap();
        lines
            .lines()
            .map(|line| {
                let line: Value = serde_json::from_str(line).unwrap();
                let vector = line["embedding"].as_array().unwrap().iter();
                vector.map(|v| v.as_f64().unwrap()).collect()
            })
            .collect()
    }
}

fn distance(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let both = a.iter().flatten().zip(b.iter().flatten());
    both.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// `mlx train` on an encoder chooses the contrastive loss. Its adapter works in `mlx embed`, and a
/// fused model computes the same vectors.
#[test]
fn an_encoder_learns_which_texts_belong_together() {
    for encoder in ["bert", "embeddinggemma"] {
        let place = Place::new(encoder);
        let adapters = place.at("a");
        let more = ["--iters", "60", "--train", "--test", "--json"];
        let output = place.train(&adapters, &more);
        let told = json(&output);
        let loss = |part: &str| told[part]["loss"].as_f64().unwrap();
        assert!(loss("validation") < 0.5 * loss("base"), "{encoder}: {told}");
        assert_eq!(told["validation"]["pairs"], 6);
        assert_eq!(told["test"]["accuracy"], 1.0, "{encoder}: {told}");
        let options = std::fs::read_to_string(adapters.join("training_config.yaml"));
        let options = options.unwrap();
        assert!(options.contains("contrastive"), "{options}");

        let alone = place.train(&adapters, &["--test", "--json"]);
        assert_eq!(json(&alone)["loss"], told["test"]["loss"]);

        let dir = PathBuf::from(&place.model);
        let path = text(&adapters);
        let adapted = place.embed(&dir, &["--adapter-path", &path]);
        let plain = place.embed(&dir, &[]);
        assert!(distance(&adapted, &plain) > 1e-2, "{encoder}");
        let fused = place.at("fused");
        let (model, output) = (place.model.as_str(), text(&fused));
        let fuse = [
            "--model",
            model,
            "--adapter-path",
            &path,
            "--output",
            &output,
        ];
        let done = mlx("fuse", &fuse);
        assert!(done.status.success(), "{}", stderr(&done));
        let error = distance(&place.embed(&fused, &[]), &adapted);
        assert!(error < 1e-3, "{encoder}: {error}");
    }
}

/// Each epoch has new batches. A resumed run has bit-identical losses all the same.
#[test]
fn a_run_on_an_encoder_goes_on_as_if_it_had_not_been_interrupted() {
    let place = Place::new("modernbert");
    let (whole, parts) = (place.at("whole"), place.at("parts"));
    let more = [
        "--iters",
        "9",
        "--save-every",
        "5",
        "--dropout",
        "0.1",
        "--json",
    ];
    let straight = json(&place.train(&whole, &more));
    let mut first = more;
    first[1] = "5";
    json(&place.train(&parts, &first));
    let resumed = [&more[..], &["--resume"]].concat();
    let resumed = json(&place.train(&parts, &resumed));
    assert_eq!(straight["train_loss"], resumed["train_loss"]);
    assert_eq!(
        straight["validation"]["loss"],
        resumed["validation"]["loss"]
    );
    let other = [&more[..], &["--resume", "--similarity-scale", "7"]].concat();
    let refused = place.train(&parts, &other);
    assert_eq!(refused.status.code(), Some(1));
    let told = stderr(&refused);
    assert!(told.contains("similarity_scale"), "{told}");
}

#[test]
fn the_model_s_prompts_stand_before_the_texts() {
    let place = Place::new("nomic-bert");
    let more = [
        "--anchor-prompt-name",
        "search_query",
        "--positive-prompt-name",
        "search_document",
        "--iters",
        "1",
        "--json",
    ];
    let with = json(&place.train(&place.at("with"), &more));
    let without = json(&place.train(&place.at("without"), &more[4..]));
    assert_ne!(with["base"]["loss"], without["base"]["loss"]);
    let mut unknown = more;
    unknown[1] = "nothing";
    let refused = place.train(&place.at("unknown"), &unknown);
    let told = stderr(&refused);
    assert!(
        !refused.status.success() && told.contains("search_query"),
        "{told}"
    );
}

#[test]
fn what_does_not_fit_an_encoder_is_refused() {
    let place = Place::new("bert");
    for (more, what) in [
        (&["--method", "sft"][..], "method contrastive"),
        (&["--method", "dpo"], "method contrastive"),
        (&["--mask-prompt"], "mask_prompt"),
        (&["--pack"], "pack"),
        (&["--similarity-scale", "0"], "similarity_scale"),
        (&["--batch-size", "1"], "negative"),
    ] {
        let mut args = place.args(&place.at("a"), more);
        if more[0] == "--batch-size" {
            let at = args.iter().position(|arg| arg == "--batch-size").unwrap();
            args.drain(at..at + 2);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = command("train", &args).output().unwrap();
        let told = stderr(&output);
        assert!(!output.status.success(), "{more:?}");
        assert!(told.contains(what), "{more:?}: {told}");
    }
    // A decoder has no vectors to train, and chats are not pairs of texts.
    let decoder = Place {
        model: text(&model()),
        ..Place::new("bert")
    };
    for (more, what) in [
        (&["--method", "contrastive"][..], "decoder"),
        (&["--similarity-scale", "7"], "contrastive"),
    ] {
        let refused = decoder.train(&decoder.at("a"), more);
        let told = stderr(&refused);
        assert!(!refused.status.success() && told.contains(what), "{told}");
    }
    let line = r#"{"prompt": "hi", "completion": "ahoy"}"#;
    std::fs::write(Path::new(&place.data).join("train.jsonl"), line).unwrap();
    let refused = place.train(&place.at("a"), &[]);
    let told = stderr(&refused);
    assert!(
        told.contains("\\\"anchor\\\"") || told.contains("\"anchor\""),
        "{told}"
    );
}
