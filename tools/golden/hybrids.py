"""Makes tests/fixtures/tiny/<hybrid>: tiny random checkpoints of families that keep a state in some layers.

The reference is Python mlx-lm on the CPU in float32. Checkpoints have the names and layouts of transformers, as published
ones do, and mlx-lm renames them itself. Where it computes something else than transformers, its layer is replaced here by
one that follows transformers' formula, and the golden file says so.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import falcon_h1, granitemoehybrid, lfm2_moe, mamba2

import tiny_tokenizer
from tiny_models import DEFAULT_OUT, numbers, text_goldens, write_json

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "max_position_embeddings": 256,
    "bos_token_id": tiny_tokenizer.BOS,
    "eos_token_id": tiny_tokenizer.EOS,
    "torch_dtype": "bfloat16",
}
CONV, FULL = "conv", "full_attention"


@dataclass
class Spec:
    """One fixture: its configuration as published, and how mlx-lm's weights become those of transformers."""

    name: str
    config: dict[str, Any]
    class_name: str
    # The tensors of mlx-lm as transformers names them and lays them out.
    published: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    pre: str = "qwen2"
    # What mlx-lm computes otherwise than transformers, and is replaced.
    replaced: list[str] = field(default_factory=list)
    # Factor on the matrices. Deep narrow models with gates need more, so that layers outweigh the embedding.
    gain: float = 1.5


class Lfm2Router(nn.Module):
    """The mixture of LFM2 as transformers computes it: sigmoids, and a bias that counts for the choice only."""

    def __init__(self, block: nn.Module, args: Any):
        super().__init__()
        self.gate, self.switch_mlp, self.expert_bias = block.gate, block.switch_mlp, block.expert_bias
        self.top_k = args.num_experts_per_tok

    def __call__(self, x: mx.array) -> mx.array:
        shares = mx.sigmoid(self.gate(x).astype(mx.float32))
        chosen = mx.argsort(-(shares + self.expert_bias), axis=-1)[..., : self.top_k]
        shares = mx.take_along_axis(shares, chosen, axis=-1)
        shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-6)
        return (self.switch_mlp(x, chosen) * shares[..., None]).sum(axis=-2)


def with_own_routers(model: nn.Module) -> None:
    """Replaces what mlx-lm 0.30.7 computes otherwise."""
    for layer in getattr(model, "layers", []):
        block = getattr(layer, "feed_forward", None)
        if isinstance(block, lfm2_moe.Lfm2MoeSparseMoeBlock):
            layer.feed_forward = Lfm2Router(block, model.args)


def with_falcon_factors(model: nn.Module) -> None:
    """mlx-lm 0.30.7 leaves two factors of Falcon-H1 out when it folds them into the matrices."""
    args = getattr(model, "args", None)
    if getattr(args, "model_type", "") == "falcon_h1":
        for layer in model.layers:
            layer.self_attn.k_proj.weight *= args.key_multiplier
            layer.self_attn.v_proj.weight *= args.attention_in_multiplier


class GroupedNorm(nn.Module):
    """The gated norm of Mamba-2 as mamba_ssm and transformers compute it: each group of channels has its own mean square.
    mlx-lm 0.30.7 takes that of all groups together."""

    def __init__(self, norm: nn.Module, groups: int):
        super().__init__()
        self.weight, self.eps, self.groups = norm.weight, norm.eps, groups

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        grouped = mx.unflatten(nn.silu(gate) * x, -1, (self.groups, -1))
        return self.weight * mx.fast.rms_norm(grouped, None, self.eps).flatten(-2)


def with_grouped_norms(model: nn.Module) -> None:
    """Replaces the gated norms that mlx-lm 0.30.7 computes otherwise."""
    for block in model.modules():
        if isinstance(block, (mamba2.Mamba2Block, granitemoehybrid.GraniteMoeHybridMamba2Mixer)):
            block.norm = GroupedNorm(block.norm, block.n_groups)


def every_layer(forward: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Without caches mlx-lm 0.30.7 runs the first layer of Falcon-H1 only."""
    return lambda self, inputs, cache=None: forward(self, inputs, cache or [(None, None)] * len(self.layers))


falcon_h1.FalconH1Model.__call__ = every_layer(falcon_h1.FalconH1Model.__call__)


def as_bfloat16(value: np.ndarray) -> np.ndarray:
    """What is left of a number when it is stored as bfloat16."""
    return np.array(mx.array(value.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))


def turned(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convolutions are [channels, 1, width] in transformers."""
    ends = ("conv.weight", "conv1d.weight")
    return {name: value.swapaxes(1, 2) if name.endswith(ends) else value for name, value in weights.items()}


def one_by_one(weights: dict[str, np.ndarray], parts: dict[str, str]) -> dict[str, np.ndarray]:
    """Experts that do not stand in stacks, and what they call their matrices."""
    out = {}
    for name, value in weights.items():
        stem, _, part = name.removesuffix(".weight").partition(".switch_mlp.")
        if part:
            out |= {f"{stem}.experts.{e}.{parts[part]}.weight": matrix for e, matrix in enumerate(value)}
        else:
            out[name] = value
    return out


def lfm2(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices of feed-forward blocks have numbers, not names."""
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    out = {}
    for name, value in one_by_one(turned(weights), parts).items():
        *stem, part, end = name.split(".") if "feed_forward" in name else (name, "", "")
        out[".".join([*stem, parts[part], end]) if part in parts else name] = value
    return out


def qwen3_next(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Most norms have the one added when they are used; what predicts further tokens is not used."""
    same = {part: part for part in ("gate_proj", "up_proj", "down_proj")}
    out = one_by_one(turned(weights), same)
    for name, value in out.items():
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            out[name] = as_bfloat16(value - 1.0)
    return out | {"mtp.fc.weight": np.ones((4, 8), np.float32)}


def qwen3_5(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The text part stands beside a vision tower. Experts are in stacks, gate and up in one."""
    stacked: dict[str, np.ndarray] = {}
    single: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        name = name.replace("language_model.model.", "model.language_model.").removeprefix("language_model.")
        stem, _, part = name.removesuffix(".weight").partition(".switch_mlp.")
        if part == "down_proj":
            stacked[f"{stem}.experts.down_proj"] = value
        elif part == "gate_proj":
            up = weights[f"{stem}.switch_mlp.up_proj.weight".replace("model.language_model.", "language_model.model.")]
            stacked[f"{stem}.experts.gate_up_proj"] = np.concatenate([value, up], axis=1)
        elif not part:
            single[name] = value
    return qwen3_next(single) | stacked | {"model.visual.patch_embed.proj.weight": np.ones((4, 8), np.float32)}


def granite(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate and up of each feed-forward block are in one matrix, and those of all experts in one stack."""
    out = turned(weights)
    for prefix, place in ((".block_sparse_moe.switch_mlp", ".block_sparse_moe"), (".mlp", ".shared_mlp")):
        for name in [name for name in out if name.endswith(f"{prefix}.gate_proj.weight")]:
            stem = name.removesuffix(f"{prefix}.gate_proj.weight")
            gate, up, down = (out.pop(f"{stem}{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
            out[f"{stem}{place}.input_linear.weight"] = np.concatenate([gate, up], axis=-2)
            out[f"{stem}{place}.output_linear.weight"] = down
    return out


def nemotron(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of two matrices each stand one by one."""
    return one_by_one(turned(weights), {"fc1": "up_proj", "fc2": "down_proj"})


LFM2 = BASE | {
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
}

QWEN3_NEXT = BASE | {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    # Keys and values have different widths, so that a transposed state shows.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
QWEN_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
VISION = {"hidden_size": 8, "depth": 1, "num_heads": 2, "patch_size": 2}


def multimodal(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """A configuration with a text part and a tower that a text engine must step over."""
    text = text | {"model_type": f"{model_type}_text", "rope_parameters": MROPE}
    return {
        "model_type": model_type,
        "text_config": text,
        "vision_config": VISION | {"model_type": f"{model_type}_vision"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
    }


GRANITE = BASE | {
    "model_type": "granitemoehybrid",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "attention_bias": False,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
    "tie_word_embeddings": True,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, 1e9],
}

FALCON = BASE | {
    "model_type": "falcon_h1",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "head_dim": 10,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    # Other than the width of a head, so that a transposed state shows.
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    # Each factor has a number of its own, so that one in the wrong place shows.
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 1.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.75, 1.2, 0.85],
    "mlp_multipliers": [0.9, 0.7],
}

GROUPED_NORM = ["gated norm: of each group, as in transformers"]

FALCON_REPLACED = ["key_multiplier on keys and attention_in_multiplier on values", "all layers without caches"]

NEMOTRON = BASE | {
    "model_type": "nemotron_h",
    "layer_norm_epsilon": 1e-5,
    "head_dim": 12,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 5,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    # Published configurations write the number that JSON does not have.
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": False,
}


SPECS = [
    Spec(
        "lfm2",
        LFM2
        | {
            "num_hidden_layers": 5,
            "full_attn_idxs": [2, 4],
            "block_dim": 32,
            "block_ff_dim": 72,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "tie_embedding": True,
        },
        "Lfm2ForCausalLM",
        lfm2,
    ),
    Spec(
        "lfm2-moe",
        LFM2
        | {
            "model_type": "lfm2_moe",
            "num_hidden_layers": 4,
            "layer_types": [CONV, FULL, CONV, FULL],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        "Lfm2MoeForCausalLM",
        lfm2,
        replaced=["router: sigmoids, and a bias for the choice only, as in transformers"],
    ),
    Spec(
        "qwen3-next",
        QWEN3_NEXT
        | QWEN_MOE
        | {
            "model_type": "qwen3_next",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "Qwen3NextForCausalLM",
        qwen3_next,
    ),
    Spec("qwen3-5", multimodal("qwen3_5", QWEN3_NEXT), "Qwen3_5ForConditionalGeneration", qwen3_5),
    Spec(
        "qwen3-5-moe",
        multimodal("qwen3_5_moe", QWEN3_NEXT | QWEN_MOE),
        "Qwen3_5MoeForConditionalGeneration",
        qwen3_5,
    ),
    Spec(
        "mamba2",
        {name: value for name, value in BASE.items() if "attention" not in name and "key_value" not in name}
        | {
            "model_type": "mamba2",
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "intermediate_size": 64,
            # Other than the width of a head, so that a transposed state shows.
            "state_size": 6,
            "n_groups": 2,
            "conv_kernel": 4,
            "expand": 2,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, 1e9],
            "time_step_rank": "auto",
        },
        "Mamba2ForCausalLM",
        turned,
        replaced=GROUPED_NORM,
    ),
    Spec(
        "granitemoehybrid",
        GRANITE
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "position_embedding_type": "nope",
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "GraniteMoeHybridForCausalLM",
        granite,
        replaced=GROUPED_NORM,
    ),
    Spec(
        "granitemoehybrid-dense",
        GRANITE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "mamba", "attention"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
        "GraniteMoeHybridForCausalLM",
        granite,
        replaced=GROUPED_NORM,
    ),
    Spec(
        "falcon-h1",
        FALCON
        | {
            "num_hidden_layers": 3,
            "mamba_n_groups": 2,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": False,
        },
        "FalconH1ForCausalLM",
        turned,
        replaced=FALCON_REPLACED,
    ),
    Spec(
        "falcon-h1-norm",
        FALCON
        | {
            "num_hidden_layers": 2,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "tie_word_embeddings": True,
        },
        "FalconH1ForCausalLM",
        turned,
        replaced=FALCON_REPLACED,
    ),
    Spec(
        "nemotron-h",
        NEMOTRON | {"num_hidden_layers": 5, "hybrid_override_pattern": "M-*-M"},
        "NemotronHForCausalLM",
        nemotron,
    ),
    Spec(
        "nemotron-h-moe",
        NEMOTRON
        | {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "MEM*E",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        "NemotronHForCausalLM",
        nemotron,
    ),
]


def drawn(spec: Spec, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that keep activations near unit size and give logits a spread of a few units."""
    normal = rng.standard_normal(shape)
    if name.endswith("expert_bias"):
        return 0.1 * normal
    if name.endswith(".D"):
        return 1.0 + 0.2 * normal
    if name.endswith("A_log"):
        return 0.5 * normal - 1.0  # a memory that reaches back
    if name.endswith(("norm.weight", "norm_f.weight")):
        return 1.0 + 0.2 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    if "embed_tokens" in name or name.endswith("embeddings.weight"):
        return 0.25 * normal
    # Convolutions are [channels, width, 1].
    fan_in = shape[1] if name.endswith(("conv.weight", "conv1d.weight")) else shape[-1]
    return spec.gain / np.sqrt(fan_in) * normal


def build(spec: Spec, seed: int) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """mlx-lm's model, and its weights as transformers has them, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    model = reference.empty_model(spec.config)
    weights = {
        name: as_bfloat16(drawn(spec, name, tuple(like.shape), rng)) for name, like in tree_flatten(model.parameters())
    }
    published = spec.published(weights)
    stored = {name: mx.array(value) for name, value in published.items()}
    model.load_weights(list(model.sanitize(stored).items()), strict=True)
    with_own_routers(model)
    with_falcon_factors(model)
    with_grouped_norms(model)
    model.eval()
    mx.eval(model.parameters())
    return model, published


Built = tuple[nn.Module, dict[str, np.ndarray]]


def make(
    spec: Spec,
    out_root: Path,
    first_seed: int,
    built: Callable[[Spec, int], Built] = build,
    script: str = "hybrids.py",
) -> int:
    """Writes one fixture; returns its size in bytes."""
    for seed in range(first_seed, first_seed + 500):
        model, published = built(spec, seed)
        try:
            result = numbers(model, seed)
        except ValueError:  # the margins are too small
            continue
        if result is None:
            continue
        files = tiny_tokenizer.files(spec.pre)
        golden = {
            "made_by": f"tools/golden/{script}",
            "reference": reference.versions() | ({"replaced": spec.replaced} if spec.replaced else {}),
            "seed": seed,
            **result,
            "text": text_goldens(spec, files["tokenizer.json"]),
        }
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / spec.name
            out.mkdir()
            arrays = {name: mx.array(value).astype(mx.bfloat16) for name, value in published.items()}
            mx.save_safetensors(str(out / "model.safetensors"), arrays, metadata={"format": "pt"})
            write_json(out / "config.json", spec.config | {"architectures": [spec.class_name]})
            write_json(out / "tokenizer.json", files["tokenizer.json"], compact=True)
            write_json(out / "tokenizer_config.json", files["tokenizer_config.json"])
            write_json(out / "golden.json", golden, compact=True)
            target = out_root / spec.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(out, target)
            size = sum(file.stat().st_size for file in target.iterdir())
        print(f"{spec.name}: seed {seed}, min margin {golden['min_margin']}, {size / 1024:.0f} KiB", flush=True)
        return size
    raise SystemExit(f"{spec.name}: no seed from {first_seed} on gives clear margins")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: tests/fixtures/tiny")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    args = parser.parse_args()
    known = {spec.name: spec for spec in SPECS}
    if unknown := set(args.names) - set(known):
        parser.error(f"no fixture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    total = sum(make(known[name], args.out, args.seed) for name in args.names or known)
    print(f"{total / 2**20:.2f} MiB in {args.out}")


if __name__ == "__main__":
    main()
