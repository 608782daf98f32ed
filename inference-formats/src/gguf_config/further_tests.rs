//! Tests of GGUF files whose layers differ in heads, rotations or experts, and of files that an
//! architecture alone does not identify.

use super::decoder_tests::{File, deepseek, latent};
use super::*;

const EXPERTS: [(&str, u32); 3] = [
    ("expert_count", 4),
    ("expert_used_count", 2),
    ("expert_feed_forward_length", 24),
];

/// A file of two layers. The second layer has experts.
fn mixture(architecture: &'static str) -> File {
    File::new(architecture)
        .with(&EXPERTS)
        .tensor("blk.1.ffn_gate_inp.weight", &[32, 4])
}

#[test]
fn a_growth_of_queries_tells_mistral_from_deepseek() {
    let growing = |architecture| {
        let mut file = latent(architecture, false);
        file.floats.push(("attention.temperature_scale", 0.25));
        scaled(file)
    };
    fn scaled(mut file: File) -> Map<String, Value> {
        file = file.with(&[("rope.scaling.original_context_length", 16)]);
        file.floats.push(("rope.scaling.factor", 8.0));
        file.text("rope.scaling.type", "yarn").read().unwrap()
    }
    let usual = scaled(latent("mistral4", false));
    for (config, growth) in [
        (growing("deepseek2"), 0.25),
        (growing("mistral4"), 0.25),
        (usual, f64::from(0.1f32)),
    ] {
        assert_eq!(config["model_type"], "mistral4");
        assert_eq!(config["scoring_func"], "softmax");
        let rotation = &config["rope_parameters"];
        assert_eq!(rotation["llama_4_scaling_beta"], growth);
        assert_eq!(rotation["rope_theta"], 10_000.0);
        assert_eq!(config["rope_scaling"], Value::Null);
    }
    let plain = deepseek(false).read().unwrap();
    assert_eq!(plain["model_type"], "deepseek_v2");
}

/// A file with the numbers of an indexer, and its tensor.
fn indexed(architecture: &'static str) -> File {
    latent(architecture, false)
        .with(&[
            ("attention.indexer.head_count", 16),
            ("attention.indexer.key_length", 12),
            ("attention.indexer.top_k", 7),
        ])
        .tensor("blk.0.indexer.attn_k.weight", &[32, 12])
}

#[test]
fn indexers_have_sizes_and_tensors() {
    for (architecture, family) in [("deepseek32", "deepseek_v32"), ("glm-dsa", "glm_moe_dsa")] {
        let config = indexed(architecture).read().unwrap();
        assert_eq!(config["model_type"], family);
        for (name, expected) in [
            ("index_n_heads", 16),
            ("index_head_dim", 12),
            ("index_topk", 7),
        ] {
            assert_eq!(config[name], expected, "{name}");
        }
        // Readers of these files assume sigmoids.
        assert_eq!(config["scoring_func"], "sigmoid");
        let without = latent(architecture, false).refused();
        assert!(without.contains("blk.N.indexer"), "{without}");
        let error = indexed(architecture).without("attention.indexer.top_k");
        assert!(error.refused().contains("attention.indexer.top_k"));
    }
}

#[test]
fn layers_that_share_an_indexer_are_named() {
    const TYPES: &str = "attention.indexer.types";
    let file = || indexed("glm-dsa");
    let config = file().flags(TYPES, &[true, false, true]).read().unwrap();
    assert_eq!(config["indexer_types"], json!(["full", "shared"]));
    assert!(file().flags(TYPES, &[true]).refused().contains(TYPES));
    // Without a list, only the longer context tells GLM 5.2 from its predecessors.
    let shares = |context| {
        let config = file().with(&[("context_length", context)]).read().unwrap();
        config.contains_key("index_topk_freq")
    };
    assert_eq!([shares(202_752), shares(1 << 20)], [false, true]);
}

#[test]
fn heads_and_rotations_differ_by_kind_of_layer() {
    let file = || {
        mixture("step35")
            .with(&[
                ("attention.key_length", 8),
                ("attention.sliding_window", 16),
            ])
            .list("attention.head_count", &[4, 6])
            .list("attention.head_count_kv", &[2, 2])
            .flags("attention.sliding_window_pattern", &[false, true])
    };
    let config = file().read().unwrap();
    for (name, expected) in [
        ("num_attention_heads", json!(4)),
        ("num_sliding_attention_heads", json!(6)),
        ("num_key_value_heads", json!(2)),
        ("mlp_layer_types", json!(["dense", "sparse"])),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
        ),
    ] {
        assert_eq!(config[name], expected, "{name}");
    }
    let rotation = &config["rope_parameters"];
    let part = |kind: &str| rotation[kind]["partial_rotary_factor"].clone();
    assert_eq!(part("full_attention"), 0.5);
    assert_eq!(part("sliding_attention"), 1.0);
    let other = file()
        .with(&[("block_count", 3)])
        .list("attention.head_count", &[4, 6, 5])
        .list("attention.head_count_kv", &[1, 1, 1])
        .flags("attention.sliding_window_pattern", &[false, true, true]);
    let error = other.refused();
    assert!(error.contains("attention.head_count"), "{error}");
}

#[test]
fn values_may_be_narrower_than_keys() {
    let file = mixture("mimo2")
        .with(&[
            ("attention.key_length", 12),
            ("attention.value_length", 8),
            ("attention.sliding_window", 16),
            ("rope.dimension_count", 4),
        ])
        .list("attention.head_count_kv", &[1, 2])
        // These files have numbers instead of booleans.
        .list("attention.sliding_window_pattern", &[0, 1]);
    let config = file.read().unwrap();
    for (name, expected) in [
        ("head_dim", json!(12)),
        ("v_head_dim", json!(8)),
        ("num_key_value_heads", json!(1)),
        ("swa_num_key_value_heads", json!(2)),
        ("attention_value_scale", json!(1.0)),
        ("scoring_func", json!("sigmoid")),
    ] {
        assert_eq!(config[name], expected, "{name}");
    }
    let wrong = file.list("attention.sliding_window_pattern", &[0, 2]);
    assert!(wrong.refused().contains("sliding_window_pattern"));
}

#[test]
fn rows_show_what_has_a_gate() {
    let file = |rows: [u64; 2]| {
        mixture("laguna")
            .with(&[
                ("attention.key_length", 8),
                ("attention.sliding_window", 16),
            ])
            .list("attention.head_count", &[4, 6])
            .tensor("blk.0.attn_gate.weight", &[32, rows[0]])
            .tensor("blk.1.attn_gate.weight", &[32, rows[1]])
    };
    let gating = |rows| file(rows).read().unwrap()["gating"].clone();
    assert_eq!(gating([4, 6]), "per-head");
    assert_eq!(gating([32, 48]), "per-element");
    assert!(file([4, 48]).refused().contains("attn_gate"));
    let config = file([4, 6]).read().unwrap();
    assert_eq!(config["num_attention_heads_per_layer"], json!([4, 6]));
    // Without a list, the first of four layers is full.
    let kinds = json!(["full_attention", "sliding_attention"]);
    assert_eq!(config["layer_types"], kinds);
    let full = file([4, 6]).without("attention.sliding_window");
    let kinds = json!(["full_attention", "full_attention"]);
    assert_eq!(full.read().unwrap()["layer_types"], kinds);
}

#[test]
fn layers_without_key_heads_keep_a_state() {
    let jamba = mixture("jamba")
        .with(&[
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 64),
            ("ssm.state_size", 6),
            ("ssm.time_step_rank", 3),
        ])
        .list("attention.head_count_kv", &[0, 2]);
    let config = jamba.read().unwrap();
    assert_eq!(config["layer_types"], json!(["mamba", "attention"]));
    assert_eq!(config["mlp_layer_types"], json!(["dense", "sparse"]));
    assert_eq!(config["mamba_expand"], 2);
    let error = jamba.with(&[("ssm.inner_size", 65)]).refused();
    assert!(error.contains("ssm.inner_size"), "{error}");

    let kimi = latent("kimi-linear", false)
        .with(&[("kda.head_dim", 8), ("ssm.conv_kernel", 4)])
        .list("attention.head_count_kv", &[0, 1])
        .tensor("blk.0.ssm_a", &[1, 3, 1, 1]);
    let config = kimi.read().unwrap();
    let kinds = json!(["linear_attention", "full_attention"]);
    assert_eq!(config["layer_types"], kinds);
    assert_eq!(config["linear_num_heads"], 3);
    assert!(
        kimi.without("kda.head_dim")
            .refused()
            .contains("kda.head_dim")
    );
}

#[test]
fn norms_follow_the_key_of_their_epsilon() {
    let file = || mixture("cohere2moe").with(&[("attention.sliding_window", 16)]);
    assert_eq!(file().read().unwrap()["norm_type"], "rms");
    let mut layer = file();
    layer.floats = vec![("attention.layer_norm_epsilon", 1e-5)];
    let config = layer.read().unwrap();
    assert_eq!(config["norm_type"], "layer");
    assert_eq!(config["intermediate_size"], 24);
    assert_eq!(config["prefix_dense_intermediate_size"], 48);
    layer.floats.push(("expert_weights_scale", 2.0));
    assert!(layer.refused().contains("expert_weights_scale"));
}
