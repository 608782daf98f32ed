"""Makes tests/fixtures/training/dpo.json: steps of direct preference optimization on the tiny llama, in plain numpy.

An own computation in float64: the forward pass of numpy_llama.py, the loss from the paper (Rafailov et al. 2023, equation 7, with
the label smoothing of the authors' code), slopes by central differences, and plain gradient descent. No framework is needed:

    pip install numpy==2.4.6 safetensors==0.8.0
    python tools/golden/dpo.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy_llama import forward
from safetensors.numpy import load_file

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
CHECKPOINT = FIXTURES / "tiny" / "llama"
OUT = FIXTURES / "training" / "dpo.json"
RANK, SCALE, BETA, RATE, STEPS, DIFFERENCE = 2, 4.0, 0.3, 0.5, 3, 1e-5
# The layers of the last block that have an adapter.
LAYERS = [f"model.layers.2.self_attn.{name}_proj" for name in ("q", "v")]

Params = dict[str, np.ndarray]


def pairs(seed: int, vocab: int) -> list[dict[str, Any]]:
    """Two pairs of replies of different lengths, each beginning with its prompt."""
    rng = np.random.default_rng(seed)

    def pair() -> dict[str, Any]:
        prompt = rng.integers(3, vocab, int(rng.integers(3, 6))).tolist()
        reply = lambda: prompt + rng.integers(3, vocab, int(rng.integers(3, 7))).tolist()
        return {"from": len(prompt), "chosen": reply(), "rejected": reply()}

    return [pair(), pair()]


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0.0, -x))


class Model:
    """The checkpoint with an adapter `W + scale * B A`."""

    def __init__(self) -> None:
        self.config = json.loads((CHECKPOINT / "config.json").read_text())
        self.config["head_dim"] = self.config["hidden_size"] // self.config["num_attention_heads"]
        self.base = {k: v.astype(np.float64) for k, v in load_file(CHECKPOINT / "model.safetensors").items()}

    def logprob(self, params: Params | None, ids: list[int], start: int) -> float:
        """Of the reply, whose first token is number `start`."""
        weights = self.base
        if params is not None:
            weights = dict(weights)
            for layer in LAYERS:
                delta = params[f"{layer}.lora_b"] @ params[f"{layer}.lora_a"]
                weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + SCALE * delta
        logits = forward(self.config, weights, ids)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return float(sum(logprobs[at - 1, ids[at]] for at in range(start, len(ids))))

    def rewards(self, params: Params, batch: list[dict[str, Any]], base: list[list[float]]) -> list[list[float]]:
        """Of each pair the reward of the better reply and of the worse."""
        names = ("chosen", "rejected")
        return [
            [BETA * (self.logprob(params, pair[name], pair["from"]) - known) for name, known in zip(names, both)]
            for pair, both in zip(batch, base)
        ]


def loss_of(rewards: list[list[float]], smoothing: float) -> float:
    margins = [chosen - rejected for chosen, rejected in rewards]
    each = [-(1 - smoothing) * log_sigmoid(m) - smoothing * log_sigmoid(-m) for m in margins]
    return sum(each) / len(each)


def run(model: Model, start: Params, batches: list[list[dict[str, Any]]], smoothing: float) -> dict[str, Any]:
    """Some steps of gradient descent."""
    params = {name: value.copy() for name, value in start.items()}
    steps = []
    for batch in batches:
        base = [[model.logprob(None, pair[n], pair["from"]) for n in ("chosen", "rejected")] for pair in batch]
        rewards = model.rewards(params, batch, base)
        steps.append(
            {
                "loss": loss_of(rewards, smoothing),
                "chosen": float(np.mean([r[0] for r in rewards])),
                "rejected": float(np.mean([r[1] for r in rewards])),
                "accuracy": float(np.mean([r[0] > r[1] for r in rewards])),
            }
        )
        slopes = {}
        for name, value in params.items():
            slope = np.zeros_like(value)
            for at in np.ndindex(value.shape):
                element = value[at]
                ends = []
                for side in (DIFFERENCE, -DIFFERENCE):
                    value[at] = element + side
                    ends.append(loss_of(model.rewards(params, batch, base), smoothing))
                value[at] = element
                slope[at] = (ends[0] - ends[1]) / (2 * DIFFERENCE)
            slopes[name] = slope
        for name, slope in slopes.items():
            params[name] = params[name] - RATE * slope
    flat = {name: [round(x, 9) for x in value.ravel().tolist()] for name, value in params.items()}
    return {"smoothing": smoothing, "steps": steps, "params": flat}


def main() -> None:
    model = Model()
    hidden = model.config["hidden_size"]
    rng = np.random.default_rng(11)
    start: Params = {}
    for layer in LAYERS:
        rows = model.base[f"{layer}.weight"].shape[0]
        start[f"{layer}.lora_a"] = np.round(rng.normal(0, 0.1, (RANK, hidden)), 4)
        start[f"{layer}.lora_b"] = np.round(rng.normal(0, 0.1, (rows, RANK)), 4)
    batches = [pairs(3 + i, model.config["vocab_size"]) for i in range(STEPS)]
    golden = {
        "rank": RANK,
        "scale": SCALE,
        "beta": BETA,
        "rate": RATE,
        "start": {name: value.ravel().tolist() for name, value in start.items()},
        "batches": batches,
        "runs": [run(model, start, batches, smoothing) for smoothing in (0.0, 0.2)],
    }
    OUT.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
