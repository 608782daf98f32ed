"""Makes tests/fixtures/tiny/<family>: tiny random checkpoints of decoder families, with mlx-lm's numbers.

The reference is Python mlx-lm on the CPU in float32. Checkpoints have the names and layouts of transformers, as published
ones do, and mlx-lm renames them itself. Where it computes something else than transformers, that part is replaced here, and
the golden file says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import hybrids
from family_weights import (
    bailing,
    dots,
    gptj,
    granite,
    kimi_vl,
    latent,
    neox,
    numbered,
    older_wrapper,
    rwkv7,
    same,
    singles,
    step3p5,
    with_prediction,
    wrapped,
    wrapped_experts,
)
from hybrids import BASE, VISION, Spec, as_bfloat16
from tiny_models import DEFAULT_OUT


def text_of(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """A configuration with a text part and a tower that a text engine must step over."""
    return {
        "model_type": model_type,
        "text_config": text,
        "vision_config": VISION,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
    }


LLAMA = BASE | {
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
}
LAYER_NORM = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"} | {"layer_norm_eps": 1e-5}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}


GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": BASE["vocab_size"],
    "bos_token_id": BASE["bos_token_id"],
    "eos_token_id": BASE["eos_token_id"],
    "torch_dtype": "bfloat16",
}
DEEPSEEK = LLAMA | MOE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def family(model_type: str, class_name: str, base: dict[str, Any], **more: Any) -> Spec:
    """The fixture of a family, named after it."""
    published = more.pop("published", same)
    replaced = more.pop("replaced", [])
    gain = more.pop("gain", 1.5)
    name = more.pop("name", model_type.replace("_", "-"))
    config = base if "text_config" in base else base | {"model_type": model_type} | more
    return Spec(name, config, class_name, published, replaced=replaced, gain=gain)


SPECS = [
    family("seed_oss", "SeedOssForCausalLM", LLAMA, head_dim=16, attention_bias=True, attention_out_bias=False),
    family("mimo", "MiMoForCausalLM", LLAMA, num_nextn_predict_layers=1, attention_bias=True),
    family("helium", "HeliumForCausalLM", LLAMA, head_dim=8, mlp_bias=False),
    family("ernie4_5", "Ernie4_5ForCausalLM", LLAMA, head_dim=16, use_bias=True, tie_word_embeddings=True),
    family(
        "glm",
        "GlmForCausalLM",
        LLAMA,
        head_dim=16,
        attention_bias=True,
        partial_rotary_factor=0.5,
        replaced=["half of each head rotates, as in transformers"],
    ),
    # The rotation changes beyond the trained context only.
    family(
        "internlm2",
        "InternLM2ForCausalLM",
        LLAMA,
        bias=False,
        rope_theta=1e6,
        max_position_embeddings=256,
        rope_scaling={"type": "dynamic", "factor": 2.0},
    ),
    family("telechat3", "Telechat3ForCausalLM", LLAMA, head_dim=8, mlp_bias=True),
    family("minicpm", "MiniCPMForCausalLM", LLAMA, scale_depth=1.4, scale_emb=2.0, dim_model_base=16, gain=2.5),
    family(
        "stablelm",
        "StableLmForCausalLM",
        LAYER_NORM,
        use_qkv_bias=True,
        partial_rotary_factor=0.5,
        use_parallel_residual=False,
        qk_layernorm=False,
    ),
    family(
        "stablelm",
        "StableLmForCausalLM",
        LAYER_NORM,
        name="stablelm-parallel",
        use_qkv_bias=False,
        partial_rotary_factor=0.25,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_parallel_residual=True,
        qk_layernorm=False,
    ),
    family(
        "nemotron",
        "NemotronForCausalLM",
        LLAMA,
        norm_eps=1e-5,
        hidden_act="relu2",
        partial_rotary_factor=0.5,
        mlp_bias=False,
        replaced=[],
    ),
    family(
        "cohere",
        "CohereForCausalLM",
        LAYER_NORM,
        logit_scale=0.5,
        use_qk_norm=False,
        tie_word_embeddings=True,
    ),
    family("phi", "PhiForCausalLM", LAYER_NORM, hidden_act="gelu_new", partial_rotary_factor=0.5, qk_layernorm=False),
    family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {name: value for name, value in LAYER_NORM.items() if name not in ("rope_theta", "num_key_value_heads")},
        intermediate_size=128,
        rotary_emb_base=10000,
        rotary_pct=0.25,
        hidden_act="gelu_new",
        use_parallel_residual=True,
        attention_bias=True,
        published=neox,
    ),
    family(
        "exaone",
        "ExaoneForCausalLM",
        {name: value for name, value in LLAMA.items() if name not in ("num_hidden_layers", "rms_norm_eps")},
        num_layers=2,
        layer_norm_epsilon=1e-5,
        activation_function="silu",
        head_dim=8,
    ),
    family("ministral3", "Ministral3ForCausalLM", LLAMA, head_dim=16, rope_parameters=YARN),
    family(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        text_of("mistral3", LLAMA | {"model_type": "mistral", "head_dim": 16, "rope_theta": 1e6, "sliding_window": None}),
        published=older_wrapper,
    ),
    family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {**LLAMA, "model_type": "qwen2_5_vl", "rope_scaling": MROPE, "rope_theta": 1e6, "vision_config": VISION},
        use_sliding_window=False,
        published=lambda weights: {
            name.removeprefix("language_model."): value for name, value in weights.items()
        } | {"visual.patch_embed.proj.weight": np.ones((4, 8), np.float32)},
    ),
    family(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        text_of(
            "qwen3_vl",
            LLAMA
            | {
                "model_type": "qwen3_vl_text",
                "head_dim": 16,
                "rope_theta": 5e6,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
                "tie_word_embeddings": True,
            },
        ),
        published=wrapped,
    ),
    family(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        text_of(
            "qwen3_vl_moe",
            LLAMA
            | {
                "model_type": "qwen3_vl_moe_text",
                "head_dim": 16,
                "rope_theta": 5e6,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
        ),
        published=wrapped_experts,
    ),
    family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        rope_scaling=DEEPSEEK_YARN,
        num_nextn_predict_layers=0,
        published=singles,
    ),
    family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK,
        name="deepseek-v2-lite",
        q_lora_rank=None,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        scoring_func="softmax",
        norm_topk_prob=False,
        rope_scaling=DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        num_nextn_predict_layers=0,
        published=singles,
    ),
    family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_scaling=DEEPSEEK_YARN,
        published=latent,
    ),
    family(
        "kimi_vl",
        "KimiVLForConditionalGeneration",
        text_of(
            "kimi_vl",
            DEEPSEEK
            | {
                "model_type": "deepseek_v3",
                "q_lora_rank": None,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "n_group": 1,
                "topk_group": 1,
                "num_nextn_predict_layers": 0,
            },
        ),
        published=kimi_vl,
    ),
    family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        DEEPSEEK,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        rope_scaling=None,
        published=with_prediction,
    ),
    family(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        LLAMA,
        num_key_value_heads=4,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        scale_depth=1.4,
        scale_emb=2.0,
        dim_model_base=16,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [1.0, 1.2, 1.5, 2.0],
            "original_max_position_embeddings": 256,
        },
        gain=2.5,
        published=same,
    ),
    family(
        "youtu_llm",
        "YoutuForCausalLM",
        {name: value for name, value in DEEPSEEK.items() if name not in MOE or name == "num_hidden_layers"},
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        rope_traditional=True,
        tie_word_embeddings=True,
        gain=2.0,
    ),
    family(
        "deepseek",
        "DeepseekForCausalLM",
        LLAMA | MOE,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        published=singles,
    ),
    family(
        "mellum",
        "MellumForCausalLM",
        LLAMA,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_hidden_layers=3,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.138629436111989,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        published=singles,
    ),
    family(
        "gptj",
        "GPTJForCausalLM",
        GPT,
        rotary_dim=4,
        activation_function="gelu_new",
        tie_word_embeddings=False,
        published=gptj,
    ),
    family(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        GPT,
        n_inner=64,
        multi_query=True,
        activation_function="gelu",
        tie_word_embeddings=True,
        gain=2.5,
    ),
    family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        LLAMA,
        head_dim=16,
        use_qk_norm=True,
        tie_word_embeddings=True,
        rope_scaling={"alpha": 50.0, "factor": 1.0, "type": "dynamic"},
    ),
    family(
        "olmoe",
        "OlmoeForCausalLM",
        LLAMA,
        intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        clip_qkv=None,
        published=singles,
    ),
    family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        LLAMA,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=0.25,
        tie_word_embeddings=True,
        gain=3.0,
        published=granite,
    ),
    family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        LLAMA | MOE,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        partial_rotary_factor=0.5,
        rope_scaling=None,
        published=singles,
    ),
    family(
        "dots1",
        "Dots1ForCausalLM",
        LLAMA | MOE,
        n_group=1,
        topk_group=1,
        scoring_func="noaux_tc",
        head_dim=16,
        published=dots,
    ),
    family(
        "solar_open",
        "SolarOpenForCausalLM",
        LLAMA | MOE,
        n_group=1,
        topk_group=1,
        head_dim=16,
        partial_rotary_factor=1.0,
        first_k_dense_replace=0,
        published=singles,
    ),
    family(
        "step3p5",
        "Step3p5ForCausalLM",
        {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
        num_hidden_layers=4,
        num_attention_groups=2,
        head_dim=8,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 8,
        },
        rope_theta=[5e6, 1e4, 1e4, 5e6, 5e6],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 0.5],
        yarn_only_types=["full_attention"],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        use_head_wise_attn_gate=True,
        moe_num_experts=6,
        moe_top_k=2,
        moe_intermediate_size=24,
        share_expert_dim=20,
        moe_layers_enum="1,2,3",
        moe_router_scaling_factor=3.0,
        norm_expert_weight=True,
        swiglu_limits=[0.0, 0.0, 0.7, 0.5, 0.0],
        swiglu_limits_shared=[0.5, 0.0, 0.0, 0.7, 0.0],
        num_nextn_predict_layers=1,
        published=step3p5,
    ),
    # With this epsilon, that of the heads' norms is mlx-lm's constant.
    family(
        "rwkv7",
        "RWKV7ForCausalLM",
        {name: BASE[name] for name in ("hidden_size", "vocab_size", "bos_token_id", "eos_token_id", "torch_dtype")},
        intermediate_size=64,
        head_dim=8,
        num_hidden_layers=3,
        norm_eps=8e-5,
        a_low_rank_dim=6,
        v_low_rank_dim=5,
        gate_low_rank_dim=12,
        decay_low_rank_dim=7,
        tie_word_embeddings=False,
        gain=2.0,
        published=rwkv7,
    ),
    family(
        "qwen",
        "QWenLMHeadModel",
        {name: BASE[name] for name in ("hidden_size", "vocab_size", "bos_token_id", "eos_token_id", "torch_dtype")},
        intermediate_size=96,
        num_attention_heads=4,
        num_hidden_layers=2,
        kv_channels=8,
        max_position_embeddings=256,
        layer_norm_epsilon=1e-6,
        no_bias=True,
        rotary_emb_base=10000,
        tie_word_embeddings=False,
    ),
    family(
        "lille-130m",
        "LilleForCausalLM",
        {name: BASE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "torch_dtype")},
        n_embd=64,
        n_head=4,
        n_kv_heads=2,
        n_layer=2,
        block_size=256,
        layer_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        gain=2.0,
    ),
    family(
        "minimax",
        "MiniMaxM2ForCausalLM",
        LLAMA,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=0,
        head_dim=16,
        rotary_dim=8,
        use_qk_norm=True,
        scoring_func="sigmoid",
        published=numbered,
    ),
    family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        LLAMA,
        num_hidden_layers=3,
        use_bias=False,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=2,
        moe_intermediate_size=24,
        moe_layer_start_index=1,
        moe_layer_interval=1,
        tie_word_embeddings=True,
        published=singles,
    ),
    family(
        "phimoe",
        "PhimoeForCausalLM",
        LLAMA,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        # Wider than published, so that neighbors take a share.
        router_jitter_noise=0.3,
        rope_scaling=None,
        attention_bias=True,
        published=numbered,
    ),
    family(
        "bailing_moe",
        "BailingMoeForCausalLM",
        LLAMA,
        name="bailing-moe",
        num_hidden_layers=3,
        num_experts=6,
        num_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        norm_head=False,
        published=bailing,
    ),
    family(
        "bailing_moe",
        "BailingMoeV2ForCausalLM",
        LLAMA,
        name="bailing-moe-groups",
        num_hidden_layers=3,
        num_experts=8,
        num_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        norm_head=False,
        use_qk_norm=True,
        n_group=4,
        topk_group=2,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        routed_scaling_factor=2.5,
        partial_rotary_factor=0.5,
        published=bailing,
    ),
]


def drawn(spec: Spec, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that keep activations near unit size and give logits a spread of a few units."""
    normal = rng.standard_normal(shape)
    if name.endswith(("norm.weight", ".ln_1.weight", ".ln_2.weight", ".ln_f.weight")):
        # Nemotron adds one.
        return (0.0 if spec.config["model_type"] == "nemotron" else 1.0) + 0.2 * normal
    if name.endswith(("correction_bias", "expert_bias")):
        return 0.1 * normal
    if any(part in name for part in (".wte.", ".wpe.", "embed_in", "word_embeddings", "tok_embeddings")):
        return 0.25 * normal
    return hybrids.drawn(spec, name, shape, rng)


def with_half_rotation(model: nn.Module) -> None:
    """mlx-lm rotates whole heads in GLM-4 of 2024; transformers rotates what the configuration says."""
    args = getattr(model, "args", None)
    if getattr(args, "model_type", "") == "glm":
        for layer in model.layers:
            layer.self_attn.rope = nn.RoPE(args.head_dim // 2, traditional=True, base=args.rope_theta)


def build(spec: Spec, seed: int) -> hybrids.Built:
    """mlx-lm's model, and its weights as transformers has them, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    model = reference.empty_model(spec.config)
    weights = {
        name: as_bfloat16(drawn(spec, name, tuple(like.shape), rng)) for name, like in tree_flatten(model.parameters())
    }
    published = spec.published(weights)
    stored = {name: mx.array(value) for name, value in published.items()}
    sanitized = model.sanitize(stored) if hasattr(model, "sanitize") else stored
    model.load_weights(list(sanitized.items()), strict=True)
    with_half_rotation(model)
    model.eval()
    mx.eval(model.parameters())
    return model, published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: tests/fixtures/tiny")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    args = parser.parse_args()
    known = {spec.name: spec for spec in SPECS}
    if unknown := set(args.names) - set(known):
        parser.error(f"no fixture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in args.names or known:
        hybrids.make(known[name], args.out, args.seed, build, "families.py")


if __name__ == "__main__":
    main()
