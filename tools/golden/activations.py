"""Makes tests/fixtures/activations.json: what the down matrices of tiny checkpoints read, `act(gate) * up`.

numpy in float64, from the files alone, at the first and the last position of a prompt: `numpy_llama.py` for a gated
feed-forward part, and `feed_forward.gpt2` for one without a gate. The passes themselves are held against transformers by
`feed_forward.py`.

    python tools/golden/activations.py      # needs numpy
"""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
from feed_forward import ROOT, TINY, gelu_new, gpt2, tensors
from numpy_llama import forward


def main() -> None:
    models = {}
    for name in ("llama", "gpt2"):
        config = json.loads((TINY / name / "config.json").read_text())
        w = tensors(TINY / name / "model.safetensors")
        golden = json.loads((TINY / name / "golden.json").read_text())
        tokens = max((p["tokens"] for p in golden["prompts"]), key=len)
        inputs: list[np.ndarray] = []
        layers = []
        if name == "llama":
            forward(config, w, tokens, seen=inputs)
            for i, x in enumerate(inputs):
                at = f"model.layers.{i}.mlp"
                gate = x @ w[f"{at}.gate_proj.weight"].T
                layers.append(gate / (1 + np.exp(-gate)) * (x @ w[f"{at}.up_proj.weight"].T))
        else:
            gpt2(config, w, tokens, {}, seen=inputs)
            layers = [gelu_new(x) for x in inputs]
        models[name] = {
            "tokens": tokens,
            "positions": [0, len(tokens) - 1],
            "layers": [[float(f"{v:.7g}") for v in np.concatenate([a[0], a[-1]])] for a in layers],
        }
    golden = {
        "made_by": "tools/golden/activations.py",
        "reference": {"numpy": version("numpy"), "compute": "float64"},
        "models": models,
    }
    out = ROOT / "tests/fixtures/activations.json"
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
