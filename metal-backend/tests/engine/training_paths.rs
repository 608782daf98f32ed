//! Tests training of all trainable parameters on every architecture: compares gradients with finite
//! differences, and checks a training step. Also tests training of weights instead of adapters,
//! training of embedding tables, and the exchange of adapters. `training.rs` compares with Python
//! mlx-lm.

mod compiled;

use std::path::Path;

use crate::training_common::{
    at_rate, batch, check_slopes, cpu, distance, disturb, fixtures, fresh, length, load, logits,
    read, tiny,
};
use inference::{BatchEvent, ErrorKind, GenerateOptions, LoraConfig, Prompt};
use metal_backend::train::{self, AdapterKind, OptimizerConfig, Params, Sequence, Trainer, Tuning};
use mlx_rs_core::{Array, Dtype};

/// Returns every test model, with the names of its attention's projections.
fn models() -> Vec<(String, Vec<&'static str>)> {
    let dir = std::fs::read_dir(fixtures().join("tiny")).unwrap();
    let mut names: Vec<String> = dir
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let targets = |name: &str| match name {
        "gpt2" => vec!["c_attn"],
        "phi3" => vec!["qkv_proj"],
        _ if name.starts_with("xlstm") => vec!["q", "k", "v", "igate_preact", "fgate_preact"],
        _ if name.starts_with("qwen3-next") => vec!["q_proj", "in_proj_qkvz", "out_proj"],
        _ if name.starts_with("qwen3-5") => {
            vec![
                "q_proj",
                "in_proj_qkv",
                "in_proj_z",
                "in_proj_a",
                "in_proj_b",
            ]
        }
        "mamba" | "falcon-mamba" => vec!["in_proj", "x_proj", "out_proj"],
        "mamba2" => vec!["in_proj", "out_proj"],
        "kimi-linear" => vec![
            "q_proj", "k_proj", "v_proj", "b_proj", "f_b_proj", "g_b_proj", "o_proj",
        ],
        "rwkv7" => vec!["r_proj", "k_proj", "v_proj", "o_proj"],
        "jamba" => vec!["q_proj", "v_proj", "in_proj", "out_proj"],
        _ if name.starts_with("falcon") => vec!["q_proj", "in_proj", "out_proj", "up_proj"],
        _ if name.starts_with("nemotron-h") => vec!["q_proj", "in_proj", "out_proj", "up_proj"],
        "granitemoe" => vec!["q_proj", "v_proj"],
        // One matrix computes queries, keys and values.
        "bailing-moe" | "bailing-moe-groups" | "dbrx" | "gpt-bigcode" | "lille-130m" | "qwen" => {
            vec!["qkv_proj", "o_proj"]
        }
        "gpt-neox" | "internlm2" => vec!["o_proj", "up_proj"],
        // Queries, keys and values are computed from low-rank vectors.
        "deepseek-v2" | "deepseek-v3" | "deepseek-v32" | "glm-moe-dsa" | "glm4-moe-lite"
        | "minicpm3" | "mistral4" | "youtu-llm" => {
            vec!["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        }
        "deepseek-v2-lite" | "kimi-vl" => vec!["q_proj", "kv_a_proj_with_mqa", "o_proj"],
        _ if name.starts_with("granitemoe") => vec!["q_proj", "in_proj", "out_proj"],
        _ if name.starts_with("lfm2") => vec!["q_proj", "v_proj", "in_proj", "out_proj"],
        _ => vec!["q_proj", "v_proj"],
    };
    names
        .into_iter()
        .map(|name| {
            let targets = targets(&name);
            (name, targets)
        })
        .collect()
}

/// Returns whether a checkpoint is stored in a 16-bit type, so that written values are rounded.
fn is_rounded(name: &str) -> bool {
    let dir = std::fs::read_dir(tiny(name)).unwrap();
    let mut files = dir.map(|entry| entry.unwrap().path());
    files.any(|file| {
        let stored = file.extension().is_some_and(|e| e == "safetensors");
        stored && {
            let loaded = mlx_rs_core::io::load_safetensors(&file).unwrap();
            let mut arrays = loaded.arrays.values();
            arrays.any(|a| matches!(a.dtype(), Dtype::Bfloat16 | Dtype::Float16))
        }
    })
}

fn rank(rank: usize) -> LoraConfig {
    LoraConfig::new().with_rank(rank)
}

#[test]
fn every_architecture_learns_with_and_without_checkpoints() {
    if crate::alone::ran_elsewhere(
        "training_paths::every_architecture_learns_with_and_without_checkpoints",
    ) {
        return;
    }
    let models = models();
    assert!(models.len() >= 40, "{}", models.len());
    for (name, targets) in models {
        let config = rank(2).with_targets(targets);
        let mut trainer = fresh(&name, &config, at_rate(1e-2));
        let before = trainer.params();
        let batch = batch(2);
        let (_, plain) = trainer.gradients(&batch).unwrap();
        let losses: Vec<f32> = (0..4).map(|_| trainer.step(&batch).unwrap().loss).collect();
        assert!(losses[3] < losses[0], "{name}: {losses:?}");
        for (part, value) in trainer.params() {
            let moved = value.subtract(&before[&part]).unwrap();
            assert!(length(&moved) > 0.0, "{name}: {part} stands still");
        }

        let again = Tuning {
            checkpoint: true,
            ..at_rate(1e-2)
        };
        same_gradients(&name, &fresh(&name, &config, again), &plain);
    }
}

fn same_gradients(name: &str, trainer: &Trainer, expected: &Params) {
    let (_, gradients) = trainer.gradients(&batch(2)).unwrap();
    assert!(gradients.keys().eq(expected.keys()), "{name}");
    for (part, gradient) in gradients {
        assert!(
            gradient.all_close(&expected[&part], 1e-4, 1e-6).unwrap(),
            "{name}: {part} is another with checkpoints"
        );
    }
}

/// Some layers of Gemma 4 attend to keys and values of earlier layers. With gradient checkpointing,
/// these layers belong to different checkpoints, and gradients must flow between them.
#[test]
fn keys_of_other_layers_have_gradients_through_checkpoints() {
    for name in ["gemma4-small", "gemma4-large"] {
        let mut targets = vec!["q_proj", "k_proj", "o_proj", "down_proj", "embed_tokens"];
        if name == "gemma4-small" {
            targets.extend(["v_proj", "per_layer_input_gate"]);
        }
        let config = rank(2).with_targets(targets);
        let by = |checkpoint| {
            let tuning = Tuning {
                checkpoint,
                ..Tuning::default()
            };
            let mut trainer = fresh(name, &config, tuning);
            disturb(&mut trainer);
            trainer
        };
        let (_, plain) = by(false).gradients(&batch(2)).unwrap();
        let keys = plain.iter().filter(|(part, _)| part.contains("k_proj"));
        assert!(keys.clone().count() > 1);
        for (part, gradient) in keys {
            assert!(length(gradient) > 0.0, "{name}: {part}");
        }
        same_gradients(name, &by(true), &plain);
    }
}

#[test]
fn gradients_through_quantized_weights_are_slopes() {
    let targets = ["q_proj", "k_proj", "o_proj", "down_proj"];
    for name in [
        "llama-q4",
        "llama-q8",
        "llama-modes",
        "llama-gguf",
        "qwen3-q4",
        "gemma3-text-q4",
    ] {
        let config = rank(2).with_num_layers(1).with_targets(targets);
        let mut trainer = fresh(name, &config, Tuning::default());
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |_| true);
    }
}

/// Covers the chunks of a recurrence and the transitions between chunks. The loss is not
/// differentiable where the sum in a denominator changes its sign. So queries, keys and gates are
/// not trained here; the recurrence's own test covers their gradients.
#[test]
fn gradients_through_a_recurrence_are_slopes() {
    let mlstm = ["v", "ogate_preact", "out_proj", "proj_up", "proj_down"];
    for (name, layers, targets) in [
        ("xlstm", 1, &mlstm[..]),
        ("xlstm-q4", 1, &mlstm[..]),
        ("lfm2", 2, &["in_proj", "out_proj", "q_proj", "w2"][..]),
        (
            "qwen3-5",
            2,
            &[
                "in_proj_qkv",
                "in_proj_z",
                "in_proj_b",
                "in_proj_a",
                "q_proj",
            ][..],
        ),
        ("mamba2", 1, &["in_proj", "out_proj"][..]),
        ("granitemoehybrid-dense", 2, &["in_proj", "out_proj"][..]),
        ("falcon-h1", 1, &["in_proj", "q_proj", "up_proj"][..]),
        ("nemotron-h", 4, &["in_proj", "q_proj", "up_proj"][..]),
    ] {
        let config = rank(2).with_num_layers(layers);
        let config = config.with_targets(targets.iter().copied());
        let mut trainer = fresh(name, &config, Tuning::default());
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |_| true);
    }
}

#[test]
fn gradients_of_experts_are_slopes() {
    for (name, targets) in [
        ("qwen3-moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3-moe-mixed", ["gate_proj", "up_proj", "down_proj"]),
        (
            "qwen2-moe",
            ["shared_expert.up_proj", "gate_proj", "switch_mlp.down_proj"],
        ),
        ("mixtral", ["gate_proj", "up_proj", "down_proj"]),
        ("mixtral-q4", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let config = rank(2).with_num_layers(1).with_targets(targets);
        let mut trainer = fresh(name, &config, Tuning::default());
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |_| true);
    }
}

#[test]
fn gradients_of_tables_and_heads_are_slopes() {
    for (name, targets) in [
        ("llama", vec!["embed_tokens", "lm_head"]),
        ("llama-q4", vec!["embed_tokens"]),
        // One table is used for input and output.
        ("llama-tied-gqa", vec!["embed_tokens"]),
        ("gemma3-text-q4", vec!["embed_tokens"]),
        ("gpt2", vec!["wte", "wpe"]),
        (
            "gemma4-small",
            vec![
                "embed_tokens",
                "embed_tokens_per_layer",
                "per_layer_projection",
            ],
        ),
    ] {
        let mut trainer = fresh(name, &rank(2).with_targets(targets), Tuning::default());
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |_| true);
    }
}

#[test]
fn gradients_of_row_lengths_are_slopes() {
    // DoRA treats the lengths as constants in the gradients of A and B, so finite differences do
    // not apply to these. `training.rs` compares them with mlx-lm's.
    for name in ["llama", "llama-q4", "phi3", "gpt2"] {
        let targets = match name {
            "phi3" => vec!["qkv_proj", "down_proj"],
            "gpt2" => vec!["c_attn", "wte"],
            _ => vec!["q_proj", "down_proj", "embed_tokens"],
        };
        let config = rank(2).with_targets(targets);
        let mut trainer = load(name, &config, AdapterKind::Dora, Tuning::default());
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |part| part.ends_with(".m"));
    }
}

#[test]
fn gradients_of_whole_weights_are_slopes() {
    // The models cover all kinds of norms, biases, fused and separate matrices, and experts.
    for name in [
        "llama",
        "gemma2",
        "cohere2",
        "gpt2",
        "qwen2",
        "phi3",
        "qwen3-moe",
        "olmo2",
        "exaone4",
    ] {
        let config = LoraConfig::new().with_num_layers(1);
        let mut trainer = load(name, &config, AdapterKind::Full, Tuning::default());
        check_slopes(&mut trainer, name, |_| true);
    }
}

#[test]
fn whole_weights_learn_are_saved_loaded_removed_and_fused() {
    for name in ["llama", "gemma2", "gpt2", "qwen2", "qwen3-moe"] {
        let config = LoraConfig::new().with_num_layers(1);
        let mut trainer = load(name, &config, AdapterKind::Full, at_rate(1e-3));
        let params = trainer.params();
        assert!(
            params
                .keys()
                .any(|part| part.contains("norm") || part.contains("ln_1"))
        );
        let base = logits(trainer.model());
        let plain = inference::load_model(tiny(name), &cpu()).unwrap();
        assert!(distance(&base, &logits(plain.as_ref())) < 1e-4);
        let first = trainer.step(&batch(2)).unwrap().loss;
        for _ in 0..8 {
            trainer.step(&batch(2)).unwrap();
        }
        let last = trainer.step(&batch(2)).unwrap().loss;
        assert!(last < first, "{name}: {first} {last}");
        let trained = logits(trainer.model());
        assert!(distance(&base, &trained) > 1e-3);

        let dir = tempfile::tempdir().unwrap();
        let (saved, fused) = (dir.path().join("full"), dir.path().join("fused"));
        trainer.save(&saved).unwrap();
        let written = read(&saved.join("adapter_config.json"));
        assert_eq!(written["fine_tune_type"], "full");
        assert_eq!(written["num_layers"], 1);
        let again = inference::load_model(tiny(name), &cpu().with_adapter_path(&saved)).unwrap();
        assert!(distance(&trained, &logits(again.as_ref())) < 1e-4, "{name}");
        again.as_trainable().unwrap().remove_adapter().unwrap();
        assert!(distance(&base, &logits(again.as_ref())) < 1e-4, "{name}");
        // These checkpoints store an expert's matrices as separate tensors.
        let changed = train::fuse(&tiny(name), &saved, &fused).unwrap();
        assert!(changed >= params.len(), "{name}: {changed}");
        let fused = inference::load_model(&fused, &cpu()).unwrap();
        let allowed = if is_rounded(name) { 0.1 } else { 2e-3 };
        let error = distance(&trained, &logits(fused.as_ref()));
        assert!(error < allowed, "{name}: {error}");
    }
    let full = LoraConfig::new();
    let e = Trainer::load(
        &tiny("llama-q4"),
        &cpu(),
        &full,
        AdapterKind::Full,
        Tuning::default(),
    );
    let e = e.err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(
        e.to_string().contains("quantized") && e.to_string().contains("LoRA"),
        "{e}"
    );
}

#[test]
fn fused_equals_adapted_in_every_layout() {
    let targets: [(&str, &[&str]); 6] = [
        ("llama-q4", &["q_proj", "embed_tokens"]),
        ("llama-sharded", &["q_proj", "lm_head"]),
        ("llama-tied-gqa", &["embed_tokens"]),
        ("gpt2", &["c_attn", "c_proj", "c_fc", "wte"]),
        ("phi3", &["qkv_proj", "gate_up_proj"]),
        ("gemma3-text", &["q_proj", "down_proj"]),
    ];
    for (name, targets) in targets {
        for kind in [AdapterKind::Lora, AdapterKind::Dora] {
            let config = rank(2).with_targets(targets.to_vec());
            let mut trainer = load(name, &config, kind, Tuning::default());
            disturb(&mut trainer);
            let dir = tempfile::tempdir().unwrap();
            let adapter = dir.path().join("adapter");
            trainer.save(&adapter).unwrap();
            let apart = logits(trainer.model());
            let plain = inference::load_model(tiny(name), &cpu()).unwrap();
            let apart_from_plain = distance(&apart, &logits(plain.as_ref()));
            assert!(apart_from_plain > 0.2, "{name}: {apart_from_plain}");
            let (packed, dense) = (dir.path().join("packed"), dir.path().join("dense"));
            train::fuse(&tiny(name), &adapter, &packed).unwrap();
            train::fuse_dequantized(&tiny(name), &adapter, &dense).unwrap();
            let open = |path: &Path| logits(inference::load_model(path, &cpu()).unwrap().as_ref());
            let rounding = if is_rounded(name) { 0.1 } else { 5e-3 };
            let error = distance(&apart, &open(&dense));
            assert!(error < rounding, "{name}: {error}, of {apart_from_plain}");
            // A quantized model is quantized again, which adds rounding errors.
            let allowed = if name.ends_with("q4") {
                0.5 * apart_from_plain
            } else {
                rounding
            };
            let error = distance(&apart, &open(&packed));
            assert!(error < allowed, "{name}: {error}, of {apart_from_plain}");
            let config = read(&dense.join("config.json"));
            assert!(config.get("quantization").is_none());
        }
    }
}

/// Checkpoints of transformers store gate and up of all experts in one tensor, or the matrices of
/// all experts one below another.
#[test]
fn experts_that_share_a_tensor_are_trained_and_fused() {
    let parts = ["gate_proj", "up_proj", "down_proj"];
    for (name, prefix) in [
        ("qwen3-5-moe", "switch_mlp"),
        // Matrices are stored as `[in, out]`.
        ("qwen3-vl-moe", "switch_mlp"),
        ("llama4", "experts"),
        ("granitemoe", "switch_mlp"),
        // Rows of gate and up alternate.
        ("gpt-oss", "experts"),
        // A tensor has the rows of all experts.
        ("dbrx", "switch_mlp"),
    ] {
        for kind in [AdapterKind::Lora, AdapterKind::Full] {
            let targets = parts.map(|part| format!("{prefix}.{part}"));
            let config = match kind {
                AdapterKind::Lora => rank(2).with_targets(targets.to_vec()),
                _ => LoraConfig::new().with_num_layers(1),
            };
            let mut trainer = load(name, &config, kind, at_rate(1e-2));
            let params = trainer.params();
            for part in &targets {
                let is_trained = |param: &String| param.contains(&format!(".{part}."));
                assert!(params.keys().any(is_trained), "{name}: {part}");
            }
            if kind == AdapterKind::Lora {
                disturb(&mut trainer);
            } else {
                for _ in 0..4 {
                    trainer.step(&batch(2)).unwrap();
                }
            }
            let dir = tempfile::tempdir().unwrap();
            let (adapter, fused) = (dir.path().join("adapter"), dir.path().join("fused"));
            trainer.save(&adapter).unwrap();
            let apart = logits(trainer.model());
            let plain = inference::load_model(tiny(name), &cpu()).unwrap();
            let change = distance(&apart, &logits(plain.as_ref()));
            assert!(change > 0.1, "{name}: {change}");
            let changed = train::fuse(&tiny(name), &adapter, &fused).unwrap();
            assert!(changed > 0, "{name}");
            let fused = inference::load_model(&fused, &cpu()).unwrap();
            let error = distance(&apart, &logits(fused.as_ref()));
            // The fused weights are rounded to bfloat16.
            assert!(error < 0.3 * change, "{name}: {error} of {change}");
        }
    }
}

/// An adapter of experts in OpenAI's packing could not be merged, so they have no slots.
#[test]
fn experts_in_the_packing_of_openai_are_not_trained() {
    let name = "gpt-oss-mxfp4";
    let mut trainer = load(name, &rank(2), AdapterKind::Lora, Tuning::default());
    let params = trainer.params();
    assert!(params.keys().any(|param| param.contains("q_proj")));
    assert!(!params.keys().any(|param| param.contains("experts")));
    disturb(&mut trainer);
    let dir = tempfile::tempdir().unwrap();
    let (adapter, fused) = (dir.path().join("adapter"), dir.path().join("fused"));
    trainer.save(&adapter).unwrap();
    assert!(train::fuse(&tiny(name), &adapter, &fused).unwrap() > 0);
    let fused = inference::load_model(&fused, &cpu()).unwrap();
    let error = distance(&logits(trainer.model()), &logits(fused.as_ref()));
    assert!(error < 0.1, "{error}");
}

#[test]
fn a_request_takes_nothing_from_rows_that_ran_without_its_adapter() {
    let model = inference::load_model(tiny("llama"), &cpu()).unwrap();
    let prompt = Prompt::Tokens((0..30).map(|i| 5 + (i * 7 + i * i % 11) % 90).collect());
    let options = GenerateOptions::new()
        .with_max_tokens(12)
        .with_ignore_eos(true)
        .with_logits(true);
    let mut session = model.batch_session().unwrap();
    let first = session.add(&prompt, &options).unwrap();
    for _ in 0..3 {
        session.step().unwrap();
    }
    let dir = fixtures().join("training/llama-1");
    let trainable = model.as_trainable().unwrap();
    let _handle = trainable.load_adapter(&dir).unwrap();
    let second = session.add(&prompt, &options).unwrap();
    let mut logits = None;
    while !session.is_empty() {
        for event in session.step().unwrap() {
            match event {
                BatchEvent::Token { row, token } if row == second => {
                    logits.get_or_insert_with(|| token.logits.unwrap().to_vec());
                }
                BatchEvent::Done { row, metrics, .. } => {
                    assert!(row == first || metrics.cached_tokens == 0);
                }
                _ => {}
            }
        }
    }
    let direct = inference::load_model(tiny("llama"), &cpu().with_adapter_path(&dir)).unwrap();
    let mut stream = direct.generate(&prompt, &options).unwrap();
    let expected = stream.next().unwrap().unwrap().logits.unwrap().to_vec();
    assert!(distance(&logits.unwrap(), &expected) < 1e-4);
}

#[test]
fn adapters_are_exchanged_while_a_model_answers() {
    let model = inference::load_model(tiny("llama"), &cpu()).unwrap();
    let trainable = model.as_trainable().unwrap();
    let base = logits(model.as_ref());
    let prompt = Prompt::Tokens(vec![5, 17, 99, 4, 31, 8]);
    let say = || {
        let options = GenerateOptions::new()
            .with_max_tokens(12)
            .with_ignore_eos(true);
        let output = model.generate(&prompt, &options).unwrap().collect_output();
        output.unwrap().tokens
    };
    let alone = say();
    let mut seen = Vec::new();
    for adapter in ["llama-1", "llama-dora", "llama-4"] {
        let dir = fixtures().join("training").join(adapter);
        let handle = trainable.load_adapter(&dir).unwrap();
        assert!(handle.num_parameters() > 0 && handle.parameter_names().is_sorted());
        let now = logits(model.as_ref());
        let direct = inference::load_model(tiny("llama"), &cpu().with_adapter_path(&dir)).unwrap();
        assert!(distance(&now, &logits(direct.as_ref())) < 1e-4, "{adapter}");
        assert!(distance(&now, &base) > 1e-3);
        // Keys that were cached for this prompt under the other adapter must not be reused.
        let fresh = direct
            .generate(
                &prompt,
                &GenerateOptions::new()
                    .with_max_tokens(12)
                    .with_ignore_eos(true),
            )
            .unwrap();
        assert_eq!(say(), fresh.collect_output().unwrap().tokens);
        seen.push(now);
    }
    assert!(distance(&seen[0], &seen[2]) > 1e-3);
    // Loading an adapter of another model must not change anything.
    let wrong = fixtures().join("training/qwen3-q4");
    assert_eq!(
        trainable.load_adapter(&wrong).err().unwrap().kind(),
        ErrorKind::InvalidModel
    );
    assert!(distance(&seen[2], &logits(model.as_ref())) < 1e-5);
    trainable.remove_adapter().unwrap();
    trainable.remove_adapter().unwrap();
    assert!(distance(&base, &logits(model.as_ref())) < 1e-5);
    assert_eq!(say(), alone);
    model.close().unwrap();
    assert_eq!(
        trainable.remove_adapter().unwrap_err().kind(),
        ErrorKind::Closed
    );
}

#[test]
fn accumulated_batches_are_one_large_batch() {
    let same = |i: u32| Sequence::new((0..12).map(|j| 3 + (i * 41 + j * j * 13) % 290).collect());
    let all: Vec<Sequence> = (0..4).map(same).collect();
    let tuning = |accumulation| Tuning {
        accumulation,
        optimizer: OptimizerConfig::from_name("sgd").unwrap(),
        ..at_rate(0.5)
    };
    let mut large = fresh("llama", &rank(4), tuning(1));
    let mut small = fresh("llama", &rank(4), tuning(2));
    disturb(&mut large);
    disturb(&mut small);
    let before = small.params();
    assert!(large.step(&all).unwrap().updated);
    assert!(!small.step(&all[..2]).unwrap().updated);
    assert!(small.step(&all[2..]).unwrap().updated);
    let mut moved = 0.0;
    for (part, value) in small.params() {
        assert!(
            value.all_close(&large.params()[&part], 1e-4, 1e-6).unwrap(),
            "{part}"
        );
        moved += length(&value.subtract(&before[&part]).unwrap());
    }
    assert!(moved > 1e-3);
}

#[test]
fn clipping_bounds_the_step_and_says_the_norm() {
    let tuning = |clip| Tuning {
        clip: Some(clip),
        optimizer: OptimizerConfig::from_name("sgd").unwrap(),
        ..at_rate(1.0)
    };
    let norm_of = |params: &Params| {
        let squares = params.values().map(|g| length(g).powi(2));
        squares.sum::<f32>().sqrt()
    };
    for clip in [1e-3, 1e3] {
        let mut trainer = fresh("llama", &rank(4), tuning(clip));
        let before = disturb(&mut trainer);
        let (_, gradients) = trainer.gradients(&batch(2)).unwrap();
        let norm = norm_of(&gradients);
        let report = trainer.step(&batch(2)).unwrap();
        assert!((report.norm.unwrap() - norm).abs() < 1e-4 * norm);
        let moved: Params = trainer
            .params()
            .iter()
            .map(|(part, value)| (part.clone(), value.subtract(&before[part]).unwrap()))
            .collect::<Params>();
        let expected = norm.min(clip);
        assert!(
            (norm_of(&moved) - expected).abs() < 1e-2 * expected,
            "{clip}"
        );
    }
}

#[test]
fn names_of_other_programs_are_understood() {
    let mut trainer = fresh(
        "llama",
        &rank(2).with_targets(["q_proj", "down_proj"]),
        Tuning::default(),
    );
    let params = disturb(&mut trainer);
    let expected = logits(trainer.model());
    let dir = tempfile::tempdir().unwrap();
    // go-mlx uses our layout without `lora_parameters`. PEFT uses other parameter names and another
    // file name for the weights.
    let turned = |a: &Array| a.contiguous().unwrap();
    for (file, config, renamed) in [
        (
            "adapters.safetensors",
            r#"{"rank": 2, "alpha": 16.0, "target_keys": ["q_proj"]}"#,
            false,
        ),
        (
            "adapter_model.safetensors",
            r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 16, "lora_dropout": 0.0}"#,
            true,
        ),
    ] {
        let path = dir.path().join(file);
        std::fs::create_dir(&path).unwrap();
        let named: Params = params
            .iter()
            .map(|(name, value)| {
                let name = if renamed {
                    let name = name.replace(".lora_a", ".lora_A.weight");
                    format!(
                        "base_model.model.{}",
                        name.replace(".lora_b", ".lora_B.weight")
                    )
                } else {
                    name.clone()
                };
                (name, turned(value))
            })
            .collect();
        mlx_rs_core::io::save_safetensors(path.join(file), &named, &[]).unwrap();
        std::fs::write(path.join("adapter_config.json"), config).unwrap();
        let model = inference::load_model(tiny("llama"), &cpu().with_adapter_path(&path)).unwrap();
        assert!(
            distance(&expected, &logits(model.as_ref())) < 1e-4,
            "{file}"
        );
    }
}
