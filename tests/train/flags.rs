//! Tests of `mlx train`'s flags when files of earlier runs exist.

use std::path::Path;

use metal_backend::train::config::TrainConfig;
use metal_backend::train::{CONFIG_FILE, STATE_FILE, WEIGHTS_FILE};

use crate::{json, mlx, model, pirate, stderr};

/// As in mlx-lm, `--test` without `--train` only measures. A run must not replace an existing
/// adapter without a flag.
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
    // The new run removes files that only the earlier run could use to resume.
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

/// A run can start from an adapter with a non-default shape. Options that the command omits come
/// from the adapter; options that the command sets must match it.
#[test]
fn an_earlier_adapter_keeps_its_shape() {
    let dirs = tempfile::tempdir().unwrap();
    let (model, data) = (model(), pirate());
    let first = dirs.path().join("first");
    let run = |adapters: &Path, more: &[&str]| {
        let [model, data, path] = [&model, &data, adapters].map(|p| p.to_str().unwrap());
        let args = [
            &["--model", model, "--data", data, "--adapter-path", path],
            &["--backend", "cpu", "--iters", "2", "--val-batches", "1"][..],
            &["--batch-size", "1", "--json", "--overwrite"],
            more,
        ]
        .concat();
        mlx("train", &args)
    };
    let shape = [
        "--fine-tune-type",
        "dora",
        "--num-layers",
        "1",
        "--rank",
        "4",
        "--scale",
        "5",
        "--dropout",
        "0.25",
        "--keys",
        "self_attn.q_proj,mlp.up_proj",
    ];
    let begun = [&shape[..], &["--learning-rate", "1e-2"]].concat();
    let trained = json(&run(&first, &begun));
    let loss = trained["validation"]["loss"].as_f64().unwrap();
    assert_ne!(trained["base"]["loss"], trained["validation"]["loss"]);
    let config = |dir: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(dir.join(CONFIG_FILE)).unwrap()).unwrap()
    };

    let second = dirs.path().join("second");
    let from = first.to_str().unwrap();
    for more in [&[][..], &shape] {
        let again = json(&run(
            &second,
            &[&["--resume-adapter-file", from], more].concat(),
        ));
        assert_eq!(again["base"]["loss"], loss);
        assert_eq!(config(&second), config(&first));
        let options = TrainConfig::read(second.join("training_config.yaml")).unwrap();
        assert_eq!((options.num_layers, options.lora_parameters.rank), (1, 4));
        assert_eq!(options.lora_parameters.scale, 5.0);
    }
    for (flag, value, theirs) in [
        ("--fine-tune-type", "lora", "dora"),
        ("--num-layers", "2", "1"),
        ("--rank", "8", "4"),
        ("--scale", "20", "5"),
        ("--keys", "self_attn.q_proj", "mlp.up_proj,self_attn.q_proj"),
    ] {
        let refused = run(&second, &["--resume-adapter-file", from, flag, value]);
        let told = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{flag}: {told}");
        let name = flag.trim_start_matches('-').replace('-', "_");
        assert!(told.contains(&format!("{name} is {value}")), "{told}");
        assert!(told.contains(&format!("has {theirs};")), "{told}");
    }
    // Dropout is not stored in the adapter, so it may differ.
    let other = ["--resume-adapter-file", from, "--dropout", "0.5"];
    assert_eq!(json(&run(&second, &other))["base"]["loss"], loss);
    assert_eq!(config(&second)["lora_parameters"]["dropout"], 0.5);

    // Without a configuration file, the tensors determine rank, layers and type. Only the scale
    // must be given as an option.
    let bare = dirs.path().join("bare.safetensors");
    std::fs::copy(first.join(WEIGHTS_FILE), &bare).unwrap();
    let from = bare.to_str().unwrap();
    let made = run(&second, &["--resume-adapter-file", from, "--scale", "5"]);
    assert!(stderr(&made).contains("its scale is taken to be 5"));
    assert_eq!(json(&made)["base"]["loss"], loss);
    let actual = config(&second);
    for name in ["fine_tune_type", "num_layers"] {
        assert_eq!(actual[name], config(&first)[name]);
    }
    let refused = run(&second, &["--resume-adapter-file", from, "--rank", "8"]);
    assert!(
        stderr(&refused).contains("rank is 8"),
        "{}",
        stderr(&refused)
    );
    let larger = json(&run(&second, &["--resume-adapter-file", from]));
    assert_ne!(larger["base"]["loss"], loss);
}

/// If weights overflow, the run must end with an error that names the step. Earlier saves must
/// remain.
#[test]
fn a_run_that_diverges_ends_with_an_error() {
    let dirs = tempfile::tempdir().unwrap();
    let (model, data) = (model(), pirate());
    let adapters = dirs.path().join("a");
    let config = dirs.path().join("decay.yaml");
    std::fs::write(&config, "optimizer_config: {sgd: {weight_decay: 1e36}}\n").unwrap();
    let [model, data, path] = [&model, &data, &adapters].map(|p| p.to_str().unwrap());
    let decay = ["-c", config.to_str().unwrap(), "--learning-rate", "1e4"];
    let run = |more: &[&str]| {
        let args = [
            &["--model", model, "--data", data, "--adapter-path", path],
            &["--backend", "cpu", "--val-batches", "0"][..],
            &["--batch-size", "1", "--optimizer", "sgd"],
            more,
        ]
        .concat();
        mlx("train", &args)
    };
    // With this learning rate, the loss may still be finite after the first update.
    let refused = run(&["--iters", "2", "--learning-rate", "1e10"]);
    let told = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{told}");
    assert!(told.contains("from 0 to 10000"), "{told}");
    // In the first case, a later loss shows the overflow. In the second case, the overflowing
    // update is the last, and no loss follows.
    for (iters, what) in [("9", "step 2: the loss is NaN"), ("1", "step 1: ")] {
        let ended = run(&[&["--iters", iters], &decay[..]].concat());
        let told = stderr(&ended);
        assert_eq!(ended.status.code(), Some(1), "{iters}: {told}");
        assert!(
            told.contains(what) && told.contains("learning rate"),
            "{told}"
        );
        assert!(!adapters.join(WEIGHTS_FILE).exists(), "{iters}");
    }
    // Step 1 has a small update and is saved. Step 2 overflows, and the save of step 1 must remain.
    let schedule = "{name: constant, arguments: [1e4], warmup: 1, warmup_init: 1e-38}";
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}lr_schedule: {schedule}\n")).unwrap();
    let ended = run(&["--iters", "9", "--save-every", "1", decay[0], decay[1]]);
    let told = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(
        told.contains("step 2: ") && told.contains("not finite any more"),
        "{told}"
    );
    let read = |name: &str| std::fs::read(adapters.join(name)).unwrap();
    assert!(read(WEIGHTS_FILE) == read("0000001_adapters.safetensors"));
    assert!(!adapters.join("0000002_adapters.safetensors").exists());
}
