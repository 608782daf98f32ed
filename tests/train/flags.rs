//! Flags of `mlx train` that decide what happens to files that are there already.

use std::path::Path;

use metal_backend::train::{STATE_FILE, WEIGHTS_FILE};

use crate::{json, mlx, model, stderr};

/// `--test` without `--train` only measures, as in mlx-lm, and a run never replaces another's adapter unasked.
#[test]
fn an_adapter_is_only_replaced_on_request() {
    let dirs = tempfile::tempdir().unwrap();
    let adapters = dirs.path().join("a");
    let data = dirs.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let line = "{\"prompt\": \"hi\", \"completion\": \"ahoy\"}\n";
    for name in ["train.jsonl", "test.jsonl"] {
        std::fs::write(data.join(name), line.repeat(4)).unwrap();
    }
    let model = model();
    let [model, data, path] = [&model, &data, &adapters].map(|p| p.to_str().unwrap());
    let run = |more: &[&str]| {
        let args = [
            &["--model", model, "--data", data, "--adapter-path", path],
            &["--backend", "cpu", "--iters", "3", "--val-batches", "0"][..],
            more,
        ]
        .concat();
        mlx("train", &args)
    };
    let test = run(&["--test"]);
    assert_eq!(test.status.code(), Some(1));
    assert!(stderr(&test).contains("no adapter in"), "{}", stderr(&test));
    assert!(!adapters.exists());

    let trained = json(&run(&["--train", "--test", "--save-every", "1", "--json"]));
    let weights = || std::fs::read(adapters.join(WEIGHTS_FILE)).unwrap();
    let (before, files) = (weights(), names(&adapters));
    let tested = json(&run(&["--test", "--json"]));
    assert_eq!(tested["loss"], trained["test"]["loss"]);
    assert_eq!(tested["examples"], 4);
    assert!(before == weights() && files == names(&adapters));
    let base = json(&mlx(
        "train",
        &[
            "--model",
            model,
            "--data",
            data,
            "--backend",
            "cpu",
            "--test",
            "--json",
            "--adapter-path",
            "",
        ],
    ));
    assert_ne!(base["loss"], tested["loss"]);

    for more in [&[][..], &["--train"], &["--train", "--test"]] {
        let refused = run(more);
        assert_eq!(refused.status.code(), Some(1), "{more:?}");
        let told = stderr(&refused);
        assert!(
            told.contains("--resume") && told.contains("--overwrite"),
            "{told}"
        );
        assert!(before == weights() && files == names(&adapters));
    }
    for more in [&["--test", "--resume"][..], &["--resume", "--overwrite"]] {
        assert_eq!(run(more).status.code(), Some(2), "{more:?}");
    }
    let again = run(&["--overwrite", "--seed", "1"]);
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    assert!(before != weights());
    // What only the earlier run could go on from is gone.
    assert!(adapters.join(STATE_FILE).is_file());
    assert!(!adapters.join("0000002_adapters.safetensors").exists());
}

/// The files of a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}
