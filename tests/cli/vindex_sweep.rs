//! Compares the tables of `mlx vindex sweep` with other commands and with the test's own counts.
#![cfg(feature = "probe")]

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::fixture;
use crate::program::{mlx, refused, stdout, text};
use inference_probe::vindex::{Vindex, Writer};
use serde_json::Value;

const TEXT: &str = "the cat sat on the mat and the dog sat on the log";

fn llama() -> PathBuf {
    fixture("tiny/llama")
}

fn build(dir: &Path) -> PathBuf {
    let to = dir.join("v");
    let args = ["vindex", "build", "--backend", "cpu", "--down-top-k", "0"];
    let mut command = mlx(dir, &args);
    command.arg("--model").arg(llama()).arg("-o").arg(&to);
    stdout(&command.output().unwrap());
    to
}

fn sweep(dir: &Path, vindex: &Path, more: &[&str]) -> Output {
    let mut command = mlx(dir, &["vindex", "sweep", "--backend", "cpu"]);
    command.arg(vindex).arg("--model").arg(llama()).args(more);
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

#[test]
fn widths_are_those_of_other_commands() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build(dir.path());
    let file = dir.path().join("text.txt");
    std::fs::write(&file, TEXT).unwrap();
    let file = file.to_str().unwrap();
    let perplexity = |plan: &str| {
        let args = ["perplexity", "--backend", "cpu", "--file", file];
        let mut command = mlx(dir.path(), &args);
        command.args(["--ffn", plan]).arg("--model").arg(llama());
        let report: Value = json(&command.output().unwrap());
        report["perplexity"].as_f64().unwrap()
    };
    let flags = ["--top-k", "64,1,9,9999", "--boundaries", "none", "--json"];
    let more = ["--file", file, "--tokens", "40"];
    for only in [false, true] {
        let flags = [&flags[..], &more, if only { &["--walk-only"] } else { &[] }].concat();
        let report = json(&sweep(dir.path(), &vindex, &flags));
        assert_eq!(report["boundaries"], serde_json::json!([]));
        // A layer has three matrices of 64 features with 32 elements each. The model has three
        // layers.
        let row = 32 * 4;
        assert_eq!(report["dense"]["bytes_per_token"], 3 * 3 * 64 * row);
        let near = |a: &Value, b: f64| (a.as_f64().unwrap() / b - 1.0).abs() < 1e-4;
        assert!(near(&report["dense"]["perplexity"], perplexity("dense")));
        let widths = report["widths"].as_array().unwrap();
        for (width, k) in widths.iter().zip([1u64, 9, 64]) {
            assert_eq!(width["top_k"], k);
            // `sparse` computes the same result from the model's own weights.
            let wanted = perplexity(&format!("sparse:{k}"));
            assert!(near(&width["perplexity"], wanted), "{width}");
            assert_eq!(width["bytes_per_token"], 3 * (64 + 2 * k) * row);
            for speed in ["speed", "dense_speed"] {
                for of in ["prompt", "reply"] {
                    assert!(width[speed][of].as_f64().unwrap() > 0.0, "{width}");
                }
            }
        }
        assert_eq!(widths.len(), 3);
        assert_eq!(widths[2]["agreement"], 1.0);
        assert!(widths[0]["agreement"].as_f64().unwrap() < 1.0);
        assert!(report["positions"].as_u64().unwrap() > 20);
    }
}

#[test]
fn boundaries_answer_as_the_dense_pass_or_fail() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build(dir.path());
    let fast = ["--tokens", "4", "--top-k", "64"];
    let report = json(&sweep(
        dir.path(),
        &vindex,
        &[&fast[..], &["--json"]].concat(),
    ));
    let boundaries = report["boundaries"].as_array().unwrap();
    assert_eq!(boundaries.len(), 3);
    let probability = |b: &Value| b["probability"].as_f64().unwrap();
    for (i, b) in boundaries.iter().enumerate() {
        assert_eq!(
            (&b["boundary"], &b["identical"], &b["prompts"]),
            (&i.into(), &5.into(), &5.into())
        );
        assert!(
            (probability(b) - probability(&boundaries[0])).abs() < 1e-5,
            "{b}"
        );
        assert!(probability(b) > 0.0 && probability(b) < 1.0, "{b}");
    }
    assert_eq!(boundaries[0]["walking"], 100.0);
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(&prompts, format!("{TEXT}\n\nand the\n")).unwrap();
    let plot = dir.path().join("sweep.svg");
    let drawn = [
        "--boundaries",
        "none",
        "--top-k",
        "1,64",
        "--tokens",
        "4",
        "--plot",
    ];
    let drawn = [&drawn[..], &[plot.to_str().unwrap()]].concat();
    stdout(&sweep(dir.path(), &vindex, &drawn));
    let drawn = std::fs::read_to_string(&plot).unwrap();
    for text in ["agreement", "reply speed", ">64<", "</svg>"] {
        assert!(drawn.contains(text), "{text}: {drawn}");
    }
    let few = ["--boundaries", "2,0", "--boundary-top-k", "1", "--prompts"];
    let few = [&fast[..], &few, &[prompts.to_str().unwrap()]].concat();
    let few = stdout(&sweep(dir.path(), &vindex, &few));
    // Few features may change an answer, so a different answer is not a failure.
    assert_eq!(few.lines().count(), 6, "{few}");
    assert!(few.contains("of 2"), "{few}");

    // A vindex of another model with the same name is refused.
    let from = Vindex::open(&vindex).unwrap();
    let wrong = dir.path().join("wrong");
    let mut writer = Writer::create(&wrong, from.about().clone(), 0).unwrap();
    for i in 0..from.layers().len() {
        let mut layer = from.layer(i).unwrap();
        layer.down.iter_mut().for_each(|x| *x *= -3.0);
        writer.push(&layer, &from.tokens(i).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let failed = sweep(dir.path(), &wrong, &fast);
    assert_eq!(failed.status.code(), Some(1));
    let said = text(&failed.stderr);
    assert!(
        said.contains("answers are not those of the dense pass"),
        "{said}"
    );
    assert!(
        text(&failed.stdout).contains("boundary"),
        "the tables are shown"
    );
}

#[test]
fn what_cannot_be_swept_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build(dir.path());
    for (flags, code, named) in [
        (
            &["--ffn", "sparse:3"][..],
            2,
            "leave --ffn and --vindex out",
        ),
        (&["--boundaries", "3"], 2, "no layer of 0 to 2"),
        (&["--top-k", "0"], 2, "1 or more"),
        (&["--prompts", "nothing.txt"], 1, "cannot read nothing.txt"),
    ] {
        let said = refused(&sweep(dir.path(), &vindex, flags), code);
        assert!(said.contains(named), "{flags:?}: {said}");
    }
    let said = refused(&sweep(dir.path(), dir.path(), &[]), 1);
    assert!(said.contains("index.json"), "{said}");
}

#[test]
fn plans_are_measured_in_turns() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build(dir.path());
    let bench = |plans: &str, more: &[&str]| {
        let flags = [
            "--prompt-tokens",
            "8",
            "--generate-tokens",
            "4",
            "--repeat",
            "2",
        ];
        let mut command = mlx(dir.path(), &["bench", "--backend", "cpu", "--ffn", plans]);
        command.args(flags).arg("--model").arg(llama());
        command.arg("--vindex").arg(&vindex).args(more);
        command.output().unwrap()
    };
    let report = json(&bench("dense,walk:3,walk", &[]));
    let plans = report["plans"].as_array().unwrap();
    let names: Vec<&str> = plans.iter().map(|p| p["ffn"].as_str().unwrap()).collect();
    assert_eq!(names, ["dense", "walk:3", "walk"]);
    for plan in plans {
        assert_eq!(plan["decode_runs"].as_array().unwrap().len(), 2, "{plan}");
        assert!(plan["decode_ratio"].as_f64().unwrap() > 0.0, "{plan}");
    }
    assert_eq!(plans[0]["prefill_ratio"], 1.0);
    let report = json(&bench("dense;0=dense,1-=walk:3", &["--walk-only"]));
    let measured_plans = report["plans"].as_array().unwrap();
    assert_eq!(measured_plans[1]["ffn"], "0=dense,1-=walk:3");
    let bytes = |plan: &Value| plan["weight_bytes"].as_u64().unwrap();
    assert!(
        bytes(&measured_plans[1]) < bytes(&measured_plans[0]),
        "{report}"
    );
    let one = json(&bench("walk:3", &[]));
    assert!(one["plans"].is_null() && one["runs"].is_array());
    assert!(refused(&bench("dense,walk", &["--batch", "2"]), 2).contains("one plan"));
    assert!(refused(&bench("dense,nothing", &[]), 2).contains("nothing"));
    // Commands other than `sweep` accept only one plan.
    let mut command = mlx(
        dir.path(),
        &["generate", "--ffn", "dense,walk:3", "--tokens", "5"],
    );
    command
        .arg("--model")
        .arg(llama())
        .arg("--vindex")
        .arg(&vindex);
    let said = refused(&command.output().unwrap(), 2);
    assert!(said.contains("mlx bench"), "{said}");
}
