//! Compares training with Python mlx-lm: with equal adapters and batches, logits, gradients and
//! losses must agree. `tools/golden/training.py` computes the expected values.

use std::path::Path;

use crate::training_common::{
    at_rate, batch, check_slopes, cpu, distance, disturb, fixtures, floats, fresh, logits, read,
    sequences, tiny,
};
use inference::{
    ComputeType, ErrorKind, GenerateOptions, Interrupt, LoadOptions, LoraConfig, TokenModel,
};
use metal_backend::train::{
    self, AdapterKind, Compile, Optimizer, OptimizerConfig, Params, Preference, Schedule, Sequence,
    Trainer, Tuning, optim,
};
use mlx_rs_core::{Array, Dtype, io};
use serde_json::Value;

/// The training options that mlx-lm uses in these tests.
fn like_mlx_lm(rate: f32) -> Tuning {
    Tuning {
        optimizer: OptimizerConfig::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            bias_correction: false,
        },
        schedule: Schedule::constant(rate),
        ..Tuning::default()
    }
}

fn against_mlx_lm(name: &str) {
    let dir = fixtures().join("training").join(name);
    let golden = read(&dir.join("golden.json"));
    let checkpoint = tiny(golden["checkpoint"].as_str().unwrap());
    let rate = golden["rate"].as_f64().unwrap() as f32;
    for recomputed in [false, true] {
        let tuning = Tuning {
            checkpoint: recomputed,
            ..like_mlx_lm(rate)
        };
        let options = cpu().with_adapter_path(&dir);
        let unused = LoraConfig::new();
        let mut trainer =
            Trainer::load(&checkpoint, &options, &unused, AdapterKind::Lora, tuning).unwrap();
        let batches: Vec<_> = golden["batches"].as_array().unwrap().iter().collect();
        let first = sequences(batches[0]);

        let model = trainer.model().as_token_model().unwrap();
        let prompt = first[0].ids.clone().into();
        let logits = TokenModel::logits(model, &prompt, false, &Interrupt::new()).unwrap();
        for (got, expected) in logits.logits.iter().zip(floats(&golden["logits"])) {
            // mlx-lm rounds Gemma's factor on embeddings to bfloat16, so the bound is large.
            assert!((got - expected).abs() < 1e-3, "{name}: {got} {expected}");
        }

        let (_, gradients) = trainer.gradients(&first).unwrap();
        let expected = io::load_safetensors(dir.join("gradients.safetensors")).unwrap();
        assert_eq!(gradients.len(), expected.arrays.len());
        for (part, expected) in &expected.arrays {
            let got = &gradients[part];
            // mlx-lm stores A and B transposed, except for experts and tables.
            let turned = part.contains("lora_") && !part.contains("embed_tokens");
            let got = match got.shape().len() {
                2 if turned => got.swap_axes(0, 1).unwrap(),
                _ => got.clone(),
            };
            assert_eq!(got.shape(), expected.shape(), "{name} {part}");
            assert!(
                got.all_close(expected, 1e-3, 1e-4).unwrap(),
                "{name} {part}: {got} {expected}"
            );
        }

        for (i, (batch, expected)) in batches.iter().zip(floats(&golden["losses"])).enumerate() {
            let report = trainer.step(&sequences(batch)).unwrap();
            assert!(
                (report.loss - expected).abs() < 1e-3 && report.updated,
                "{name}, step {i}: {} {expected}",
                report.loss
            );
        }
    }
}

#[test]
fn llama_learns_as_in_mlx_lm() {
    against_mlx_lm("llama-1");
    against_mlx_lm("llama-4");
}

#[test]
fn dora_learns_as_in_mlx_lm() {
    against_mlx_lm("llama-dora");
}

#[test]
fn gemma3_learns_as_in_mlx_lm() {
    if crate::alone::ran_elsewhere("training::gemma3_learns_as_in_mlx_lm") {
        return;
    }
    against_mlx_lm("gemma3-1");
    against_mlx_lm("gemma3-4");
}

#[test]
fn experts_learn_as_in_mlx_lm() {
    against_mlx_lm("qwen3-moe-1");
    against_mlx_lm("qwen3-moe-4");
}

#[test]
fn adapters_on_quantized_weights_learn_as_in_mlx_lm() {
    if crate::alone::ran_elsewhere("training::adapters_on_quantized_weights_learn_as_in_mlx_lm") {
        return;
    }
    against_mlx_lm("qwen3-q4");
    against_mlx_lm("llama-q4-1");
    against_mlx_lm("gemma3-q4-4");
    against_mlx_lm("mixtral-q4-4");
}

#[test]
fn tables_and_whole_weights_learn_as_in_mlx_lm() {
    against_mlx_lm("llama-tied-table");
    against_mlx_lm("llama-full");
}

/// Muon's steps depend on the orientation of a matrix. Our adapters are stored transposed, so the
/// optimizer must take this into account.
#[test]
fn muon_trains_adapters_as_mlx_does() {
    if crate::alone::ran_elsewhere("training::muon_trains_adapters_as_mlx_does") {
        return;
    }
    let all = read(&fixtures().join("training/muon.json"));
    let rate = all["rate"].as_f64().unwrap() as f32;
    for (name, expected) in all["losses"].as_object().unwrap() {
        let dir = fixtures().join("training").join(name);
        let golden = read(&dir.join("golden.json"));
        let checkpoint = tiny(golden["checkpoint"].as_str().unwrap());
        for compile in [Compile::Off, Compile::On] {
            let tuning = Tuning {
                optimizer: OptimizerConfig::from_name("muon").unwrap(),
                compile,
                ..at_rate(rate)
            };
            let options = cpu().with_adapter_path(&dir);
            let unused = LoraConfig::new();
            let mut trainer =
                Trainer::load(&checkpoint, &options, &unused, AdapterKind::Lora, tuning).unwrap();
            let batches = golden["batches"].as_array().unwrap().iter();
            for (i, (batch, expected)) in batches.zip(floats(expected)).enumerate() {
                let loss = trainer.step(&sequences(batch)).unwrap().loss;
                assert!(
                    (loss - expected).abs() < 1e-3,
                    "{name}, step {i}: {loss} {expected}"
                );
            }
        }
    }
}

#[test]
fn optimizers_are_those_of_mlx() {
    let golden = read(&fixtures().join("training/optimizers.json"));
    let params = |value: &Value| -> Params {
        let tree = value.as_object().unwrap().iter();
        tree.map(|(name, numbers)| {
            let shape = golden["shapes"][name].as_array().unwrap().iter();
            let shape: Vec<i32> = shape.map(|d| d.as_i64().unwrap() as i32).collect();
            (
                name.clone(),
                Array::from_slice(&floats(numbers), &shape).unwrap(),
            )
        })
        .collect()
    };
    let with = |name: &str, change: &dyn Fn(&mut OptimizerConfig)| {
        let mut config = OptimizerConfig::from_name(name).unwrap();
        change(&mut config);
        config
    };
    let nothing: &dyn Fn(&mut OptimizerConfig) = &|_| ();
    let configs = [
        ("adamw", with("adamw", nothing)),
        (
            "adamw_plain",
            with("adamw", &|c| {
                if let OptimizerConfig::AdamW {
                    weight_decay,
                    bias_correction,
                    ..
                } = c
                {
                    (*weight_decay, *bias_correction) = (0.1, false);
                }
            }),
        ),
        ("adam", with("adam", nothing)),
        ("sgd", with("sgd", nothing)),
        (
            "sgd_momentum",
            OptimizerConfig::Sgd {
                momentum: 0.9,
                weight_decay: 0.1,
                dampening: 0.2,
                nesterov: false,
            },
        ),
        (
            "sgd_nesterov",
            OptimizerConfig::Sgd {
                momentum: 0.9,
                weight_decay: 0.0,
                dampening: 0.0,
                nesterov: true,
            },
        ),
        (
            "lion",
            with("lion", &|c| {
                if let OptimizerConfig::Lion { weight_decay, .. } = c {
                    *weight_decay = 0.1;
                }
            }),
        ),
        ("adafactor", with("adafactor", nothing)),
        (
            "adafactor_relative",
            with("adafactor", &|c| {
                if let OptimizerConfig::Adafactor {
                    relative_step,
                    beta1,
                    weight_decay,
                    ..
                } = c
                {
                    (*relative_step, *beta1, *weight_decay) = (true, Some(0.9), 0.1);
                }
            }),
        ),
        ("muon", with("muon", nothing)),
    ];
    assert_eq!(configs.len(), golden["results"].as_object().unwrap().len());
    for (name, config) in configs {
        let mut optimizer = Optimizer::new(config);
        let mut current = params(&golden["start"]);
        for (i, gradients) in golden["gradients"].as_array().unwrap().iter().enumerate() {
            if i == 2 {
                // A new optimizer with the saved state must continue identically.
                let (steps, state) = (optimizer.steps(), optimizer.state().clone());
                optimizer = Optimizer::new(config);
                optimizer.restore(steps, state);
            }
            current = optimizer
                .update(&current, &params(gradients), 0.05)
                .unwrap();
        }
        for (part, expected) in params(&golden["results"][name]) {
            assert!(
                current[&part].all_close(&expected, 1e-4, 1e-5).unwrap(),
                "{name} {part}: {} {expected}",
                current[&part]
            );
        }
    }
    let gradients = params(&golden["gradients"][0]);
    let (clipped, norm) = optim::clip_by_global_norm(&gradients, 1.5).unwrap();
    let expected = golden["norm"].as_f64().unwrap() as f32;
    assert!((norm.item::<f32>().unwrap() - expected).abs() < 1e-5);
    for (part, expected) in params(&golden["clipped"]) {
        assert!(clipped[&part].all_close(&expected, 1e-5, 1e-6).unwrap());
    }
    assert!(
        OptimizerConfig::from_name("adagrad")
            .unwrap_err()
            .to_string()
            .contains("muon")
    );
}

#[test]
fn gradients_are_those_of_finite_differences() {
    if crate::alone::ran_elsewhere("training::gradients_are_those_of_finite_differences") {
        return;
    }
    let config = LoraConfig::new().with_rank(2).with_targets([
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "down_proj",
        "lm_head",
    ]);
    for name in [
        "llama",
        "gemma2",
        "phi3",
        "gpt2",
        "qwen3-moe",
        "gpt-oss",
        "cohere2",
    ] {
        let mut config = config.clone();
        match name {
            "phi3" => config.targets = vec!["qkv_proj".into(), "gate_up_proj".into()],
            "gpt2" => config.targets = vec!["c_attn".into(), "c_fc".into()],
            "gemma2" | "cohere2" => config.targets.truncate(5),
            "gpt-oss" => config.targets.truncate(4),
            _ => {}
        }
        let mut trainer = fresh(name, &config, at_rate(1e-3));
        disturb(&mut trainer);
        check_slopes(&mut trainer, name, |_| true);
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_a_trained_one_comes_back_from_its_files() {
    let prompt = inference::Prompt::Tokens(vec![5, 17, 99, 4]);
    let plain = inference::load_model(tiny("qwen3"), &cpu()).unwrap();
    let before = plain
        .as_token_model()
        .unwrap()
        .logits(&prompt, true, &Interrupt::new())
        .unwrap();
    let tuning = Tuning {
        schedule: Schedule::constant(1e-2),
        accumulation: 2,
        clip: Some(1.0),
        ..Tuning::default()
    };
    for kind in [AdapterKind::Lora, AdapterKind::Dora] {
        let config = LoraConfig::new().with_dropout(0.1).with_num_layers(1);
        let mut trainer =
            Trainer::load(&tiny("qwen3"), &cpu(), &config, kind, tuning.clone()).unwrap();
        let logits = |trainer: &Trainer| {
            let model = trainer.model().as_token_model().unwrap();
            model
                .logits(&prompt, true, &Interrupt::new())
                .unwrap()
                .logits
        };
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(near(&logits(&trainer), &before.logits));
        let batch = batch(3);
        let first = trainer.evaluate(&batch).unwrap();
        for i in 0..12 {
            let report = trainer.step(&batch).unwrap();
            assert_eq!(report.updated, i % 2 == 1);
            assert_eq!(report.norm.is_some(), report.updated);
        }
        let last = trainer.evaluate(&batch).unwrap();
        assert!(last.loss < first.loss && last.tokens == first.tokens);
        let trained = logits(&trainer);
        assert!(!near(&trained, &before.logits));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("adapter");
        trainer.save(&path).unwrap();
        let saved = read(&path.join("adapter_config.json"));
        assert_eq!(saved["num_layers"], 1);
        assert_eq!(saved["lora_parameters"]["keys"][0], "self_attn.q_proj");
        let names = io::load_safetensors(path.join("adapters.safetensors")).unwrap();
        let a = &names.arrays["model.layers.1.self_attn.q_proj.lora_a"];
        assert_eq!(a.shape().last(), Some(&8)); // [in, rank], as in mlx-lm
        let loaded = inference::load_model(tiny("qwen3"), &cpu().with_adapter_path(&path)).unwrap();
        let again = loaded
            .as_token_model()
            .unwrap()
            .logits(&prompt, true, &Interrupt::new())
            .unwrap();
        assert!(near(&again.logits, &trained));

        trainer
            .model()
            .as_trainable()
            .unwrap()
            .remove_adapter()
            .unwrap();
        assert!(near(&logits(&trainer), &before.logits));
        assert_eq!(
            trainer.save(&path).unwrap_err().kind(),
            ErrorKind::InvalidOption
        );
    }
}

#[test]
fn a_run_that_is_taken_up_again_gives_the_same_losses() {
    let config = LoraConfig::new().with_dropout(0.2);
    let tuning = || Tuning {
        schedule: Schedule::constant(1e-2).with_warmup(3, 0.0),
        seed: 5,
        ..Tuning::default()
    };
    let batch = batch(2);
    let mut uninterrupted = fresh("llama", &config, tuning());
    let losses: Vec<f32> = (0..6)
        .map(|_| uninterrupted.step(&batch).unwrap().loss)
        .collect();
    let mut first = fresh("llama", &config, tuning());
    for loss in &losses[..3] {
        assert_eq!(first.step(&batch).unwrap().loss, *loss);
    }
    let (params, state) = (first.params(), first.optimizer().state().clone());
    let mut second = fresh(
        "llama",
        &config,
        Tuning {
            seed: 5,
            ..tuning()
        },
    );
    second
        .restore(&params, state, first.optimizer().steps(), first.batches())
        .unwrap();
    for loss in &losses[3..] {
        assert_eq!(second.step(&batch).unwrap().loss, *loss);
    }
    let mut missing = params;
    missing.pop_first();
    let e = second.restore(&missing, Params::new(), 0, 0).unwrap_err();
    assert!(e.to_string().contains("missing"), "{e}");
}

#[test]
fn preferences_are_learned() {
    let tuning = Tuning {
        schedule: Schedule::constant(5e-3),
        ..Tuning::default()
    };
    let mut trainer = fresh("llama", &LoraConfig::new(), tuning);
    let prompt = vec![5u32, 80, 31];
    let reply =
        |end: [u32; 2]| Sequence::new([prompt.as_slice(), &end].concat()).with_prompt(prompt.len());
    let pair = [Preference {
        chosen: reply([40, 41]),
        rejected: reply([7, 200]),
    }];
    let first = trainer.step_by_preference(&pair, 0.1, 0.0).unwrap();
    assert!((first.loss - 2f32.ln()).abs() < 1e-4, "{first:?}");
    for _ in 0..8 {
        trainer.step_by_preference(&pair, 0.1, 0.0).unwrap();
    }
    let last = trainer.step_by_preference(&pair, 0.1, 0.0).unwrap();
    assert!(last.loss < 0.9 * first.loss, "{last:?}");
    assert!(trainer.step_by_preference(&pair, 0.0, 0.0).is_err());
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let load = |config: &LoraConfig, kind| {
        Trainer::load(&tiny("qwen3-moe"), &cpu(), config, kind, Tuning::default())
            .err()
            .unwrap()
    };
    let e = load(
        &LoraConfig::new().with_targets(["nothing"]),
        AdapterKind::Lora,
    );
    assert_eq!(e.kind(), ErrorKind::InvalidOption);
    assert!(e.to_string().contains("q_proj"), "{e}");
    let experts = LoraConfig::new().with_targets(["switch_mlp.down_proj"]);
    assert_eq!(
        load(&experts, AdapterKind::Dora).kind(),
        ErrorKind::Unsupported
    );

    let mut trainer = fresh("llama", &LoraConfig::new(), Tuning::default());
    for bad in [
        vec![],
        vec![Sequence::new(vec![4])],
        vec![Sequence::new(vec![4, 5]).with_prompt(2)],
        vec![Sequence::new(vec![4, 1_000_000])],
    ] {
        assert_eq!(
            trainer.step(&bad).unwrap_err().kind(),
            ErrorKind::InvalidOption
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let wrong = cpu().with_adapter_path(dir.path());
    assert!(inference::load_model(tiny("llama"), &wrong).is_err());
    // An adapter of another model must be rejected.
    let other = cpu().with_adapter_path(fixtures().join("training/qwen3-q4"));
    let e = inference::load_model(tiny("llama"), &other).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidModel);
}

#[test]
fn a_model_in_training_still_answers() {
    let mut trainer = fresh("llama", &LoraConfig::new(), like_mlx_lm(1e-2));
    let say = |trainer: &Trainer| {
        let options = GenerateOptions::new()
            .with_max_tokens(8)
            .with_ignore_eos(true);
        let prompt = inference::Prompt::Tokens(vec![5, 17, 99]);
        let stream = trainer.model().generate(&prompt, &options).unwrap();
        stream.map(|token| token.unwrap().id).collect::<Vec<_>>()
    };
    let learned: Vec<u32> = vec![5, 17, 99, 40, 41, 42, 43, 44, 45, 46, 47];
    let before = say(&trainer);
    for _ in 0..60 {
        trainer.step(&[Sequence::new(learned.clone())]).unwrap();
    }
    assert_ne!(before, learned[3..]);
    assert_eq!(say(&trainer), learned[3..]);
}

#[test]
fn a_fused_model_computes_what_the_adapted_one_does() {
    for (adapter, checkpoint, tolerance) in [
        ("llama-1", "llama", 1e-4),
        ("llama-dora", "llama", 1e-4),
        // The merged model is rounded to bfloat16, so the bound is large.
        ("qwen3-moe-4", "qwen3-moe", 0.05),
        // The merged model is quantized again, which adds further rounding errors.
        ("qwen3-q4", "qwen3-q4", 1.0),
    ] {
        let adapter = fixtures().join("training").join(adapter);
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("fused");
        let changed = train::fuse(&tiny(checkpoint), &adapter, &output).unwrap();
        assert!(changed > 0);
        let logits = |path: &Path, options: &LoadOptions| {
            let model = inference::load_model(path, options).unwrap();
            let prompt = inference::Prompt::Tokens(vec![5, 17, 99, 4]);
            let tokens = model.as_token_model().unwrap();
            tokens
                .logits(&prompt, true, &Interrupt::new())
                .unwrap()
                .logits
        };
        let apart = logits(&tiny(checkpoint), &cpu().with_adapter_path(&adapter));
        let fused = logits(&output, &cpu());
        let plain = logits(&tiny(checkpoint), &cpu());
        let distance = |a: &[f32]| {
            let each = a.iter().zip(&apart).map(|(a, b)| (a - b).abs());
            each.fold(0f32, f32::max)
        };
        assert!(
            distance(&fused) < tolerance,
            "{} {checkpoint}",
            distance(&fused)
        );
        assert!(distance(&plain) > 1e-2);
        let e = train::fuse(&tiny(checkpoint), &adapter, &output).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
    }
}

/// Adapters in bfloat16 need half the memory of float32. They must learn, too, and stay in
/// bfloat16. The adapter's product is computed in the wider type.
#[test]
fn adapters_in_bfloat16_learn_and_stay_bfloat16() {
    let learned = Sequence::new(vec![5, 17, 99, 40, 41, 42, 43, 44, 45, 46, 47]);
    let losses = |dtype: ComputeType| {
        let config = LoraConfig::new().with_dtype(dtype);
        let mut trainer = fresh("llama", &config, like_mlx_lm(1e-2));
        let losses: Vec<f32> = (0..20)
            .map(|_| trainer.step(std::slice::from_ref(&learned)).unwrap().loss)
            .collect();
        (trainer, losses)
    };
    let (_, wide) = losses(ComputeType::Float32);
    let (trainer, narrow) = losses(ComputeType::BFloat16);
    // B is zero at first, so the adapter has no effect on the first loss.
    assert!((narrow[0] - wide[0]).abs() < 1e-3, "{narrow:?} {wide:?}");
    for (name, losses) in [("float32", &wide), ("bfloat16", &narrow)] {
        assert!(losses[19] < 0.7 * losses[0], "{name}: {losses:?}");
    }
    let params = trainer.params();
    assert!(!params.is_empty());
    assert!(params.values().all(|p| p.dtype() == Dtype::Bfloat16));

    // After saving and loading, the adapter must compute the same logits.
    let dir = tempfile::tempdir().unwrap();
    trainer.save(dir.path()).unwrap();
    let stored = io::load_safetensors(dir.path().join("adapters.safetensors")).unwrap();
    assert!(stored.arrays.values().all(|a| a.dtype() == Dtype::Bfloat16));
    let options = cpu().with_adapter_path(dir.path());
    let again = inference::load_model(tiny("llama"), &options).unwrap();
    let difference = distance(&logits(again.as_ref()), &logits(trainer.model()));
    assert!(difference < 1e-4, "{difference}");
}
