//! Common facts of the GGUF files of one family: names, the order of rows, and facts that the
//! metadata does not give. A new family is one entry of [`FAMILIES`].

/// Tensor names: GGUF's, and those of transformers.
pub(super) type Names = &'static [(&'static str, &'static str)];

/// The GGUF files of one `model_type`.
#[non_exhaustive]
#[derive(Debug, Clone, Copy)]
pub struct GgufFamily {
    /// The `model_type` in a `config.json`.
    pub model_type: &'static str,
    /// `general.architecture` in GGUF. Two families may share one.
    pub architecture: &'static str,
    /// The class in transformers.
    pub class: &'static str,
    /// The activation of the feed-forward block, as transformers names it.
    pub activation: &'static str,
    /// The field of a `config.json` that holds the activation.
    pub activation_field: &'static str,
    /// Whether converters reorder the rows of query and key heads, for a rotation of neighboring
    /// elements.
    pub permuted: bool,
    /// Whether norms subtract the mean. Their epsilon has a key of its own.
    pub layer_norm: bool,
    /// Whether converters store the weights of norms with 1 added.
    pub norm_plus_one: bool,
    /// Names that differ from `block`, in blocks.
    pub(super) own: Names,
    /// Names in `blk.N`.
    pub(super) block: Names,
    /// Names outside of blocks.
    pub(super) global: Names,
    /// The prefix of blocks in transformers, before their number.
    pub(super) prefix: &'static str,
    /// The name of a mixture in transformers.
    pub(super) mixture: &'static str,
}

/// Names outside of blocks.
const GLOBAL: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Names in blocks that most families share.
const BLOCK: Names = &[
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
const SANDWICH: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const TANH_GELU: &str = "gelu_pytorch_tanh";

/// A family like llama, but with rows in the usual order. The entries below start from it.
pub(super) const PLAIN: GgufFamily = GgufFamily {
    model_type: "",
    architecture: "",
    class: "",
    activation: "silu",
    activation_field: "hidden_act",
    permuted: false,
    layer_norm: false,
    norm_plus_one: false,
    own: &[],
    block: BLOCK,
    global: GLOBAL,
    prefix: "model.layers.",
    mixture: "mlp",
};

/// All families, sorted by `model_type`. Of those that share an architecture the first is the plain
/// one: without experts, without a window.
const FAMILIES: [GgufFamily; 17] = [
    GgufFamily {
        model_type: "exaone4",
        architecture: "exaone4",
        class: "Exaone4ForCausalLM",
        own: SANDWICH,
        ..PLAIN
    },
    GgufFamily {
        model_type: "gemma",
        architecture: "gemma",
        class: "GemmaForCausalLM",
        activation: TANH_GELU,
        norm_plus_one: true,
        ..PLAIN
    },
    GgufFamily {
        model_type: "gemma2",
        architecture: "gemma2",
        class: "Gemma2ForCausalLM",
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        norm_plus_one: true,
        own: SANDWICH,
        ..PLAIN
    },
    GgufFamily {
        model_type: "gemma3_text",
        architecture: "gemma3",
        class: "Gemma3ForCausalLM",
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        norm_plus_one: true,
        own: SANDWICH,
        ..PLAIN
    },
    GgufFamily {
        model_type: "gpt2",
        architecture: "gpt2",
        class: "GPT2LMHeadModel",
        activation: "gelu_new",
        activation_field: "activation_function",
        layer_norm: true,
        block: &[
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        ],
        global: &[
            ("token_embd", "wte"),
            ("position_embd", "wpe"),
            ("output_norm", "ln_f"),
            ("output", "lm_head"),
        ],
        prefix: "h.",
        ..PLAIN
    },
    GgufFamily {
        model_type: "granite",
        architecture: "granite",
        class: "GraniteForCausalLM",
        permuted: true,
        ..PLAIN
    },
    GgufFamily {
        model_type: "llama",
        architecture: "llama",
        class: "LlamaForCausalLM",
        permuted: true,
        ..PLAIN
    },
    GgufFamily {
        model_type: "mixtral",
        architecture: "llama",
        class: "MixtralForCausalLM",
        permuted: true,
        mixture: "block_sparse_moe",
        ..PLAIN
    },
    GgufFamily {
        model_type: "olmo2",
        architecture: "olmo2",
        class: "Olmo2ForCausalLM",
        // It has no norms before the two parts, so `ffn_norm` is never asked for.
        own: SANDWICH,
        ..PLAIN
    },
    GgufFamily {
        model_type: "olmo3",
        architecture: "olmo2",
        class: "Olmo3ForCausalLM",
        own: SANDWICH,
        ..PLAIN
    },
    GgufFamily {
        model_type: "phi3",
        architecture: "phi3",
        class: "Phi3ForCausalLM",
        own: &[("ffn_up", "mlp.gate_up_proj")],
        ..PLAIN
    },
    GgufFamily {
        model_type: "qwen2",
        architecture: "qwen2",
        class: "Qwen2ForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        model_type: "qwen2_moe",
        architecture: "qwen2moe",
        class: "Qwen2MoeForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        model_type: "qwen3",
        architecture: "qwen3",
        class: "Qwen3ForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        model_type: "qwen3_moe",
        architecture: "qwen3moe",
        class: "Qwen3MoeForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        model_type: "smollm3",
        architecture: "smollm3",
        class: "SmolLM3ForCausalLM",
        permuted: true,
        ..PLAIN
    },
    GgufFamily {
        model_type: "starcoder2",
        architecture: "starcoder2",
        class: "Starcoder2ForCausalLM",
        activation: TANH_GELU,
        layer_norm: true,
        own: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        ..PLAIN
    },
];

impl GgufFamily {
    /// All families, sorted by `model_type`.
    pub fn all() -> &'static [Self] {
        &FAMILIES
    }

    /// The family of a `model_type`.
    pub fn of(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|f| f.model_type == model_type)
    }

    /// The family of an architecture in GGUF; of two, the plain one.
    pub(super) fn of_architecture(architecture: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|f| f.architecture == architecture)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_type_has_one_entry() {
        assert!(FAMILIES.is_sorted_by(|a, b| a.model_type < b.model_type));
        assert!(FAMILIES.iter().all(|f| !f.class.is_empty()));
        let llama = GgufFamily::of_architecture("llama").unwrap();
        assert_eq!(llama.model_type, "llama");
    }
}
