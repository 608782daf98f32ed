"""Makes tests/fixtures/feed_forward.json: logits of tiny models whose layers have other feed-forward strategies.

numpy in float64, from the files alone: `numpy_llama.py` for a gated feed-forward part, and GPT-2 (Radford et al. 2019)
below for one without a gate. Before anything is written, the dense passes are held against the logits in the fixtures'
golden.json, which are of mlx-lm and transformers.

    python tools/golden/feed_forward.py      # needs numpy
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy_llama import _softmax, forward, keep_greatest

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny"

# As `--ffn` takes them, and the same by layer.
PLANS: dict[str, dict[str, dict[int, tuple[str, float]]]] = {
    "llama": {
        "sparse:1": {i: ("sparse", 1) for i in range(3)},
        "sparse:16": {i: ("sparse", 16) for i in range(3)},
        "sparse:63": {i: ("sparse", 63) for i in range(3)},
        "attention-only": {i: ("attention-only", 0) for i in range(3)},
        "0=dense,1=sparse:8,2=attention-only": {1: ("sparse", 8), 2: ("attention-only", 0)},
        "0=gain:1.25,2=sparse:20": {0: ("gain", 1.25), 2: ("sparse", 20)},
        "1-=gain:-0.5": {1: ("gain", -0.5), 2: ("gain", -0.5)},
    },
    "gpt2": {
        "sparse:3": {0: ("sparse", 3), 1: ("sparse", 3)},
        "sparse:100": {0: ("sparse", 100), 1: ("sparse", 100)},
        "1=attention-only": {1: ("attention-only", 0)},
        "0=gain:0.75,1=sparse:40": {0: ("gain", 0.75), 1: ("sparse", 40)},
    },
}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Of one safetensors file, in float64: numpy has no bfloat16, so the bytes are read here."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    results = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + n for n in about["data_offsets"])
        if about["dtype"] == "BF16":
            bits = np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16
            values = bits.view("<f4")
        else:
            values = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2"}[about["dtype"]])
        results[name] = values.astype(np.float64).reshape(about["shape"])
    return results


def layer_norm(x: np.ndarray, w: dict[str, np.ndarray], at: str, eps: float) -> np.ndarray:
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + eps)
    return scaled * w[f"{at}.weight"] + w[f"{at}.bias"]


def gelu_new(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gpt2(
    config: dict[str, Any],
    w: dict[str, np.ndarray],
    ids: list[int],
    plan: dict[int, tuple[str, float]],
    seen: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Logits. `seen` gets what each layer's activation function reads."""
    n, heads, width, eps = len(ids), config["n_head"], config["n_embd"], config["layer_norm_epsilon"]
    mask = np.triu(np.full((n, n), -np.inf), 1)
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:n]

    def linear(h: np.ndarray, at: str) -> np.ndarray:
        return h @ w[f"{at}.weight"] + w[f"{at}.bias"]

    def split(h: np.ndarray) -> np.ndarray:
        return h.reshape(n, heads, width // heads).transpose(1, 0, 2)

    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        strategy, number = plan.get(layer, ("dense", 0))
        if strategy == "gain":
            x = number * x
            continue
        q, k, v = map(split, np.split(linear(layer_norm(x, w, f"{at}.ln_1", eps), f"{at}.attn.c_attn"), 3, axis=-1))
        weights = _softmax(q @ k.transpose(0, 2, 1) / np.sqrt(width // heads) + mask)
        x = x + linear((weights @ v).transpose(1, 0, 2).reshape(n, width), f"{at}.attn.c_proj")
        if strategy == "attention-only":
            continue
        inputs = linear(layer_norm(x, w, f"{at}.ln_2", eps), f"{at}.mlp.c_fc")
        if seen is not None:
            seen.append(inputs)
        activations = gelu_new(inputs)
        if strategy == "sparse":
            activations = keep_greatest(inputs, activations, int(number))
        x = x + linear(activations, f"{at}.mlp.c_proj")
    return layer_norm(x, w, "transformer.ln_f", eps) @ w["transformer.wte.weight"].T


def main() -> None:
    models: dict[str, Any] = {}
    for name, plans in PLANS.items():
        config = json.loads((TINY / name / "config.json").read_text())
        weights = tensors(TINY / name / "model.safetensors")
        golden = json.loads((TINY / name / "golden.json").read_text())
        prompt = max(golden["prompts"], key=lambda p: len(p["tokens"]))
        tokens = prompt["tokens"]

        def logits(plan: dict[int, tuple[str, float]]) -> np.ndarray:
            if name == "gpt2":
                return gpt2(config, weights, tokens, plan)
            return forward(config, weights, tokens, plan=plan)

        difference = np.abs(logits({})[-1] - np.array(prompt["logits"])).max()
        assert difference < 1e-4, f"{name}: the dense pass differs by {difference} from the fixture's golden logits"
        print(f"{name}: dense within {difference:.1e} of the fixture's golden logits")
        models[name] = {
            "tokens": tokens,
            "plans": {text: [float(f"{x:.7g}") for x in logits(plan)[-1]] for text, plan in plans.items()},
        }
    golden = {
        "made_by": "tools/golden/feed_forward.py",
        "reference": {"numpy": version("numpy"), "compute": "float64"},
        "models": models,
    }
    out = ROOT / "tests/fixtures/feed_forward.json"
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
