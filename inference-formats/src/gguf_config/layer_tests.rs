//! Tests of metadata that differ between layers: Gemma 4 and LFM2, complete and wrong.

use super::*;
use crate::gguf::testing::Writer;

fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The keys of both families, without `left_out`.
fn common(architecture: &str, layers: u32) -> Writer {
    let mut w = Writer::default().str("general.architecture", architecture);
    for (key, value) in [
        ("block_count", layers),
        ("embedding_length", 32),
        ("attention.head_count", 4),
        ("context_length", 256),
    ] {
        w = w.u32(&format!("{architecture}.{key}"), value);
    }
    w.f32(
        &format!("{architecture}.attention.layer_norm_rms_epsilon"),
        1e-6,
    )
    .tensor("token_embd.weight", &[32, 3], 0, &[0; 384])
}

/// Six layers, with two sliding layers before each full layer. The last three layers share keys.
struct Gemma {
    heads: Vec<i32>,
    widths: Vec<i32>,
    factors: Option<Vec<f32>>,
    values: Vec<u32>,
    shared: u32,
    left_out: &'static str,
}

impl Default for Gemma {
    fn default() -> Self {
        Self {
            heads: vec![2, 2, 1, 2, 2, 1],
            widths: vec![48, 48, 48, 96, 96, 96],
            factors: Some(vec![1.0, 1.0, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30]),
            values: vec![0, 1],
            shared: 3,
            left_out: "",
        }
    }
}

impl Gemma {
    fn file(&self) -> Writer {
        let mut w = common("gemma4", 6);
        for (key, value) in [
            ("attention.key_length", 16),
            ("attention.value_length", 16),
            ("attention.key_length_swa", 8),
            ("attention.value_length_swa", 8),
            ("rope.dimension_count", 16),
            ("rope.dimension_count_swa", 8),
            ("attention.sliding_window", 16),
            ("attention.shared_kv_layers", self.shared),
            ("embedding_length_per_layer_input", 4),
        ] {
            if key != self.left_out {
                w = w.u32(&format!("gemma4.{key}"), value);
            }
        }
        if self.left_out != "attention.sliding_window_pattern" {
            let key = "gemma4.attention.sliding_window_pattern";
            w = w.array(key, 7, 6, &[1, 1, 0, 1, 1, 0]);
        }
        let array = |w: Writer, key: &str, values: &[i32]| {
            w.array(
                &format!("gemma4.{key}"),
                5,
                values.len() as u64,
                &ints(values),
            )
        };
        w = array(w, "attention.head_count_kv", &self.heads);
        if self.left_out != "feed_forward_length" {
            w = array(w, "feed_forward_length", &self.widths);
        }
        w = w
            .f32("gemma4.rope.freq_base", 1e6)
            .f32("gemma4.final_logit_softcapping", 20.0)
            .tensor("per_layer_token_embd.weight", &[24, 5], 0, &[0; 480]);
        for layer in &self.values {
            w = w.tensor(
                &format!("blk.{layer}.attn_v.weight"),
                &[32, 1],
                0,
                &[0; 128],
            );
        }
        match &self.factors {
            Some(factors) => {
                let dims = [factors.len() as u64];
                w.tensor("rope_freqs.weight", &dims, 0, &floats(factors))
            }
            None => w,
        }
    }
}

fn read(w: &Writer) -> Result<Map<String, Value>> {
    let (_dir, path) = w.file();
    fields(&Gguf::open(&path)?)
}

#[test]
fn gemma4_has_numbers_of_its_own_for_full_layers() {
    let config = read(&Gemma::default().file()).unwrap();
    for (name, expected) in [
        ("model_type", json!("gemma4_text")),
        ("head_dim", json!(8)),
        ("global_head_dim", json!(16)),
        ("num_key_value_heads", json!(2)),
        ("num_global_key_value_heads", json!(1)),
        ("attention_k_eq_v", json!(true)),
        ("num_kv_shared_layers", json!(3)),
        ("intermediate_size", json!(48)),
        ("use_double_wide_mlp", json!(true)),
        ("hidden_size_per_layer_input", json!(4)),
        ("vocab_size_per_layer_input", json!(5)),
        ("final_logit_softcapping", json!(20.0)),
        ("enable_moe_block", json!(false)),
    ] {
        assert_eq!(config[name], expected, "{name}");
    }
    let rope = &config["rope_parameters"];
    assert_eq!(rope["full_attention"]["partial_rotary_factor"], 0.25);
    assert_eq!(rope["full_attention"]["rope_type"], "proportional");
    assert_eq!(rope["sliding_attention"]["rope_theta"], 10_000.0);
    assert_eq!(config["layer_types"][2], "full_attention");
    // In this model, full layers have separate values, and all layers have equal widths.
    let other = Gemma {
        values: vec![0, 1, 2],
        widths: vec![48],
        factors: None,
        shared: 0,
        ..Gemma::default()
    };
    let other = Gemma {
        values: vec![0, 1, 2, 3, 4, 5],
        ..other
    };
    let config = read(&other.file()).unwrap();
    assert_eq!(config["attention_k_eq_v"], false);
    assert!(config["num_global_key_value_heads"].is_null());
    assert_eq!(config["use_double_wide_mlp"], false);
    let full = &config["rope_parameters"]["full_attention"];
    assert_eq!(full["partial_rotary_factor"], 1.0);
}

#[test]
fn gemma4_that_contradicts_itself_is_refused() {
    for (file, why) in [
        (
            Gemma {
                left_out: "attention.sliding_window_pattern",
                ..Gemma::default()
            },
            "sliding_window_pattern",
        ),
        (
            Gemma {
                left_out: "feed_forward_length",
                ..Gemma::default()
            },
            "feed_forward_length",
        ),
        (
            Gemma {
                left_out: "attention.key_length_swa",
                ..Gemma::default()
            },
            "value_length_swa",
        ),
        (
            Gemma {
                heads: vec![2, 1, 1, 2, 2, 1],
                ..Gemma::default()
            },
            "head_count_kv of layer 1",
        ),
        (
            Gemma {
                heads: vec![2, 2, 1],
                ..Gemma::default()
            },
            "3 values for 6 layers",
        ),
        (
            Gemma {
                heads: vec![2, 2, 0, 2, 2, 0],
                ..Gemma::default()
            },
            "is 0 in a layer",
        ),
        (
            Gemma {
                widths: vec![48, 64, 48, 96, 96, 96],
                ..Gemma::default()
            },
            "is 64 in layer 1",
        ),
        (
            Gemma {
                widths: vec![-1],
                ..Gemma::default()
            },
            "feed_forward_length",
        ),
        (
            Gemma {
                shared: 7,
                ..Gemma::default()
            },
            "shared_kv_layers",
        ),
        (
            Gemma {
                factors: Some(vec![1.0; 4]),
                ..Gemma::default()
            },
            "no factor for each pair",
        ),
        (
            Gemma {
                factors: Some(vec![2.0; 8]),
                ..Gemma::default()
            },
            "must hold 1 for the first pairs",
        ),
        (
            Gemma {
                factors: Some(vec![1.0, 1e30, 1.0, 1e30, 1e30, 1e30, 1e30, f32::NAN]),
                ..Gemma::default()
            },
            "must hold 1 for the first pairs",
        ),
        (
            Gemma {
                shared: 0,
                widths: vec![48],
                values: vec![0, 1, 2],
                ..Gemma::default()
            },
            "layer 5 differs",
        ),
    ] {
        let error = read(&file.file()).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
}

fn lfm2(heads: &[i32]) -> Writer {
    common("lfm2", 3)
        .array(
            "lfm2.attention.head_count_kv",
            5,
            heads.len() as u64,
            &ints(heads),
        )
        .u32("lfm2.feed_forward_length", 48)
        .u32("lfm2.shortconv.l_cache", 3)
        .f32("lfm2.rope.freq_base", 1e6)
}

#[test]
fn layers_of_lfm2_without_key_heads_are_convolutions() {
    let config = read(&lfm2(&[0, 2, 0])).unwrap();
    assert_eq!(
        config["layer_types"],
        json!(["conv", "full_attention", "conv"])
    );
    assert_eq!(config["num_key_value_heads"], 2);
    assert_eq!(
        (&config["conv_L_cache"], &config["intermediate_size"]),
        (&json!(3), &json!(48))
    );
    for (heads, why) in [
        (&[0, 2, 1][..], "is 1 in layer 2"),
        (&[0, 0, 0], "no number above 0"),
        (&[0, 2], "2 values for 3 layers"),
        (&[0, -2, 0], "head_count_kv is -2"),
    ] {
        let error = read(&lfm2(heads)).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn names_of_gemma4_and_lfm2_go_both_ways() {
    for (family, stored, usual) in [
        (
            "gemma4_text",
            "blk.3.ffn_gate_inp.scale",
            "model.layers.3.router.scale",
        ),
        (
            "gemma4_text",
            "blk.3.ffn_gate_inp.weight",
            "model.layers.3.router.proj.weight",
        ),
        (
            "gemma4_text",
            "blk.0.ffn_down_exps.scale",
            "model.layers.0.router.per_expert_scale",
        ),
        (
            "gemma4_text",
            "blk.0.ffn_gate_up_exps.weight",
            "model.layers.0.experts.gate_up_proj",
        ),
        (
            "gemma4_text",
            "blk.0.layer_output_scale.weight",
            "model.layers.0.layer_scalar",
        ),
        (
            "gemma4_text",
            "per_layer_token_embd.weight",
            "model.embed_tokens_per_layer.weight",
        ),
        (
            "lfm2",
            "blk.1.shortconv.conv.weight",
            "model.layers.1.conv.conv.weight",
        ),
        (
            "lfm2",
            "blk.1.attn_norm.weight",
            "model.layers.1.operator_norm.weight",
        ),
        (
            "lfm2",
            "token_embd_norm.weight",
            "model.embedding_norm.weight",
        ),
    ] {
        let names = GgufNames::new(family);
        assert_eq!(names.tensor(usual).as_deref(), Some(stored), "{usual}");
        assert_eq!(names.usual(stored).as_deref(), Some(usual), "{stored}");
    }
    let gemma = GgufNames::new("gemma4_text");
    assert_eq!(gemma.usual("blk.x.ffn_gate_inp.scale"), None);
    assert_eq!(gemma.usual("blk.0.attn_q.scale"), None);
    assert_eq!(gemma.tensor("model.layers.0.self_attn.scale"), None);
    // Stacks that are loaded packed keep the suffix.
    assert_eq!(
        gemma
            .tensor("model.layers.0.experts.gate_up_proj.weight")
            .as_deref(),
        Some("blk.0.ffn_gate_up_exps.weight")
    );
}
