//! Parquet files as data of the program. `tools/golden/parquet.py` makes the files.

use crate::common::fixture;
use crate::{mlx, model, stderr};

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

/// Training and evaluation have the same results as with the same examples in JSONL files.
#[cfg(feature = "parquet")]
#[test]
fn rows_count_as_lines() {
    use serde_json::Value;

    use crate::json;

    let dirs = tempfile::tempdir().unwrap();
    let rows: Value =
        serde_json::from_slice(&std::fs::read(fixture("parquet/rows.json")).unwrap()).unwrap();
    let lines = |names: &[&str]| -> String {
        let rows = names.iter().flat_map(|name| rows[name].as_array().unwrap());
        rows.map(|row| format!("{row}\n")).collect()
    };
    let shards = [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ];
    let same = dirs.path().join("same");
    std::fs::create_dir(&same).unwrap();
    for (name, rows) in [
        ("train", lines(&shards)),
        ("valid", lines(&["validation.parquet"])),
        ("test", lines(&["test.parquet"])),
        ("pairs", lines(&["pairs.parquet"])),
        ("verdicts", lines(&["verdicts.parquet"])),
    ] {
        std::fs::write(same.join(format!("{name}.jsonl")), rows).unwrap();
    }
    let parquet = fixture("parquet");
    let (model, adapters) = (model(), dirs.path().join("adapters"));
    let train = |data: &std::path::Path, more: &[&str]| {
        let args = [
            "--model",
            text(&model),
            "--data",
            text(data),
            "--adapter-path",
            text(&adapters),
            "--backend",
            "cpu",
            "--batch-size",
            "2",
            "--iters",
            "2",
            "--overwrite",
            "--json",
        ];
        let mut told = json(&mlx("train", &[&args, more].concat()));
        let summary = told.as_object_mut().unwrap();
        // These values differ between runs.
        summary.retain(|name, _| !name.contains("seconds") && !name.contains("memory"));
        for score in ["base", "validation", "test"] {
            if let Some(score) = summary.get_mut(score).and_then(Value::as_object_mut) {
                score.remove("seconds");
            }
        }
        told
    };
    let tested = ["--train", "--test"];
    let told = train(&parquet, &tested);
    assert_eq!(told, train(&same, &tested));
    assert!(told["test"]["loss"].is_number(), "{told}");
    assert!(told["validation"]["loss"].is_number(), "{told}");
    for (method, name) in [("dpo", "pairs"), ("kto", "verdicts")] {
        let more = ["--method", method];
        let told = train(&parquet.join(format!("{name}.parquet")), &more);
        assert_eq!(told, train(&same.join(format!("{name}.jsonl")), &more));
    }

    let measured = |command: &str, args: &[&str]| {
        let fixed = ["--model", text(&model), "--backend", "cpu"];
        json(&mlx(command, &[&fixed, args].concat()))
    };
    for file in [parquet.clone(), parquet.join("test.parquet")] {
        let told = measured("evaluate", &["--json", "--data", text(&file)]);
        assert_eq!(
            told["loss"],
            measured("evaluate", &["--json", "--data", text(&same)])["loss"]
        );
    }
    let perplexity = |data: &std::path::Path| {
        let args = ["--data-path", text(data), "--sequence-length", "16"];
        measured("perplexity", &args)["perplexity"].clone()
    };
    assert!(perplexity(&parquet).is_number());
    assert_eq!(perplexity(&parquet), perplexity(&same));

    // Learned quantization reads the same calibration data.
    let learned = |data: &std::path::Path, name: &str| {
        let out = dirs.path().join(name);
        let args = [
            "--model",
            text(&model),
            "--output",
            text(&out),
            "--method",
            "gptq",
            "--group-size",
            "32",
            "--data",
            text(data),
            "--sequence-length",
            "16",
            "--backend",
            "cpu",
        ];
        let output = mlx("convert", &args);
        assert!(output.status.success(), "{}", stderr(&output));
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    let first = parquet.join("train-00000-of-00002.parquet");
    let weights = learned(&same, "of_lines");
    assert!(weights == learned(&parquet, "of_parts"));
    assert!(weights == learned(&first, "of_first"));
}

#[cfg(feature = "parquet")]
#[test]
fn unusable_files_are_told() {
    let dirs = tempfile::tempdir().unwrap();
    let cut = dirs.path().join("train-00000-of-00002.parquet");
    let whole = std::fs::read(fixture("parquet/train-00000-of-00002.parquet")).unwrap();
    std::fs::write(&cut, &whole[..whole.len() - 1]).unwrap();
    let wrong = fixture("parquet/prompts.parquet");
    let both = fixture("parquet/pairs.parquet");
    let alone = dirs.path().join("train.parquet");
    std::fs::write(&alone, &whole[..whole.len() / 2]).unwrap();
    for (data, what) in [
        (cut.as_path(), "train-00001-of-00002.parquet is missing"),
        (&alone, "not a Parquet file"),
        (dirs.path(), "leave one of them"),
        (&wrong, "\"completion\""),
        (&both, "\"text\""),
    ] {
        let output = mlx(
            "train",
            &[
                "--model",
                text(&model()),
                "--data",
                text(data),
                "--backend",
                "cpu",
                "--adapter-path",
                text(&dirs.path().join("adapters")),
            ],
        );
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(what), "{}: {told}", data.display());
    }
}

#[cfg(not(feature = "parquet"))]
#[test]
fn without_the_feature_an_error_names_it() {
    let dirs = tempfile::tempdir().unwrap();
    let (model, adapters) = (model(), dirs.path().join("adapters"));
    for data in ["parquet", "parquet/pairs.parquet"] {
        let output = mlx(
            "train",
            &[
                "--model",
                text(&model),
                "--data",
                text(&fixture(data)),
                "--backend",
                "cpu",
                "--adapter-path",
                text(&adapters),
            ],
        );
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("the feature `parquet`"), "{told}");
    }
}
