//! Tests of configurations of all families, and of invalid configurations.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::ErrorKind;

fn base() -> Value {
    json!({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 300, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": [2, 3],
        "max_position_embeddings": 2048, "unknown_key": {"a": [1]}})
}

fn parse(value: &Value) -> Result<ModelConfig> {
    ModelConfig::from_json(value.to_string().as_bytes())
}

fn with(changes: Value) -> Result<ModelConfig> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    parse(&config)
}

#[test]
fn reads_what_it_needs() {
    let c = parse(&base()).unwrap();
    assert_eq!(c.model_type.as_deref(), Some("llama"));
    assert_eq!(
        (c.hidden_size, c.num_key_value_heads, c.head_dim),
        (64, 2, None)
    );
    assert_eq!((c.rms_norm_eps, c.rope.theta), (1e-5, 10_000.0));
    assert_eq!((c.eos_token_ids, c.tie_word_embeddings), (vec![2, 3], None));
    assert_eq!(c.quantization, None);
    let c = with(
        json!({"num_key_value_heads": null, "head_dim": null, "model_type": null,
        "eos_token_id": 7, "hidden_size": 64.0, "rms_norm_eps": null}),
    )
    .unwrap();
    assert_eq!(
        (c.num_key_value_heads, c.head_dim, c.model_type),
        (4, None, None)
    );
    assert_eq!((c.eos_token_ids, c.hidden_size), (vec![7], 64));
    assert_eq!(
        with(json!({"eos_token_id": null})).unwrap().eos_token_ids,
        [0u32; 0]
    );
    assert_eq!(
        with(json!({"eos_token_id": -1})).unwrap().eos_token_ids,
        [0u32; 0]
    );
}

#[test]
fn rotary_scaling_old_and_new() {
    let c = with(
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_theta": null}),
    );
    let c = c.unwrap();
    assert_eq!((c.rope.theta, c.rope.scaling), (5e5, RopeScaling::None));
    let c = with(json!({"rope_scaling": {"type": "linear", "factor": 4}})).unwrap();
    assert_eq!(c.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };
    assert_eq!(
        with(json!({"rope_scaling": llama3})).unwrap().rope.scaling,
        expected
    );
    assert_eq!(
        with(json!({"rope_parameters": llama3}))
            .unwrap()
            .rope
            .scaling,
        expected
    );
    let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
    assert_eq!(
        with(json!({"rope_scaling": dynamic, "max_position_embeddings": 64}))
            .unwrap()
            .rope
            .scaling,
        RopeScaling::Dynamic {
            factor: 2.0,
            original_context: 64,
        }
    );
    for kind in ["spiral", "ntk"] {
        let e = with(json!({"rope_scaling": {"type": kind, "factor": 2}})).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(
            e.message().contains(kind) && e.message().contains("llama3"),
            "{e}"
        );
    }
}

#[test]
fn rotary_scaling_by_ramp_by_list_and_by_kind_of_layer() {
    let yarn = |more: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 4096});
        scaling
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        with(json!({"rope_scaling": scaling})).map(|c| c.rope.scaling)
    };
    let attention = |scaling| match scaling {
        RopeScaling::Yarn {
            attention_factor,
            truncate,
            ..
        } => (attention_factor, truncate),
        other => panic!("{other:?}"),
    };
    let by_length = 0.1 * 32f32.ln() + 1.0;
    assert_eq!(attention(yarn(json!({})).unwrap()), (by_length, true));
    let given = json!({"attention_factor": 2.0, "truncate": false});
    assert_eq!(attention(yarn(given).unwrap()), (2.0, false));
    let weighed = json!({"mscale": 1.0, "mscale_all_dim": 1.0});
    assert_eq!(attention(yarn(weighed).unwrap()), (1.0, true));
    assert!(yarn(json!({"beta_slow": 64.0})).is_err());

    let long = json!({"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]});
    let c = with(json!({"rope_scaling": long, "original_max_position_embeddings": 512})).unwrap();
    match c.rope.scaling {
        RopeScaling::LongRope {
            short,
            long,
            original_context,
            attention_factor,
        } => {
            assert_eq!((short, long), (vec![1.0, 1.5], vec![2.0, 4.0]));
            assert_eq!(original_context, 512);
            let expected = (1.0 + 4f32.ln() / 512f32.ln()).sqrt();
            assert!((attention_factor - expected).abs() < 1e-6);
        }
        other => panic!("{other:?}"),
    }
    for bad in [json!([]), json!([0.0]), json!("x"), json!(null)] {
        let scaling = json!({"type": "longrope", "short_factor": bad, "long_factor": [1.0]});
        assert!(with(json!({"rope_scaling": scaling})).is_err());
    }

    let c = with(
        json!({"layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    )
    .unwrap();
    assert_eq!(c.rope_of(0), &RopeConfig::plain(1e4));
    assert_eq!((c.rope_of(1).theta, c.rope_of(1).partial), (1e6, 0.25));
    let c = with(json!({"partial_rotary_factor": 0.5})).unwrap();
    assert_eq!(c.rope.partial, 0.5);
    assert!(with(json!({"partial_rotary_factor": 1.5})).is_err());
}

#[test]
fn quantization_and_its_exceptions() {
    let c = with(json!({"quantization": {"group_size": 64, "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8}, "lm_head": false,
        "model.layers.0.mlp.down_proj": true, "model.layers.1.mlp.down_proj": {"bits": 6}}}))
    .unwrap();
    let default = c.quantization.clone().unwrap();
    assert_eq!(
        (default.bits, default.group_size, default.mode.as_str()),
        (4, 64, "affine")
    );
    let of = |name: &str| {
        c.quantization_overrides[name]
            .as_ref()
            .map(|q| (q.bits, q.group_size))
    };
    assert_eq!(of("model.embed_tokens"), Some((8, 32)));
    assert_eq!(of("lm_head"), None);
    assert_eq!(of("model.layers.0.mlp.down_proj"), Some((4, 64)));
    assert_eq!(of("model.layers.1.mlp.down_proj"), Some((6, 64)));
    for (value, why) in [
        (json!({"group_size": 48, "bits": 4}), "48"),
        (json!({"group_size": 64, "bits": 7}), "7"),
        (json!({"group_size": 0, "bits": 4}), "group_size is 0"),
        (json!({"bits": 4}), "missing"),
        (
            json!({"group_size": 64, "bits": 4, "mode": "mxfp4"}),
            "group_size is 64",
        ),
        (json!({"group_size": 64, "bits": 4, "mode": "fp2"}), "mxfp4"),
        (
            json!({"group_size": 64, "bits": 4, "lm_head": {"bits": 99}}),
            "lm_head.bits is 99",
        ),
        (json!({"quant_method": "gptq", "bits": 4}), "group_size"),
        (json!({"quant_method": "hqq", "bits": 4}), "hqq"),
        (json!(4), "an object"),
    ] {
        let e = with(json!({"quantization": value})).unwrap_err();
        assert!(e.message().contains(why), "{e} does not say {why}");
        assert!(with(json!({"quantization_config": value})).is_err());
    }
}

#[test]
fn modes_other_than_affine() {
    for (value, mode, group, bits) in [
        (json!({"mode": "mxfp4"}), "mxfp4", 32, 4),
        (
            json!({"mode": "mxfp8", "group_size": 32, "bits": 8}),
            "mxfp8",
            32,
            8,
        ),
        (
            json!({"mode": "nvfp4", "group_size": 16, "bits": 4}),
            "nvfp4",
            16,
            4,
        ),
        (json!({"quant_method": "mxfp4"}), "mxfp4", 32, 4),
    ] {
        let q = with(json!({"quantization": value})).unwrap().quantization;
        let q = q.unwrap();
        assert_eq!((q.mode.as_str(), q.group_size, q.bits), (mode, group, bits));
    }
    // An exception may have another mode than the other layers.
    let c = with(json!({"quantization": {"mode": "mxfp4",
        "lm_head": {"mode": "affine", "group_size": 64, "bits": 8}}}))
    .unwrap();
    let head = c.quantization_overrides["lm_head"].clone().unwrap();
    assert_eq!((head.mode.as_str(), head.group_size), ("affine", 64));
}

#[test]
fn a_window_counts_only_where_it_is_used() {
    let windows = |changes| {
        let c = with(changes).unwrap();
        (c.window(0), c.window(1))
    };
    let mistral =
        |window: Value| windows(json!({"model_type": "mistral", "sliding_window": window}));
    assert_eq!(mistral(json!(4096)), (Some(4096), Some(4096)));
    assert_eq!(mistral(json!(null)), (None, None));
    let qwen = |more: Value| {
        let mut c = json!({"model_type": "qwen2", "sliding_window": 32768});
        c.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        windows(c)
    };
    assert_eq!(qwen(json!({})), (None, None));
    assert_eq!(qwen(json!({"use_sliding_window": false})), (None, None));
    let none = json!({"use_sliding_window": true, "max_window_layers": 2});
    assert_eq!(qwen(none), (None, None));
    let some = json!({"use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(qwen(some), (None, Some(32768)));
    let kinds = ["full_attention", "sliding_attention"];
    let mixed = json!({"model_type": "mistral", "sliding_window": 8, "layer_types": kinds});
    assert_eq!(windows(mixed), (None, Some(8)));
    let llama = json!({"model_type": "llama", "sliding_window": 8});
    assert_eq!(windows(llama), (None, None));
    let gemma = json!({"model_type": "gemma2", "sliding_window": 8, "head_dim": 16});
    assert_eq!(windows(gemma), (Some(8), None));
    for wrong in [
        json!(["full_attention"]),
        json!(["full_attention", "linear_attention"]),
    ] {
        assert!(with(json!({"layer_types": wrong})).is_err());
    }
}

#[test]
fn olmo3_scales_positions_in_full_layers_only() {
    let olmo = |more: Value| {
        let mut c = json!({"model_type": "olmo3", "num_hidden_layers": 5, "rope_theta": 2e5,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0,
                "original_max_position_embeddings": 256}});
        c.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        with(c).unwrap()
    };
    let c = olmo(json!({}));
    let windows: Vec<_> = (0..5).map(|i| c.window(i)).collect();
    let slides = Some(4096);
    assert_eq!(windows, [slides, slides, slides, None, slides]);
    assert_eq!(c.rope_of(0), &RopeConfig::plain(2e5));
    assert_eq!(c.rope_of(3).theta, 2e5);
    assert!(matches!(c.rope_of(3).scaling, RopeScaling::Yarn { factor, .. } if factor == 8.0));
    // Tests the reference's default base, and a base outside the scaling object.
    let c = olmo(json!({"rope_theta": null}));
    assert_eq!((c.rope_of(0).theta, c.rope_of(3).theta), (5e5, 5e5));
    let flat = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5});
    let c = olmo(json!({"rope_theta": null, "rope_scaling": null, "rope_parameters": flat}));
    assert_eq!(c.rope_of(0), &RopeConfig::plain(3e5));
    assert_eq!(c.rope_of(3).scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn exaone4_has_a_window_unless_it_says_none() {
    let kinds = |more: Value| {
        let mut c = json!({"model_type": "exaone4", "num_hidden_layers": 5});
        c.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        with(c).map(|c| {
            let slides: Vec<_> = (0..5).map(|i| c.slides(i)).collect();
            (c.sliding_window, slides)
        })
    };
    let usual = vec![true, true, true, false, true];
    assert_eq!(kinds(json!({})).unwrap(), (Some(4096), usual.clone()));
    let c = kinds(json!({"sliding_window": null, "sliding_window_pattern": null})).unwrap();
    assert_eq!(c.0, None);
    let letters = |letters: &str| kinds(json!({"sliding_window_pattern": letters}));
    assert_eq!(letters("LLLG").unwrap().1, usual);
    assert_eq!(letters("LG").unwrap().1, [true, false, true, false, true]);
    for wrong in ["", "LLX", "lllg"] {
        let error = letters(wrong).unwrap_err();
        assert!(
            error.message().contains("sliding_window_pattern"),
            "{error}"
        );
    }
}

#[test]
fn the_text_part_of_a_multimodal_configuration_counts() {
    let text = json!({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7,
        "intermediate_size": 128});
    let outer = json!({"model_type": "gemma3", "text_config": text, "vision_config": {"x": 1},
        "eos_token_id": [1, 106], "quantization": {"group_size": 64, "bits": 4}});
    let c = parse(&outer).unwrap();
    assert_eq!(c.model_type.as_deref(), Some("gemma3"));
    // Missing fields get the defaults of the family.
    assert_eq!((c.num_attention_heads, c.num_key_value_heads), (8, 4));
    assert_eq!((c.head_dim, c.vocab_size), (Some(256), 262_208));
    assert_eq!(c.eos_token_ids, [1, 106]);
    assert_eq!(c.quantization.as_ref().map(|q| q.bits), Some(4));
    assert_eq!(
        (c.window(4), c.window(5), c.window(6)),
        (Some(4096), None, Some(4096))
    );
    assert_eq!((c.rope_of(0).theta, c.rope_of(5).theta), (1e4, 1e6));
    let e = ModelConfig::from_json(br#"{"model_type": "x", "text_config": {}}"#).unwrap_err();
    assert!(e.message().contains("multimodal"));
}

#[test]
fn gpt2_has_names_of_its_own() {
    let c = parse(
        &json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 128, "vocab_size": 300, "layer_norm_epsilon": 1e-4,
        "activation_function": "gelu_new"}),
    )
    .unwrap();
    assert_eq!((c.hidden_size, c.intermediate_size), (64, 256));
    assert_eq!((c.num_hidden_layers, c.num_attention_heads), (2, 4));
    assert_eq!(
        (c.max_position_embeddings, c.rms_norm_eps),
        (Some(128), 1e-4)
    );
    assert_eq!(c.activation.as_deref(), Some("gelu_new"));
}

#[test]
fn xlstm_has_names_defaults_and_a_rounded_width() {
    let parse = |json: Value| parse(&json);
    let seven_b = parse(json!({"model_type": "xlstm"})).unwrap();
    assert_eq!((seven_b.hidden_size, seven_b.num_hidden_layers), (4096, 32));
    assert_eq!(
        (seven_b.vocab_size, seven_b.num_attention_heads),
        (50_304, 8)
    );
    // 2.667 * 4096, rounded up to a multiple of 64.
    assert_eq!(seven_b.intermediate_size, 10_944);
    assert_eq!(seven_b.number("gate_soft_cap").unwrap(), Some(15.0));
    let config = parse(
        json!({"model_type": "xlstm", "embedding_dim": 128, "num_blocks": 3,
        "num_heads": 4, "norm_eps": 1e-5, "ffn_proj_factor": 2.0,
        "ffn_round_up_to_multiple_of": 100, "gate_soft_cap": null}),
    )
    .unwrap();
    assert_eq!((config.hidden_size, config.num_hidden_layers), (128, 3));
    assert_eq!(
        (config.num_attention_heads, config.intermediate_size),
        (4, 300)
    );
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!(config.number("gate_soft_cap").unwrap(), None);
    assert_eq!(config.number("output_logit_soft_cap").unwrap(), Some(30.0));
    for (field, value) in [
        ("ffn_proj_factor", json!(-1)),
        ("ffn_round_up_to_multiple_of", json!(0)),
        ("embedding_dim", json!("wide")),
    ] {
        let error = parse(json!({"model_type": "xlstm", field: value})).unwrap_err();
        assert!(!error.message().is_empty());
    }
    // In other families these fields have another meaning, so they must have no effect.
    let mut other = base();
    other["num_heads"] = json!(1000);
    assert_ne!(parse(other).unwrap().num_attention_heads, 1000);
}

#[test]
fn layers_of_hybrids_keep_a_state_or_keys() {
    let hybrid = |more: Value| {
        let mut map = json!({"model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 4,
            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 131,
            "block_ff_dim": 6656, "norm_eps": 1e-4});
        let fields = map.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        parse(&map)
    };
    let recurrent = |c: &ModelConfig| -> Vec<bool> { (0..4).map(|i| c.is_recurrent(i)).collect() };
    let c = hybrid(json!({"full_attn_idxs": [1, 3]})).unwrap();
    assert_eq!(recurrent(&c), [true, false, true, false]);
    // 2/3 of 6656, rounded up to a multiple of 256, as in the smallest published model.
    assert_eq!((c.intermediate_size, c.rms_norm_eps), (4608, 1e-4));
    assert_eq!(c.tie_word_embeddings, Some(true));
    // Normalizing a second time must change nothing.
    let again = ModelConfig::from_map(c.fields.clone()).unwrap();
    assert_eq!(again.intermediate_size, 4608);
    let plain = json!({"block_auto_adjust_ff_dim": false, "tie_embedding": false,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"]});
    let c = hybrid(plain).unwrap();
    assert_eq!(recurrent(&c), [true, false, true, false]);
    let read = (c.intermediate_size, c.tie_word_embeddings);
    assert_eq!(read, (6656, Some(false)));
    let all = hybrid(json!({})).unwrap();
    assert_eq!(recurrent(&all), [false; 4]);
    assert!(hybrid(json!({"block_multiple_of": 0})).is_err());
    assert!(hybrid(json!({"num_hidden_layers": u64::MAX})).is_err());
    let kinds = json!(["conv", "full_attention", "conv", "other"]);
    let error = hybrid(json!({"layer_types": kinds})).unwrap_err();
    assert!(error.message().contains("conv, "), "{error}");
    // In other families no layer may have a recurrent state.
    let error = with(json!({"layer_types": ["conv", "full_attention"]})).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let every = parse(&json!({"model_type": "xlstm"})).unwrap();
    assert!(every.is_recurrent(0) && every.is_recurrent(31) && !every.is_recurrent(32));
}

#[test]
fn bounds_that_python_writes_as_infinity_are_read() {
    let text = r#"{"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1,
        "num_heads": 8, "head_dim": 8, "vocab_size": 131, "note": "Infinity \" NaN",
        "time_step_limit": [0.0, Infinity], "other": [-Infinity, NaN]}"#;
    let c = ModelConfig::from_json(text.as_bytes()).unwrap();
    assert_eq!(c.fields["time_step_limit"], json!([0.0, f64::MAX]));
    assert_eq!(c.fields["other"], json!([-f64::MAX, null]));
    assert_eq!(c.fields["note"], json!("Infinity \" NaN"));
    assert_eq!((c.num_attention_heads, c.intermediate_size), (8, 64));
    assert!(c.is_recurrent(0));
    for broken in ["{\"a\": Infinit}", "{\"a\": Infinity", "{\"a\": \"\\"] {
        assert!(ModelConfig::from_json(broken.as_bytes()).is_err());
    }
}

#[test]
fn three_layers_of_four_have_a_gated_delta_net() {
    let text = json!({"hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
            "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}});
    let config = json!({"model_type": "qwen3_5", "text_config": text, "vision_config": {}});
    let c = parse(&config).unwrap();
    let recurrent: Vec<bool> = (0..5).map(|i| c.is_recurrent(i)).collect();
    assert_eq!(recurrent, [true, true, true, false, true]);
    assert_eq!((c.rope.theta, c.rope.partial), (1e7, 0.25));
    assert_eq!((c.head_dim, c.num_experts), (Some(256), 0));
    let moe = json!({"model_type": "qwen3_5_moe", "text_config": config["text_config"]});
    assert_eq!(parse(&moe).unwrap().num_experts, 256);
    // Granite uses other names for the layer kinds.
    let granite = json!({"model_type": "granitemoehybrid", "hidden_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
        "vocab_size": 131, "mamba_n_heads": 8, "layer_types": ["mamba", "attention"]});
    let c = parse(&granite).unwrap();
    assert!(c.is_recurrent(0) && !c.is_recurrent(1));
    assert_eq!(c.fields["mamba_d_head"], json!(16));
}

#[test]
fn lies_name_field_value_and_range() {
    for (key, value, why) in [
        ("num_attention_heads", json!(0), "from 1"),
        ("num_key_value_heads", json!(0), "from 1"),
        ("num_key_value_heads", json!(3), "divide"),
        ("num_key_value_heads", json!(8), "divide"),
        ("num_attention_heads", json!(64), "half of"),
        ("hidden_size", json!(0), "from 1"),
        ("hidden_size", json!(u64::MAX), "18446744073709551615"),
        ("hidden_size", json!(-64), "-64"),
        ("hidden_size", json!(1.5), "1.5"),
        ("hidden_size", json!("64"), "whole number"),
        ("hidden_size", json!([64]), "a list of 1"),
        ("hidden_size", json!(null), "missing"),
        ("num_hidden_layers", json!(1_000_000), "1000000"),
        ("intermediate_size", json!(1u64 << 40), "whole number"),
        ("vocab_size", json!(0), "from 1"),
        ("vocab_size", json!(u32::MAX), "4194304"),
        ("head_dim", json!(0), "from 2"),
        ("head_dim", json!(33), "even"),
        ("head_dim", json!(1 << 20), "from 2"),
        ("rms_norm_eps", json!(0.0), "above 0"),
        ("rms_norm_eps", json!(-1e-5), "above 0"),
        ("rms_norm_eps", json!(1e39), "finite"),
        ("rms_norm_eps", json!(2.0), "at most 1"),
        ("rope_theta", json!(0), "above 0"),
        ("rope_theta", json!("1e4"), "above 0"),
        ("sliding_window", json!(0), "from 1"),
        ("max_position_embeddings", json!(1u64 << 40), "whole number"),
        ("eos_token_id", json!(1u64 << 40), "token id"),
        ("eos_token_id", json!("</s>"), "token id"),
        ("eos_token_id", json!([[1]]), "token id"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        ("model_type", json!(3), "a string"),
        ("rope_scaling", json!([]), "an object"),
        (
            "rope_scaling",
            json!({"type": "linear"}),
            "factor is missing",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 0}),
            "above 0",
        ),
    ] {
        let e = with(json!({key: value})).expect_err(key);
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.message().contains(why), "{key}: {e} does not say {why}");
        let known_elsewhere = ["rope_scaling"].contains(&key);
        assert!(
            known_elsewhere || e.message().contains(key),
            "{e} does not name {key}"
        );
    }
    let huge = json!({"hidden_size": 1 << 17, "num_hidden_layers": 4096,
        "intermediate_size": 1 << 20, "vocab_size": 1 << 22});
    assert!(with(huge).unwrap_err().message().contains("at most"));
}

#[test]
fn the_file_is_named_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let read = || ModelConfig::from_file(&path);
    assert_eq!(read().unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::write(&path, base().to_string()).unwrap();
    assert!(read().is_ok());
    let text = base().to_string();
    for n in 0..text.len() {
        std::fs::write(&path, &text[..n]).unwrap();
        assert_eq!(
            read().unwrap_err().path(),
            Some(path.as_path()),
            "cut to {n}"
        );
    }
    std::fs::write(&path, " ".repeat(5 << 20)).unwrap();
    assert!(read().unwrap_err().message().contains("at most"));
    let start = Instant::now();
    for bomb in [
        "[".repeat(4 << 20),
        "{\"a\":".repeat(1 << 19),
        "[],".repeat(1 << 20),
    ] {
        std::fs::write(&path, &bomb[..bomb.len().min(4 << 20)]).unwrap();
        assert!(read().is_err());
    }
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn weights_are_estimated_before_they_are_read() {
    // SmolLM2-135M: 134.5 million weights, tied.
    let c = with(
        json!({"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "tie_word_embeddings": true}),
    )
    .unwrap();
    assert_eq!(c.estimated_weight_bytes(), Some(2 * 134_515_008));
}

proptest! {
    #[test]
    fn noise_never_panics(text in ".{0,200}") {
        let _ = ModelConfig::from_json(text.as_bytes());
    }

    /// Whatever number a field has, the configuration must be rejected or safe to compute with.
    #[test]
    fn any_number_anywhere_is_safe(at in 0usize..9, number in prop_oneof![
        any::<i64>().prop_map(|n| json!(n)), any::<u64>().prop_map(|n| json!(n)),
        any::<f64>().prop_map(|n| json!(n)), (0u64..5000).prop_map(|n| json!(n)),
    ]) {
        let key = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "vocab_size", "head_dim", "rope_theta", "rms_norm_eps"][at];
        if let Ok(c) = with(json!({key: number})) {
            prop_assert!(c.num_attention_heads % c.num_key_value_heads == 0);
            prop_assert!(c.head_dim.unwrap_or(c.hidden_size / c.num_attention_heads) >= 2);
            prop_assert!(c.estimated_weight_bytes().is_some());
            prop_assert!(c.rope.theta.is_finite() && c.rms_norm_eps > 0.0);
        }
    }
}

#[test]
fn families_say_sizes_in_their_own_words() {
    let with = |model_type: &str, more: Value| {
        let mut config = json!({"model_type": model_type, "hidden_size": 64,
            "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
            "vocab_size": 300});
        let fields = config.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        parse(&config).unwrap()
    };
    let neox = with(
        "gpt_neox",
        json!({"rotary_emb_base": 500, "rotary_pct": 0.5}),
    );
    assert_eq!((neox.rope.theta, neox.rope.partial), (500.0, 0.5));
    let minimax = with(
        "minimax_m2",
        json!({"rotary_dim": 8, "num_local_experts": 6}),
    );
    assert_eq!((minimax.rope.partial, minimax.num_experts), (0.5, 6));
    // The expected base is 1e4 times 50 to the power of 16 / 14.
    let scaling = json!({"rope_scaling": {"alpha": 50.0, "type": "dynamic", "factor": 1.0}});
    let hunyuan = with("hunyuan_v1_dense", scaling);
    assert!(
        (hunyuan.rope.theta / 874_339.0 - 1.0).abs() < 1e-3,
        "{}",
        hunyuan.rope.theta
    );
    let starcoder = with("gpt_bigcode", json!({"num_key_value_heads": 4}));
    assert_eq!(starcoder.num_key_value_heads, 1);
    let minicpm3 = with("minicpm3", json!({}));
    assert_eq!(minicpm3.uint("v_head_dim", 1..=64).unwrap(), Some(16));
}
