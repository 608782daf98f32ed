"""A llama forward pass in plain numpy: a second opinion on what mlx-lm computes. In float64 unless told otherwise.

Formulas: RMSNorm (Zhang and Sennrich 2019), rotary positions on halves (Su et al. 2021), grouped-query attention
(Ainslie et al. 2023), SwiGLU (Shazeer 2020). No cache, no biases, no rope scaling: what the first model needs.
Layers may have another way of computing their feed-forward part, for `feed_forward.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rope(x: np.ndarray, theta: float) -> np.ndarray:
    """[heads, n, d] -> the same, positions 0..n."""
    n, d = x.shape[1:]
    angles = np.arange(n)[:, None] * theta ** (-np.arange(0, d, 2) / d)  # [n, d/2]
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def keep_greatest(gate: np.ndarray, activations: np.ndarray, count: int) -> np.ndarray:
    """Of each row the activations of the `count` features with the greatest gate by magnitude, else 0."""
    best = np.argsort(-np.abs(gate), axis=-1, kind="stable")[:, :count]
    masked = np.zeros_like(activations)
    np.put_along_axis(masked, best, np.take_along_axis(activations, best, axis=-1), axis=-1)
    return masked


def forward(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    ids: list[int],
    dtype: type = np.float64,
    plan: dict[int, tuple[str, float]] | None = None,
    seen: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Logits of every position: [len(ids), vocab]. `plan` gives layers another strategy: ("sparse", K),
    ("attention-only", 0) or ("gain", G). `seen` is given what each feed-forward part reads."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta, eps = config["rope_theta"], config["rms_norm_eps"]
    n = len(ids)
    mask = np.triu(np.full((n, n), -np.inf, dtype=dtype), 1)

    def w(name: str) -> np.ndarray:
        return weights[f"{name}.weight"].astype(dtype)

    def split(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(n, count, head_dim).transpose(1, 0, 2)  # [n, count * d] -> [count, n, d]

    x = weights["model.embed_tokens.weight"][ids].astype(dtype)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        strategy, number = (plan or {}).get(layer, ("dense", 0))
        if strategy == "gain":
            x = number * x
            continue
        h = _norm(x, w(f"{at}.input_layernorm"), eps)
        q = _rope(split(h @ w(f"{at}.self_attn.q_proj").T, heads), theta)
        k = _rope(split(h @ w(f"{at}.self_attn.k_proj").T, kv_heads), theta)
        v = split(h @ w(f"{at}.self_attn.v_proj").T, kv_heads)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        scores = _softmax(q @ k.transpose(0, 2, 1) / np.sqrt(dtype(head_dim)) + mask)
        mixed = (scores @ v).transpose(1, 0, 2).reshape(n, heads * head_dim)
        x = x + mixed @ w(f"{at}.self_attn.o_proj").T
        h = _norm(x, w(f"{at}.post_attention_layernorm"), eps)
        if seen is not None:
            seen.append(h)
        gate = h @ w(f"{at}.mlp.gate_proj").T
        activations = gate / (1 + np.exp(-gate)) * (h @ w(f"{at}.mlp.up_proj").T)
        if strategy == "attention-only":
            continue
        if strategy == "sparse":
            activations = keep_greatest(gate, activations, int(number))
        x = x + activations @ w(f"{at}.mlp.down_proj").T
    out = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _norm(x, w("model.norm"), eps) @ w(out).T
