//! Tests of GGUF files of hybrid models: layer kinds, sizes of the recurrent state, and
//! inconsistent metadata.

use super::*;
use crate::gguf::testing::Writer;

/// Properties of the file that a test can make wrong.
struct File {
    architecture: &'static str,
    heads: &'static [i32],
    widths: &'static [i32],
    inner: u32,
    more: &'static [(&'static str, u32)],
}

impl File {
    fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            heads: &[0, 2, 0],
            widths: &[0, 0, 48],
            inner: 64,
            more: &[],
        }
    }

    fn read(&self) -> Result<Map<String, Value>> {
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut w = Writer::default().str("general.architecture", self.architecture);
        for (name, value) in [
            ("block_count", 3),
            ("embedding_length", 32),
            (
                "attention.head_count",
                if self.heads.is_empty() { 0 } else { 4 },
            ),
            ("ssm.conv_kernel", 4),
            ("ssm.state_size", 6),
            ("ssm.group_count", 2),
            ("ssm.time_step_rank", 8),
            ("ssm.inner_size", self.inner),
        ]
        .iter()
        .chain(self.more)
        {
            w = w.u32(&key(name), *value);
        }
        for (name, values) in [
            ("attention.head_count_kv", self.heads),
            ("feed_forward_length", self.widths),
        ] {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            if !values.is_empty() {
                w = w.array(&key(name), 5, values.len() as u64, &bytes);
            }
        }
        let (_dir, path) = w
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
            .tensor("token_embd.weight", &[32, 3], 0, &[0; 384])
            .file();
        fields(&Gguf::open(&path)?)
    }

    fn refused(&self, why: &str) {
        let said = self.read().unwrap_err().to_string();
        assert!(
            said.contains(why),
            "{}: {said}, not {why}",
            self.architecture
        );
    }
}

#[test]
fn layers_are_told_by_what_they_have() {
    let config = File::new("nemotron_h").read().unwrap();
    assert_eq!(
        config["layer_types"],
        json!(["mamba", "full_attention", "mlp"])
    );
    assert_eq!(config["mamba_head_dim"], json!(8));
    let experts = File {
        more: &[
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 48),
            ("expert_shared_feed_forward_length", 24),
        ],
        ..File::new("nemotron_h_moe")
    };
    let config = experts.read().unwrap();
    assert_eq!(config["model_type"], "nemotron_h");
    assert_eq!(
        config["layer_types"],
        json!(["mamba", "full_attention", "moe"])
    );
    let config = File::new("granitehybrid").read().unwrap();
    assert_eq!(
        config["layer_types"],
        json!(["mamba", "attention", "mamba"])
    );
    // Rotation is on unless the file disables it.
    assert_eq!(config["position_embedding_type"], "rope");
    // Without attention, the number of heads is that of the recurrence.
    let alone = File {
        heads: &[],
        widths: &[],
        more: &[("feed_forward_length", 0)],
        ..File::new("mamba2")
    };
    let config = alone.read().unwrap();
    assert_eq!(
        (&config["num_heads"], &config["head_dim"]),
        (&json!(8), &json!(8))
    );
}

#[test]
fn metadata_that_does_not_fit_is_refused() {
    for architecture in ["nemotron_h", "granitehybrid"] {
        let odd = File {
            inner: 63,
            ..File::new(architecture)
        };
        odd.refused("ssm.inner_size is 63, which is not a multiple of 8 heads");
        let none = File {
            inner: 0,
            ..File::new(architecture)
        };
        none.refused("ssm.inner_size is 0");
        let few = File {
            heads: &[0, 2],
            ..File::new(architecture)
        };
        few.refused("has 2 values for 3 layers");
        let below = File {
            heads: &[0, 2, -1],
            ..File::new(architecture)
        };
        below.refused("is -1 in a layer");
    }
    let further = File {
        more: &[("nextn_predict_layers", 1)],
        ..File::new("nemotron_h")
    };
    further.refused("convert without them");
    let experts = File {
        more: &[("expert_count", 4)],
        ..File::new("granitehybrid")
    };
    experts.refused("expert_used_count");
}

#[test]
fn names_go_both_ways() {
    for (family, stored, usual) in [
        ("mamba2", "blk.1.ssm_a", "backbone.layers.1.mixer.rates"),
        (
            "mamba2",
            "blk.1.ssm_dt.bias",
            "backbone.layers.1.mixer.dt_bias",
        ),
        ("mamba2", "output_norm.weight", "backbone.norm_f.weight"),
        (
            "falcon_h1",
            "blk.0.ffn_norm",
            "model.layers.0.pre_ff_layernorm.weight",
        ),
        ("falcon_h1", "blk.0.ssm_d", "model.layers.0.mamba.D"),
        (
            "granitemoehybrid",
            "blk.2.ffn_gate_inp.weight",
            "model.layers.2.block_sparse_moe.router.layer.weight",
        ),
        (
            "granitemoehybrid",
            "blk.2.ffn_up_exps.weight",
            "model.layers.2.block_sparse_moe.switch_mlp.up_proj.weight",
        ),
        (
            "granitemoehybrid",
            "blk.2.ffn_gate.weight",
            "model.layers.2.mlp.gate_proj.weight",
        ),
        (
            "nemotron_h",
            "blk.2.exp_probs_b.bias",
            "backbone.layers.2.mixer.gate.e_score_correction_bias",
        ),
        (
            "nemotron_h",
            "blk.2.ffn_up_exps.weight",
            "backbone.layers.2.mixer.switch_mlp.fc1.weight",
        ),
        (
            "qwen3_next",
            "blk.0.ssm_ba.weight",
            "model.layers.0.linear_attn.in_proj_ba.weight",
        ),
        (
            "qwen3_next",
            "blk.0.post_attention_norm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        ),
    ] {
        let names = GgufNames::new(family);
        assert_eq!(names.tensor(usual).as_deref(), Some(stored), "{usual}");
        assert_eq!(names.usual(stored).as_deref(), Some(usual), "{stored}");
    }
}
