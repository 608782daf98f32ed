"""Makes tests/fixtures/gguf/<name>.gguf from tests/fixtures/tiny/<name>: the same numbers, as llama.cpp's converter lays them out.

The weights of those fixtures are bfloat16, which GGUF holds exactly, so the goldens of the directory are those of the file.
Names of tensors come from the `gguf` package's own map. What the converter does to the numbers is written here once more:
rows of query and key heads permuted for llama's kin, one added to Gemma's norms, GPT-2's matrices turned, experts stacked.
For hybrids `gguf_hybrids.py` does it, for further decoders `gguf_decoders.py` and `gguf_further.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

import gguf_decoders as decoders
import gguf_further as further
import gguf_hybrids as hybrids
import tiny_tokenizer
from gguf_model import permute

ROOT = Path(__file__).resolve().parents[2] / "tests" / "fixtures"

# Fixture, GGUF architecture, pre-tokenizer.
FAMILIES = {
    "mixtral": ("llama", "qwen2"),
    "qwen2-moe": ("qwen2moe", "qwen2"),
    "qwen3-moe": ("qwen3moe", "qwen2"),
    "gemma": ("gemma", "qwen2"),
    "gemma2": ("gemma2", "qwen2"),
    "gemma3-text": ("gemma3", "qwen2"),
    "phi3": ("phi3", "qwen2"),
    "gpt2": ("gpt2", "smollm"),
    "internlm2": ("internlm2", "qwen2"),
    "olmo": ("olmo", "qwen2"),
    "apertus": ("apertus", "qwen2"),
    "olmo2": ("olmo2", "qwen2"),
    "olmo3": ("olmo2", "qwen2"),
    "exaone4": ("exaone4", "qwen2"),
    "exaone4-full": ("exaone4", "qwen2"),
    "granite": ("granite", "qwen2"),
    "smollm3": ("smollm3", "qwen2"),
    "starcoder2": ("starcoder2", "qwen2"),
    "gpt-bigcode": ("starcoder", "starcoder"),
    "llama-yarn": ("llama", "qwen2"),
    "gpt-oss-mxfp4": ("gpt-oss", "qwen2"),
    "gemma4-small": ("gemma4", "qwen2"),
    "gemma4-large": ("gemma4", "qwen2"),
    "lfm2": ("lfm2", "qwen2"),
    "lfm2-moe": ("lfm2moe", "qwen2"),
    "mamba2": ("mamba2", "qwen2"),
    "falcon-h1": ("falcon-h1", "qwen2"),
    "granitemoehybrid": ("granitehybrid", "qwen2"),
    "granitemoehybrid-dense": ("granitehybrid", "qwen2"),
    "nemotron-h": ("nemotron_h", "qwen2"),
    "nemotron-h-moe": ("nemotron_h_moe", "qwen2"),
    "qwen3-next": ("qwen3next", "qwen2"),
    **decoders.FAMILIES,
    **further.FAMILIES,
}
PERMUTED = ("llama", "granite", "smollm3", "granitehybrid", "internlm2", "olmo")
# The numbers of the activation of Apertus.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
PLUS_ONE = ("gemma", "gemma2", "gemma3")
GGUF_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    """The first field that is there and not null."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def metadata(
    writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], scalars: dict[str, np.ndarray], old: bool
) -> None:
    """The keys that the converter writes. `scalars` are tensors that become metadata."""
    if architecture in decoders.ARCHITECTURES:
        return decoders.metadata(writer, architecture, config, old)
    if architecture in further.ARCHITECTURES:
        return further.metadata(writer, architecture, config)
    hidden = first(config, "hidden_size", "n_embd")
    heads = first(config, "num_attention_heads", "n_head", "num_heads")
    head_dim = first(config, "head_dim", default=hidden // heads)
    if architecture == "gemma4":
        return gemma4_metadata(writer, config)
    if architecture in ("lfm2", "lfm2moe"):
        return lfm2_metadata(writer, config)
    if architecture in hybrids.ARCHITECTURES:
        return hybrids.metadata(writer, architecture, config)
    rope = first(config, "rope_parameters", "rope_scaling", default={})
    rope = rope.get("full_attention", rope)
    writer.add_name("tiny")
    writer.add_block_count(first(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(first(config, "max_position_embeddings", "n_positions"))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(first(config, "intermediate_size", "n_inner", default=4 * hidden))
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if config.get("multi_query") else first(config, "num_key_value_heads", default=heads))
    if architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
        writer.add_clamp_kqv(config["clip_qkv"])
    elif architecture in ("gpt2", "starcoder", "starcoder2"):
        writer.add_layer_norm_eps(first(config, "layer_norm_epsilon", "norm_epsilon"))
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture not in ("gpt2", "starcoder"):
        writer.add_rope_freq_base(first(config, "rope_theta", default=rope.get("rope_theta", 10000.0)))
        partial = first(config, "partial_rotary_factor", default=rope.get("partial_rotary_factor") or 1.0)
        writer.add_rope_dimension_count(int(head_dim * partial))
    if "head_dim" in config and config["head_dim"] is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if architecture in ("olmo2", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "apertus":
        layers = config["num_hidden_layers"]
        numbers = {name: [float(scalars[f"model.layers.{i}.mlp.act_fn.{name}"].item()) for i in range(layers)] for name in XIELU}
        writer.add_xielu_alpha_p(numbers["alpha_p"])
        writer.add_xielu_alpha_n(numbers["alpha_n"])
        writer.add_xielu_beta(numbers["beta"])
        writer.add_xielu_eps(numbers["eps"])
    if experts := first(config, "num_local_experts", "num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def gemma4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys of Gemma 4: numbers by layer, sizes of full layers, and those of sliding ones with names of their own."""
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    width = config["intermediate_size"]
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width if i < layers - shared else 2 * width for i in range(layers)])
    else:
        writer.add_feed_forward_length(width)
    heads, full_heads = config["num_key_value_heads"], config.get("num_global_key_value_heads")
    writer.add_head_count_kv(heads if full_heads is None else [heads if slides_here else full_heads for slides_here in slides])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def lfm2_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys of LFM2: layers without key heads are convolutions, and the width is the adjusted one."""
    layers, width = config["num_hidden_layers"], first(config, "block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim"):
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // config["block_multiple_of"]) * config["block_multiple_of"]
    kinds = config.get("layer_types") or [
        "full_attention" if i in config["full_attn_idxs"] else "conv" for i in range(layers)
    ]
    heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(width)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens, merges = tiny_tokenizer.vocabulary()
    specials = len(tiny_tokenizer.SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * specials + [gguf.TokenType.NORMAL] * (len(tokens) - specials))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tiny_tokenizer.BOS)
    writer.add_eos_token_id(tiny_tokenizer.EOS)
    writer.add_pad_token_id(tiny_tokenizer.PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_tokenizer.CHAT_TEMPLATE)


def tensors(architecture: str, config: dict[str, Any], weights: dict[str, np.ndarray], old: bool) -> dict[str, np.ndarray]:
    """float32 arrays under their GGUF names."""
    if architecture in decoders.ARCHITECTURES:
        return decoders.tensors(architecture, config, weights, old)
    if architecture in further.ARCHITECTURES:
        return further.tensors(architecture, config, weights)
    layers = first(config, "num_hidden_layers", "n_layer")
    if architecture in hybrids.ARCHITECTURES:
        weights = hybrids.reordered(architecture, config, weights)
    model = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(model, layers)
    heads = first(config, "num_attention_heads", "n_head", "num_heads")
    kv_heads = first(config, "num_key_value_heads", default=heads)
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        if architecture == "gemma4":
            if name.endswith((".router.scale", ".router.per_expert_scale")):
                # The factors of experts stand beside their down projection.
                part = "ffn_gate_inp" if name.endswith("r.scale") else "ffn_down_exps"
                out[f"blk.{name.split('.')[2]}.{part}.scale"] = value
                continue
            name = name if name.endswith(".weight") else f"{name}.weight"
        elif name.startswith("blk."):
            out[name] = value  # named already
            continue
        elif ".wqkv." in name:
            # One matrix, group by group: query heads, a key head, its value head.
            rows = value.reshape(kv_heads, heads // kv_heads + 2, -1, value.shape[-1])
            parts = {"q": rows[:, :-2], "k": rows[:, -2:-1], "v": rows[:, -1:]}
            for part, own in parts.items():
                own = own.reshape(-1, value.shape[-1])
                if part != "v":
                    own = permute(own, heads if part == "q" else kv_heads)
                out[f"blk.{name.split('.')[2]}.attn_{part}.weight"] = own
            continue
        elif ".experts." in name:
            before, after = name.split(".experts.")
            number, part, _ = after.split(".")
            layer = before.split(".")[2]
            key = f"blk.{layer}.{GGUF_EXPERTS[MIXTRAL.get(part, part)]}.weight"
            stacks.setdefault(key, {})[int(number)] = value
            continue
        if architecture in PERMUTED and name.endswith("q_proj.weight"):
            value = permute(value, heads)
        elif architecture in PERMUTED and name.endswith("k_proj.weight"):
            value = permute(value, kv_heads)
        if architecture in PLUS_ONE and name.endswith("norm.weight"):
            value = value + 1.0
        if name.endswith(".expert_bias"):
            name += ".bias"  # as the converter does
        if architecture in ("lfm2", "lfm2moe") and name.endswith("conv.conv.weight"):
            value = value.reshape(value.shape[0], -1)  # without the axis of length one
        if architecture == "gpt2":
            name = name.removeprefix("transformer.")
            if value.ndim == 2 and name.startswith("h."):
                value = value.T
        if name.endswith(".sinks"):
            name += ".weight"  # as the converter does
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise ValueError(f"{architecture} has no name for {name}")
        out[mapped] = value
    for key, parts in stacks.items():
        out[key] = np.stack([parts[number] for number in range(len(parts))])
    if architecture == "gpt2":
        out["output.weight"] = out["token_embd.weight"]  # the converter writes it twice
    if architecture == "gemma4":
        # Only a part of a full layer's head rotates: the other pairs have waves without end.
        pairs = config["global_head_dim"] // 2
        turning = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        out["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)
    if architecture in ("exaone4", "apertus"):
        out["rope_freqs.weight"] = llama3_factors(config)
    if architecture == "phi3":
        rope = config["rope_parameters"]
        out["rope_factors_long.weight"] = np.array(rope["long_factor"], dtype=np.float32)
        out["rope_factors_short.weight"] = np.array(rope["short_factor"], dtype=np.float32)
    return out


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 32 as GGUF has them, from OpenAI's: the same bits, with halves of a block in the two halves of bytes."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    joined = np.concatenate([scales[..., None], packed], axis=-1)
    return np.ascontiguousarray(joined.reshape(*scales.shape[:-1], -1))


def packed_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stacks of gpt-oss under their GGUF names, taken out of `weights`. Rows of gate and up alternate there."""
    out = {}
    for name in [name for name in weights if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        layer, part = stem.split(".")[2], stem.rsplit(".", 1)[1]
        stack = mxfp4(weights.pop(name), weights.pop(f"{stem}_scales"))
        bias = weights.pop(f"{stem}_bias").astype(np.float32)
        if part == "gate_up_proj":
            for first, part_name in enumerate(("gate", "up")):
                out[f"blk.{layer}.ffn_{part_name}_exps.weight"] = np.ascontiguousarray(stack[:, first::2])
                out[f"blk.{layer}.ffn_{part_name}_exps.bias"] = np.ascontiguousarray(bias[:, first::2])
        else:
            out[f"blk.{layer}.ffn_down_exps.weight"] = stack
            out[f"blk.{layer}.ffn_down_exps.bias"] = bias
    return out


def stored(path: Path) -> dict[str, np.ndarray]:
    """Tensors as they are, but bfloat16 as float32."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except TypeError:  # numpy has no bfloat16
        return as_float32(path.read_bytes())


def as_float32(file: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file of bfloat16 and float32, which are the upper halves of float32 and itself."""
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    out = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        raw = data[slice(*info["data_offsets"])]
        bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16 if info["dtype"] == "BF16" else np.frombuffer(raw, "<u4")
        if info["dtype"] not in ("BF16", "F32"):
            raise ValueError(f"{name} is {info['dtype']}")
        out[name] = bits.view(np.float32).reshape(info["shape"])
    return out


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """By how much Llama 3's scaling stretches the wavelength of each pair."""
    rope = config["rope_scaling"]
    head_dim = first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"])
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / (ramp + (1.0 - ramp) / rope["factor"])).astype(np.float32)


def make(name: str) -> int:
    architecture, pre = FAMILIES[name]
    old = name.endswith(decoders.OLD)
    source = ROOT / "tiny" / name.removesuffix(decoders.OLD)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = stored(source / "model.safetensors")
    packed = packed_experts(weights)
    out = ROOT / ("gguf_other" if old or name in (*decoders.OTHER_VALUES, *further.OTHER_VALUES) else "gguf") / f"{name}.gguf"
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(out, architecture)
    scalars = {name: weights.pop(name) for name in list(weights) if ".act_fn." in name}
    metadata(writer, architecture, config, scalars, old)
    tokenizer(writer, pre)
    for key, value in tensors(architecture, config, weights, old).items():
        # The converter keeps vectors, and what routes, in float32.
        data = np.ascontiguousarray(value, dtype=np.float32)
        is_plain = value.ndim == 1 or hybrids.is_float(key) or "ffn_gate_inp" in key or (data.view(np.uint32) & 0xFFFF).any()
        kind = Kind.F32 if is_plain else Kind.BF16
        writer.add_tensor(key, gguf.quants.quantize(data, kind), raw_dtype=kind)
    for key, value in packed.items():
        writer.add_tensor(key, value, raw_dtype=Kind.MXFP4 if value.dtype == np.uint8 else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    names = parser.parse_args().names or list(FAMILIES)
    for name in names:
        print(f"{name}: {make(name) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
