"""The weights of mlx-lm's models under the names and in the layouts of transformers, for `families.py`."""

from __future__ import annotations

import numpy as np

import hybrids
from hybrids import one_by_one

SAME = {part: part for part in ("gate_proj", "up_proj", "down_proj")}
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
Weights = dict[str, np.ndarray]


def same(weights: Weights) -> Weights:
    """mlx-lm has the names of transformers."""
    return weights


def singles(weights: Weights) -> Weights:
    """Experts stand one by one."""
    return one_by_one(weights, SAME)


def dots(weights: Weights) -> Weights:
    """mlx-lm's stacks have the name of the list."""
    return singles({name.replace(".mlp.experts.", ".mlp.switch_mlp."): value for name, value in weights.items()})


def numbered(weights: Weights) -> Weights:
    """Experts stand one by one, and their matrices have numbers."""
    return one_by_one(weights, MIXTRAL)


def neox(weights: Weights) -> Weights:
    """Transformers has a module of its own around all but the head."""
    out = {}
    for name, value in weights.items():
        name = name.removeprefix("model.").replace("h.", "layers.", 1) if name.startswith("model.h.") else name
        name = name.removeprefix("model.")
        out[name if name.startswith("embed_out") else f"gpt_neox.{name}"] = value
    # A mask that old checkpoints carry.
    return out | {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 4, 4), np.float32)}


def granite(weights: Weights) -> Weights:
    """Gate and up of all experts are in one stack."""
    return hybrids.granite(weights)


def bailing(weights: Weights) -> Weights:
    """Experts stand one by one, and the router has no part of its own."""
    return {name.replace(".gate.gate_proj.", ".gate."): value for name, value in singles(weights).items()}


def wrapped(weights: Weights) -> Weights:
    """The text part stands beside a vision tower."""
    out = {}
    for name, value in weights.items():
        name = name.replace("language_model.model.", "model.language_model.").removeprefix("language_model.")
        out[name] = value
    return out | {"model.visual.patch_embed.proj.weight": np.ones((4, 8), np.float32)}


def wrapped_experts(weights: Weights) -> Weights:
    """The same with experts in stacks of [in, out], gate and up in one."""
    out = {}
    for name, value in wrapped(weights).items():
        stem, _, part = name.removesuffix(".weight").partition(".switch_mlp.")
        if part == "gate_proj":
            up = weights[f"{stem}.switch_mlp.up_proj.weight".replace("model.language_model.", "language_model.model.")]
            out[f"{stem}.experts.gate_up_proj"] = np.concatenate([value, up], axis=1).swapaxes(-1, -2)
        elif part == "down_proj":
            out[f"{stem}.experts.down_proj"] = value.swapaxes(-1, -2)
        elif not part:
            out[name] = value
    return out


def latent(weights: Weights) -> Weights:
    """One matrix makes keys and values of the short vector, and experts stand one by one."""
    out = {}
    for name, value in singles(weights).items():
        stem, _, part = name.removesuffix(".weight").partition(".embed_q")
        if ".embed_q." in name:
            values = weights[f"{stem}.unembed_out.weight"]
            both = np.concatenate([value.swapaxes(-1, -2), values], axis=1)
            out[f"{stem}.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        elif ".unembed_out." not in name:
            out[name] = value
    return out


def with_prediction(weights: Weights) -> Weights:
    """As mlx-lm writes latent attention, with a layer that predicts a further token."""
    return singles(weights) | {"model.layers.3.eh_proj.weight": np.ones((4, 8), np.float32)}


def kimi_vl(weights: Weights) -> Weights:
    """The text part as mlx-lm writes it, beside a vision tower."""
    return weights | {"vision_tower.patch_embed.proj.weight": np.ones((4, 8), np.float32)}


def step3p5(weights: Weights) -> Weights:
    """Stacks of experts have a module of their own, norms add one, and a layer predicts a further token."""
    names = [
        (".mlp.switch_mlp.", ".moe."),
        (".mlp.gate.gate.", ".moe.gate."),
        (".mlp.gate.router_bias", ".moe.router_bias"),
        (".mlp.share_expert.", ".share_expert."),
    ]
    out = {"model.layers.4.eh_proj.weight": np.ones((4, 8), np.float32)}
    for name, value in weights.items():
        for old, new in names:
            name = name.replace(old, new)
        out[name] = value - 1.0 if name.endswith("norm.weight") else value
    return out


def rwkv7(weights: Weights) -> Weights:
    """Vectors of heads have one axis."""
    flat = ("k_k", "k_a", "g_norm.weight", "g_norm.bias")
    return {name: value.reshape(-1) if name.endswith(flat) else value for name, value in weights.items()}


def gptj(weights: Weights) -> Weights:
    """Transformers has another name of the module around all but the head."""
    return {name.replace("model.", "transformer."): value for name, value in weights.items()}


def older_wrapper(weights: Weights) -> Weights:
    """The names of older wrappers."""
    return weights | {"vision_tower.patch_conv.weight": np.ones((4, 8), np.float32)}
