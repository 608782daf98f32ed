//! Tensor names of transformers checkpoints, which the engine uses throughout, as GGUF has them.

/// Names outside of blocks.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Names in `blk.N`, and in `model.layers.N`.
const BLOCK: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// A tensor that has no counterpart and keeps its name: factors of the rotary wavelengths.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// What GGUF calls the tensor `name`, such as `blk.0.attn_q.weight` for
/// `model.layers.0.self_attn.q_proj.weight`. `rope_freqs.weight` keeps its name. `None` for one that
/// GGUF has no name for.
pub fn tensor_name(name: &str) -> Option<String> {
    if name == ROPE_FREQS {
        return Some(name.to_owned());
    }
    let (stem, suffix) = name.rsplit_once('.')?;
    if !matches!(suffix, "weight" | "bias") {
        return None;
    }
    if let Some((to, _)) = GLOBAL.iter().find(|(_, from)| *from == stem) {
        return Some(format!("{to}.{suffix}"));
    }
    let (layer, part) = stem.strip_prefix("model.layers.")?.split_once('.')?;
    let (to, _) = BLOCK.iter().find(|(_, from)| *from == part)?;
    Some(format!("blk.{layer}.{to}.{suffix}"))
}
