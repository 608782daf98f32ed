//! Compares `mlx vindex` with numpy (`tools/golden/vindex.py`) and with the engine's forward
//! passes.
#![cfg(feature = "probe")]

use std::path::Path;

use crate::common::{fixture, floats, ids, max_difference, tiny};
use crate::program::{output, refused, stdout};
use inference::{ErrorKind, Interrupt, Prompt};
use inference_probe::vindex::{Activation, Build, Layer, Level, Vindex, Writer};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden() -> Value {
    let text = std::fs::read_to_string(fixture("vindex.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["models"].clone()
}

fn model(name: &str) -> String {
    fixture("tiny").join(name).display().to_string()
}

fn build(name: &str, dir: &Path, more: &[&str]) -> String {
    let path = dir.join("v").display().to_string();
    let model = model(name);
    let base = [
        "vindex",
        "build",
        "--model",
        &model,
        "--backend",
        "cpu",
        "--output",
        &path,
    ];
    let said = stdout(&output(&[&base[..], more].concat()));
    assert_eq!(said.trim(), path);
    path
}

#[test]
fn files_are_those_of_numpy() {
    let mut files = 0;
    for (name, golden) in golden().as_object().unwrap() {
        let dir = tempfile::tempdir().unwrap();
        let path = build(name, dir.path(), &[]);
        for (file, expected) in golden["sha256"].as_object().unwrap() {
            let bytes = std::fs::read(Path::new(&path).join(file)).unwrap();
            let actual: String = Sha256::digest(&bytes)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            assert_eq!(&actual, expected.as_str().unwrap(), "{name}, {file}");
            files += 1;
        }
    }
    assert_eq!(files, 6);
}

#[test]
fn the_nearest_features_are_those_of_numpy() {
    let golden = golden()["llama"].clone();
    let dir = tempfile::tempdir().unwrap();
    let path = build("llama", dir.path(), &["--down-top-k", "3"]);
    let tokens: Vec<String> = ids(&golden["tokens"]).iter().map(u32::to_string).collect();
    let (tokens, llama) = (tokens.join(","), model("llama"));
    let walk = |more: &[&str]| {
        let base = [
            "vindex",
            "walk",
            &path,
            "--backend",
            "cpu",
            "--tokens",
            &tokens,
        ];
        output(&[&base[..], more].concat())
    };
    let report = stdout(&walk(&["--model", &llama, "--top", "4", "--json"]));
    let report: Value = serde_json::from_str(&report).unwrap();
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.len(), golden["layers"].as_array().unwrap().len());
    for (ours, expected) in layers.iter().zip(golden["layers"].as_array().unwrap()) {
        let of = |name: &str| -> Vec<f32> {
            let features = ours["features"].as_array().unwrap();
            features
                .iter()
                .map(|f| f[name].as_f64().unwrap() as f32)
                .collect()
        };
        assert_eq!(of("feature"), floats(&expected["features"]));
        assert!(max_difference(&of("gate"), &floats(&expected["gates"])) < 1e-5);
        assert!(max_difference(&of("activation"), &floats(&expected["activations"])) < 1e-5);
        let error = ours["error"].as_f64().unwrap() - expected["error"].as_f64().unwrap();
        assert!(error.abs() < 1e-5, "{error}");
        assert_eq!(ours["features"][0]["tokens"].as_array().unwrap().len(), 3);
    }
    let text = stdout(&walk(&["--model", &llama, "--layers", "1", "--top", "2"]));
    assert!(
        text.starts_with("layer   1") && text.lines().count() == 3,
        "{text}"
    );
    let wrong = refused(&walk(&["--model", &llama, "--layers", "7"]), 2);
    assert!(wrong.contains("the model has 3"), "{wrong}");
    let wrong = refused(&walk(&["--model", &model("llama-yarn")]), 1);
    assert!(wrong.contains("another version"), "{wrong}");
    // A copy of the model in another directory matches the vindex. Flags that change the model's
    // features are refused.
    let elsewhere = dir.path().join("moved");
    std::fs::create_dir(&elsewhere).unwrap();
    for entry in std::fs::read_dir(&llama).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, elsewhere.join(file.file_name().unwrap())).unwrap();
    }
    let elsewhere = elsewhere.display().to_string();
    stdout(&walk(&["--model", &elsewhere, "--layers", "1"]));
    let adapter = fixture("training/llama-4").display().to_string();
    for (flags, why) in [
        (["--adapter-path", &adapter], "without an adapter"),
        (["--ffn", "gain:2"], "as they were trained"),
    ] {
        let model = ["--model", llama.as_str()];
        let wrong = refused(&walk(&[model, flags].concat()), 2);
        assert!(wrong.contains(why), "{wrong}");
        let out = dir.path().join("w").display().to_string();
        let built = [&["vindex", "build", "-o", &out], &model[..], &flags[..]].concat();
        let wrong = refused(&output(&built), 2);
        assert!(wrong.contains(why), "{wrong}");
    }
}

/// For all kinds of weights, norms and biases, the files contain the values that the engine adds to
/// the residual stream.
#[test]
fn all_features_give_what_the_engine_gives() {
    let tokens: Vec<u32> = (3..19).collect();
    let (prompt, last) = (Prompt::Tokens(tokens.clone()), tokens.len() - 1);
    let mut layers = 0;
    for name in [
        "llama",
        "gpt2",
        "starcoder2",
        "gemma",
        "qwen2",
        "llama-gguf",
        "qwen3-q8",
        "lfm2",
    ] {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let until = Interrupt::new();
        let inputs = inspector
            .feed_forward_inputs(&prompt, &[last], &until)
            .unwrap();
        let trace = inspector.trace_residuals(&prompt, &[last], &until).unwrap();
        for (i, (input, traced)) in inputs.layers.iter().zip(&trace.layers).enumerate() {
            let weights = inspector.feed_forward_weights(i).unwrap();
            let biased = weights.gate_bias.is_some() || weights.down_bias.is_some();
            let features = weights.features;
            let layer = Layer {
                activation: Activation::from_name(&weights.activation).unwrap(),
                biases: biased.then(|| inference_probe::vindex::Biases {
                    gate: weights.gate_bias.unwrap_or(vec![0.0; features]),
                    up: weights
                        .up
                        .as_ref()
                        .map(|_| weights.up_bias.unwrap_or(vec![0.0; features])),
                    down: weights.down_bias.unwrap_or(vec![0.0; weights.hidden_size]),
                }),
                gate: weights.gate,
                up: weights.up,
                down: weights.down,
                experts: None,
            };
            let (y, _) = layer.walk(input, usize::MAX).unwrap();
            let greatest = y.iter().fold(1.0f32, |m, x| m.max(x.abs()));
            let difference = max_difference(&y, &traced.feed_forward) / greatest;
            // The kernels round the inputs of quantized matrix multiplications to 16 bits.
            let bound = if name.contains('-') { 1e-2 } else { 1e-4 };
            assert!(difference < bound, "{name}, layer {i}: {difference}");
            layers += 1;
        }
    }
    assert!(layers >= 16, "{layers}");
    let clamped = tiny("gpt-oss");
    let clamped = clamped.as_attention_inspector().unwrap();
    let error = clamped.feed_forward_weights(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("clamped"), "{error}");
    let error = clamped.feed_forward_weights(99).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
}

/// Tests the vindex levels, float16 storage, models with experts, and a resumed build.
#[test]
fn a_build_has_what_it_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let run = |name: &str, to: &str, more: &[&str]| {
        let model = model(name);
        let base = [
            "vindex",
            "build",
            "--backend",
            "cpu",
            "--model",
            &model,
            "-o",
            to,
        ];
        output(&[&base[..], more].concat())
    };
    let info = |path: &str| -> Value {
        let said = stdout(&output(&["vindex", "info", path, "--json", "--verify"]));
        serde_json::from_str(&said).unwrap()
    };
    let walk = |path: &str, name: &str| {
        let model = model(name);
        let base = [
            "vindex",
            "walk",
            path,
            "--backend",
            "cpu",
            "--model",
            &model,
        ];
        output(&[&base[..], &["--tokens", "5,6,7", "--json"]].concat())
    };
    let mut bytes = Vec::new();
    for (level, tensors) in [("browse", 1), ("inference", 1), ("all", 21)] {
        let path = at(level);
        stdout(&run("llama", &path, &["--level", level]));
        let about = info(&path);
        assert_eq!(
            (&about["level"], &about["tensors"]),
            (&level.into(), &tensors.into())
        );
        bytes.push(about["bytes"].as_u64().unwrap());
        let walked: Value = serde_json::from_str(&stdout(&walk(&path, "llama"))).unwrap();
        let first = &walked["layers"][0];
        assert_eq!(first["error"].is_null(), level == "browse");
        assert_eq!(
            first["features"][0]["activation"].is_null(),
            level == "browse"
        );
        assert_eq!(first["features"][0]["tokens"].as_array().unwrap().len(), 10);
    }
    assert!(bytes[0] < bytes[1] && bytes[1] < bytes[2], "{bytes:?}");
    // The vindex of level `all` contains the model's tensors under their own names.
    let all = Vindex::open(Path::new(&at("all"))).unwrap();
    let table = all.tensor("model.embed_tokens.weight").unwrap().unwrap();
    assert_eq!(table.len(), 300 * 32);
    let half = at("half");
    stdout(&run("llama", &half, &["--f16", "--level", "all"]));
    let about = info(&half);
    assert_eq!(about["dtype"], "float16");
    assert!(about["bytes"].as_u64().unwrap() < bytes[2] * 7 / 10);
    // Layers can walk on features rounded to float16. A vindex with only gate vectors is not
    // enough.
    let logits = |vindex: &str| {
        let model = model("llama");
        let base = [
            "logits",
            "--model",
            &model,
            "--backend",
            "cpu",
            "--tokens",
            "5,6,7",
        ];
        output(&[&base[..], &["--ffn", "walk", "--vindex", vindex]].concat())
    };
    let of = |vindex: &str| -> Vec<f32> {
        let all: Value = serde_json::from_str(&stdout(&logits(vindex))).unwrap();
        floats(&all["logits"])
    };
    let (rounded, exact) = (of(&half), of(&at("inference")));
    let away = max_difference(&rounded, &exact);
    assert!(away > 0.0 && away < 1e-2, "{away}");
    let wrong = refused(&logits(&at("browse")), 1);
    assert!(wrong.contains("level browse"), "{wrong}");

    let experts = at("experts");
    stdout(&run("mixtral", &experts, &["--level", "all"]));
    let about = info(&experts);
    assert_eq!(about["layers_with_experts"], about["layers"]);
    assert_eq!(about["features"], 2 * 4 * 48);
    let walked: Value = serde_json::from_str(&stdout(&walk(&experts, "mixtral"))).unwrap();
    for feature in walked["layers"][1]["features"].as_array().unwrap() {
        assert!(feature["expert"].as_u64().unwrap() < 4);
        assert!(feature["feature"].as_u64().unwrap() < 48);
    }
    let wrong = run("llama", &at("x"), &["--level", "some"]);
    assert!(refused(&wrong, 2).contains("browse, inference, all"));
    // The second build resumes from the files of an interrupted build.
    let opened = Vindex::open(Path::new(&at("all"))).unwrap();
    let resumed = at("resumed");
    let begun = Build {
        level: Level::All,
        resume: true,
        ..Build::default()
    };
    let begun = Writer::begin(Path::new(&resumed), opened.about().clone(), begun);
    let mut begun = begun.unwrap();
    let (layer, said) = (opened.layer(0).unwrap(), opened.tokens(0).unwrap());
    begun.push(&layer, &said).unwrap();
    let flags = ["--level", "all", "--resume"];
    let wrong = refused(&run("llama", &resumed, &flags), 1);
    assert!(wrong.contains("another process"), "{wrong}");
    drop(begun);
    let done = run("llama", &resumed, &flags);
    assert!(crate::program::text(&done.stderr).contains("1 layers are there already"));
    stdout(&done);
    info(&resumed);
    let resumed = Vindex::open(Path::new(&resumed)).unwrap();
    for i in 0..3 {
        assert_eq!(resumed.layer(i).unwrap(), opened.layer(i).unwrap());
        assert_eq!(resumed.tokens(i).unwrap(), opened.tokens(i).unwrap());
    }
}

#[test]
fn directories_are_whole_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = build("llama", dir.path(), &["--down-top-k", "0"]);
    let info = |more: &[&str]| output(&[&["vindex", "info", &path], more].concat());
    let report: Value = serde_json::from_str(&stdout(&info(&["--json", "--verify"]))).unwrap();
    assert_eq!(
        (&report["layers"], &report["features"]),
        (&3.into(), &192.into())
    );
    assert_eq!(report["verified"], true);
    assert!(stdout(&info(&[])).contains("192 of 32 elements"));
    // A build never overwrites another build, and leaves no temporary files.
    let again = [
        "vindex",
        "build",
        "--model",
        &model("llama"),
        "--backend",
        "cpu",
        "-o",
        &path,
    ];
    let wrong = refused(&output(&again), 1);
    assert!(
        wrong.contains("already exists; choose another path"),
        "{wrong}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let file = Path::new(&path).join("up_features.bin");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[9000] ^= 1; // in layer 1, whose part begins at 8192
    std::fs::write(&file, &bytes).unwrap();
    stdout(&info(&[]));
    let wrong = refused(&info(&["--verify"]), 1);
    assert!(
        wrong.contains("up_features.bin") && wrong.contains("damaged"),
        "{wrong}"
    );
    Vindex::open(Path::new(&path)).unwrap().layer(0).unwrap();
    // A model whose experts have an unsupported activation is refused, and the build leaves no
    // files.
    let empty = tempfile::tempdir().unwrap();
    let out = empty.path().join("v").display().to_string();
    let clamped = [
        "vindex",
        "build",
        "--model",
        &model("gpt-oss"),
        "--backend",
        "cpu",
        "-o",
        &out,
    ];
    assert!(refused(&output(&clamped), 1).contains("clamped"));
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
}
