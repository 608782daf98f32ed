"""The metadata and tensors of GGUF files of further families, for `gguf_families.py`: models with states (Jamba, Kimi Linear,
RWKV-7), and models whose layers differ in heads, rotations or experts.

The keys, the names and the changes of numbers are those of llama.cpp's converter.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np

# Fixture, GGUF architecture, pre-tokenizer.
FAMILIES = {
    "jamba": ("jamba", "qwen2"),
    "kimi-linear": ("kimi-linear", "qwen2"),
    "rwkv7": ("rwkv7", "qwen2"),
    "step3p5": ("step35", "qwen2"),
    "mimo-v2-flash": ("mimo2", "qwen2"),
    "laguna": ("laguna", "qwen2"),
    "dbrx": ("dbrx", "qwen2"),
    "cohere2-moe": ("cohere2moe", "qwen2"),
    "cohere2-moe-rms": ("cohere2moe", "qwen2"),
}
ARCHITECTURES = {architecture for architecture, _ in FAMILIES.values()}
# Files cannot hold these fields of the fixture, so the test compares with the directory that has other values of them.
OTHER_VALUES = ("cohere2-moe-rms", "kimi-linear", "laguna")
# Architectures that are newer than the package, each with one whose map has the names.
SAME_NAMES = {"laguna": "step35", "cohere2moe": "cohere2"}
# The converter's context length for models without positions.
ENDLESS = 2**20
GATES = {"sigmoid": gguf.ExpertGatingFuncType.SIGMOID, "softmax": gguf.ExpertGatingFuncType.SOFTMAX}
STACKS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "v1": "up", "down_proj": "down", "w2": "down"}
SHARES = ("r", "w", "k", "v", "a", "g")


def metadata(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The keys of a file."""
    writer.add_name("tiny")
    layers = config.get("num_hidden_layers") or config["n_layers"]
    writer.add_block_count(layers + (config.get("num_nextn_predict_layers") or 0))
    writer.add_embedding_length(config.get("hidden_size") or config["d_model"])
    writer.add_vocab_size(config["vocab_size"])
    OWN[architecture](writer, config)


def attention(writer: gguf.GGUFWriter, config: dict[str, Any], *, values: bool = True) -> None:
    """The keys of attention with one number of query heads."""
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count(config["num_attention_heads"])
    if values and config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def experts(writer: gguf.GGUFWriter, config: dict[str, Any], count: int, used: int) -> None:
    """The keys of a mixture that all families have."""
    writer.add_expert_count(count)
    writer.add_expert_used_count(used)


def jamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attention(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    writer.add_head_count_kv([config["num_key_value_heads"] if i % period == offset else 0 for i in layers])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    experts(writer, config, config["num_experts"], config["num_experts_per_tok"])


def kimi_linear(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attention(writer, config, values=False)
    linear, rotated = config["linear_attn_config"], config["qk_rope_head_dim"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv([int(i + 1 in linear["full_attn_layers"]) for i in range(config["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
    writer.add_kda_head_dim(linear["head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["kv_lora_rank"] + rotated)
    writer.add_value_length(config["head_dim"])  # of the configuration, which is not the width of values
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    experts(writer, config, config["num_experts"], config["num_experts_per_token"])
    writer.add_expert_group_used_count(config["topk_group"])  # the number of groups has another name than the converter's
    writer.add_expert_gating_func(GATES[config["moe_router_activation_func"]])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def rwkv7(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(ENDLESS)
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_wkv_head_size(config["head_dim"])
    writer.add_decay_lora_rank(config["decay_low_rank_dim"])
    writer.add_iclr_lora_rank(config["a_low_rank_dim"])
    writer.add_value_residual_mix_lora_rank(config["v_low_rank_dim"])
    writer.add_gate_lora_rank(config["gate_low_rank_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(0)


def step35(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    blocks = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    other = config["attention_other_setting"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_freq_base(config["rope_theta"][0])
    writer.add_rope_freq_base_swa(config["rope_theta"][1])
    for add, name in ((writer.add_head_count, "num_attention_heads"), (writer.add_head_count_kv, "num_attention_groups")):
        add([other[name] if sliding else config[name] for sliding in slides])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    experts(writer, config, config["moe_num_experts"], config["moe_top_k"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_expert_weight"])
    writer.add_leading_dense_block_count(int(config["moe_layers_enum"].split(",")[0]))
    writer.add_moe_every_n_layers(1)
    writer.add_swiglu_clamp_exp([float(limit) for limit in config["swiglu_limits"][:blocks]])
    writer.add_swiglu_clamp_shexp([float(limit) for limit in config["swiglu_limits_shared"][:blocks]])
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])


def mimo2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attention(writer, config, values=False)
    slides = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    heads = config["num_key_value_heads"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv([config.get("swa_num_key_value_heads", 2 * heads) if sliding else heads for sliding in slides])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    experts(writer, config, config["n_routed_experts"], config["num_experts_per_tok"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def laguna(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    full, sliding = config["rope_parameters"]["full_attention"], config["rope_parameters"]["sliding_attention"]
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads_per_layer"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_sliding_window(config["sliding_window"])
    # The converter writes no pattern, because in published models the first of four layers is full.
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
    writer.add_rope_dimension_count_swa(int(head_dim * sliding["partial_rotary_factor"]))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
    writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    experts(writer, config, config["num_experts"], config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    writer.add_expert_gating_func(GATES["sigmoid"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))


def dbrx(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    parts, mixture = config["attn_config"], config["ffn_config"]
    writer.add_context_length(config["max_seq_len"])
    writer.add_feed_forward_length(mixture["ffn_hidden_size"])
    writer.add_head_count(config["n_heads"])
    writer.add_head_count_kv(parts["kv_n_heads"])
    writer.add_rope_freq_base(parts["rope_theta"])
    writer.add_clamp_kqv(parts["clip_qkv"])
    experts(writer, config, mixture["moe_num_experts"], mixture["moe_top_k"])
    writer.add_layer_norm_eps(1e-5)


def cohere2moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    width, shared = config["intermediate_size"], config["num_shared_experts"]
    writer.add_context_length(config["max_position_embeddings"])
    if config["prefix_dense_intermediate_size"] is not None:
        writer.add_feed_forward_length(config["prefix_dense_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if config["rms_norm_eps"] is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_logit_scale(config["logit_scale"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    experts(writer, config, config["num_experts"], config["num_experts_per_tok"])
    writer.add_expert_gating_func(GATES[config["expert_selection_fn"]])
    writer.add_expert_feed_forward_length(width)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_shared_count(shared)
    writer.add_expert_shared_feed_forward_length(width * shared)


OWN = {
    "jamba": jamba,
    "kimi-linear": kimi_linear,
    "rwkv7": rwkv7,
    "step35": step35,
    "mimo2": mimo2,
    "laguna": laguna,
    "dbrx": dbrx,
    "cohere2moe": cohere2moe,
}


def tensors(architecture: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under their GGUF names."""
    layers = config.get("num_hidden_layers") or config["n_layers"]

    def map_of(name: str) -> gguf.TensorNameMap:
        kind = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        return gguf.get_tensor_name_map(kind, layers + 1)

    # Names of experts are those of DeepSeek where the package's map lacks them.
    maps = [map_of(name) for name in (SAME_NAMES.get(architecture, architecture), "deepseek2", "step35")]
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    shares: dict[str, dict[str, np.ndarray]] = {}
    for name, value in weights.items():
        block = re.search(r"\.(?:layers|blocks)\.(\d+)\.", name)
        own = f"blk.{block[1]}" if block else ""
        name = name.replace(".feed_forward.experts.", ".mlp.experts.")
        if match := re.search(r"\.experts\.(\d+)\.(\w+)\.weight$", name):
            stacks.setdefault(f"{own}.ffn_{STACKS[match[2]]}_exps.weight", {})[int(match[1])] = value
        elif match := re.search(r"\.ffn\.experts\.mlp\.(\w+)$", name):
            # Experts one below another; those of down matrices are turned.
            rows = value.reshape(config["ffn_config"]["moe_num_experts"], -1, value.shape[1])
            out[f"{own}.ffn_{STACKS[match[1]]}_exps.weight"] = rows.swapaxes(1, 2) if match[1] == "w2" else rows
        elif architecture == "rwkv7":
            rwkv(out, shares, name, own, value, maps[0])
        elif name.endswith(".A_log"):
            out[f"{own}.ssm_a"] = -np.exp(value)
        elif name.endswith(".mamba.D"):
            out[f"{own}.ssm_d"] = value
        elif name.endswith(".dt_bias"):
            out[f"{own}.ssm_dt.bias"] = value
        elif match := re.search(r"\.([qkv])_conv1d\.weight$", name):
            out[f"{own}.ssm_conv1d_{match[1]}.weight"] = value.reshape(1, value.shape[0], 1, -1)
        elif name.endswith(".conv1d.weight"):
            out[f"{own}.ssm_conv1d.weight"] = value.reshape(value.shape[0], -1)
        elif name.endswith(".kv_b_proj.weight"):
            both = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
            keys = config["qk_nope_head_dim"]
            out[f"{own}.attn_k_b.weight"] = both[:, :keys].swapaxes(1, 2)
            out[f"{own}.attn_v_b.weight"] = both[:, keys:]
        elif name.endswith((".e_score_correction_bias", ".router_bias")):
            out[f"{own}.exp_probs_b.bias"] = value
        elif name.endswith(".eh_proj.weight"):
            out[f"{own}.nextn.eh_proj.weight"] = value
        elif name.endswith(".attention_sink_bias"):
            out[f"{own}.attn_sinks.weight"] = value
        elif name.endswith(".g_proj.weight"):
            out[f"{own}.attn_gate.weight"] = value
        else:
            if architecture == "step35" and name.endswith("norm.weight"):
                value = value + 1.0
            # transformers saves Kimi's dense layer under the name of a mixture.
            name = re.sub(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1.", name)
            found = (m.get_name(name, try_suffixes=(".weight", ".bias")) for m in maps)
            mapped = next((mapped for mapped in found if mapped), None)
            if mapped is None:
                raise ValueError(f"{architecture} has no name for {name}")
            out[mapped] = value
    for key, parts in stacks.items():
        out[key] = np.stack([parts[number] for number in range(len(parts))])
    for own, parts in shares.items():
        out[f"{own}.time_mix_lerp_fused.weight"] = np.stack([parts[part] for part in SHARES])
    if architecture == "step35":
        out["rope_freqs.weight"] = step35_factors(config)
    return out


def rwkv(
    out: dict[str, np.ndarray],
    shares: dict[str, dict[str, np.ndarray]],
    name: str,
    own: str,
    value: np.ndarray,
    names: gguf.TensorNameMap,
) -> None:
    """A tensor of RWKV-7, whose names the converter unifies before it looks them up."""
    if match := re.search(r"\.attn\.x_([a-z])$", name):
        shares.setdefault(own, {})[match[1]] = value
        return
    if match := re.search(r"\.attn\.([a-z])_lora\.lora\.(\d)\.(\w+)$", name):
        part = f"time_mix_{match[1]}{0 if match[3] == 'bias' else 1 if match[2] == '0' else 2}.weight"
    else:
        unified = name.replace("ffn_norm", "ln2").replace("attn_norm", "attention_norm")
        unified = unified.replace(".ffn.", ".feed_forward.").replace(".attn.", ".attention.").replace("g_norm", "ln_x")
        mapped = names.get_name(unified, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise ValueError(f"rwkv7 has no name for {name}")
        mapped += "" if mapped.endswith((".weight", ".bias")) else ".weight"
        out[mapped] = value.reshape(-1) if name.endswith("r_k") else value.squeeze()
        return
    out[f"{own}.{part}"] = value
    if own == "blk.0" and part.startswith("time_mix_a"):
        # The first block has unused tensors, since readers expect the same ones in all blocks.
        out[f"{own}.{part.replace('_a', '_v')}"] = value


def step35_factors(config: dict[str, Any]) -> np.ndarray:
    """By how much Llama 3's scaling stretches the wavelength of each pair of full layers, and ones up to whole heads."""
    rope, theta = config["rope_scaling"], config["rope_theta"][0]
    rotated = int(config["head_dim"] * config["partial_rotary_factors"][0])
    waves = 2 * np.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors = 1.0 / (ramp + (1.0 - ramp) / rope["factor"])
    return np.concatenate([factors, np.ones(config["head_dim"] // 2 - len(factors))]).astype(np.float32)
