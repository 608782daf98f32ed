"""The metadata and tensors of GGUF files of further decoders, for `gguf_families.py`: those whose files differ from
llama's by latent attention, experts chosen by groups or sigmoids, parallel parts, or fused matrices.
"""

from __future__ import annotations

import re
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

from gguf_model import permute

# Fixture, GGUF architecture, pre-tokenizer.
FAMILIES = {
    "deepseek": ("deepseek", "qwen2"),
    "deepseek-v2": ("deepseek2", "qwen2"),
    "deepseek-v2-lite": ("deepseek2", "qwen2"),
    "deepseek-v3": ("deepseek2", "qwen2"),
    "glm4-moe-lite": ("deepseek2", "glm4"),
    "youtu-llm": ("deepseek2", "qwen2"),
    "mistral4": ("mistral4", "qwen2"),
    "deepseek-v32": ("deepseek32", "qwen2"),
    "glm-moe-dsa": ("glm-dsa", "glm4"),
    "glm": ("chatglm", "qwen2"),
    "glm4": ("glm4", "qwen2"),
    "glm4-moe": ("glm4moe", "qwen2"),
    "dots1": ("dots1", "qwen2"),
    "bailing-moe": ("bailingmoe", "qwen2"),
    "bailing-moe-groups": ("bailingmoe2", "qwen2"),
    "ernie4-5": ("ernie4_5", "qwen2"),
    "ernie4-5-moe": ("ernie4_5-moe", "qwen2"),
    "hunyuan-v1-dense": ("hunyuan-dense", "qwen2"),
    "hunyuan": ("hunyuan-moe", "qwen2"),
    "minimax": ("minimax-m2", "qwen2"),
    "olmoe": ("olmoe", "qwen2"),
    "granitemoe": ("granitemoe", "qwen2"),
    "phimoe": ("phimoe", "qwen2"),
    "phi": ("phi2", "qwen2"),
    "cohere": ("command-r", "qwen2"),
    "cohere2": ("cohere2", "qwen2"),
    "exaone": ("exaone", "qwen2"),
    "seed-oss": ("seed_oss", "qwen2"),
    "stablelm": ("stablelm", "qwen2"),
    "stablelm-parallel": ("stablelm", "qwen2"),
    "nemotron": ("nemotron", "qwen2"),
    "gpt-neox": ("gptneox", "qwen2"),
    "minicpm": ("minicpm", "qwen2"),
    "solar-open": ("glm4moe", "qwen2"),
    "qwen2-5-vl": ("qwen2vl", "qwen2"),
    "qwen3-vl": ("qwen3vl", "qwen2"),
    "qwen3-vl-moe": ("qwen3vlmoe", "qwen2"),
    "qwen3-5": ("qwen35", "qwen35"),
    "qwen3-5-moe": ("qwen35moe", "qwen35"),
    "ministral3": ("mistral3", "qwen2"),
    "mistral3": ("mistral3", "qwen2"),
    "gemma3n": ("gemma3n", "qwen2"),
    "llama4": ("llama4", "qwen2"),
    "exaone-moe": ("exaone-moe", "qwen2"),
    "afmoe": ("afmoe", "qwen2"),
    "minicpm3": ("minicpm3", "qwen2"),
    "qwen": ("qwen", "qwen2"),
    "mamba": ("mamba", "qwen2"),
    "falcon-mamba": ("mamba", "qwen2"),
    # Old forms of files.
    "deepseek-v2-lite-old": ("deepseek2", "qwen2"),
    "glm-old": ("chatglm", "qwen2"),
    "phi-old": ("phi2", "qwen2"),
}
OLD = "-old"
# Files cannot hold these fields of the fixture, so the test compares with the directory that has
# other values of them.
OTHER_VALUES = ("deepseek-v2", "deepseek-v3", "gpt-bigcode", "llama4", "minicpm3", "phimoe")
ARCHITECTURES = {architecture for architecture, _ in FAMILIES.values()}
# Architectures that are newer than the package, each with one that has the same tensors.
SAME_TENSORS = {"deepseek32": "glm-dsa"}
# Files have the two matrices of latent attention apart.
LATENT = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")

# Rows of query and key heads are permuted: rotation pairs neighbors in the file, and halves in the
# directory.
PERMUTED = ("deepseek", "bailingmoe", "granitemoe", "minicpm", "mistral3")
LAYER_NORM = ("phi2", "command-r", "cohere2", "stablelm", "nemotron", "gptneox")
GATES = {"sigmoid": gguf.ExpertGatingFuncType.SIGMOID, "softmax": gguf.ExpertGatingFuncType.SOFTMAX}
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    """The first field that is there and not null; of a list, its first element."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    return value[0] if isinstance(value, list) else value


def metadata(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], old: bool) -> None:
    """The keys of a file. An `old` one has the keys of whole heads of latent attention."""
    config = text_part(config)
    if architecture == "mamba":
        return mamba_metadata(writer, config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = first(config, "head_dim", default=hidden // heads)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = scaling.get("full_attention", scaling)
    latent, old = architecture in (*LATENT, "minicpm3"), old or architecture == "minicpm3"
    writer.add_name("tiny")
    # The converter keeps the layers that predict further tokens for this family, and drops them for
    # DeepSeek.
    further = config["num_nextn_predict_layers"] if config["model_type"] == "glm4_moe_lite" else 0
    writer.add_block_count(first(config, "num_hidden_layers", "num_layers") + further)
    if further:
        writer.add_nextn_predict_layers(further)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config.get("intermediate_size_mlp") or config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if latent and not old else first(config, "num_key_value_heads", default=heads))
    writer.add_vocab_size(config["vocab_size"])
    epsilon = first(config, "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    if architecture in LAYER_NORM:
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(epsilon)
    if architecture not in ("phi2", "gptneox"):  # their readers assume 10000
        writer.add_rope_freq_base(theta(config, scaling, head_dim))
    if not latent:
        part = first(config, "partial_rotary_factor", "rotary_pct", default=scaling.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(first(config, "rotary_dim", default=int(head_dim * part)))
        if config.get("head_dim") is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "exaone-moe":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in ("afmoe", "cohere2"):
        writer.add_sliding_window(config["sliding_window"])
        # The converter writes no pattern, because published models have a full layer after three
        # others.
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in ("stablelm", "gptneox"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture == "granitemoe":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(hidden / config["dim_model_base"])
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if architecture == "gemma3n":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_altup_active_idx(config["altup_active_idx"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        shares = config["activation_sparsity_pattern"]
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(p) if p > 0 else -np.inf for p in shares])
    if architecture == "mistral3" and config["model_type"] == "ministral3":
        yarn(writer, scaling)
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if architecture in ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"):
        writer.add_rope_dimension_sections([*scaling["mrope_section"], 0])
    if architecture in ("qwen35", "qwen35moe"):
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    if latent:
        latent_metadata(writer, config, scaling, old)
    if "index_topk" in config:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if config.get("indexer_types"):
        writer.add_array(f"{architecture}.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])
    if experts := first(config, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"):
        mixture(writer, architecture, config, experts)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model."""
    return {**config, **config.get("text_config", {})}


def mamba_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys of Mamba, which has no attention."""
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def theta(config: dict[str, Any], scaling: dict[str, Any], head_dim: int) -> float:
    """The base of the rotation. Hunyuan's grows with `alpha`."""
    base = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    alpha = scaling.get("alpha")
    return base if alpha is None else base * alpha ** (head_dim / (head_dim - 2))


def yarn(writer: gguf.GGUFWriter, scaling: dict[str, Any]) -> None:
    """The keys of YaRN."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def latent_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], scaling: dict[str, Any], old: bool) -> None:
    """The keys of latent attention: widths of the cached vector, and those of heads under other names."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    key, value = config["qk_nope_head_dim"] + rotated, config.get("v_head_dim")
    writer.add_key_length(key if old else rank + rotated)
    if config["model_type"] != "minicpm3":
        writer.add_value_length(value if old else rank)
    if not old:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    if scaling.get("type", scaling.get("rope_type")) == "yarn":
        yarn(writer, scaling)
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    if config["model_type"] == "youtu_llm":
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)


def mixture(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], experts: int) -> None:
    """The keys of a mixture of experts."""
    writer.add_expert_count(experts)
    writer.add_expert_used_count(first(config, "num_experts_per_tok", "moe_topk", "moe_k"))
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    score = first(config, "scoring_func", "score_function")
    if architecture in ("glm4moe", "dots1", "afmoe", "deepseek32"):
        score = "sigmoid"
    if score is not None:
        writer.add_expert_gating_func(GATES[score])
    if architecture not in ("olmoe", "granitemoe", "phimoe"):
        writer.add_expert_feed_forward_length(first(config, "moe_intermediate_size", default=config["intermediate_size"]))
    dense = first(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    if dense is not None:
        writer.add_leading_dense_block_count(dense)
    shared = first(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if architecture == "hunyuan-moe":
        shared = first(config, "num_shared_expert", default=1)
    if shared is not None:
        writer.add_expert_shared_count(shared)
    if config.get("shared_expert_intermediate_size") is not None:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        # The converter divides by the number of key heads, which is not the width of the matrices.
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
    scale = first(config, "routed_scaling_factor", "route_scale")
    if scale is not None:
        writer.add_expert_weights_scale(scale)
    if architecture not in ("olmoe", "granitemoe", "phimoe", "minimax-m2", "ernie4_5-moe", "hunyuan-moe"):
        if (normalized := config.get("norm_topk_prob")) is not None and (normalized or architecture not in LATENT):
            writer.add_expert_weights_norm(normalized)


def tiled(config: dict[str, Any], name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of Qwen3.5's delta net whose value heads are in another order: the first ones of all key heads first."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def moved(part: np.ndarray, axis: int) -> np.ndarray:
        apart = part.reshape(*part.shape[:axis], keys, heads // keys, -1, *part.shape[axis + 1 :])
        return apart.swapaxes(axis, axis + 1).reshape(part.shape)

    if "out_proj" in name:
        return moved(value, 1)
    if "in_proj_qkv" in name or "conv1d" in name:
        shared = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([value[:shared], moved(value[shared:], 0)])
    return value if ".norm." in name else moved(value, 0)


def tensors(architecture: str, config: dict[str, Any], weights: dict[str, np.ndarray], old: bool) -> dict[str, np.ndarray]:
    """The arrays under their GGUF names. In an `old` file, queries, keys and values are one matrix, or keys and values."""
    config = text_part(config)
    layers = first(config, "num_hidden_layers", "num_layers")
    same = SAME_TENSORS.get(architecture, architecture)
    model = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == same)
    names = gguf.get_tensor_name_map(model, layers)
    # The dense layers of the first bailing_moe are not in the package's list of its tensors.
    others = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK, layers)
    heads = config.get("num_attention_heads", 1)
    kv_heads = first(config, "num_key_value_heads", default=heads)
    fused = old and architecture != "deepseek2"
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        if name.endswith((".attention.bias", ".attention.masked_bias", ".inv_freq")):
            continue  # computed anyway
        if name.startswith(("mtp.", "vision_tower.", "visual.", "model.visual.")):
            continue  # other parts
        name = name.replace("model.language_model.", "model.").replace("language_model.", "")
        if ".linear_attn." in name:
            value = tiled(config, name, value.reshape(value.shape[0], -1) if "conv1d" in name else value)
        block = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        own = (lambda part: f"blk.{block[1]}.{part}.weight") if block else None
        if match := re.search(r"\.experts\.(\d+)\.(\w+)\.weight$", name):
            part = STACKS[PARTS.get(match[2], match[2])]
            stacks.setdefault(own(part), {})[int(match[1])] = value
        elif name.endswith(".A_log"):
            out[f"blk.{block[1]}.ssm_a"] = -np.exp(value)
        elif name.endswith(".mixer.D"):
            out[f"blk.{block[1]}.ssm_d"] = value
        elif name.endswith(".conv1d.weight"):
            out[own("ssm_conv1d")] = value.reshape(value.shape[0], -1)
        elif name.endswith(".dt_bias"):
            out[f"blk.{block[1]}.ssm_dt.bias"] = value
        elif match := re.search(r"altup_(unembed_)?projections\.(\d+)\.weight$", name):
            key = "altup_unembd_proj.weight" if match[1] else "altup_proj.weight"
            stacks.setdefault(key, {})[int(match[2])] = value
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            if config["model_type"].startswith(("qwen3_vl", "llama4")):
                value = value.swapaxes(1, 2)  # [experts, in, out]
            if name.endswith("gate_up_proj") and architecture == "mistral4":
                out[own("ffn_gate_up_exps")] = value  # the converter keeps the stack
            elif name.endswith("gate_up_proj"):
                out[own("ffn_gate_exps")], out[own("ffn_up_exps")] = np.split(value, 2, axis=1)
            else:
                out[own("ffn_down_exps")] = value
        elif name.endswith(".shared_expert_gate.weight"):
            out[own("ffn_gate_inp_shexp")] = value.reshape(-1)  # older converters drop axes of length one
        elif fused and ".q_proj." in name:
            part = name.rsplit(".", 1)[1]
            rows = [weights[name.replace(".q_proj.", f".{each}_proj.")] for each in "qkv"]
            out[f"blk.{block[1]}.attn_qkv.{part}"] = np.concatenate(rows)
        elif fused and (".k_proj." in name or ".v_proj." in name):
            continue
        elif name.endswith("kv_b_proj.weight") and not old and architecture in LATENT:
            # The keys' half is turned, so that it maps queries to the cached vector.
            both = value.reshape(heads, -1, value.shape[-1])
            keys = config["qk_nope_head_dim"]
            out[own("attn_k_b")] = both[:, :keys].swapaxes(1, 2)
            out[own("attn_v_b")] = both[:, keys:]
        elif name.endswith((".embed_q.weight", ".unembed_out.weight")):
            # mlx-lm's directories have both matrices as files do.
            out[own("attn_k_b" if ".embed_q." in name else "attn_v_b")] = value
        elif name.endswith(".eh_proj.weight"):
            out[own("nextn.eh_proj")] = value
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(value, 2, axis=1)
            out[own("ffn_gate_exps")], out[own("ffn_up_exps")] = gate, up
        elif ".query_key_value." in name and architecture == "gptneox":
            # Head by head to queries, keys and values one after another.
            apart = value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
            out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = apart
        elif ".query_key_value." in name and architecture == "bailingmoe":
            dim = value.shape[0] // (heads + 2 * kv_heads)
            q, k, v = np.split(value, [heads * dim, (heads + kv_heads) * dim])
            out[own("attn_q")], out[own("attn_k")], out[own("attn_v")] = permute(q, heads), permute(k, kv_heads), v
        else:
            if architecture in PERMUTED and name.endswith("q_proj.weight"):
                value = permute(value, heads)
            elif architecture in PERMUTED and name.endswith("k_proj.weight"):
                value = permute(value, kv_heads)
            plus_one = architecture == "nemotron" or architecture.startswith("qwen35") and ".linear_attn." not in name
            if plus_one and name.endswith("norm.weight"):
                value = value + 1.0
            name += ".weight" if name.endswith("_scale") else ""
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            name += ".bias" if name.endswith(".expert_bias") else ""
            mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
            mapped = mapped or others.get_name(name, try_suffixes=(".weight", ".bias"))
            if mapped is None:
                raise ValueError(f"{architecture} has no name for {name}")
            out[mapped] = value.reshape(-1) if "exp_probs_b" in mapped else value
    for key, parts in stacks.items():
        out[key] = np.stack([parts[number] for number in range(len(parts))])
    if "long_factor" in (scaling := config.get("rope_scaling") or {}):
        for each in ("long", "short"):
            out[f"rope_factors_{each}.weight"] = np.array(scaling[f"{each}_factor"], dtype=np.float32)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_factors(config["rope_parameters"], config["head_dim"])
    return out


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """By how much Llama 3's scaling stretches the wavelength of each pair. Llama 4 has no part between the two."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ramp = (turns > low) * 1.0 if low == high else np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / (ramp + (1.0 - ramp) / rope["factor"])).astype(np.float32)
