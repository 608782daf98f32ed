//! Compares feed-forward strategies per layer with numpy (`tools/golden/feed_forward.py`), with the
//! dense pass and with their definitions, on every family. Also tests the program's flag `--ffn`.

use crate::common::{fixture, floats, greedy, ids, max_difference, order_bound, tiny, tiny_names};
use crate::program::{output, refused, stdout};
use inference::{
    ErrorKind, FeedForwardPlan, Interrupt, LoadOptions, Precision, Prompt, ResidualTrace, Result,
    TextModel,
};
use serde_json::Value;

fn routed(name: &str, plan: &str) -> Result<Box<dyn TextModel>> {
    let plan: FeedForwardPlan = plan.parse()?;
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_feed_forward(plan);
    inference::load_model(fixture("tiny").join(name), &options)
}

fn logits(model: &dyn TextModel, tokens: &[u32]) -> Vec<f32> {
    let prompt = Prompt::Tokens(tokens.to_vec());
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

fn trace(model: &dyn TextModel, tokens: &[u32]) -> ResidualTrace {
    let positions: Vec<usize> = (0..tokens.len()).collect();
    let prompt = Prompt::Tokens(tokens.to_vec());
    let inspector = model.as_attention_inspector().unwrap();
    inspector
        .trace_residuals(&prompt, &positions, &Interrupt::new())
        .unwrap()
}

/// The greatest difference, relative to the greatest absolute value.
fn relative(ours: &[f32], expected: &[f32]) -> f32 {
    let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    max_difference(ours, expected) / greatest
}

/// Whether a tiny model has layers to which a strategy cannot apply: layers with experts, with a
/// factor in the feed-forward part, or without a feed-forward part.
fn without_features(name: &str) -> bool {
    let Ok(text) = std::fs::read(fixture("tiny").join(name).join("config.json")) else {
        return false; // the GGUF fixtures have no such layers
    };
    let config = inference_formats::python_json::from_slice(&text).unwrap();
    let experts = |key: &str| {
        let all = [config.get(key), config["text_config"].get(key)];
        all.iter()
            .flatten()
            .any(|n| n.as_u64().is_some_and(|n| n > 0))
    };
    let other = [
        "mamba",
        "falcon_mamba",
        "mamba2",
        "falcon_h1",
        "nemotron_h",
        "dbrx",
        "gemma3n_text",
        "rwkv7",
    ];
    let fields = [
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
    ];
    fields.into_iter().any(experts) || other.iter().any(|kind| config["model_type"] == *kind)
}

#[test]
fn logits_are_those_of_numpy() {
    let text = std::fs::read_to_string(fixture("feed_forward.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let mut plans = 0;
    for (name, case) in golden["models"].as_object().unwrap() {
        let tokens = ids(&case["tokens"]);
        let dense = logits(tiny(name).as_ref(), &tokens);
        for (plan, expected) in case["plans"].as_object().unwrap() {
            let expected = floats(expected);
            let ours = logits(routed(name, plan).unwrap().as_ref(), &tokens);
            let difference = max_difference(&ours, &expected);
            assert!(difference < 1e-4, "{name}, {plan}: {difference}");
            let away = max_difference(&dense, &expected);
            assert!(away > 1e-2, "{name}, {plan} is the dense pass: {away}");
            plans += 1;
        }
    }
    assert!(plans >= 11, "only {plans} plans were compared");
}

#[test]
fn all_features_are_the_dense_pass_and_few_are_not() {
    if crate::alone::ran_elsewhere("feed_forward::all_features_are_the_dense_pass_and_few_are_not")
    {
        return;
    }
    let tokens: Vec<u32> = (3..23).collect();
    let (mut compared, mut without) = (0, 0);
    for name in tiny_names() {
        if without_features(&name) {
            let error = routed(&name, "sparse:3").err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
            assert!(error.to_string().contains("sparse:3"), "{name}: {error}");
            without += 1;
            continue;
        }
        let dense = tiny(&name);
        // The kernels quantize inputs of quantized multiplications, and round in a different order.
        let bound = match dense.info().quantization_bits {
            Some(_) => 2e-3,
            None => order_bound(1e-5),
        };
        let expected = logits(dense.as_ref(), &tokens);
        let all = logits(routed(&name, "sparse:1000000").unwrap().as_ref(), &tokens);
        let difference = relative(&all, &expected);
        assert!(difference < bound, "{name}: {difference}");
        let few = logits(routed(&name, "sparse:2").unwrap().as_ref(), &tokens);
        let difference = relative(&few, &expected);
        assert!(
            difference > 1e-3,
            "{name}: two features are all: {difference}"
        );
        compared += 1;
    }
    assert!(compared > 30 && without > 8, "{compared}, {without}");
}

#[test]
fn what_is_left_out_adds_nothing_and_gains_scale() {
    if crate::alone::ran_elsewhere("feed_forward::what_is_left_out_adds_nothing_and_gains_scale") {
        return;
    }
    let tokens: Vec<u32> = (3..15).collect();
    let (mut left_out, mut scaled) = (0, 0);
    for name in tiny_names() {
        // A plan may name only layers with exactly one feed-forward part, which the block computes
        // separately.
        if ["gemma4-large", "gemma3n", "rwkv7"].contains(&name.as_str()) {
            let error = routed(&name, "attention-only").err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
            continue;
        }
        let model = routed(&name, "0=attention-only").unwrap();
        let (ours, dense) = (
            trace(model.as_ref(), &tokens),
            trace(tiny(&name).as_ref(), &tokens),
        );
        let [first, dense_layer] = [&ours, &dense].map(|t| &t.layers[0]);
        let bound = match model.info().quantization_bits {
            Some(_) => 2e-3,
            None => order_bound(1e-5),
        };
        assert!(relative(&first.mixer, &dense_layer.mixer) < bound, "{name}");
        // The first block of Nemotron-H is only a mixer. All blocks of Mamba are only mixers.
        let mamba = ["mamba", "falcon-mamba", "mamba2"];
        let mixer_alone = mamba.contains(&name.as_str()) || name.starts_with("nemotron-h");
        if !name.starts_with("gemma4") && !mixer_alone {
            assert!(first.feed_forward.iter().all(|x| *x == 0.0), "{name}");
            assert!(dense_layer.feed_forward.iter().any(|x| *x != 0.0), "{name}");
            left_out += 1;
        }

        let model = routed(&name, "1-=gain:-0.5").unwrap();
        let ours = trace(model.as_ref(), &tokens);
        let mut before = &ours.layers[0].residual;
        assert!(
            relative(before, &dense.layers[0].residual) < bound,
            "{name}"
        );
        for layer in &ours.layers[1..] {
            let expected: Vec<f32> = before.iter().map(|x| -0.5 * x).collect();
            assert!(relative(&layer.residual, &expected) < 1e-6, "{name}");
            assert!(layer.mixer.iter().all(|x| *x == 0.0), "{name}");
            before = &layer.residual;
            scaled += 1;
        }
    }
    assert!(left_out > 40 && scaled > 60, "{left_out}, {scaled}");
}

/// A token's result must not depend on how the sequence is divided: prompt and reply in one pass,
/// or token by token with a KV cache.
#[test]
fn steps_with_caches_are_one_pass() {
    let plans = [
        ("llama", "0=sparse:7,1=gain:0.9,2=attention-only"),
        ("gpt2", "0=gain:1.1,1=sparse:30"),
        ("gemma3-text", "sparse:5"),
        ("qwen3-q4", "0=gain:1.05,1-=sparse:9"),
        ("gemma4-small", "0=gain:1.1,2-=sparse:6"),
        ("xlstm", "0=gain:1.2,1=sparse:11"),
        ("lfm2", "0=gain:1.2,1=attention-only"),
    ];
    for (name, plan) in plans {
        let model = routed(name, plan).unwrap();
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
            let mut all = prompt.clone();
            for token in output.tokens {
                let one_pass = logits(model.as_ref(), &all);
                let expected = one_pass[token as usize];
                let best = one_pass.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
                // Two tokens may differ only if their logits are equal up to rounding.
                let close = if name.contains("q4") { 2e-2 } else { 1e-4 };
                assert!(
                    best - expected < close,
                    "{name}, {plan}, steps of {step}: {best} {expected}"
                );
                all.push(token);
            }
        }
    }
}

#[test]
fn layers_that_are_not_there_are_refused() {
    for (plan, named) in [
        ("0-3=attention-only", "layers 0-3; the model has 3"),
        ("3-=dense", "layers 3-; the model has 3"),
        ("7=sparse:1", "layers 7; the model has 3"),
    ] {
        let error = routed("llama", plan).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{plan}");
        assert!(error.to_string().contains(named), "{plan}: {error}");
    }
    let error = routed("mamba2", "0=sparse:1").err().unwrap().to_string();
    assert!(error.contains("has no feed-forward part"), "{error}");
    let error = routed("mixtral", "0=sparse:1").err().unwrap().to_string();
    assert!(error.contains("several experts"), "{error}");
}

/// A cache computed with one plan is wrong for another plan, so plans must not share caches.
#[test]
fn prompt_caches_belong_to_their_plan() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kept.safetensors");
    let prompt = Prompt::Tokens((5..30).collect());
    let save = |model: &dyn TextModel| {
        let caches = model.as_prompt_cache().unwrap();
        caches
            .save_prompt_cache(&prompt, &file, &Interrupt::new())
            .unwrap();
    };
    let load = |plan: &str| {
        let model = routed("llama", plan).unwrap();
        let caches = model.as_prompt_cache().unwrap();
        caches.load_prompt_cache(&file).map(|_| ())
    };
    save(routed("llama", "1-=sparse:9").unwrap().as_ref());
    load("1-=sparse:9").unwrap();
    for other in ["dense", "1-=sparse:8", "0=attention-only"] {
        assert!(load(other).is_err(), "{other}");
    }
    save(tiny("llama").as_ref());
    load("0-2=dense").unwrap();
    assert!(load("sparse:64").is_err());
}

#[test]
fn the_program_takes_a_plan_wherever_it_loads_a_model() {
    let model = fixture("tiny").join("llama").display().to_string();
    let base = ["--model", &model, "--backend", "cpu"];
    let run = |command: &str, more: &[&str]| {
        let all: Vec<&str> = [&[command], &base[..], more].concat();
        output(&all)
    };
    let tokens = ["--tokens", "5,6,7,8"];
    let of = |command: &str, more: &[&str]| {
        let plain = stdout(&run(command, more));
        let few = stdout(&run(command, &[more, &["--ffn", "0-=sparse:2"]].concat()));
        let all = stdout(&run(command, &[more, &["--ffn", "0-2=dense"]].concat()));
        assert_ne!(plain, few, "{command}");
        assert_eq!(plain, all, "{command}");
    };
    of(
        "generate",
        &[&tokens[..], &["-n", "8", "--ignore-eos"]].concat(),
    );
    of("logits", &tokens);
    of("trace", &tokens);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "the cat sat on the mat and the dog sat on the log",
    )
    .unwrap();
    let file = file.path().display().to_string();
    of("classify", &["--text", "--input", &file, "--top", "3"]);
    let perplexity = |plan: &str| -> f64 {
        let out = run("perplexity", &["--file", &file, "--ffn", plan]);
        let report: Value = serde_json::from_str(&stdout(&out)).unwrap();
        report["perplexity"].as_f64().unwrap()
    };
    assert!((perplexity("dense") - perplexity("sparse:64")).abs() < 1e-3);
    assert!((perplexity("dense") - perplexity("attention-only")).abs() > 1e-2);

    let wrong = refused(
        &run("generate", &[&tokens[..], &["--ffn", "0=nothing"]].concat()),
        2,
    );
    assert!(wrong.contains("not one of dense, sparse:K"), "{wrong}");
    let wrong = refused(
        &run("generate", &[&tokens[..], &["--ffn", "9=dense"]].concat()),
        1,
    );
    assert!(wrong.contains("layers 9; the model has 3"), "{wrong}");
}

/// Writes a low-rank adapter for the gates of the tiny Llama. The adapter is large enough to change
/// which features a strategy chooses.
fn gates(dir: &std::path::Path) {
    let config = r#"{"fine_tune_type": "lora", "num_layers": 3,
        "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.gate_proj"]}}"#;
    std::fs::write(dir.join("adapter_config.json"), config).unwrap();
    let numbers = |n: usize, salt: usize| -> Vec<u8> {
        let all = (0..n).map(|i| (((i + salt) * 7919 % 101) as f32 - 50.0) / 100.0);
        all.flat_map(f32::to_le_bytes).collect()
    };
    let mut tensors = Vec::new();
    for layer in 0..3 {
        for (end, shape) in [("lora_a", vec![32, 2]), ("lora_b", vec![2, 64])] {
            let name = format!("model.layers.{layer}.mlp.gate_proj.{end}");
            tensors.push((
                name,
                shape.clone(),
                numbers(shape[0] * shape[1], tensors.len()),
            ));
        }
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let of = safetensors::Dtype::F32;
        (
            name,
            safetensors::tensor::TensorView::new(of, shape.clone(), bytes).unwrap(),
        )
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.join("adapters.safetensors"), file).unwrap();
}

/// A strategy must choose features by the adapted gate. Its result must equal that of the fused
/// model, and differ from that of the model without the adapter.
#[test]
fn adapters_count() {
    let dir = tempfile::tempdir().unwrap();
    let base = fixture("tiny/llama");
    let tokens: Vec<u32> = (3..19).collect();
    let fused = dir.path().join("fused");
    gates(dir.path());
    metal_backend::train::fuse(&base, dir.path(), &fused).unwrap();
    for plan in [
        "sparse:8",
        "0-1=sparse:5,2=sparse:3",
        "0=gain:1.5,1-=sparse:9",
    ] {
        let plan: FeedForwardPlan = plan.parse().unwrap();
        let options = LoadOptions::new()
            .with_backend("cpu")
            .with_precision(Precision::Exact)
            .with_feed_forward(plan.clone());
        let of = |path: &std::path::Path, options: &LoadOptions| {
            let model = inference::load_model(path, options).unwrap();
            logits(model.as_ref(), &tokens)
        };
        let adapted = of(&base, &options.clone().with_adapter_path(dir.path()));
        let difference = relative(&adapted, &of(&fused, &options));
        assert!(difference < 1e-4, "{plan}: {difference}");
        let away = relative(&adapted, &of(&base, &options));
        assert!(away > 1e-2, "{plan}: the adapter changed {away}");
    }
}
