//! Python mlx-lm must load adapters that this engine trained, and generate equal replies with them.

use inference::{ComputeType, Interrupt, LoadOptions, LoraConfig, Precision, Prompt, TextModel};
use metal_backend::train::{AdapterKind, Schedule, Sequence, Trainer, Tuning};

use super::{backend, tiny};
use crate::common::max_difference;
use inference::Backend as _;

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let prompt = Prompt::Tokens(vec![5, 17, 99, 4]);
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, true, &Interrupt::new())
        .unwrap()
        .logits
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn adapters_trained_here_say_the_same_there() {
    use AdapterKind::{Dora, Full, Lora};
    // mlx-lm cannot load the fixtures of gpt2 and gemma3, so they are omitted. For gemma2 and phi3,
    // mlx-lm's results differ from ours even without an adapter.
    let cases: [(&str, AdapterKind, &[&str]); 10] = [
        ("llama", Lora, &["q_proj", "down_proj", "lm_head"]),
        ("llama", Dora, &["q_proj", "embed_tokens"]),
        ("llama", Full, &[]),
        ("llama-q4", Lora, &["q_proj", "embed_tokens"]),
        ("llama-tied-gqa", Lora, &["embed_tokens", "v_proj"]),
        ("qwen2", Full, &[]),
        ("qwen3-q4", Dora, &["q_proj", "up_proj"]),
        ("qwen3-moe", Lora, &["gate_proj", "down_proj", "k_proj"]),
        ("mixtral", Lora, &["up_proj", "q_proj"]),
        ("gemma3-text", Lora, &["q_proj", "embed_tokens"]),
    ];
    for (name, kind, targets) in cases {
        let mut config = LoraConfig::new().with_rank(2).with_num_layers(2);
        if !targets.is_empty() {
            config = config.with_targets(targets.to_vec());
        }
        let tuning = Tuning {
            schedule: Schedule::constant(1e-2),
            ..Tuning::default()
        };
        let cpu = LoadOptions::new()
            .with_backend("cpu")
            .with_precision(Precision::Exact);
        let mut trainer = Trainer::load(&tiny(name), &cpu, &config, kind, tuning).unwrap();
        let base = logits(trainer.model());
        for i in 0..5u32 {
            let ids = (0..12).map(|j| 3 + (i * 37 + j * j * 11) % 290).collect();
            trainer.step(&[Sequence::new(ids)]).unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        trainer.save(dir.path()).unwrap();
        let ours = logits(trainer.model());
        let options = LoadOptions::new()
            .with_dtype(ComputeType::Float32)
            .with_adapter_path(dir.path());
        let theirs = backend()
            .load_model(&tiny(name), &options)
            .unwrap_or_else(|e| panic!("{name} {kind:?}: {e}"));
        let difference = max_difference(&ours, &logits(theirs.as_ref()));
        println!("{name} {kind:?}: {difference}");
        // mlx-lm rounds Gemma's embedding factor, so these results differ more, also without an
        // adapter.
        let allowed = if name.starts_with("gemma") {
            5e-3
        } else {
            1e-3
        };
        assert!(difference < allowed, "{name} {kind:?}: {difference}");
        assert!(max_difference(&ours, &base) > 1e-2, "{name} {kind:?}");
    }
}
