"""What llama.cpp's converter writes for hybrids with Mamba-2 and with gated delta nets: the keys, and what it does to numbers.

Rates of forgetting stand for the logarithms of their negatives, vectors of heads and norms of groups are matrices, the convolution
has no axis of length one. Falcon-H1's factors go into the matrices, so these are no bfloat16 numbers and are stored as float32.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

ARCHITECTURES = ("mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "qwen3next")
# The converter's context length for models without positions.
ENDLESS = 2**20


def is_float(key: str) -> bool:
    """Whether a tensor of a hybrid is float32 whatever the others are."""
    return any(part in key for part in (".ssm_a", ".ssm_d", ".ssm_norm", ".ssm_conv1d", ".ssm_dt"))


def kinds(config: dict[str, Any]) -> list[str]:
    """Of each layer `mamba`, `attention` or `fed`."""
    if letters := config.get("hybrid_override_pattern"):
        return [{"M": "mamba", "*": "attention"}.get(letter, "fed") for letter in letters]
    return config["layer_types"]


def common(writer: gguf.GGUFWriter, config: dict[str, Any], eps: float) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_layer_norm_rms_eps(eps)


def sizes(writer: gguf.GGUFWriter, conv: int, state: int, groups: int, heads: int, dim: int) -> None:
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * dim)


def metadata(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The keys that the converter writes."""
    if architecture == "mamba2":
        common(writer, config, config["layer_norm_epsilon"])
        writer.add_context_length(ENDLESS)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        keys = ("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim")
        return sizes(writer, *(config[key] for key in keys))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_head_count(heads)
    if architecture in ("nemotron_h", "nemotron_h_moe"):
        common(writer, config, config["layer_norm_epsilon"])
        keys = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
        sizes(writer, *(config[key] for key in keys))
        writer.add_context_length(ENDLESS)
        writer.add_rope_scaling_finetuned(False)
        writer.add_head_count_kv([kv_heads if kind == "attention" else 0 for kind in kinds(config)])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        has_experts = architecture == "nemotron_h_moe"
        width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
        writer.add_feed_forward_length([width if kind == "fed" else 0 for kind in kinds(config)])
        if has_experts:
            writer.add_expert_count(config["n_routed_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(width)
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_group_count(config["n_group"])
        return None
    common(writer, config, config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture == "qwen3next":
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        keys = ("conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads", "value_head_dim")
        return sizes(writer, *(config[f"linear_{key}"] for key in keys))
    keys = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
    sizes(writer, *(config[key] for key in keys))
    if architecture == "falcon-h1":
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        return None
    rotates = config["position_embedding_type"] == "rope"
    writer.add_context_length(config["max_position_embeddings"] if rotates else ENDLESS)
    writer.add_rope_scaling_finetuned(rotates)
    writer.add_head_count_kv([kv_heads if kind == "attention" else 0 for kind in kinds(config)])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def falcon(config: dict[str, Any], name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of Falcon-H1 with its factors."""
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = (inner, inner, shared, shared, config["mamba_n_heads"])
        rows = np.repeat(np.float32(config["ssm_multipliers"]), widths) * np.float32(config["ssm_in_multiplier"])
        return value * rows[:, None]
    return value * np.float32(factors.get(part, 1.0))


def heads_apart(config: dict[str, Any], layer: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Queries, keys, values and gates by kind, from rows by head of keys."""
    heads = config["linear_num_key_heads"]
    key, values = config["linear_key_head_dim"], config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts = np.split(value.reshape(heads, 2 * key + 2 * values, -1), [key, 2 * key, 2 * key + values], axis=1)
    q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
    return {f"blk.{layer}.attn_qkv.weight": np.concatenate([q, k, v]), f"blk.{layer}.attn_gate.weight": z}


def reordered(architecture: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as the converter stores them, those under GGUF's names that the package's map does not have."""
    out: dict[str, np.ndarray] = {}
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    for name, value in weights.items():
        if name.startswith("mtp."):
            continue
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        as_column = architecture != "qwen3next"
        if architecture == "falcon-h1":
            value = falcon(config, name, value)
        if name.endswith(".A_log"):
            rates = -np.exp(value)
            out[f"blk.{layer}.ssm_a"] = rates[:, None] if as_column else rates
        elif name.endswith(".D"):
            out[f"blk.{layer}.ssm_d"] = value[:, None]
        elif name.endswith(".dt_bias"):
            out[f"blk.{layer}.ssm_dt.bias"] = value
        elif name.endswith("conv1d.weight"):
            out[name] = value.reshape(value.shape[0], -1)
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            out[name] = value.reshape(groups, -1)
        elif name.endswith(".e_score_correction_bias"):
            out[f"blk.{layer}.exp_probs_b.bias"] = value
        elif name.endswith("in_proj_qkvz.weight"):
            out.update(heads_apart(config, layer, value))
        elif architecture == "qwen3next" and name.endswith("norm.weight") and "linear_attn" not in name:
            out[name] = value + 1.0
        elif name.endswith(("moe.input_linear.weight", "shared_mlp.input_linear.weight")):
            kind = "exps" if "moe." in name else "shexp"
            kind = f"_{kind}" if config["num_local_experts"] else ""
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=-2)):
                out[f"blk.{layer}.ffn_{part}{kind}.weight"] = half
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            out[f"blk.{layer}.ffn_down.weight"] = value
        else:
            out[name] = value
    return out
