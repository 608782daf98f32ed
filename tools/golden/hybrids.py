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
from mlx_lm.models import lfm2_moe

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
    # What transformers calls a tensor of mlx-lm, in the layout that it has there.
    published: Callable[[str, np.ndarray], dict[str, np.ndarray]]
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


def lfm2(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Convolutions are [channels, 1, width] in transformers, and experts stand one by one."""
    if name.endswith("conv.conv.weight"):
        return {name: value.swapaxes(1, 2)}
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for new, old in parts.items():
        if f"switch_mlp.{new}" in name:
            stem = name.split(".switch_mlp.")[0]
            return {f"{stem}.experts.{e}.{old}.weight": matrix for e, matrix in enumerate(value)}
        if f"feed_forward.{new}" in name:
            return {name.replace(new, old): value}
    return {name: value}


LFM2 = BASE | {
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
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
]


def drawn(spec: Spec, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that keep activations near unit size and give logits a spread of a few units."""
    normal = rng.standard_normal(shape)
    if name.endswith("expert_bias"):
        return 0.1 * normal
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    if "embed_tokens" in name or name.endswith("embeddings.weight"):
        return 0.25 * normal
    # Convolutions are [channels, width, 1].
    fan_in = shape[1] if name.endswith(("conv.weight", "conv1d.weight")) else shape[-1]
    return spec.gain / np.sqrt(fan_in) * normal


def as_bfloat16(value: np.ndarray) -> np.ndarray:
    """What is left of a number when it is stored as bfloat16."""
    return np.array(mx.array(value.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))


def build(spec: Spec, seed: int) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """mlx-lm's model, and its weights as transformers has them, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    model = reference.empty_model(spec.config)
    published: dict[str, np.ndarray] = {}
    for name, like in tree_flatten(model.parameters()):
        value = as_bfloat16(drawn(spec, name, tuple(like.shape), rng))
        published |= spec.published(name, value)
    stored = {name: mx.array(value) for name, value in published.items()}
    model.load_weights(list(model.sanitize(stored).items()), strict=True)
    with_own_routers(model)
    model.eval()
    mx.eval(model.parameters())
    return model, published


def make(spec: Spec, out_root: Path, first_seed: int) -> int:
    """Writes one fixture; returns its size in bytes."""
    for seed in range(first_seed, first_seed + 500):
        model, published = build(spec, seed)
        try:
            found = numbers(model, seed)
        except ValueError:  # the margins are too small
            continue
        if found is None:
            continue
        files = tiny_tokenizer.files(spec.pre)
        golden = {
            "made_by": "tools/golden/hybrids.py",
            "reference": reference.versions() | ({"replaced": spec.replaced} if spec.replaced else {}),
            "seed": seed,
            **found,
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
