"""Makes tests/fixtures/vindex.json: what `mlx vindex` must write and find for tiny checkpoints.

SHA-256 of the feature-major matrices as numpy transposes them, and for one prompt the features of each layer with the
greatest gates, from the forward pass of `numpy_llama.py` in float64.

    python tools/golden/vindex.py      # needs numpy
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

import numpy as np
from feed_forward import ROOT, TINY, tensors
from numpy_llama import forward

TOP = 4


def digest(parts: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(p, dtype="<f4").tobytes() for p in parts)).hexdigest()


def llama() -> dict[str, Any]:
    config = json.loads((TINY / "llama/config.json").read_text())
    w = tensors(TINY / "llama/model.safetensors")
    layers = range(config["num_hidden_layers"])

    def part(i: int, name: str) -> np.ndarray:
        return w[f"model.layers.{i}.mlp.{name}_proj.weight"]

    golden = json.loads((TINY / "llama/golden.json").read_text())
    tokens = max((p["tokens"] for p in golden["prompts"]), key=len)
    inputs: list[np.ndarray] = []
    forward(config, w, tokens, seen=inputs)
    features = []
    for i, x in zip(layers, inputs, strict=True):
        gates = part(i, "gate") @ x[-1]
        activations = gates / (1 + np.exp(-gates)) * (part(i, "up") @ x[-1])
        best = np.argsort(-np.abs(gates), kind="stable")[:TOP]
        full, few = part(i, "down") @ activations, part(i, "down")[:, best] @ activations[best]
        features.append(
            {
                "features": best.tolist(),
                "gates": gates[best].tolist(),
                "activations": activations[best].tolist(),
                "error": float(np.linalg.norm(few - full) / np.linalg.norm(full)),
            }
        )
    return {
        "sha256": {
            "gate_vectors.bin": digest([part(i, "gate") for i in layers]),
            "up_features.bin": digest([part(i, "up") for i in layers]),
            "down_features.bin": digest([part(i, "down").T for i in layers]),
        },
        "tokens": tokens,
        "layers": features,
    }


def gpt2() -> dict[str, Any]:
    config = json.loads((TINY / "gpt2/config.json").read_text())
    w = tensors(TINY / "gpt2/model.safetensors")
    at = [f"transformer.h.{i}.mlp" for i in range(config["n_layer"])]
    return {
        "sha256": {
            "gate_vectors.bin": digest([w[f"{p}.c_fc.weight"].T for p in at]),
            "down_features.bin": digest([w[f"{p}.c_proj.weight"] for p in at]),
            "biases.bin": digest([w[f"{p}.{name}.bias"] for p in at for name in ("c_fc", "c_proj")]),
        }
    }


def main() -> None:
    golden = {
        "made_by": "tools/golden/vindex.py",
        "reference": {"numpy": version("numpy"), "compute": "float64"},
        "models": {"llama": llama(), "gpt2": gpt2()},
    }
    (ROOT / "tests/fixtures/vindex.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
