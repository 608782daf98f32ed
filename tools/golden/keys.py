"""Makes tests/fixtures/keys.json: keys after rotation as mlx-lm's own caches hold them, of tiny checkpoints.

Every layer and KV head; of the positions and elements a few each. The prompt is longer than the sliding windows. Caches
are filled in one pass, in which mlx-lm's rotating ones hold all positions. Gemma 2, Cohere 2 and gpt-oss are not among them:
their keys differ from ours, whose logits are transformers' (golden.json); mlx-lm's of Cohere 2 are not. Everything runs on the
CPU in float32.
Pins: requirements.txt.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["llama", "llama-tied-gqa", "qwen3-q4", "gemma3-text"]
POSITIONS = [0, 1, 13, 26, 38, 39]
ELEMENTS = 6


def main() -> None:
    tokens = [5 + (i * 7 + i * i % 11) % 90 for i in range(40)]
    cases = []
    for name in NAMES:
        model, config = load_model(ROOT / "tests" / "fixtures" / "tiny" / name)
        model.set_dtype(mx.float32)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens]), cache=caches))
        layers = []
        for cache in caches:
            keys = np.array(cache.keys)[0][:, : len(tokens)]  # [Hkv, n, D]
            if keys.shape[1] != len(tokens):
                raise ValueError(f"{name}: a cache holds {keys.shape[1]} positions of {len(tokens)}")
            picked = keys[:, POSITIONS][..., :: max(keys.shape[-1] // ELEMENTS, 1)]
            layers.append([[float(f"{v:.7g}") for v in head.ravel()] for head in picked])
        kinds = [type(cache).__name__ for cache in caches]
        print(name, kinds, config.get("num_attention_heads"), keys.shape)
        cases.append({"model": name, "step": max(keys.shape[-1] // ELEMENTS, 1), "keys": layers})
    golden = {
        "made_by": "tools/golden/keys.py",
        "reference": reference.versions(),
        "tokens": tokens,
        "positions": POSITIONS,
        "cases": cases,
    }
    out = ROOT / "tests" / "fixtures" / "keys.json"
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
