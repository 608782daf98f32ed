//! Compares residual streams, the output of each part, and attention weights with transformers
//! (`tools/golden/trace.py`). Also tests `mlx trace`.
#![cfg(feature = "probe")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, floats, ids, max_difference, order_bound, reference_bound, tiny};
use inference::{ErrorKind, Interrupt, Prompt};
use inference_probe::trace_store::TraceStore;
use inference_probe::window_store::{Tier, WindowStore};
use serde_json::Value;

fn goldens() -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(fixture("trace.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let models = all["models"].as_object().unwrap();
    models.iter().map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// The greatest difference, relative to the greatest absolute value.
fn relative(ours: &[f32], expected: &[f32]) -> f32 {
    let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    max_difference(ours, expected) / greatest
}

#[test]
fn states_and_parts_are_those_of_transformers() {
    let (mut models, mut parts) = (0, 0);
    for (name, golden) in goldens() {
        let model = tiny(&name);
        let inspector = model.as_attention_inspector().unwrap();
        let tokens = ids(&golden["tokens"]);
        let (prompt, last) = (Prompt::Tokens(tokens.clone()), tokens.len() - 1);
        let states = inspector
            .hidden_states(&prompt, &[last], &Interrupt::new())
            .unwrap();
        let trace = inspector
            .trace_residuals(&prompt, &[last], &Interrupt::new())
            .unwrap();
        let check = |what: &str, ours: &[f32], expected: &Value| {
            let difference = relative(ours, &floats(expected));
            assert!(
                difference < reference_bound(1e-4),
                "{name}, {what}: {difference}"
            );
        };
        check("embedding", &trace.embedding, &golden["embedding"]);
        let blocks = golden["blocks"].as_array().unwrap();
        assert_eq!(
            (states.blocks.len(), trace.layers.len()),
            (blocks.len(), blocks.len()),
            "{name}"
        );
        for (i, block) in blocks.iter().enumerate() {
            check(&format!("state {i}"), &states.blocks[i], block);
            check(&format!("residual {i}"), &trace.layers[i].residual, block);
        }
        for (i, between) in golden["between"]
            .as_array()
            .into_iter()
            .flatten()
            .enumerate()
        {
            let ours = trace.between(i).unwrap();
            check(&format!("between the parts of {i}"), &ours, between);
            parts += 1;
        }
        models += 1;
    }
    assert!(models > 25 && parts > 50, "{models} models, {parts} blocks");
}

#[test]
fn attention_weights_are_those_of_transformers() {
    let mut layers = 0;
    for (name, golden) in goldens() {
        let Some(expected) = golden["weights"].as_array() else {
            continue;
        };
        let model = tiny(&name);
        let inspector = model.as_attention_inspector().unwrap();
        let prompt = Prompt::Tokens(ids(&golden["tokens"]));
        let ours = inspector
            .attention_weights(&prompt, None, &Interrupt::new())
            .unwrap();
        assert_eq!(
            ours.layers,
            (0..expected.len()).collect::<Vec<_>>(),
            "{name}"
        );
        for (layer, (ours, expected)) in ours.weights.iter().zip(expected).enumerate() {
            let expected = expected.as_array().unwrap();
            assert_eq!(ours.len(), expected.len(), "{name}");
            for (head, (ours, expected)) in ours.iter().zip(expected).enumerate() {
                let difference = max_difference(ours, &floats(expected));
                assert!(
                    difference < order_bound(2e-5),
                    "{name}, layer {layer}, head {head}: {difference}"
                );
                let total: f32 = ours.iter().sum();
                assert!(total < 1.0 + 1e-5, "{name}: {total}");
            }
            layers += 1;
        }
    }
    assert!(layers > 60, "{layers}");
    let model = tiny("llama");
    let inspector = model.as_attention_inspector().unwrap();
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let one = inspector.attention_weights(&prompt, Some(&[1]), &Interrupt::new());
    assert_eq!(one.unwrap().layers, [1]);
    let none = inspector.attention_weights(&prompt, Some(&[99]), &Interrupt::new());
    assert_eq!(none.unwrap_err().kind(), ErrorKind::InvalidOption);
    let model = tiny("xlstm");
    let inspector = model.as_attention_inspector().unwrap();
    let none = inspector.attention_weights(&prompt, None, &Interrupt::new());
    assert_eq!(none.unwrap_err().kind(), ErrorKind::Unsupported);
}

/// The test covers every family, with quantized and recurrent models, at every position.
#[test]
fn parts_add_up_to_the_residual_stream() {
    if crate::alone::ran_elsewhere("trace::parts_add_up_to_the_residual_stream") {
        return;
    }
    for name in crate::common::tiny_names() {
        let model = tiny(&name);
        let inspector = model.as_attention_inspector().unwrap();
        let tokens: Vec<u32> = (3..23).collect();
        let positions: Vec<usize> = (0..tokens.len()).collect();
        let prompt = Prompt::Tokens(tokens);
        let trace = inspector
            .trace_residuals(&prompt, &positions, &Interrupt::new())
            .unwrap();
        let mut before = &trace.embedding;
        assert_eq!(before.len(), positions.len() * trace.hidden_size);
        for (i, layer) in trace.layers.iter().enumerate() {
            let added = layer.mixer.iter().zip(&layer.feed_forward);
            let sum: Vec<f32> = before
                .iter()
                .zip(added)
                .map(|(x, (m, f))| x + m + f)
                .collect();
            let difference = relative(&sum, &layer.residual);
            assert!(
                difference < order_bound(1e-5),
                "{name}, layer {i}: {difference}"
            );
            // A block with both parts adds both to the stream.
            let parts = [&layer.mixer, &layer.feed_forward];
            let works = |part: &&&Vec<f32>| part.iter().any(|x| x.abs() > 1e-6);
            // The parts of Gemma 3n change several streams together.
            let mamba = ["mamba", "falcon-mamba", "mamba2", "gemma3n"];
            let one = mamba.contains(&name.as_str()) || name.starts_with("nemotron-h");
            let count = parts.iter().filter(works).count();
            assert_eq!(count, if one { 1 } else { 2 }, "{name}, layer {i}");
            before = &layer.residual;
        }
        // The last residual, through the norm and the head, must give the model's logits.
        let last = trace.hidden_size * (positions.len() - 1);
        let logits = inspector.unembed(&before[last..]).unwrap();
        let actual = model
            .as_token_model()
            .unwrap()
            .logits(&prompt, false, &Interrupt::new())
            .unwrap();
        assert!(relative(&logits[0], &actual.logits) < 2e-3, "{name}");
    }
}

fn mlx(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(run: &Output) -> String {
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{stderr}");
    String::from_utf8(run.stdout.clone()).unwrap()
}

#[test]
fn the_program_shows_the_growth_of_an_answer() {
    let model = fixture("tiny").join("gemma2").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.trac").display().to_string();
    let shared = [
        "trace",
        "--model",
        &model,
        "--backend",
        "cpu",
        "--tokens",
        "5,6,7,8",
    ];
    let run = |more: &[&str]| mlx(&[&shared[..], more].concat());
    let report: Value =
        serde_json::from_str(&stdout(&run(&["--json", "--attention", "--save", &file]))).unwrap();
    let steps = report["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3);
    assert_eq!(steps[0]["layer"], Value::Null);
    // The answer is the most likely token after the last layer.
    assert_eq!(steps[2]["rank"], 1);
    assert_eq!(steps[2]["top"][0]["token"], report["answer"]["token"]);
    // The contributions of all parts must add up to the final logit.
    let of = |i: usize, name: &str| steps[i][name].as_f64().unwrap();
    let sum = of(0, "logit")
        + (1..3)
            .map(|i| of(i, "mixer_logit") + of(i, "feed_forward_logit"))
            .sum::<f64>();
    assert!((sum - of(2, "logit")).abs() < 1e-3, "{sum}");
    assert_eq!(
        report["attention"][1]["weights"][0]
            .as_array()
            .unwrap()
            .len(),
        4
    );
    let stored = TraceStore::read(Path::new(&file)).unwrap();
    assert_eq!((stored.tokens(), stored.blocks()), (4, 2));
    let [residual, ..] = stored.node(3, 2).unwrap();
    let norm = residual
        .iter()
        .map(|x| f64::from(*x).powi(2))
        .sum::<f64>()
        .sqrt();
    assert!((norm - of(2, "residual_norm")).abs() < 1e-4);

    let text = stdout(&run(&["--layers", "1", "--for", "Paris", "--top", "2"]));
    assert!(
        text.starts_with("answer ") && text.lines().count() == 3,
        "{text}"
    );
    let wrong = run(&["--layers", "0-7"]);
    let stderr = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("the model has 2"), "{stderr}");
}

/// The stored windows have the trace's vectors at the last positions. The stored outputs of both
/// parts must add up to the state after the layer.
#[test]
fn the_program_saves_the_ends_of_windows() {
    let name = "gemma2";
    let model = tiny(name);
    let count = model.info().num_layers;
    let tokens: Vec<u32> = (5..15).collect();
    let ends = [3, 7, 9];
    let trace = model
        .as_attention_inspector()
        .unwrap()
        .trace_residuals(&Prompt::Tokens(tokens), &ends, &Interrupt::new())
        .unwrap();
    let width = trace.hidden_size;
    let at = |all: &[f32], window: usize| all[window * width..(window + 1) * width].to_vec();
    let path = fixture("tiny").join(name).display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("windows").display().to_string();
    let shared = ["trace", "--model", &path, "--backend", "cpu", "--tokens"];
    let run = |more: &[&str]| {
        let prompt = ["5,6,7,8,9,10,11,12,13,14", "--save", &file];
        mlx(&[&shared[..], &prompt, more].concat())
    };
    let save = |more: &[&str]| {
        stdout(&run(&[&["--window", "4"], more].concat()));
        WindowStore::read(Path::new(&file)).unwrap()
    };
    let near = |ours: &[f32], expected: &[f32]| {
        let difference = relative(ours, expected);
        assert!(difference < order_bound(1e-5), "{difference}");
    };
    let last = &trace.layers[count - 1].residual;
    let boundaries = save(&[]);
    assert_eq!((boundaries.windows(), boundaries.tokens()), (3, 10));
    assert_eq!(boundaries.tier(), None);
    for window in 0..3 {
        near(
            boundaries.window(window).unwrap().residual,
            &at(last, window),
        );
    }
    let layers = format!("0-{}", count - 1);
    let tiers = [Tier::Residual, Tier::FeedForward, Tier::Full];
    for (number, tier) in ["1", "2", "3"].iter().zip(tiers) {
        let context = save(&["--save-layers", &layers, "--tier", number]);
        assert_eq!(
            (context.tier(), context.layers().len()),
            (Some(tier), count)
        );
        for window in 0..3 {
            let stored = context.window(window).unwrap();
            near(stored.residual, &at(&trace.embedding, window));
            let counts = (stored.feed_forward.len(), stored.mixer.len());
            let full = if tier == Tier::Full { count } else { 0 };
            let half = if tier == Tier::Residual { 0 } else { count };
            assert_eq!(counts, (half, full));
            for (layer, part) in stored.feed_forward.iter().enumerate() {
                near(part, &at(&trace.layers[layer].feed_forward, window));
            }
            for (layer, part) in stored.mixer.iter().enumerate() {
                near(part, &at(&trace.layers[layer].mixer, window));
            }
            match context.reconstruct(window) {
                Some(sum) => assert!(relative(&sum, &at(last, window)) < 1e-4),
                None => assert!(tier != Tier::Full),
            }
        }
    }
    // The state before a layer is the state after the preceding layer.
    let later = save(&["--save-layers", "1"]);
    near(
        later.window(1).unwrap().residual,
        &at(&trace.layers[0].residual, 1),
    );
    for (wrong, says) in [
        (&["--window", "0"][..], "0 is not in"),
        (&["--save-layers", "0"], "--window"),
        (&["--window", "4", "--tier", "2"], "--save-layers"),
        (&["--window", "4", "--save-layers", "0", "--tier", "4"], "4"),
        (
            &["--window", "4", "--save-layers", "7"],
            "--save-layers names layer 7",
        ),
        (
            &["--window", "4", "--save-layers", "e"],
            "not the embedding",
        ),
    ] {
        let refused = run(wrong);
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{wrong:?}: {stderr}");
        assert!(stderr.contains(says), "{wrong:?}: {stderr}");
    }
}

#[test]
fn the_program_draws_the_growth_of_an_answer() {
    let path = fixture("tiny").join("llama").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("growth.svg");
    let shared = ["trace", "--model", &path, "--backend", "cpu", "--json"];
    let plot = ["--tokens", "5,6,7", "--plot", file.to_str().unwrap()];
    let report = stdout(&mlx(&[&shared[..], &plot].concat()));
    let report: Value = serde_json::from_str(&report).unwrap();
    let svg = std::fs::read_to_string(&file).unwrap();
    for text in ["logit", "added: mixer", "added: mlp", "</svg>"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    // The curve has one point per layer, and no point for the embedding.
    let layers = report["steps"].as_array().unwrap().len() - 1;
    let curves: Vec<usize> = (svg.split("<path d=\"").skip(1))
        .map(|rest| rest.split('"').next().unwrap())
        .map(|path| path.matches(['M', 'L']).count())
        .collect();
    assert_eq!(curves, [layers; 3]);
}

#[test]
fn logits_as_numpy_reads_them() {
    let model = fixture("tiny").join("llama").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("l.npy");
    let name = file.display().to_string();
    let run = mlx(&[
        "logits",
        "--model",
        &model,
        "--backend",
        "cpu",
        "--tokens",
        "5,6,7",
        "--all",
        "--output",
        &name,
    ]);
    assert_eq!(stdout(&run), "");
    let bytes = std::fs::read(&file).unwrap();
    let tiny_model = tiny("llama");
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let expected = tiny_model
        .as_token_model()
        .unwrap()
        .logits(&prompt, true, &Interrupt::new())
        .unwrap();
    assert_eq!(&bytes[..6], b"\x93NUMPY");
    let numbers = &bytes[bytes.len() - 4 * expected.logits.len()..];
    let (chunks, _) = numbers.as_chunks::<4>();
    let ours: Vec<f32> = chunks.iter().map(|c| f32::from_le_bytes(*c)).collect();
    assert!(max_difference(&ours, &expected.logits) < 1e-6);
    let shape = format!("'shape': ({}, {})", expected.shape[0], expected.shape[1]);
    assert!(String::from_utf8_lossy(&bytes[..128]).contains(&shape));
}

/// Compares the inputs of the down projections with numpy (`tools/golden/activations.py`).
#[test]
fn activations_are_those_of_numpy() {
    let text = std::fs::read_to_string(fixture("activations.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let mut layers = 0;
    for (name, golden) in all["models"].as_object().unwrap() {
        let model = tiny(name);
        let inspector = model.as_attention_inspector().unwrap();
        let prompt = Prompt::Tokens(ids(&golden["tokens"]));
        let positions: Vec<usize> = (ids(&golden["positions"]).iter())
            .map(|p| *p as usize)
            .collect();
        let seen = |positions: &[usize]| {
            inspector.feed_forward_activations(&prompt, positions, &Interrupt::new())
        };
        let ours = seen(&positions).unwrap();
        let expected = golden["layers"].as_array().unwrap();
        assert_eq!(ours.layers.len(), expected.len());
        for (ours, expected) in ours.layers.iter().zip(expected) {
            let difference = max_difference(ours, &floats(expected));
            assert!(difference < order_bound(1e-5), "{name}: {difference}");
            layers += 1;
        }
        let beyond = seen(&[999]).unwrap_err();
        assert_eq!(beyond.kind(), ErrorKind::InvalidOption);
    }
    assert!(layers >= 5, "{layers}");
    // In a layer that computes only some features, the other activations are 0. A layer with
    // experts has no activation list.
    let prompt = Prompt::Tokens((3..20).collect());
    let seen = |model: &dyn inference::TextModel| {
        let inspector = model.as_attention_inspector().unwrap();
        let actual = inspector.feed_forward_activations(&prompt, &[4, 16], &Interrupt::new());
        actual.unwrap().layers
    };
    let options = inference::LoadOptions::new().with_backend("cpu");
    let options = options.with_feed_forward("1=sparse:5,2=attention-only".parse().unwrap());
    let few = inference::load_model(fixture("tiny/llama"), &options).unwrap();
    let (few, all) = (seen(few.as_ref()), seen(tiny("llama").as_ref()));
    let worth = |layer: &[f32]| layer.iter().filter(|x| **x != 0.0).count();
    assert_eq!(few.iter().map(Vec::len).collect::<Vec<_>>(), [128, 128, 0]);
    assert!(relative(&few[0], &all[0]) < 1e-6);
    assert_eq!((worth(&few[1]), worth(&all[1])), (10, 128));
    assert!(seen(tiny("mixtral").as_ref()).iter().all(Vec::is_empty));
}

#[test]
fn the_program_shows_activations() {
    let dir = fixture("tiny/llama").display().to_string();
    let run = |more: &[&str]| {
        let args = [
            "trace",
            "--model",
            &dir,
            "--backend",
            "cpu",
            "--tokens",
            "5,6,7",
        ];
        crate::program::stdout(&crate::program::output(&[&args[..], more].concat()))
    };
    let report = run(&["--activations", "3", "--layers", "1-2", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let shown = report["activations"].as_array().unwrap();
    assert_eq!(shown.len(), 2);
    let model = tiny("llama");
    let inspector = model.as_attention_inspector().unwrap();
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let all = inspector.feed_forward_activations(&prompt, &[2], &Interrupt::new());
    let all = all.unwrap().layers;
    for layer in shown {
        let expected = &all[layer["layer"].as_u64().unwrap() as usize];
        assert_eq!(layer["features"], expected.len());
        let top = layer["top"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        for feature in top {
            let at = feature["feature"].as_u64().unwrap() as usize;
            assert!((feature["activation"].as_f64().unwrap() as f32 - expected[at]).abs() < 1e-6);
            let greater = expected
                .iter()
                .filter(|x| x.abs() > expected[at].abs())
                .count();
            assert!(greater < 3, "{greater} are worth more");
        }
    }
    assert!(!run(&[]).contains("features"));
    assert!(run(&["--activations", "2"]).contains("layer   0 features"));
}
