//! Tests of `--steer` in all commands that accept the flag, and of `mlx trace --patch`.
#![cfg(feature = "probe")]

use std::path::Path;

use inference::{EditOperation, Hook, Interrupt, Prompt, Steering};
use serde_json::{Value, json};

use crate::common::{fixture, floats, greedy, max_difference, tiny};
use crate::program::{mlx, piped, refused, stdout, text, tiny as tiny_path};

/// Writes edits to a file in `dir`. One edit reads its vector from another file.
fn edits(dir: &Path) -> (String, Steering) {
    let numbers: Vec<f32> = (0..32).map(|i| (i % 5) as f32 - 2.0).collect();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (32,), }\n";
    let mut npy = b"\x93NUMPY\x01\x00".to_vec();
    npy.extend((header.len() as u16).to_le_bytes());
    npy.extend(header.bytes());
    npy.extend(numbers.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(dir.join("v.npy"), npy).unwrap();
    let path = dir.join("edits.json");
    let list = |vector: Value| {
        json!({"edits": [{"layers": "0-1", "hook": "resid_post", "op": "add", "vector": vector,
                          "coefficient": 0.5},
                         {"layers": 2, "hook": "z", "heads": [1], "op": "zero"}]})
    };
    std::fs::write(&path, list(json!({"file": "v.npy"})).to_string()).unwrap();
    let steering = serde_json::from_value(list(json!(numbers))).unwrap();
    (path.display().to_string(), steering)
}

#[test]
fn commands_edit_as_the_engine_does() {
    let home = tempfile::tempdir().unwrap();
    let (file, steering) = edits(home.path());
    let model = tiny("llama");
    let model_path = tiny_path();
    let run = |args: &[&str]| {
        let all = [
            args,
            &["--backend", "cpu", "--model", &model_path, "--steer", &file],
        ]
        .concat();
        stdout(&mlx(home.path(), &all).output().unwrap())
    };
    let tokens = vec![5, 17, 42, 99, 7, 63];
    let prompt = Prompt::Tokens(tokens.clone());
    let given = "5,17,42,99,7,63";
    let options = greedy(8).with_steering(steering.clone());
    let expected = model
        .generate(&prompt, &options)
        .unwrap()
        .collect_output()
        .unwrap();
    let reply = run(&[
        "generate", "--tokens", given, "--json", "-n", "8", "--temp", "0",
    ]);
    let reply: Value = serde_json::from_str(&reply).unwrap();
    assert_eq!(reply["tokens"], json!(expected.tokens));
    let plain = model
        .generate(&prompt, &greedy(8))
        .unwrap()
        .collect_output()
        .unwrap();
    assert_ne!(plain.tokens, expected.tokens);

    let steerable = model.as_steerable().unwrap();
    let interrupt = Interrupt::new();
    let expected = steerable
        .steered_logits(&prompt, false, &steering, &interrupt)
        .unwrap();
    let logits: Value = serde_json::from_str(&run(&["logits", "--tokens", given])).unwrap();
    let difference = max_difference(&floats(&logits["logits"]), &expected.logits);
    assert!(difference < 1e-5, "{difference}");

    let words = Prompt::from("hello");
    let expected = steerable
        .steered_logits(&words, false, &steering, &interrupt)
        .unwrap();
    let best = |logits: &[f32]| {
        (0..logits.len())
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .unwrap()
    };
    let args = [
        "classify",
        "--backend",
        "cpu",
        "--model",
        &model_path,
        "--steer",
        &file,
    ];
    let classified = piped(mlx(home.path(), &args), "{\"prompt\": \"hello\"}\n");
    let class: Value = serde_json::from_str(&stdout(&classified)).unwrap();
    assert_eq!(class["token"], json!(best(&expected.logits)));
    let infer: Value =
        serde_json::from_str(&run(&["infer", "--prompt", "hello", "--json"])).unwrap();
    let tokens = model.as_token_model().unwrap();
    let first = tokens.decode(&[best(&expected.logits) as u32]).unwrap();
    assert_eq!(infer["predictions"][0]["token"], json!(first));

    // Runs the conversations one by one first, then together in a batch.
    let asked = [inference::Message::user("hello")];
    let options = greedy(8)
        .with_ignore_eos(false)
        .with_steering(steering.clone());
    let reply = |options| {
        let stream = model.chat(&asked, options).unwrap();
        stream.collect_output().unwrap().text
    };
    let expected = reply(&options);
    assert_ne!(reply(&greedy(8).with_ignore_eos(false)), expected);
    let flags = [
        "--backend",
        "cpu",
        "-n",
        "8",
        "--temp",
        "0",
        "--repeat-penalty",
        "1",
        "--steer",
        &file,
    ];
    let one = mlx(
        home.path(),
        &[&["run", &model_path, "hello"], &flags[..]].concat(),
    );
    let one = stdout(&piped(one, ""));
    assert_eq!(one.trim(), expected.trim());
    let many = mlx(
        home.path(),
        &[&["batch", "--model", &model_path], &flags[..]].concat(),
    );
    let line = json!({"messages": [{"role": "user", "content": "hello"}]});
    let many = stdout(&piped(many, &format!("{line}\n{line}\n")));
    for line in many.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["text"], expected, "{line}");
    }
    assert_eq!(many.lines().count(), 2);

    let long = "hello the capital of one two three x";
    let actual: Value = serde_json::from_str(&run(&["perplexity", "--prompt", long])).unwrap();
    let ids = Prompt::Tokens(tokens.encode(long, true).unwrap());
    let logprobs = steerable
        .steered_logprobs(&ids, &steering, &interrupt)
        .unwrap();
    let mean = -logprobs.iter().map(|v| f64::from(*v)).sum::<f64>() / logprobs.len() as f64;
    let ours = actual["perplexity"].as_f64().unwrap();
    assert!(
        (ours / mean.exp() - 1.0).abs() < 1e-5,
        "{ours} {}",
        mean.exp()
    );
}

#[test]
fn a_trace_is_that_of_the_edited_model() {
    let home = tempfile::tempdir().unwrap();
    let (file, steering) = edits(home.path());
    let model = tiny("llama");
    let model_path = tiny_path();
    let args = [
        "trace",
        "--backend",
        "cpu",
        "--model",
        &model_path,
        "--tokens",
    ];
    let run = |more: &[&str]| {
        let all = [&args[..], &["5,17,42,99,7,63", "--json"], more].concat();
        let actual = stdout(&mlx(home.path(), &all).output().unwrap());
        serde_json::from_str::<Value>(&actual).unwrap()
    };
    let shown = ["--attention", "--activations", "2"];
    let (plain, edited) = (
        run(&shown),
        run(&[&shown[..], &["--steer", &file]].concat()),
    );
    let prompt = Prompt::Tokens(vec![5, 17, 42, 99, 7, 63]);
    let logits = (model.as_steerable().unwrap())
        .steered_logits(&prompt, false, &steering, &Interrupt::new())
        .unwrap()
        .logits;
    let last = edited["steps"].as_array().unwrap().last().unwrap();
    let token = edited["answer"]["token"].as_u64().unwrap() as usize;
    let difference = last["logit"].as_f64().unwrap() - f64::from(logits[token]);
    assert!(difference.abs() < 1e-4, "{difference}");
    assert!(logits.iter().all(|logit| *logit <= logits[token]));
    for part in ["steps", "attention", "activations"] {
        assert_ne!(plain[part], edited[part], "{part}");
    }
    for other in [["--activations", "2"], ["--steer", &file]] {
        let all = [&args[..], &["5,6", "--patch", "one dog"], &other].concat();
        let message = refused(&mlx(home.path(), &all).output().unwrap(), 2);
        assert!(
            message.contains(other[0]) && message.contains("--patch"),
            "{message}"
        );
    }
}

#[test]
fn edits_that_cannot_be_are_refused_with_the_file() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("edits.json");
    let run = |edits: Value, code: i32| {
        std::fs::write(&path, edits.to_string()).unwrap();
        let (model_path, file) = (tiny_path(), path.display().to_string());
        let args = [
            "generate",
            "--backend",
            "cpu",
            "--model",
            &model_path,
            "--tokens",
            "5,6",
        ];
        let all = [&args[..], &["-n", "1", "--steer", &file]].concat();
        refused(&mlx(home.path(), &all).output().unwrap(), code)
    };
    let unknown = json!({"edits": [{"layers": 0, "hook": "z", "op": "zero", "colour": 1}]});
    let message = run(unknown, 2);
    assert!(
        message.contains("colour") && message.contains("edits.json"),
        "{message}"
    );
    let outside = json!({"edits": [{"layers": 9, "hook": "z", "op": "zero"}]});
    let message = run(outside, 2);
    assert!(message.contains("the model has layers 0 to 2"), "{message}");
}

#[test]
fn a_backend_without_edits_says_so() {
    let home = tempfile::tempdir().unwrap();
    let output = mlx(home.path(), &["backends", "--json"]).output().unwrap();
    let all: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let has = |name: &str| {
        let list = all
            .as_array()
            .or_else(|| all["backends"].as_array())
            .unwrap();
        let backend = list.iter().find(|b| b["name"] == name).unwrap();
        backend["capabilities"]["steering"] == json!(true)
    };
    assert!(has("cpu"));
    assert!(!has("mlx_lm"));
}

#[test]
fn patched_states_bring_back_what_they_do_elsewhere() {
    let home = tempfile::tempdir().unwrap();
    let read = |name: &str| -> Value {
        let golden = std::fs::read_to_string(fixture(name)).unwrap();
        serde_json::from_str(&golden).unwrap()
    };
    let (hooks, libraries) = (read("steering.json"), read("steering_libraries.json"));
    let (golden, libraries) = (&hooks["patching"], &libraries["patching"]);
    for name in ["texts", "tokens", "corrupted", "answer", "against"] {
        assert_eq!(golden[name], libraries[name]);
    }
    let tables = ["transformer_lens", "nnsight"].map(|name| libraries[name].as_object().unwrap());
    let tables = tables
        .into_iter()
        .flatten()
        .filter(|(hook, _)| *hook != "z by head");
    let tables: Vec<_> = golden["recovered"]
        .as_object()
        .unwrap()
        .iter()
        .chain(tables)
        .collect();
    assert_eq!(tables.len(), 11);
    let texts = [0, 1].map(|at| golden["texts"][at].as_str().unwrap());
    let model_path = tiny_path();
    let plot = home.path().join("patch.svg").display().to_string();
    let run = |more: &[&str]| {
        let args = [
            "trace",
            "--backend",
            "cpu",
            "--model",
            &model_path,
            "--prompt",
            texts[0],
        ];
        let all = [&args[..], &["--patch", texts[1]], more].concat();
        stdout(&mlx(home.path(), &all).output().unwrap())
    };
    for (hook, table) in tables {
        let report = run(&["--at", hook, "--json", "--plot", &plot]);
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["tokens"], golden["tokens"]);
        assert_eq!(report["corrupted_tokens"], golden["corrupted"]);
        assert_eq!(report["answer"]["token"], golden["answer"]);
        assert_eq!(report["against"]["token"], golden["against"]);
        let rows = report["layers"].as_array().unwrap();
        assert_eq!(rows.len(), table.as_array().unwrap().len());
        for (row, expected) in rows.iter().zip(table.as_array().unwrap()) {
            let difference = max_difference(&floats(&row["recovered"]), &floats(expected));
            assert!(difference < 1e-4, "{hook}: {difference}");
        }
        let svg = std::fs::read_to_string(&plot).unwrap();
        let cells = rows.len() * golden["tokens"].as_array().unwrap().len();
        assert_eq!(svg.matches("<title>").count(), cells, "a cell each: {svg}");
    }
    // After the last layer, only the state of the last position determines the answer.
    let table = run(&["--layers", "2"]);
    assert!(
        table.lines().last().unwrap().trim().ends_with("1.00"),
        "{table}"
    );
    let args = [
        "trace",
        "--backend",
        "cpu",
        "--model",
        &model_path,
        "--prompt",
        texts[0],
    ];
    let other = [&args[..], &["--patch", "one dog"]].concat();
    let message = refused(&mlx(home.path(), &other).output().unwrap(), 2);
    assert!(message.contains("prompts of as many"), "{message}");
    let same = [&args[..], &["--patch", texts[0]]].concat();
    let message = refused(&mlx(home.path(), &same).output().unwrap(), 2);
    assert!(message.contains("--against"), "{message}");
}

/// Compares the written edits, which add a difference of mean states, with the test's own
/// computation. Other methods must write other edits. A set with a single prompt must be refused.
#[test]
fn a_direction_is_what_lies_between_two_sets_of_prompts() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str| home.path().join(name).display().to_string();
    let sets = [["two cats", "one dog"], ["the sea", "six two"]];
    for (name, lines) in ["positive", "negative"].iter().zip(sets) {
        std::fs::write(file(name), format!("{}\n\n{}\n", lines[0], lines[1])).unwrap();
    }
    let model = tiny("llama");
    let (tokens, steerable) = (
        model.as_token_model().unwrap(),
        model.as_steerable().unwrap(),
    );
    let mean = |lines: [&str; 2], layer: usize| -> Vec<f32> {
        let last = lines.map(|line| {
            let prompt = Prompt::Tokens(tokens.encode(line, true).unwrap());
            let states = steerable
                .hook_states(&prompt, &[(layer, Hook::ResidPost)], &Interrupt::new())
                .unwrap();
            states[0].rows().last().unwrap().to_vec()
        });
        last[0]
            .iter()
            .zip(&last[1])
            .map(|(a, b)| (a + b) / 2.0)
            .collect()
    };
    let (model_path, output) = (tiny_path(), file("d.json"));
    let (positive, negative) = (file("positive"), file("negative"));
    let args = [
        "probe",
        "direction",
        "--backend",
        "cpu",
        "--model",
        &model_path,
    ];
    let sets_of = [
        "--positive",
        &positive,
        "--negative",
        &negative,
        "--layers",
        "0-1",
    ];
    let run = |more: &[&str]| {
        let all = [&args[..], &sets_of, &["-o", &output], more].concat();
        let out = stdout(&mlx(home.path(), &all).output().unwrap());
        let lines: Vec<Value> = out
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        (lines, Steering::read(Path::new(&output)).unwrap())
    };
    let (lines, steering) = run(&["--coefficient", "-2"]);
    assert_eq!(lines.len(), 2);
    for (layer, edit) in steering.edits().iter().enumerate() {
        let EditOperation::Add {
            vector,
            coefficient,
        } = &edit.operation
        else {
            panic!("{edit:?}");
        };
        let [a, b] = sets.map(|lines| mean(lines, layer));
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        assert!(max_difference(vector, &expected) < 1e-5);
        assert!((coefficient + 2.0).abs() < 1e-6);
        let norm = expected.iter().map(|v| v * v).sum::<f32>().sqrt();
        assert!((lines[layer]["norm"].as_f64().unwrap() - f64::from(norm)).abs() < 1e-4);
        assert_eq!(lines[layer]["separated"], json!(1.0));
    }
    for method in ["probe", "pca"] {
        let (lines, other) = run(&["--method", method, "--position", "mean"]);
        assert_eq!((lines.len(), other.edits().len()), (2, 2));
        assert_ne!(other, steering);
    }
    std::fs::write(file("positive"), "two cats\n").unwrap();
    let all = [&args[..], &sets_of, &["-o", &output]].concat();
    let message = refused(&mlx(home.path(), &all).output().unwrap(), 1);
    assert!(message.contains("1 positive and 2 negative"), "{message}");
}
