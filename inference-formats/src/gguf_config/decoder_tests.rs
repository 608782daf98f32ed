//! Tests of GGUF files of decoders whose files have several forms: latent attention, mixtures with
//! shared experts, layers that predict further tokens, and features that are not supported.

use super::*;
use crate::gguf::testing::Writer;

/// A file of two blocks with 32 elements and 4 heads.
pub(super) struct File {
    architecture: &'static str,
    numbers: Vec<(&'static str, u32)>,
    pub(super) floats: Vec<(&'static str, f32)>,
    texts: Vec<(&'static str, &'static str)>,
    lists: Vec<(&'static str, Vec<i32>)>,
    flags: Vec<(&'static str, Vec<bool>)>,
    tensors: Vec<(&'static str, Vec<u64>)>,
}

impl File {
    pub(super) fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            numbers: vec![
                ("block_count", 2),
                ("embedding_length", 32),
                ("feed_forward_length", 48),
                ("attention.head_count", 4),
            ],
            floats: vec![("attention.layer_norm_rms_epsilon", 1e-6)],
            texts: Vec::new(),
            lists: Vec::new(),
            flags: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// Adds numbers. They replace earlier ones with the same names.
    pub(super) fn with(mut self, numbers: &[(&'static str, u32)]) -> Self {
        for (name, _) in numbers {
            self.numbers.retain(|(old, _)| old != name);
        }
        self.numbers.extend_from_slice(numbers);
        self
    }

    /// Adds a list with a number for each layer. It replaces a single number.
    pub(super) fn list(mut self, name: &'static str, numbers: &[i32]) -> Self {
        self.lists.retain(|(old, _)| *old != name);
        self.flags.retain(|(old, _)| *old != name);
        self.lists.push((name, numbers.to_vec()));
        self.without(name)
    }

    /// Adds a list with a boolean for each layer.
    pub(super) fn flags(mut self, name: &'static str, flags: &[bool]) -> Self {
        self.flags.retain(|(old, _)| *old != name);
        self.flags.push((name, flags.to_vec()));
        self
    }

    /// Adds a text.
    pub(super) fn text(mut self, name: &'static str, text: &'static str) -> Self {
        self.texts.push((name, text));
        self
    }

    pub(super) fn without(mut self, name: &str) -> Self {
        self.numbers.retain(|(old, _)| *old != name);
        self
    }

    pub(super) fn tensor(mut self, name: &'static str, dims: &[u64]) -> Self {
        self.tensors.push((name, dims.to_vec()));
        self
    }

    pub(super) fn read(&self) -> Result<Map<String, Value>> {
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut w = Writer::default().str("general.architecture", self.architecture);
        for (name, value) in &self.numbers {
            w = w.u32(&key(name), *value);
        }
        for (name, value) in &self.floats {
            w = w.f32(&key(name), *value);
        }
        for (name, value) in &self.texts {
            w = match name.contains("tokenizer") {
                true => w.str(name, value),
                false => w.str(&key(name), value),
            };
        }
        for (name, values) in &self.lists {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            w = w.array(&key(name), 5, values.len() as u64, &bytes);
        }
        for (name, values) in &self.flags {
            let bytes: Vec<u8> = values.iter().map(|v| u8::from(*v)).collect();
            w = w.array(&key(name), 7, values.len() as u64, &bytes);
        }
        w = w.tensor("token_embd.weight", &[32, 3], 0, &[0; 384]);
        for (name, dims) in &self.tensors {
            let bytes = usize::try_from(dims.iter().product::<u64>() * 4).unwrap();
            w = w.tensor(name, dims, 0, &vec![0; bytes]);
        }
        let (_dir, path) = w.file();
        fields(&Gguf::open(&path)?)
    }

    pub(super) fn refused(&self) -> String {
        self.read().unwrap_err().to_string()
    }
}

/// `DeepSeek`'s numbers. `old` is the form with one matrix for keys and values.
pub(super) fn deepseek(old: bool) -> File {
    latent("deepseek2", old)
}

/// The numbers of latent attention and experts.
pub(super) fn latent(architecture: &'static str, old: bool) -> File {
    let file = File::new(architecture).with(&[
        ("attention.kv_lora_rank", 12),
        ("rope.dimension_count", 8),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 24),
        ("expert_shared_count", 2),
        ("leading_dense_block_count", 1),
    ]);
    let file = file.tensor("blk.1.ffn_up_shexp.weight", &[32, 48]);
    match old {
        true => file.with(&[
            ("attention.head_count_kv", 4),
            ("attention.key_length", 18),
            ("attention.value_length", 6),
        ]),
        false => file.with(&[
            ("attention.head_count_kv", 1),
            ("attention.key_length", 20),
            ("attention.value_length", 12),
            ("attention.key_length_mla", 18),
            ("attention.value_length_mla", 6),
        ]),
    }
}

#[test]
fn both_forms_of_latent_attention_have_the_same_sizes() {
    for old in [true, false] {
        let config = deepseek(old).read().unwrap();
        for (name, expected) in [
            ("model_type", json!("deepseek_v2")),
            ("num_key_value_heads", json!(4)),
            ("kv_lora_rank", json!(12)),
            ("q_lora_rank", Value::Null),
            ("qk_rope_head_dim", json!(8)),
            ("qk_nope_head_dim", json!(10)),
            ("v_head_dim", json!(6)),
            ("head_dim", Value::Null),
            ("scoring_func", json!("softmax")),
            ("topk_method", json!("greedy")),
            ("norm_topk_prob", json!(false)),
            ("n_shared_experts", json!(2)),
            ("moe_shared_expert_intermediate_size", json!(24)),
            ("first_k_dense_replace", json!(1)),
        ] {
            assert_eq!(config[name], expected, "{name}, {old}");
        }
    }
}

#[test]
fn the_scores_and_the_tokenizer_tell_the_relatives_apart() {
    let model = |file: File| file.read().unwrap()["model_type"].clone();
    let sigmoids = || deepseek(false).with(&[("expert_gating_func", 2)]);
    assert_eq!(model(sigmoids()), "deepseek_v3");
    // If the file states no scoring function, a selection bias means sigmoids.
    let biased = deepseek(false).tensor("blk.1.exp_probs_b.bias", &[8]);
    assert_eq!(model(biased), "deepseek_v3");
    let mut glm = sigmoids();
    glm.texts.push(("tokenizer.ggml.pre", "glm4"));
    assert_eq!(model(glm), "glm4_moe_lite");
    assert_eq!(model(deepseek(false).without("expert_count")), "youtu_llm");
    let grouped = deepseek(false).with(&[
        ("expert_group_count", 4),
        ("expert_group_used_count", 2),
        ("expert_gating_func", 1),
    ]);
    let grouped = grouped.read().unwrap();
    assert_eq!(grouped["topk_method"], "group_limited_greedy");
    assert_eq!(
        [&grouped["n_group"], &grouped["topk_group"]],
        [&json!(4), &json!(2)]
    );
}

#[test]
fn yarn_has_the_weight_of_its_factor() {
    let mut file = deepseek(false).with(&[("rope.scaling.original_context_length", 16)]);
    file.texts.push(("rope.scaling.type", "yarn"));
    let factor = "rope.scaling.factor";
    assert!(file.refused().contains(factor), "{}", file.refused());
    file.floats.push((factor, 40.0));
    file.floats
        .push(("rope.scaling.yarn_log_multiplier", 0.0707));
    let scaling = &file.read().unwrap()["rope_scaling"];
    assert_eq!(scaling["mscale_all_dim"], 0.707);
    assert_eq!(scaling["mscale"], 0.707);
    assert_eq!(scaling["factor"], 40.0);
}

#[test]
fn impossible_sizes_are_errors() {
    for (file, said) in [
        (
            deepseek(false).with(&[("rope.dimension_count", 18)]),
            "rope.dimension_count is 18",
        ),
        (
            deepseek(false).without("attention.kv_lora_rank"),
            "attention.kv_lora_rank",
        ),
        (
            deepseek(false).with(&[("expert_shared_count", 5)]),
            "expert_shared_count is 5",
        ),
        (
            deepseek(false).with(&[("expert_gating_func", 3)]),
            "expert_gating_func is 3",
        ),
        (
            deepseek(false).with(&[("nextn_predict_layers", 2)]),
            "nextn_predict_layers is 2",
        ),
        (
            File::new("dots1").with(&[("expert_used_count", 2)]),
            "expert_count",
        ),
    ] {
        let error = file.refused();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let file = deepseek(false).with(&[("block_count", 3), ("nextn_predict_layers", 1)]);
    let config = file.read().unwrap();
    assert_eq!(config["num_hidden_layers"], 2);
    for (stored, further) in [
        ("blk.2.nextn.eh_proj.weight", true),
        ("blk.2.attn_norm.weight", true),
        ("blk.1.attn_norm.weight", false),
        ("blk.3.attn_norm.weight", false),
        ("output.weight", false),
    ] {
        assert_eq!(predicts_further(&config, stored), further, "{stored}");
    }
    let config = deepseek(false).read().unwrap();
    assert!(!predicts_further(&config, "blk.2.attn_norm.weight"));
}

#[test]
fn what_tensors_show_becomes_a_field() {
    let read = |file: File, name: &str| file.read().unwrap()[name].clone();
    let norms = |architecture| File::new(architecture).tensor("blk.0.attn_q_norm.weight", &[8]);
    // The engine refuses these models because of this field.
    assert_eq!(read(norms("command-r"), "use_qk_norm"), true);
    assert_eq!(read(norms("stablelm"), "qk_layernorm"), true);
    assert_eq!(read(File::new("hunyuan-dense"), "use_qk_norm"), false);
    let fused = File::new("chatglm").tensor("blk.0.attn_qkv.bias", &[64]);
    assert_eq!(read(fused, "attention_bias"), true);
    let norm = File::new("stablelm").tensor("blk.0.ffn_norm.weight", &[32]);
    assert_eq!(read(norm, "use_parallel_residual"), false);
    assert_eq!(
        read(File::new("stablelm"), "use_parallel_residual"),
        true,
        "a block with one norm"
    );
    let shared = File::new("granitemoe").with(&[("expert_count", 4), ("expert_used_count", 2)]);
    assert_eq!(
        shared.read().unwrap()["num_local_experts"],
        4,
        "without shared experts"
    );
    let shared = shared.tensor("blk.0.ffn_up_shexp.weight", &[32, 8]);
    assert!(shared.refused().contains("shared experts"));
    // Command R 7B has a full layer after three others; files say nothing about it.
    let windows =
        File::new("cohere2").with(&[("block_count", 4), ("attention.sliding_window", 16)]);
    assert_eq!(
        read(windows, "layer_types"),
        json!([
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention"
        ])
    );
    // Old files of MiniCPM lack the factors.
    assert_eq!(read(File::new("minicpm"), "scale_emb"), 12.0);
}

#[test]
fn the_feed_forward_part_of_jina_bert_shows_in_its_tensors() {
    let kind = |name: &'static str, rows: u64| {
        let file = File::new("jina-bert-v2").tensor("blk.0.ffn_up.weight", &[32, 48]);
        let file = match name {
            "" => file,
            name => File::new("jina-bert-v2").tensor(name, &[32, rows]),
        };
        let config = file.read().unwrap();
        assert_eq!(config["position_embedding_type"], "alibi");
        config["feed_forward_type"].clone()
    };
    assert_eq!(kind("", 0), "original");
    assert_eq!(kind("blk.0.ffn_up.weight", 96), "geglu", "fused");
    assert_eq!(kind("blk.0.ffn_gate.weight", 48), "geglu", "separate");
}
