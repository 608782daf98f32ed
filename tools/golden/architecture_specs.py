"""The fixtures that `architectures.py` makes: one configuration each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tiny_tokenizer

# What mlx-lm does otherwise: Mistral, Gemma 2 and Phi-3 without windows, StarCoder2 with the exact GELU, LongRoPE with
# its long factors always, YaRN with rounded ends, Qwen2-MoE without `norm_topk_prob`.
WINDOW = 16

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "max_position_embeddings": 256,
    "bos_token_id": tiny_tokenizer.BOS,
    "eos_token_id": tiny_tokenizer.EOS,
    "pad_token_id": tiny_tokenizer.PAD,
    "tie_word_embeddings": False,
}
WIDE = BASE | {"hidden_size": 64, "intermediate_size": 64}
GEMMA = BASE | {"head_dim": 16, "tie_word_embeddings": True}
EXAONE4: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# A multiple of 128: else transformers' own widths of queries and keys contradict each other. Keys and values have different
# widths, so that a transposed state shows.
XLSTM: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "ffn_proj_factor": 0.5,
    "chunk_size": 5,
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "bos_token_id": tiny_tokenizer.BOS,
    "eos_token_id": tiny_tokenizer.EOS,
    "pad_token_id": tiny_tokenizer.PAD,
}
LLAMA4 = BASE | {
    "head_dim": 8,
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}
MAMBA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "bos_token_id": tiny_tokenizer.BOS,
    "eos_token_id": tiny_tokenizer.EOS,
    "pad_token_id": tiny_tokenizer.PAD,
    "tie_word_embeddings": True,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
INDEXED: dict[str, Any] = BASE | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "index_topk": 12,
    "index_head_dim": 12,
    "index_n_heads": 16,
}
INDEXED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SLIDE, FULL = "sliding_attention", "full_attention"


@dataclass
class Spec:
    """One fixture: the configuration, and what a reader may have to do otherwise."""

    name: str
    model_type: str
    config: dict[str, Any]
    pre: str = "qwen2"
    also_mlx_lm: bool = True
    # Fields of config.json in the form that published checkpoints have, where transformers 5 writes another.
    published: dict[str, Any] = field(default_factory=dict)
    # Blocks of xLSTM that have an sLSTM layer. They have no cache.
    slstm: tuple[int, ...] = ()
    # Whether each position beyond the trained context changes the rotation. A pass without a cache then gives other
    # numbers, because keys in a cache keep the rotation with which they were added.
    gradual: bool = False
    # How matrices are quantized, as (mode, bits, group size), by the end of their names; "" is for the others.
    # `None` leaves one whole.
    quantize: dict[str, tuple[str, int, int] | None] = field(default_factory=dict)

    def format(self, name: str) -> tuple[str, int, int] | None:
        """The format of a matrix by its name, without `.weight`."""
        for end, how in self.quantize.items():
            if end and name.endswith(end):
                return how
        return self.quantize.get("")


SPECS = [
    Spec("mistral-window", "mistral", BASE | {"sliding_window": WINDOW, "head_dim": 16}, also_mlx_lm=False),
    Spec("mixtral", "mixtral", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Spec(
        "qwen2-moe",
        "qwen2_moe",
        BASE | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ),
    Spec(
        "qwen3-moe",
        "qwen3_moe",
        BASE | MOE | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": []},
        published={"num_experts": 6, "decoder_sparse_step": 1},
    ),
    Spec(
        "qwen3-moe-mixed",
        "qwen3_moe",
        BASE | MOE | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [0]},
        also_mlx_lm=False,  # it wants experts in the first layer
        published={"num_experts": 6, "decoder_sparse_step": 1},
    ),
    Spec(
        "qwen2-window",
        "qwen2",
        BASE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": True},
        also_mlx_lm=False,
    ),
    Spec("gemma", "gemma", GEMMA),
    Spec(
        "gemma2",
        "gemma2",
        GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        also_mlx_lm=False,
    ),
    Spec(
        "gemma3-text",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "rope_theta": 1e6},
    ),
    Spec(
        "gemma3",
        "gemma3",
        {
            "text_config": GEMMA
            | {
                "num_hidden_layers": 6,
                "sliding_window": WINDOW,
                "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE, FULL],
                "query_pre_attn_scalar": 24,
            },
            # Tiny, and not used: what a text engine must step over.
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "gemma4-small",
        "gemma4_text",
        GEMMA
        | {
            "num_hidden_layers": 6,
            "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE, FULL],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": tiny_tokenizer.VOCAB_SIZE,
            "final_logit_softcapping": 20.0,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "gemma4-large",
        "gemma4_text",
        GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": [SLIDE, SLIDE, FULL],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 20.0,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "phi3",
        "phi3",
        BASE
        | {
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.0, 1.7, 2.9, 6.0],
            },
        },
        also_mlx_lm=False,
    ),
    Spec(
        "gpt2",
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 96,
            "vocab_size": tiny_tokenizer.VOCAB_SIZE,
            "bos_token_id": tiny_tokenizer.BOS,
            "eos_token_id": tiny_tokenizer.EOS,
        },
        pre="smollm",
        also_mlx_lm=False,
    ),
    Spec(
        "gpt-oss",
        "gpt_oss",
        BASE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": [SLIDE, FULL],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
        also_mlx_lm=False,
    ),
    Spec("olmo2", "olmo2", BASE),
    Spec(
        "olmo3",
        "olmo3",
        BASE
        | {
            "num_hidden_layers": 4,
            "max_position_embeddings": 1024,
            "sliding_window": WINDOW,
            "layer_types": [SLIDE, SLIDE, FULL, SLIDE],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.138629436111989,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    Spec(
        "exaone4",
        "exaone4",
        BASE
        | EXAONE4
        | {
            "num_hidden_layers": 5,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLG",
            "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE],
        },
    ),
    # Without a window every layer rotates, as in the smallest published model.
    Spec(
        "exaone4-full",
        "exaone4",
        BASE
        | EXAONE4
        | {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL, FULL],
            "tie_word_embeddings": True,
        },
    ),
    Spec("smollm3", "smollm3", BASE | {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    Spec(
        "granite",
        "granite",
        BASE
        | {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    Spec("glm4", "glm4", BASE | {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    Spec(
        "cohere2",
        "cohere2",
        BASE
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [SLIDE, SLIDE, FULL, SLIDE],
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
        },
        also_mlx_lm=False,
    ),
    Spec("starcoder2", "starcoder2", BASE | {"sliding_window": None, "tie_word_embeddings": True}, also_mlx_lm=False),
    Spec(
        "llama-yarn",
        "llama",
        BASE
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Spec(
        "llama-modes",
        "llama",
        WIDE,
        also_mlx_lm=False,
        quantize={
            "q_proj": ("affine", 2, 32),
            "k_proj": ("affine", 3, 64),
            "v_proj": ("affine", 5, 32),
            "o_proj": ("affine", 6, 64),
            "gate_proj": ("mxfp4", 4, 32),
            "up_proj": ("mxfp8", 8, 32),
            "down_proj": ("nvfp4", 4, 16),
            "embed_tokens": ("mxfp8", 8, 32),
            "lm_head": ("affine", 8, 64),
        },
    ),
    Spec(
        "mixtral-q4",
        "mixtral",
        WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        quantize={"": ("affine", 4, 32), "gate": ("affine", 8, 64)},
    ),
    Spec(
        "gemma3-text-q4",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "intermediate_size": 64, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        also_mlx_lm=False,
        quantize={"": ("affine", 4, 32)},
    ),
    Spec(
        "gpt-oss-mxfp4",
        "gpt_oss",
        WIDE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": [SLIDE, FULL],
        },
        also_mlx_lm=False,
        quantize={"": ("mxfp4", 4, 32)},
    ),
    Spec("xlstm", "xlstm", XLSTM, also_mlx_lm=False),
    Spec("xlstm-slstm", "xlstm", XLSTM | {"qk_dim_factor": 1.0}, also_mlx_lm=False, slstm=(1,)),
    Spec(
        "xlstm-q4",
        "xlstm",
        XLSTM,
        also_mlx_lm=False,
        # As `mlx convert` does it: these gates are exponents.
        quantize={"igate_preact": None, "fgate_preact": None, "": ("affine", 4, 32)},
    ),
    Spec(
        "llama-linear",
        "llama",
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    Spec("olmo", "olmo", BASE | {"clip_qkv": 1.5}, also_mlx_lm=False),
    Spec(
        "apertus",
        "apertus",
        BASE
        | {
            "hidden_size": 64,
            "rope_parameters": EXAONE4["rope_parameters"] | {"rope_theta": 12e6, "factor": 8.0},
        },
        published={"post_norm": False, "qk_norm": True, "mlp_bias": False},
    ),
    # The longer prompt is beyond the trained context.
    Spec(
        "internlm3",
        "internlm3",
        BASE
        | {
            "head_dim": 8,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
        },
        also_mlx_lm=False,
        published={"bias": False, "qkv_bias": False},
        gradual=True,
    ),
    Spec("nanochat", "nanochat", BASE | {"num_key_value_heads": 4, "final_logit_softcapping": 3.0}, also_mlx_lm=False),
    Spec(
        "cohere2-moe",
        "cohere2_moe",
        BASE
        | {
            "head_dim": 8,
            "num_hidden_layers": 5,
            "intermediate_size": 24,
            "prefix_dense_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "cohere2-moe-rms",
        "cohere2_moe",
        BASE
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "softmax",
            "rms_norm_eps": 1e-6,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
        },
        also_mlx_lm=False,
    ),
    # Both prompts end beyond the first chunk.
    Spec(
        "llama4-text",
        "llama4_text",
        LLAMA4 | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2},
        also_mlx_lm=False,
    ),
    Spec(
        "llama4",
        "llama4",
        {
            "text_config": LLAMA4 | {"num_hidden_layers": 4, "use_qk_norm": False, "attn_temperature_tuning": False},
            # Tiny, and not used: what a text engine must step over.
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "vision_output_dim": 16,
            },
        },
        also_mlx_lm=False,
    ),
    Spec("mamba", "mamba", MAMBA, also_mlx_lm=False),
    Spec("falcon-mamba", "falcon_mamba", MAMBA | {"tie_word_embeddings": False}, also_mlx_lm=False),
    Spec(
        "jamba",
        "jamba",
        BASE
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 3,
            "use_mamba_kernels": False,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "exaone-moe",
        "exaone_moe",
        BASE
        | MOE
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLG",
            "layer_types": [SLIDE, SLIDE, FULL, SLIDE],
        },
        also_mlx_lm=False,
    ),
    Spec(
        "afmoe",
        "afmoe",
        BASE
        | MOE
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "sliding_window": WINDOW,
            "global_attn_every_n_layers": 3,
            "mup_enabled": True,
        },
        also_mlx_lm=False,
    ),
    Spec(
        "hunyuan",
        "hunyuan_v1_moe",
        BASE
        | {
            "head_dim": 8,
            "intermediate_size": 24,
            "num_experts": 6,
            "moe_topk": [2, 2],
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
        also_mlx_lm=False,
    ),
    Spec(
        "dbrx",
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "vocab_size": tiny_tokenizer.VOCAB_SIZE,
            "bos_token_id": tiny_tokenizer.BOS,
            "eos_token_id": tiny_tokenizer.EOS,
            "pad_token_id": tiny_tokenizer.PAD,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5e5},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    Spec(
        "laguna",
        "laguna",
        BASE
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 2.0,
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDE, SLIDE, FULL],
            "num_attention_heads_per_layer": [4, 6, 6, 4],
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.138629436111989,
                    "partial_rotary_factor": 0.5,
                },
                SLIDE: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    Spec(
        "kimi-linear",
        "kimi_linear",
        BASE
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 10,
            "v_head_dim": 6,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "head_dim": 8,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
            },
        },
        # transformers 5 writes lists of kinds, which mlx-lm does not read.
        published={
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "head_dim": 8,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "use_grouped_topk": True,
            "mla_use_nope": True,
            "rope_theta": 10000.0,
        },
        # transformers saves the dense layer under the name of experts, where mlx-lm does not look.
        also_mlx_lm=False,
    ),
    # Many heads, so that few scores are exactly zero and thus equal.
    Spec("deepseek-v32", "deepseek_v32", INDEXED | {"rope_parameters": INDEXED_YARN}),
    Spec(
        "glm-moe-dsa",
        "glm_moe_dsa",
        INDEXED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        also_mlx_lm=False,
    ),
    Spec(
        "mistral4",
        "mistral4",
        BASE
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 10,
            "v_head_dim": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        also_mlx_lm=False,
    ),
    Spec(
        "mimo-v2-flash",
        "mimo_v2_flash",
        BASE
        | {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDE, SLIDE, FULL],
            "attention_value_scale": 0.707,
        },
        also_mlx_lm=False,
    ),
    # A sparsity below one half keeps most of the few values.
    Spec(
        "gemma3n",
        "gemma3n_text",
        GEMMA
        | {
            "num_hidden_layers": 6,
            "intermediate_size": [48, 48, 32, 48, 48, 48],
            "sliding_window": WINDOW,
            "layer_types": [SLIDE, FULL, SLIDE, FULL, SLIDE, FULL],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": tiny_tokenizer.VOCAB_SIZE - 8,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "altup_active_idx": 0,
            "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0, 0.0, 0.0],
        },
        also_mlx_lm=False,
    ),
]
