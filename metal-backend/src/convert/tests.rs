//! Tests the rules about names, formats and outputs. `tests/files/convert.rs` of the root crate
//! tests complete conversions.

use super::gguf::llama3_scaling;
use super::rules::{Chooser, base_format, expert, is_dropped, is_fused_stack, layer_of, stacks};
use super::*;
use crate::checkpoint::gguf_config::GgufNames;
use mlx_rs_core::QuantMode;

fn quantization(recipe: Option<Recipe>) -> Quantization {
    Quantization {
        recipe,
        ..Quantization::default()
    }
}

#[test]
fn formats_are_those_mlx_has() {
    let format = |mode, bits, group_size| {
        base_format(&Quantization {
            mode,
            bits,
            group_size,
            recipe: None,
        })
        .map(|f| (f.bits, f.group_size))
    };
    assert_eq!(format(QuantMode::Affine, None, None).unwrap(), (4, 64));
    assert_eq!(
        format(QuantMode::Affine, Some(3), Some(32)).unwrap(),
        (3, 32)
    );
    assert_eq!(format(QuantMode::Mxfp4, None, None).unwrap(), (4, 32));
    assert_eq!(format(QuantMode::Mxfp8, None, None).unwrap(), (8, 32));
    assert_eq!(format(QuantMode::Nvfp4, None, None).unwrap(), (4, 16));
    for (mode, bits, group) in [
        (QuantMode::Affine, Some(7), None),
        (QuantMode::Affine, None, Some(16)),
        (QuantMode::Mxfp4, Some(8), None),
        (QuantMode::Nvfp4, None, Some(64)),
    ] {
        assert_eq!(
            format(mode, bits, group).unwrap_err().kind(),
            ErrorKind::InvalidOption
        );
    }
    let recipe = Quantization {
        bits: Some(8),
        ..quantization(Some(Recipe::Mixed4_6))
    };
    assert!(
        base_format(&recipe)
            .unwrap_err()
            .to_string()
            .contains("mixed_4_6")
    );
    for recipe in Recipe::ALL {
        assert_eq!(Recipe::from_name(recipe.name()), Some(recipe));
    }
    let both = ConvertOptions::new()
        .with_quantize(quantization(None))
        .with_dequantize(true);
    assert!(both.validate().is_err());
}

#[test]
fn matrices_are_quantized_and_nothing_else() {
    let chooser = Chooser::new(&quantization(None), 2).unwrap();
    let bits =
        |path: &str, shape: &[usize]| chooser.format(path, shape).map(|f| (f.bits, f.group_size));
    for (path, shape, want) in [
        ("model.embed_tokens", &[300, 64][..], Some((4, 64))),
        ("model.layers.0.self_attn.q_proj", &[64, 64], Some((4, 64))),
        ("lm_head", &[300, 128], Some((4, 64))),
        (
            "model.layers.0.mlp.switch_mlp.up_proj",
            &[8, 32, 64],
            Some((4, 64)),
        ),
        ("model.layers.0.mlp.gate", &[8, 64], Some((8, 64))),
        (
            "model.layers.0.block_sparse_moe.gate",
            &[8, 64],
            Some((8, 64)),
        ),
        ("model.layers.0.mlp.gate_proj", &[64, 64], Some((4, 64))),
        ("model.layers.0.self_attn.q_proj", &[64, 96], None),
        ("model.norm", &[64], None),
        ("model.layers.0.some_norm", &[2, 64], None),
        ("model.layers.0.conv1d", &[64, 1, 64], None),
        ("model.wpe", &[128, 64], None),
        ("odd", &[2, 2, 64], None),
        ("empty", &[0, 0], None),
    ] {
        assert_eq!(bits(path, shape), want, "{path} {shape:?}");
    }
}

#[test]
fn recipes_give_the_layers_that_mlx_lm_gives_more() {
    // Of 16 layers, the first two, the last two, and every third layer from the fifth on get more
    // bits.
    let chooser = Chooser::new(&quantization(Some(Recipe::Mixed3_6)), 16).unwrap();
    let bits = |path: String| chooser.format(&path, &[64, 64]).unwrap().bits;
    let more: Vec<usize> = (0..16)
        .filter(|n| bits(format!("model.layers.{n}.mlp.down_proj")) == 6)
        .collect();
    assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
    assert_eq!(bits("model.layers.0.self_attn.v_proj".into()), 6);
    assert_eq!(bits("model.layers.0.self_attn.q_proj".into()), 3);
    assert_eq!(bits("lm_head".into()), 6);
    assert_eq!(bits("model.embed_tokens".into()), 3);
}

#[test]
fn names_are_taken_apart() {
    assert_eq!(layer_of("model.layers.12.mlp.up_proj"), Some(12));
    assert_eq!(layer_of("language_model.model.layers.3.x"), Some(3));
    assert_eq!(layer_of("h.7.attn"), Some(7));
    assert_eq!(layer_of("model.embed_tokens"), None);
    assert_eq!(
        expert("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        Some((
            "model.layers.1.block_sparse_moe.switch_mlp.down_proj.weight".into(),
            3
        ))
    );
    assert_eq!(expert("model.layers.1.mlp.experts.gate_up_proj"), None);
    assert_eq!(
        expert("model.layers.1.mlp.shared_expert.up_proj.weight"),
        None
    );
    let names = [
        "a.experts.0.w1.weight",
        "a.experts.1.w1.weight",
        "b.experts.1.w1.weight",
        "c.experts.0.w1.weight",
        "c.experts.0.w1.scales",
    ];
    let actual = stacks(names.into_iter());
    assert_eq!(actual.len(), 1, "{actual:?}");
    assert_eq!(actual["a.switch_mlp.gate_proj.weight"], names[..2]);
    // mlx-lm has other names for experts without a gate.
    let names = [
        "a.experts.0.up_proj.weight",
        "a.experts.0.down_proj.weight",
        "b.experts.0.up_proj.weight",
        "b.experts.0.gate_proj.weight",
    ];
    assert_eq!(
        stacks(names.into_iter()).into_keys().collect::<Vec<_>>(),
        [
            "a.switch_mlp.fc1.weight",
            "a.switch_mlp.fc2.weight",
            "b.switch_mlp.gate_proj.weight",
            "b.switch_mlp.up_proj.weight",
        ]
    );

    assert!(
        is_dropped("vision_tower.x.weight", false) && is_dropped("model.vision_tower.x", false)
    );
    assert!(is_dropped("lm_head.weight", true) && !is_dropped("lm_head.weight", false));
    assert!(is_dropped("language_model.lm_head.weight", true));
    assert!(!is_dropped("model.layers.0.mlp.up_proj.weight", true));

    assert!(is_fused_stack("l.experts.gate_up_proj", &[4, 8, 8]));
    assert!(is_fused_stack("l.ffn.experts.mlp.w1", &[32, 8]));
    assert!(is_fused_stack("l.moe.input_linear.weight", &[4, 8, 8]));
    assert!(!is_fused_stack("l.experts.gate_up_proj_bias", &[4, 8]));
    assert!(!is_fused_stack("l.mixer.input_linear.weight", &[8, 8]));
}

#[test]
fn gguf_names_are_the_inverse_of_those_the_loader_uses() {
    let common = [
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
        "blk.2.attn_output.weight",
        "blk.31.ffn_norm.weight",
        "blk.2.ffn_down.weight",
        "blk.2.ffn_up.bias",
    ];
    for (model_type, extra) in [
        ("llama", &["blk.31.attn_k.bias", "blk.0.attn_q.weight"][..]),
        (
            "qwen3_moe",
            &["blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight"],
        ),
        (
            "mixtral",
            &["blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight"],
        ),
        (
            "gemma2",
            &[
                "blk.0.post_attention_norm.weight",
                "blk.0.post_ffw_norm.weight",
            ],
        ),
        (
            "exaone4",
            &["blk.0.post_ffw_norm.weight", "blk.0.attn_q_norm.weight"],
        ),
        (
            "olmo3",
            &["blk.0.post_ffw_norm.weight", "blk.0.attn_q_norm.weight"],
        ),
        ("phi3", &["blk.0.attn_qkv.weight"]),
        ("gpt2", &["blk.0.attn_qkv.bias", "position_embd.weight"]),
        ("starcoder2", &["blk.0.attn_q.bias"]),
    ] {
        let names = GgufNames::new(model_type);
        for name in common.iter().chain(extra) {
            let usual = names.usual(name).unwrap();
            assert_eq!(names.tensor(&usual).as_deref(), Some(*name), "{usual}");
        }
        for name in [
            "blk.0.output_norm.weight",
            "blk.x.attn_norm.weight",
            "attn_norm.weight",
            "other.weight",
            "token_embd",
        ] {
            assert_eq!(names.usual(name), None, "{name}");
        }
    }
    let mixtral = GgufNames::new("mixtral");
    assert_eq!(
        mixtral.usual("blk.3.ffn_down_exps.weight").as_deref(),
        Some("model.layers.3.block_sparse_moe.switch_mlp.down_proj.weight")
    );
}

#[test]
fn the_scaling_of_llama_3_is_recognized_from_its_factors() {
    // Computed by transformers' formula for factor 8, theta 500000 and head size 128.
    let factors: Vec<f32> = (0..64)
        .map(|i| {
            let wave = 2.0 * std::f64::consts::PI * 500_000f64.powf(f64::from(2 * i) / 128.0);
            if wave < 2048.0 {
                1.0
            } else if wave > 8192.0 {
                8.0
            } else {
                let smooth = (8192.0 / wave - 1.0) / 3.0;
                (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
            }
        })
        .collect();
    assert!(factors.iter().any(|f| *f > 1.0 && *f < 8.0));
    let scaling = llama3_scaling(&factors, 500_000.0).unwrap();
    assert_eq!(scaling["factor"], 8.0);
    assert_eq!(llama3_scaling(&factors, 10_000.0), None);
    let mut odd = factors;
    odd[40] *= 1.1;
    assert_eq!(llama3_scaling(&odd, 500_000.0), None);
    assert_eq!(llama3_scaling(&[], 1e4), None);
}

#[test]
fn outputs_must_be_new_or_meant() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let at = |name: &str| dir.path().join(name);
    assert!(check_output(&model, &at("new"), false).is_ok());
    fs::create_dir(at("empty")).unwrap();
    assert!(check_output(&model, &at("empty"), false).is_ok());
    fs::create_dir(at("full")).unwrap();
    fs::write(at("full").join("x"), "").unwrap();
    assert!(
        check_output(&model, &at("full"), false)
            .unwrap_err()
            .to_string()
            .contains("--force")
    );
    assert!(check_output(&model, &at("full"), true).is_ok());
    fs::write(at("file"), "").unwrap();
    assert!(check_output(&model, &at("file"), true).is_err());
    assert!(check_output(&model, &at("no/where"), true).is_err());
    assert!(check_output(&model, &model, true).is_err());
    assert!(
        check_output(&model, dir.path(), true).is_err(),
        "the model lies in it"
    );
}
