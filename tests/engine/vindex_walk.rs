//! Compares walking layers with numpy (`tools/golden/feed_forward.py`), the dense pass and the
//! strategy `sparse`. A walking layer reads features from a vindex's mapped files. The tests cover
//! the kernels, MLX's operations, and damaged files.
#![cfg(feature = "probe")]

use std::path::{Path, PathBuf};

use crate::common::{fixture, floats, greedy, ids, max_difference, order_bound, tiny, tiny_names};
use crate::program::{mlx, output, refused, stdout};
use inference::{ErrorKind, Interrupt, LoadOptions, Precision, Prompt, Result, TextModel};
use inference_probe::vindex::{Vindex, Writer};
use serde_json::Value;

fn model(name: &str) -> String {
    fixture("tiny").join(name).display().to_string()
}

/// Writes the features of a tiny model to `dir`, without the top tokens of each feature.
fn build(name: &str, dir: &Path) -> std::result::Result<PathBuf, String> {
    let path = dir.join(name);
    let (model_path, to) = (model(name), path.display().to_string());
    let mut command = mlx(dir, &["vindex", "build", "--model", &model_path, "-o", &to]);
    let done = (command.args(["--backend", "cpu", "--down-top-k", "0"]))
        .output()
        .unwrap();
    match done.status.code() {
        Some(0) => Ok(path),
        _ => Err(crate::program::text(&done.stderr)),
    }
}

fn options(plan: &str, vindex: &Path) -> LoadOptions {
    LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_feed_forward(plan.parse().unwrap())
        .with_vindex(vindex.to_owned())
}

fn walking(name: &str, plan: &str, vindex: &Path) -> Result<Box<dyn TextModel>> {
    inference::load_model(fixture("tiny").join(name), &options(plan, vindex))
}

fn logits(model: &dyn TextModel, tokens: &[u32]) -> Vec<f32> {
    let prompt = Prompt::Tokens(tokens.to_vec());
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

/// The greatest difference, relative to the greatest absolute value.
fn relative(ours: &[f32], expected: &[f32]) -> f32 {
    let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    max_difference(ours, expected) / greatest
}

#[test]
fn walks_are_those_of_numpy() {
    let text = std::fs::read_to_string(fixture("feed_forward.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut plans = 0;
    for (name, case) in golden["models"].as_object().unwrap() {
        let (tokens, vindex) = (ids(&case["tokens"]), build(name, dir.path()).unwrap());
        for (plan, expected) in case["plans"].as_object().unwrap() {
            if !plan.contains("sparse") {
                continue;
            }
            let plan = plan.replace("sparse", "walk");
            let ours = logits(walking(name, &plan, &vindex).unwrap().as_ref(), &tokens);
            let difference = max_difference(&ours, &floats(expected));
            assert!(difference < 1e-4, "{name}, {plan}: {difference}");
            plans += 1;
        }
    }
    assert!(plans >= 8, "only {plans} plans were compared");
}

/// The test covers all families and kinds of weights.
#[test]
fn all_features_are_the_dense_pass_and_few_are_sparse() {
    if crate::alone::ran_elsewhere(
        "vindex_walk::all_features_are_the_dense_pass_and_few_are_sparse",
    ) {
        return;
    }
    let tokens: Vec<u32> = (3..23).collect();
    let dir = tempfile::tempdir().unwrap();
    let (mut compared, mut without) = (0, 0);
    for name in tiny_names() {
        let vindex = match build(&name, dir.path()) {
            Ok(vindex) => vindex,
            // Experts, and blocks without a feed-forward part, have no features.
            Err(message) => {
                assert!(message.contains("cannot be shown"), "{name}: {message}");
                without += 1;
                continue;
            }
        };
        let dense = tiny(&name);
        let expected = logits(dense.as_ref(), &tokens);
        let Ok(all) = walking(&name, "walk", &vindex) else {
            let sparse = options("sparse:3", &vindex).with_vindex(None);
            let sparse = inference::load_model(fixture("tiny").join(&name), &sparse);
            assert!(sparse.is_err(), "{name} can be sparse and cannot walk");
            without += 1;
            continue;
        };
        // The kernels round inputs of quantized multiplications, but not inputs of multiplications
        // with features.
        let bound = match dense.info().quantization_bits {
            Some(_) => 2e-2,
            None => order_bound(1e-5),
        };
        let difference = relative(&logits(all.as_ref(), &tokens), &expected);
        assert!(difference < bound, "{name}: {difference}");
        if dense.info().quantization_bits.is_none() {
            let few = walking(&name, "walk:5", &vindex).unwrap();
            let sparse = options("sparse:5", &vindex).with_vindex(None);
            let sparse = inference::load_model(fixture("tiny").join(&name), &sparse).unwrap();
            let (few, sparse) = (
                logits(few.as_ref(), &tokens),
                logits(sparse.as_ref(), &tokens),
            );
            assert!(relative(&few, &sparse) < 1e-5, "{name}");
            assert!(relative(&few, &expected) > 1e-3, "{name}: few are all");
        }
        compared += 1;
    }
    assert!(compared > 30 && without > 8, "{compared}, {without}");
}

/// One pass over prompt and reply must equal a run token by token with a KV cache.
#[test]
fn steps_with_caches_are_one_pass() {
    let dir = tempfile::tempdir().unwrap();
    for (name, plan) in [("llama", "0=walk:7,2=walk"), ("gpt2", "walk:30")] {
        let vindex = build(name, dir.path()).unwrap();
        let model = walking(name, plan, &vindex).unwrap();
        let prompt: Vec<u32> = (7..29).collect();
        for step in [512, 5] {
            let options = greedy(12)
                .with_cache_prompt(false)
                .with_prefill_step_size(step);
            let output = model
                .generate(&Prompt::Tokens(prompt.clone()), &options)
                .unwrap()
                .collect_output()
                .unwrap();
            assert!(!output.tokens.is_empty());
            let mut all = prompt.clone();
            for token in output.tokens {
                let one_pass = logits(model.as_ref(), &all);
                let best = one_pass.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
                let away = best - one_pass[token as usize];
                assert!(away < 1e-4, "{name}, steps of {step}: {away}");
                all.push(token);
            }
        }
    }
}

#[test]
fn the_program_walks_wherever_it_loads_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build("llama", dir.path()).unwrap().display().to_string();
    let file = dir.path().join("text.txt");
    std::fs::write(&file, "the cat sat on the mat and the dog sat on the log").unwrap();
    let file = file.display().to_string();
    let llama = model("llama");
    let run = |command: &[&str], more: &[&str]| {
        let base = ["--model", &llama, "--backend", "cpu"];
        output(&[command, &base[..], more].concat())
    };
    let walk = |plan: &'static str| ["--ffn", plan, "--vindex", &vindex].map(str::to_owned);
    for command in [
        &["generate", "--tokens", "5,6,7,8", "-n", "8", "--ignore-eos"][..],
        &["trace", "--tokens", "5,6,7,8"],
    ] {
        let with = |plan| {
            let flags = walk(plan);
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            stdout(&run(command, &flags))
        };
        let plain = stdout(&run(command, &[]));
        assert_ne!(plain, with("walk:2"), "{command:?}");
        // The program prints few digits, so the output must be equal.
        assert_eq!(plain, with("0-1=walk"), "{command:?}");
    }
    let probabilities = |plan| {
        let flags = walk(plan);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let out = run(
            &["classify", "--text", "--input", &file, "--top", "3"],
            &flags,
        );
        let line: Value = serde_json::from_str(&stdout(&out)).unwrap();
        let top = line["top"].as_array().unwrap().iter();
        top.map(|t| t["probability"].as_f64().unwrap() as f32)
            .collect::<Vec<_>>()
    };
    let all = probabilities("walk");
    assert!(max_difference(&all, &probabilities("1=walk")) < 1e-5);
    assert!(max_difference(&all, &probabilities("walk:1")) > 1e-3);
    let perplexity = |plan: &'static str| -> f64 {
        let flags = walk(plan);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let out = run(&["perplexity", "--file", &file], &flags);
        let report: Value = serde_json::from_str(&stdout(&out)).unwrap();
        report["perplexity"].as_f64().unwrap()
    };
    assert!((perplexity("walk") - perplexity("0=walk:64")).abs() < 1e-4);
    assert!((perplexity("walk") - perplexity("walk:1")).abs() > 1e-2);

    let tokens = ["generate", "--tokens", "5,6,7,8"];
    let wrong = refused(&run(&tokens, &["--ffn", "walk:3"]), 2);
    assert!(wrong.contains("needs vindex"), "{wrong}");
    let wrong = refused(
        &run(&tokens, &["--ffn", "sparse:3", "--vindex", &vindex]),
        2,
    );
    assert!(wrong.contains("no layer of feed_forward walks"), "{wrong}");
    refused(&run(&tokens, &["--vindex", &vindex]), 2);
    let none = dir.path().join("none").display().to_string();
    let wrong = refused(&run(&tokens, &["--ffn", "walk", "--vindex", &none]), 1);
    assert!(wrong.contains("index.json"), "{wrong}");
}

/// With the kernels off, MLX's operations must compute equal results.
#[test]
fn mlx_walks_as_the_kernels_do() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama", "gpt2"] {
        let vindex = build(name, dir.path()).unwrap().display().to_string();
        let model_path = model(name);
        let run = |kernels: Option<&str>, tokens: &str| -> Vec<f32> {
            let mut command = mlx(
                dir.path(),
                &["logits", "--model", &model_path, "--backend", "cpu"],
            );
            command.args(["--precision", "exact"]);
            command.args(["--tokens", tokens, "--ffn", "walk:9", "--vindex", &vindex]);
            if let Some(kernels) = kernels {
                command.env("MLX_CPU_KERNELS", kernels);
            }
            let all: Value = serde_json::from_str(&stdout(&command.output().unwrap())).unwrap();
            floats(&all["logits"])
        };
        for tokens in ["5", "5,6,7,8,9"] {
            let difference = relative(&run(None, tokens), &run(Some("off"), tokens));
            assert!(difference < 1e-5, "{name} {tokens}: {difference}");
        }
    }
}

fn copied(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn files_that_are_damaged_or_of_another_model_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let gpt2 = build("gpt2", dir.path()).unwrap();
    walking("gpt2", "walk", &gpt2).unwrap();
    let mut files = 0;
    for file in std::fs::read_dir(&gpt2).unwrap() {
        let name = file.unwrap().file_name();
        let shown = name.display().to_string();
        let original = std::fs::read(gpt2.join(&name)).unwrap();
        let n = original.len();
        // Walking reads only these files. It takes gate rows, for example, from the model's own
        // weights.
        let read = matches!(&*shown, "index.json" | "down_features.bin" | "biases.bin");
        let fails = |case: &str, bytes: Option<&[u8]>| {
            let other = dir.path().join("damaged");
            copied(&gpt2, &other);
            match bytes {
                Some(bytes) => std::fs::write(other.join(&name), bytes).unwrap(),
                None => std::fs::remove_file(other.join(&name)).unwrap(),
            }
            let error = walking("gpt2", "walk:3", &other).err();
            std::fs::remove_dir_all(&other).unwrap();
            let error = error.unwrap_or_else(|| panic!("{shown}, {case}"));
            assert_eq!(error.kind(), ErrorKind::InvalidModel, "{shown}: {error}");
        };
        fails("is gone", None);
        fails("is longer", Some(&[&original[..], &[0]].concat()));
        if n > 0 {
            fails("is empty", Some(&[]));
            fails("is cut", Some(&original[..n - 1]));
        }
        for at in [0, 1, n / 3, n / 2, n.saturating_sub(2), n.saturating_sub(1)] {
            if read && at < n {
                let mut bytes = original.clone();
                bytes[at] ^= 0x41;
                fails(&format!("byte {at}"), Some(&bytes));
                files += 1;
            }
        }
    }
    assert_eq!(files, 18);
    // The damaged row belongs to up matrices of a model with gates.
    let llama = build("llama", dir.path()).unwrap();
    let up = llama.join("up_features.bin");
    let mut bytes = std::fs::read(&up).unwrap();
    bytes[9000] ^= 1; // in layer 1, whose part begins at 8192
    std::fs::write(&up, &bytes).unwrap();
    let error = walking("llama", "walk", &llama).err().unwrap().to_string();
    assert!(error.contains("layer 1 has another hash"), "{error}");
    // Layers that do not walk do not read the damaged file.
    walking("llama", "0=walk,2=walk:3", &llama).unwrap();

    for (name, plan) in [("llama-yarn", "walk"), ("gpt2", "0=walk:3")] {
        let error = walking(name, plan, &llama).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{name}: {error}");
        assert!(error.to_string().contains("of the model llama"), "{error}");
    }
    // A complete vindex with another number of features must fail at each size check.
    let from = Vindex::open(&gpt2).unwrap();
    let narrow = dir.path().join("narrow");
    let mut writer = Writer::create(&narrow, from.about().clone(), 0).unwrap();
    for i in 0..from.layers().len() {
        let (mut layer, width) = (from.layer(i).unwrap(), from.about().hidden_size);
        layer.gate.truncate(5 * width);
        layer.down.truncate(5 * width);
        layer.biases.as_mut().unwrap().gate.truncate(5);
        writer.push(&layer, &from.tokens(i).unwrap()[..5]).unwrap();
    }
    writer.finish().unwrap();
    for plan in ["walk", "walk:3", "walk:90"] {
        let model = walking("gpt2", plan, &narrow).unwrap();
        let tokens = model.as_token_model().unwrap();
        let error = tokens
            .logits(&Prompt::Tokens(vec![1, 2]), false, &Interrupt::new())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Engine, "{plan}: {error}");
    }
    let error = walking("llama", "3-=walk", &llama).err().unwrap();
    assert!(error.to_string().contains("the model has 3"), "{error}");
    let adapter = options("walk", &llama).with_adapter_path("somewhere");
    let error = inference::load_model(fixture("tiny/llama"), &adapter).err();
    assert_eq!(error.unwrap().kind(), ErrorKind::InvalidOption);
}

/// A cache computed with one plan is wrong for another plan, so plans must not share caches.
#[test]
fn prompt_caches_belong_to_their_plan() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build("llama", dir.path()).unwrap();
    let file = dir.path().join("kept.safetensors");
    let walk = walking("llama", "walk:9", &vindex).unwrap();
    let prompt = Prompt::Tokens((5..30).collect());
    (walk.as_prompt_cache().unwrap())
        .save_prompt_cache(&prompt, &file, &Interrupt::new())
        .unwrap();
    for (plan, fits) in [("walk:9", true), ("walk:8", false)] {
        let model = walking("llama", plan, &vindex).unwrap();
        let caches = model.as_prompt_cache().unwrap();
        assert_eq!(caches.load_prompt_cache(&file).is_ok(), fits, "{plan}");
    }
    assert!(
        (tiny("llama").as_prompt_cache().unwrap())
            .load_prompt_cache(&file)
            .is_err()
    );
}

/// If a file is truncated while a model reads it, requests end with an error that names the file.
/// The process must survive.
#[test]
fn a_file_that_shrinks_is_an_error_and_no_signal() {
    if !mlx_rs_core::cpu::enabled() {
        return; // MLX's operations use a copy, which the truncation does not affect.
    }
    let dir = tempfile::tempdir().unwrap();
    let vindex = build("llama", dir.path()).unwrap();
    let model = walking("llama", "walk:3", &vindex).unwrap();
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let mut stream = model
        .generate(&prompt, &greedy(200).with_ignore_eos(true))
        .unwrap();
    stream.next().unwrap().unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(vindex.join("down_features.bin"))
        .unwrap();
    file.set_len(0).unwrap();
    // The stream may contain a few tokens from before the truncation.
    let error = stream.find_map(std::result::Result::err).unwrap();
    assert_eq!(error.kind(), ErrorKind::Engine, "{error:#}");
    let tokens = model.as_token_model().unwrap();
    let error = tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap_err();
    let said = format!("{error:#}");
    assert!(
        said.contains("down_features.bin was truncated while it was mapped"),
        "{said}"
    );
    drop((stream, model));
    assert!(walking("llama", "walk:3", &vindex).is_err());
    assert!(!logits(tiny("llama").as_ref(), &[5, 6]).is_empty());
}
