//! Tests of `mlx probe`, from the texts of stimuli to a report. The library computes the expected
//! values.
#![cfg(feature = "probe")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, max_difference, tiny};
use inference::{Interrupt, Prompt};
use inference_probe::activations::{Activations, read_metadata};
use serde_json::Value;

fn stimuli() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/probe/nonce_root_pattern.json")
}

fn mlx(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .arg("probe")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn ok(arguments: &[&str]) -> String {
    let run = mlx(arguments);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8(run.stdout).unwrap()
}

fn refused(arguments: &[&str], code: i32, text: &str) {
    let run = mlx(arguments);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stderr.contains(text), "{stderr}");
}

/// Writes the hidden states of a tiny model at `position` of each stimulus to a file in `dir`.
fn extract(dir: &Path, name: &str, model: &str, more: &[&str]) -> String {
    let output = dir.join(name).display().to_string();
    let model = fixture("tiny").join(model).display().to_string();
    let stimuli = stimuli().display().to_string();
    let mut arguments = vec![
        "extract",
        "--model",
        &model,
        "--backend",
        "cpu",
        "--stimuli",
        &stimuli,
        "--output",
        &output,
    ];
    arguments.extend(more);
    ok(&arguments);
    output
}

#[test]
fn extracted_states_are_those_of_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--template", "en_root", "--embedding", "--limit", "40"];
    let path = extract(dir.path(), "last.npy", "llama", &more);
    let activations = Activations::read(Path::new(&path)).unwrap();
    let model = tiny("llama");
    let info = model.info();
    assert_eq!(
        activations.shape(),
        [40, info.num_layers + 1, info.hidden_size]
    );
    let metadata = read_metadata(Path::new(&path)).unwrap();
    assert!(metadata.with_embedding && metadata.row_indices.len() == 40);
    assert_eq!(metadata.model_identity.len(), 64);
    let path = extract(
        dir.path(),
        "root.npy",
        "llama",
        &[
            "--template",
            "en_root",
            "--position",
            "root",
            "--limit",
            "40",
        ],
    );
    let roots = Activations::read(Path::new(&path)).unwrap();

    let list: Vec<Value> = serde_json::from_slice(&std::fs::read(stimuli()).unwrap()).unwrap();
    let tokens = model.as_token_model().unwrap();
    let inspector = model.as_attention_inspector().unwrap();
    for row in [0, 17, 39] {
        let text = list[row]["prompts"]["en_root"].as_str().unwrap();
        let ids = tokens.encode(text, true).unwrap();
        let last = ids.len() - 1;
        let all: Vec<usize> = (0..ids.len()).collect();
        let states = inspector
            .hidden_states(&Prompt::Tokens(ids.clone()), &all, &Interrupt::new())
            .unwrap();
        let at =
            |values: &[f32], p: usize| values[p * info.hidden_size..][..info.hidden_size].to_vec();
        let difference = max_difference(activations.state(row, 0), &at(&states.embedding, last));
        assert!(difference < 1e-5, "{difference}");
        for (layer, block) in states.blocks.iter().enumerate() {
            let difference = max_difference(activations.state(row, layer + 1), &at(block, last));
            assert!(difference < 1e-3, "row {row}, layer {layer}: {difference}");
        }
        // Tokens of the root are the tokens up to the root's end, minus the tokens up to its start.
        let root = list[row]["root"].as_str().unwrap();
        let (before, _) = text.split_once(root).unwrap();
        let ends = |text: &str| {
            (0..=ids.len())
                .find(|n| tokens.decode(&ids[..*n]).unwrap().trim_start().len() >= text.len())
                .unwrap()
        };
        let first = ends(&format!("{before}x")) - 1;
        let end = ends(&format!("{before}{root}"));
        assert!(first < end, "{text}");
        let block = states.blocks.last().unwrap();
        let mean: Vec<f32> = (0..info.hidden_size)
            .map(|i| {
                let sum: f32 = (first..end).map(|p| block[p * info.hidden_size + i]).sum();
                sum / (end - first) as f32
            })
            .collect();
        let difference = max_difference(roots.state(row, info.num_layers - 1), &mean);
        assert!(difference < 1e-3, "row {row}: {difference}");
    }
}

/// The root precedes the word, so the states at the root do not depend on the word's pattern. A
/// probe must therefore find nothing there.
#[test]
fn states_that_cannot_tell_a_label_are_warned_of_and_the_chart_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--template", "en_root", "--position", "root"];
    let states = extract(dir.path(), "a.npy", "llama", &more);
    let stimuli = stimuli().display().to_string();
    let result = dir.path().join("pattern.json");
    let result = result.to_str().unwrap();
    let line = ["train", "-a", &states, "-s", &stimuli, "--label", "pattern"];
    let more = [
        "--split",
        "root-heldout",
        "--folds",
        "4",
        "--controls",
        "1",
        "-o",
        result,
    ];
    let run = mlx(&[&line[..], &more].concat());
    assert!(run.status.success());
    let said = String::from_utf8_lossy(&run.stderr);
    for doubt in ["12 distinct states of 72", "the most frequent label (0.17)"] {
        assert!(said.contains(doubt), "{said}");
    }
    assert_eq!(said.matches("warning: ").count(), 2, "{said}");
    ok(&["report", dir.path().to_str().unwrap()]);
    let chart = std::fs::read_to_string(dir.path().join("pattern.svg")).unwrap();
    assert!(
        chart.contains("12 distinct states of 72; best accuracy"),
        "{chart}"
    );
    // A label that the states can predict causes no warning.
    let more = ["--template", "en_zero", "--position", "last"];
    let states = extract(dir.path(), "b.npy", "llama", &more);
    let line = ["train", "-a", &states, "-s", &stimuli, "--label", "pattern"];
    let run = mlx(&[&line[..], &["--controls", "1", "-o", result]].concat());
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && !said.contains("warning"), "{said}");
}

#[test]
fn results_of_every_analysis_become_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let results = dir.path().join("results");
    std::fs::create_dir(&results).unwrap();
    let json = |name: &str| results.join(name).display().to_string();
    let states = extract(
        dir.path(),
        "a.npy",
        "llama",
        &[
            "--template",
            "en_root",
            "--position",
            "mean",
            "--generate",
            "2",
        ],
    );
    let other = extract(
        dir.path(),
        "b.npy",
        "qwen3",
        &["--template", "en_root", "--position", "mean"],
    );
    let stimuli = stimuli().display().to_string();
    let model = fixture("tiny/llama").display().to_string();

    // The states of `en_root` contain the word, so a probe can predict its pattern. This is a
    // positive control.
    ok(&[
        "train",
        "-a",
        &states,
        "-s",
        &stimuli,
        "--label",
        "pattern",
        "--split",
        "root-heldout",
        "--folds",
        "4",
        "--controls",
        "2",
        "-o",
        &json("pattern.json"),
    ]);
    let train: Value =
        serde_json::from_slice(&std::fs::read(json("pattern.json")).unwrap()).unwrap();
    let layers = train["layers"].as_array().unwrap();
    assert_eq!(layers.len(), tiny("llama").info().num_layers);
    assert_eq!(train["classes"].as_array().unwrap().len(), 6);
    for layer in layers {
        let value = |name: &str| layer[name].as_f64().unwrap();
        // The accuracy is far above chance (one in six), even with random weights.
        assert!(value("accuracy") > value("control") + 0.1, "{layer}");
        assert!(
            value("accuracy") > 0.3 && value("control") < 0.35,
            "{layer}"
        );
    }

    ok(&[
        "cca",
        "-a",
        &states,
        "-s",
        &stimuli,
        "--label",
        "pattern",
        "--components",
        "3",
        "--folds",
        "3",
        "-o",
        &json("cca.json"),
    ]);
    let cca: Value = serde_json::from_slice(&std::fs::read(json("cca.json")).unwrap()).unwrap();
    assert!((cca["matrix"][0][0].as_f64().unwrap() - 1.0).abs() < 1e-6);
    assert_eq!(cca["label_correlations"][0].as_array().unwrap().len(), 3);

    let rsa: Value = serde_json::from_str(&ok(&["rsa", "-a", &states])).unwrap();
    assert!((rsa["matrix"][1][1].as_f64().unwrap() - 1.0).abs() < 1e-12);
    ok(&[
        "rsa",
        "-a",
        &states,
        "--activations-b",
        &other,
        "-o",
        &json("rsa.json"),
    ]);

    ok(&[
        "divergence",
        "--model",
        &model,
        "--backend",
        "cpu",
        "-a",
        &states,
        "-s",
        &stimuli,
        "--group",
        "pattern=CaCiC",
        "-o",
        &json("divergence.json"),
    ]);
    let text = std::fs::read(json("divergence.json")).unwrap();
    let divergence: Value = serde_json::from_slice(&text).unwrap();
    let last = divergence["from_last"].as_array().unwrap().last().unwrap();
    assert_eq!(last.as_f64(), Some(0.0));
    assert_eq!(divergence["means"].as_array().unwrap().len(), layers.len());

    let listed = ok(&["report", results.to_str().unwrap()]);
    assert!(
        listed.contains("summary.json") && listed.contains("index.html"),
        "{listed}"
    );
    let summary: Value =
        serde_json::from_slice(&std::fs::read(json("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["results"].as_array().unwrap().len(), 4);
    let page = std::fs::read_to_string(json("index.html")).unwrap();
    assert!(page.matches("<svg").count() >= 6);

    // This other model has the same width, architecture and vocabulary as the first model.
    let copy = dir.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(&model).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    let of_copy = |more: &[&str]| {
        let copy = copy.display().to_string();
        let base = ["divergence", "--model", &copy, "--backend", "cpu", "-a"];
        mlx(&[&base[..], &[&states], more].concat())
    };
    let adapter = fixture("training/llama-4").display().to_string();
    assert!(of_copy(&[]).status.success());
    let flags = ["--model", &model, "--backend", "cpu", "-a", &states];
    let with_adapter = [&["divergence"], &flags[..], &["--adapter-path", &adapter]].concat();
    refused(&with_adapter, 1, "another adapter");
    let weights = copy.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let other = of_copy(&[]);
    let why = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(1), "{why}");
    assert!(
        why.contains("another model") && why.contains("a.npy"),
        "{why}"
    );

    // A random model continues no text as expected, so all stimuli fall into one group.
    let flags = [
        "--model",
        &model,
        "--backend",
        "cpu",
        "-a",
        &states,
        "--group",
        "correct",
    ];
    refused(
        &[&["divergence"], &flags[..]].concat(),
        1,
        "both need at least one",
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let states = extract(dir.path(), "a.npy", "llama", &["--template", "en_ask"]);
    let stimuli_path = stimuli().display().to_string();
    let model = fixture("tiny/llama").display().to_string();
    let train = |more: &[&str]| {
        [&["train", "-a", &states, "-s", &stimuli_path][..], more]
            .concat()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let check = |arguments: &[String], code: i32, text: &str| {
        refused(
            &arguments.iter().map(String::as_str).collect::<Vec<_>>(),
            code,
            text,
        );
    };
    check(&train(&["--label", "absent"]), 1, "no field `absent`");
    check(
        &train(&["--label", "root", "--split", "odd"]),
        2,
        "neither random nor FIELD-heldout",
    );
    check(&train(&["--label", "root", "--folds", "1"]), 1, "folds");
    // When roots are held out, each root is in only one fold.
    check(
        &train(&["--label", "root", "--split", "root-heldout"]),
        1,
        "without having been in training",
    );
    let changed = dir.path().join("changed.json");
    std::fs::write(&changed, std::fs::read_to_string(stimuli()).unwrap() + "\n").unwrap();
    let changed = changed.display().to_string();
    refused(
        &["train", "-a", &states, "-s", &changed, "--label", "root"],
        1,
        "is not the file that",
    );
    refused(
        &[
            "extract",
            "--model",
            &model,
            "-s",
            &stimuli_path,
            "-o",
            "a.txt",
        ],
        2,
        "must end in .npy",
    );
    let output = dir.path().join("b.npy").display().to_string();
    let extract = [
        "extract",
        "--model",
        &model,
        "-s",
        &stimuli_path,
        "-o",
        &output,
    ];
    refused(&extract, 1, "choose one of en_zero, en_root, en_ask");
    let spans = [
        &extract[..],
        &["--template", "en_zero", "--position", "root"],
    ]
    .concat();
    refused(&spans, 1, "does not occur");
    assert!(!Path::new(&output).exists());
    refused(
        &["report", dir.path().to_str().unwrap()],
        1,
        "holds no result",
    );
}
