//! Tests configurations as users write them, including their mistakes.

use super::*;

#[test]
fn mlx_lm_s_example_config_is_read() {
    let yaml = r#"
# The fields of mlx-lm's example.
model: "models/first"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "data"
seed: 0
num_layers: -1
learning_rate: 1e-5
resume_adapter_file: null
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
"#;
    let config = TrainConfig::from_yaml(yaml).unwrap();
    assert_eq!(config.optimizer, OptimizerName::AdamW);
    assert_eq!(config.num_layers, -1);
    assert_eq!(config.learning_rate, 1e-5);
    let adamw = &config.optimizer_config[&OptimizerName::AdamW];
    assert_eq!(adamw["eps"], Setting::Number(1e-6));
    assert_eq!(adamw["betas"], Setting::Numbers(vec![0.9, 0.98]));
    assert_eq!(adamw["bias_correction"], Setting::Flag(true));
    assert_eq!(config.lr_schedule.unwrap().warmup, 100);
    assert_eq!(config.lora_parameters.keys.unwrap().len(), 2);
}

#[test]
fn yaml_and_toml_say_the_same() {
    let yaml = "iters: 7\nmask_prompt: true\nlora_parameters:\n  rank: 4\n";
    let toml = "iters = 7\nmask_prompt = true\n[lora_parameters]\nrank = 4\n";
    let config = TrainConfig::from_yaml(yaml).unwrap();
    assert_eq!(config, TrainConfig::from_toml(toml).unwrap());
    assert!(config.data_options().mask_prompt);
    for empty in ["", "# nothing\n"] {
        assert_eq!(
            TrainConfig::from_yaml(empty).unwrap(),
            TrainConfig::default()
        );
        assert_eq!(
            TrainConfig::from_toml(empty).unwrap(),
            TrainConfig::default()
        );
    }
}

#[test]
fn what_cannot_be_is_told() {
    for (yaml, what) in [
        ("itres: 3", "itres"),
        ("report_to: wandb", "jsonl and tensorboard"),
        ("report_to: 3", "report_to"),
        ("method: ppo", "ppo"),
        ("method: dpo\nbeta: 0.0", "beta is 0"),
        ("method: dpo\nlabel_smoothing: 0.5", "below 0.5"),
        ("method: dpo\npack: true", "not packed"),
        ("method: dpo\nbatch_order: mlx-lm", "mlx-lm has no dpo"),
        ("batch_order: shuffled", "shuffled"),
        ("batch_order: random\nkeep_order: true", "two orders"),
        ("method: orpo\nbeta: -1.0", "beta is -1"),
        ("method: orpo\nlabel_smoothing: 0.1", "about method dpo"),
        ("method: orpo\ncompile: on", "not compiled"),
        ("method: kto\nbatch_size: 1", "batch_size of at least 2"),
        ("method: kto\nmask_prompt: true", "never learns prompts"),
        (
            "method: kto\ndesirable_weight: -1.0",
            "desirable_weight is -1",
        ),
        ("method: dpo\nundesirable_weight: 2.0", "about method kto"),
        (
            "method: contrastive\nsimilarity_scale: 0.0",
            "similarity_scale is 0",
        ),
        (
            "method: contrastive\nbeta: 0.1",
            "about method dpo, orpo, kto, grpo",
        ),
        (
            "method: contrastive\nbatch_order: mlx-lm",
            "mlx-lm has no contrastive",
        ),
        (
            "method: dpo\nanchor_prompt_name: query",
            "about method contrastive",
        ),
        ("method: grpo\nbeta: -1.0", "beta is -1"),
        ("method: grpo\nnum_generations: 1", "num_generations is 1"),
        ("method: grpo\ntop_p: 0.0", "top_p is 0"),
        ("method: grpo\ntemperature: 0.0", "temperature is 0"),
        (
            "method: grpo\nmax_completion_length: 0",
            "max_completion_length is 0",
        ),
        ("method: grpo\ngrad_accumulation_steps: 2", "bnpo"),
        ("method: grpo\nnum_iterations: 0", "num_iterations is 0"),
        ("method: grpo\nepsilon: 0.1", "num_iterations 1"),
        ("method: grpo\nepsilon_high: 0.28", "num_iterations 1"),
        (
            "method: grpo\nnum_iterations: 2\nepsilon: 0.0",
            "epsilon is 0",
        ),
        (
            "method: grpo\nnum_iterations: 2\nepsilon_high: -1.0",
            "epsilon_high is -1",
        ),
        ("method: dpo\nnum_iterations: 2", "about method grpo"),
        ("method: grpo\nearly_stopping_patience: 1", "no validations"),
        ("method: dpo\nloss_type: bnpo", "about method grpo"),
        ("early_stopping_patience: 0", "early_stopping_patience is 0"),
        ("early_stopping_threshold: 0.5", "early_stopping_patience"),
        (
            "early_stopping_patience: 1\nval_batches: 0",
            "val_batches is 0",
        ),
        ("batch_order: mlx-lm\nkeep_order: true", "two orders"),
        ("batch_order: file\npack: true", "order of its own"),
        ("lora_parameters: {alpha: 16}", "alpha / rank"),
        ("iters: 0", "iters is 0"),
        ("iters: many", "iters"),
        ("num_layers: -2", "-1 for all"),
        ("learning_rate: -1.0", "learning_rate is -1"),
        ("learning_rate: .nan", "learning_rate is NaN"),
        ("max_seq_length: 1", "at least 2"),
        ("optimizer: adamx", "adamx"),
        ("lora_parameters: {dropout: 1.0}", "below 1"),
        ("lora_parameters: {keys: []}", "at least one projection"),
        ("lr_schedule: {name: cosine}", "cosine_decay"),
        (
            "lr_schedule: {name: cosine_decay, arguments: [1.0]}",
            "it takes 2 to 3",
        ),
        ("pack: true\nkeep_order: true", "leave keep_order out"),
        ("iters: 1\niters: 2", "iters"),
        ("- a\n- b", ""),
    ] {
        let error = TrainConfig::from_yaml(yaml).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().contains(what), "{yaml}: {error}");
    }
    let error = TrainConfig::from_toml("itres = 3").unwrap_err().to_string();
    assert!(
        error.contains("itres") && error.contains("iters"),
        "{error}"
    );
}

#[test]
fn what_mlx_lm_writes_itself_is_read() {
    // All fields of the adapter_config.json that mlx-lm 0.30.7 writes.
    let json = r#"{
            "adapter_path": "adapters", "batch_size": 1, "config": "lora.yaml", "data": "data",
            "fine_tune_type": "lora", "grad_accumulation_steps": 1, "grad_checkpoint": false, "iters": 3,
            "learning_rate": 1e-05, "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
            "lr_schedule": null, "mask_prompt": false, "max_seq_length": 2048, "model": "m",
            "num_layers": 16, "optimizer": "adam", "optimizer_config": {"adam": {}, "adamw": {},
            "muon": {}, "sgd": {}, "adafactor": {}}, "project_name": null, "report_to": null,
            "resume_adapter_file": null, "save_every": 100, "seed": 0, "steps_per_eval": 200,
            "steps_per_report": 10, "test": false, "test_batches": 500, "train": true, "val_batches": 25}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter_config.json");
    std::fs::write(&path, json).unwrap();
    let config = TrainConfig::read(&path).unwrap();
    assert_eq!((config.iters, config.lora_parameters.rank), (3, 4));
    assert!(config.given.rank && !config.given.keys);

    let yaml = "optimizer: AdamW\noptimizer_config: {AdamW: {eps: 0.5}}\nreport_to: null\nproject_name: x\n\
                    config: a.yaml\ntrust_remote_code: false\nclear_cache_threshold: 0\niters: 3\nval_batches: null\n";
    let config = TrainConfig::from_yaml(yaml).unwrap();
    assert_eq!((config.iters, config.val_batches), (3, 25));
    assert_eq!(config.optimizer, OptimizerName::AdamW);
    assert_eq!(
        config.optimizer_config[&OptimizerName::AdamW]["eps"],
        Setting::Number(0.5)
    );
    // Options with an effect must still be reported, even next to harmless options.
    for (more, what) in [
        ("itres: 3", "itres"),
        ("trust_remote_code: true", "trust_remote_code"),
        ("iters: 0", "iters is 0"),
    ] {
        let error = TrainConfig::from_yaml(&format!("project_name: x\n{more}")).unwrap_err();
        assert!(error.to_string().contains(what), "{more}: {error}");
    }
}

#[test]
fn reports_are_a_list_of_names() {
    let read = |yaml: &str| TrainConfig::from_yaml(yaml).unwrap().report_to;
    assert_eq!(
        read("report_to: jsonl, TensorBoard"),
        [Report::Jsonl, Report::TensorBoard]
    );
    assert_eq!(read("report_to: [tensorboard]"), [Report::TensorBoard]);
    for none in ["report_to: null", "report_to: \"\"", "iters: 3"] {
        assert_eq!(read(none), []);
    }
    let config = TrainConfig::from_yaml("report_to: jsonl\nbatch_order: mlx-lm").unwrap();
    let written = serde_json::to_string(&config).unwrap();
    assert_eq!(TrainConfig::from_yaml(&written).unwrap(), config);
}

#[test]
fn hostile_yaml_is_an_error() {
    let mut bomb = String::from("a: &a [x, x, x, x, x, x, x, x, x]\n");
    for (from, to) in "abcdefghij".chars().zip("bcdefghijk".chars()) {
        bomb.push_str(&format!(
            "{to}: &{to} [{}]\n",
            vec![format!("*{from}"); 9].join(", ")
        ));
    }
    assert!(TrainConfig::from_yaml(&bomb).is_err());
    let deep = "[".repeat(100_000);
    assert!(TrainConfig::from_yaml(&deep).is_err());
    assert!(TrainConfig::from_toml(&format!("iters = {deep}")).is_err());
}

#[test]
fn files_are_told_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.yaml");
    std::fs::write(&path, "iters: 5").unwrap();
    assert_eq!(TrainConfig::read(&path).unwrap().iters, 5);
    let path = dir.path().join("run.txt");
    assert!(
        TrainConfig::read(&path)
            .unwrap_err()
            .to_string()
            .contains("must end in .yaml")
    );
    let path = dir.path().join("none.toml");
    assert_eq!(TrainConfig::read(&path).unwrap_err().kind(), ErrorKind::Io);
}
