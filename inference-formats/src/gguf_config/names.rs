//! Tensor names: the names of transformers, and those of GGUF.

/// Names outside of blocks.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Names in `blk.N`, and in `model.layers.N`, that all families share.
const BLOCK: [(&str, &str); 20] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_norm", "post_attention_layernorm"),
];

/// With norms behind attention and feed-forward, names of GGUF mean other norms.
const SANDWICH: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const PHI3: [(&str, &str); 1] = [("ffn_up", "mlp.gate_up_proj")];
const STARCODER2: [(&str, &str); 2] = [("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")];

/// GPT-2 has names of its own outside of blocks and in `h.N`.
const GPT2_GLOBAL: [(&str, &str); 4] = [
    ("token_embd", "wte"),
    ("position_embd", "wpe"),
    ("output_norm", "ln_f"),
    ("output", "lm_head"),
];
const GPT2_BLOCK: [(&str, &str); 6] = [
    ("attn_norm", "ln_1"),
    ("attn_qkv", "attn.c_attn"),
    ("attn_output", "attn.c_proj"),
    ("ffn_norm", "ln_2"),
    ("ffn_up", "mlp.c_fc"),
    ("ffn_down", "mlp.c_proj"),
];

/// Factors of rotary wavelengths. They have no other name.
const KEPT: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

/// The tensor names of one architecture.
#[derive(Debug, Clone)]
pub struct GgufNames {
    /// The `model_type` of the configuration.
    model_type: String,
}

impl GgufNames {
    /// The names of a `model_type`.
    pub fn new(model_type: &str) -> Self {
        Self {
            model_type: model_type.to_owned(),
        }
    }

    /// Whether the converter reorders the rows of query and key heads, for a rotation of
    /// neighboring elements. It does so for llama and its relatives.
    pub fn permuted(&self) -> bool {
        matches!(
            self.model_type.as_str(),
            "llama" | "mixtral" | "granite" | "smollm3"
        )
    }

    fn own(&self) -> &'static [(&'static str, &'static str)] {
        match self.model_type.as_str() {
            "gemma2" | "gemma3_text" => &SANDWICH,
            // OLMo 2 has no norms before the two parts, so `ffn_norm` is never asked for.
            "olmo2" => &SANDWICH,
            "phi3" => &PHI3,
            "starcoder2" => &STARCODER2,
            _ => &[],
        }
    }

    /// The name in GGUF, such as `blk.0.attn_q.weight` for
    /// `model.layers.0.self_attn.q_proj.weight`. `None` for a tensor that GGUF has no name for.
    pub fn tensor(&self, name: &str) -> Option<String> {
        if KEPT.contains(&name) {
            return Some(name.to_owned());
        }
        let (stem, suffix) = name.rsplit_once('.')?;
        if !matches!(suffix, "weight" | "bias") {
            return None;
        }
        let gpt2 = self.model_type == "gpt2";
        let global: &[(&str, &str)] = if gpt2 { &GPT2_GLOBAL } else { &GLOBAL };
        if let Some((to, _)) = global.iter().find(|(_, from)| *from == stem) {
            return Some(format!("{to}.{suffix}"));
        }
        let prefix = if gpt2 { "h." } else { "model.layers." };
        let (layer, part) = stem.strip_prefix(prefix)?.split_once('.')?;
        // Mixtral's name for its mixture.
        let renamed = part
            .strip_prefix("block_sparse_moe.")
            .map(|rest| format!("mlp.{rest}"));
        let part = renamed.as_deref().unwrap_or(part);
        let block: &[(&str, &str)] = if gpt2 { &GPT2_BLOCK } else { &BLOCK };
        let (to, _) = self
            .own()
            .iter()
            .chain(block)
            .find(|(_, from)| *from == part)?;
        Some(format!("blk.{layer}.{to}.{suffix}"))
    }

    /// The inverse of [`Self::tensor`]. `None` for a tensor without another name.
    pub fn usual(&self, stored: &str) -> Option<String> {
        let (stem, suffix) = stored.rsplit_once('.')?;
        if !matches!(suffix, "weight" | "bias") {
            return None;
        }
        let gpt2 = self.model_type == "gpt2";
        let Some((layer, part)) = stem
            .strip_prefix("blk.")
            .and_then(|rest| rest.split_once('.'))
        else {
            let global: &[(&str, &str)] = if gpt2 { &GPT2_GLOBAL } else { &GLOBAL };
            let (_, to) = global.iter().find(|(from, _)| *from == stem)?;
            return Some(format!("{to}.{suffix}"));
        };
        layer.parse::<usize>().ok()?;
        let block: &[(&str, &str)] = if gpt2 { &GPT2_BLOCK } else { &BLOCK };
        let (_, to) = self
            .own()
            .iter()
            .chain(block)
            .find(|(from, _)| *from == part)?;
        let prefix = if gpt2 { "h" } else { "model.layers" };
        Some(match to.strip_prefix("mlp.") {
            Some(rest)
                if self.model_type == "mixtral"
                    && (rest == "gate" || rest.starts_with("switch_mlp")) =>
            {
                format!("{prefix}.{layer}.block_sparse_moe.{rest}.{suffix}")
            }
            _ => format!("{prefix}.{layer}.{to}.{suffix}"),
        })
    }
}
