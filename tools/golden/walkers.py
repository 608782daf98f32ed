"""Makes tests/fixtures/walkers.json: edges, OV circuits and nearest tokens of a tiny checkpoint, in float64.

Edges: of each feature the tokens whose embeddings have the greatest products with the row of the gate, and with the column
of the down matrix. Circuits: `W_O[:, h] W_V[h, :] e` for the embedding `e` of each token, with the head's whole matrix.

    python tools/golden/walkers.py      # needs numpy
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import numpy as np
from feed_forward import ROOT, TINY, tensors

TOP, LEAST, INPUTS = 3, 0.02, 7
THRESHOLDS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def best(scores: np.ndarray, k: int, least: float) -> list[tuple[int, float]]:
    order = np.argsort(-scores, kind="stable")[:k]
    return [(int(i), float(scores[i])) for i in order if scores[i] >= least]


def edges(e: np.ndarray, gate: np.ndarray, down: np.ndarray) -> dict[str, Any]:
    """`gate` is [features, hidden], `down` [hidden, features]."""
    before, behind = e @ gate.T, e @ down
    edges = []
    for feature in range(gate.shape[0]):
        for i, c_in in best(before[:, feature], TOP, LEAST):
            for o, c_out in best(behind[:, feature], TOP, LEAST):
                edges.append([feature, i, o, c_in, c_out, c_in * c_out])
    most, most_in = max(f[5] for f in edges), max(f[3] for f in edges)
    c = np.array([f[5] for f in edges]) / most
    return {
        "edges": [[*f[:5], f[5] / most, f[3] / most_in] for f in sorted(edges, key=lambda f: -f[5])[:20]],
        "count": len(edges),
        "mean_c": float(c.mean()),
        "at_least": [int((c >= t).sum()) for t in THRESHOLDS],
    }


def circuit(e: np.ndarray, values: np.ndarray, outputs: np.ndarray) -> list[Any]:
    """`values` is [head_dim, hidden], `outputs` [hidden, head_dim]."""
    added = e @ (outputs @ values).T
    lengths = np.linalg.norm(added, axis=1)
    return [[i, length, best(e @ added[i], TOP, 1e-30)] for i, length in best(lengths, INPUTS, 0.0)]


def main() -> None:
    config = json.loads((TINY / "llama-tied-gqa/config.json").read_text())
    w = tensors(TINY / "llama-tied-gqa/model.safetensors")
    e = w["model.embed_tokens.weight"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = []
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        v, o = w[f"{at}.self_attn.v_proj.weight"], w[f"{at}.self_attn.o_proj.weight"]
        of_head = [
            circuit(e, v[h * kv_heads // heads * dim :][:dim], o[:, h * dim : (h + 1) * dim]) for h in range(heads)
        ]
        mlp = edges(e, w[f"{at}.mlp.gate_proj.weight"], w[f"{at}.mlp.down_proj.weight"])
        layers.append({"mlp": mlp, "heads": of_head})
    golden = {
        "made_by": "tools/golden/walkers.py",
        "reference": {"numpy": version("numpy"), "compute": "float64"},
        "model": "llama-tied-gqa",
        "top_k": TOP,
        "inputs": INPUTS,
        "layers": layers,
    }
    (ROOT / "tests/fixtures/walkers.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
