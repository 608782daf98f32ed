"""Makes tests/fixtures/training/grpo.json: steps of group relative policy optimization on the tiny llama, in plain numpy.

An own computation in float64 with the model of dpo.py: the loss of the paper (Shao et al. 2024, arXiv:2402.03300, equation 3; the
divisors of Liu et al. 2025 and Yu et al. 2025, and the latter's own upper bound of the ratio), slopes by central differences, and
plain gradient descent. Some runs make several updates by the same replies. Replies and rewards are drawn here. No framework is
needed:

    pip install numpy==2.4.6 safetensors==0.8.0
    python tools/golden/grpo.py
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from dpo import FIXTURES, LAYERS, RANK, SCALE, Model, Params
from numpy_llama import forward
from orpo_kto import descend, flat

RATE, GROUP, MAX_LENGTH = 0.5, 2, 9


def each(model: Model, params: Params | None, one: dict[str, Any], temperature: float) -> np.ndarray:
    """The log-probability of each token of a reply."""
    weights = model.base
    if params is not None:
        weights = dict(weights)
        for layer in LAYERS:
            delta = params[f"{layer}.lora_b"] @ params[f"{layer}.lora_a"]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + SCALE * delta
    logits = forward(model.config, weights, one["ids"]) / temperature
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return np.array([logprobs[at - 1, one["ids"][at]] for at in range(one["from"], len(one["ids"]))])


def advantages(rewards: list[float]) -> list[float]:
    groups = np.array(rewards).reshape(-1, GROUP)
    centered = groups - groups.mean(axis=1, keepdims=True)
    return (centered / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-4)).ravel().tolist()


def loss_of(new: list[np.ndarray], old: list[np.ndarray], base: list[np.ndarray], gains: list[float], how: dict[str, Any]) -> dict[str, float]:
    losses, divergences, clipped = [], [], []
    for now, before, plain, gain in zip(new, old, base, gains):
        kl = np.exp(plain - now) - (plain - now) - 1
        ratio = np.exp(now - before)
        bounded = np.clip(ratio, 1 - how["epsilon"], 1 + how["epsilon_high"])
        losses.append(-(np.minimum(ratio * gain, bounded * gain) - how["beta"] * kl))
        divergences.append(kl)
        clipped.append(ratio > 1 + how["epsilon_high"] if gain > 0 else ratio < 1 - how["epsilon"])
    tokens = sum(len(one) for one in losses)
    match how["loss_type"]:
        case "grpo":
            loss = float(np.mean([one.mean() for one in losses]))
        case "dr_grpo":
            loss = float(sum(one.sum() for one in losses)) / (len(losses) * MAX_LENGTH)
        case _:
            loss = float(sum(one.sum() for one in losses)) / tokens
    kl = float(sum(one.sum() for one in divergences)) / tokens
    return {"loss": loss, "kl": kl, "clip_ratio": float(sum(one.sum() for one in clipped)) / tokens}


def batch(seed: int, vocab: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    replies = []
    for _ in range(2):
        prompt = rng.integers(3, vocab, int(rng.integers(2, 5))).tolist()
        for _ in range(GROUP):
            ids = prompt + rng.integers(3, vocab, int(rng.integers(2, 6))).tolist()
            replies.append({"from": len(prompt), "ids": ids})
    rewards = np.round(rng.normal(0, 1, len(replies)), 3).tolist()
    return {"replies": replies, "rewards": rewards, "advantages": advantages(rewards)}


def main() -> None:
    model = Model()
    rng = np.random.default_rng(11)
    start: Params = {}
    for layer in LAYERS:
        rows = model.base[f"{layer}.weight"].shape[0]
        start[f"{layer}.lora_a"] = np.round(rng.normal(0, 0.1, (RANK, model.config["hidden_size"])), 4)
        start[f"{layer}.lora_b"] = np.round(rng.normal(0, 0.1, (rows, RANK)), 4)
    batches = [batch(61 + i, model.config["vocab_size"]) for i in range(2)]
    runs = []
    for how in (
        {"loss_type": "grpo", "beta": 0.0, "temperature": 1.0},
        {"loss_type": "bnpo", "beta": 0.5, "temperature": 0.7},
        {"loss_type": "dapo", "beta": 0.0, "temperature": 1.3},
        {"loss_type": "dr_grpo", "beta": 0.2, "temperature": 1.0},
        {"loss_type": "dapo", "beta": 0.0, "temperature": 1.0, "iterations": 3, "epsilon": 0.05, "epsilon_high": 0.1},
        {"loss_type": "grpo", "beta": 0.3, "temperature": 0.8, "iterations": 2, "epsilon": 0.02, "epsilon_high": 0.02},
    ):
        how = {"iterations": 1, "epsilon": 0.2, "epsilon_high": 0.2, **how}
        params = {name: value.copy() for name, value in start.items()}
        steps = []
        for one in batches:
            compute = lambda p: [each(model, p, reply, how["temperature"]) for reply in one["replies"]]
            old, base = compute(params), compute(None)
            for _ in range(how["iterations"]):
                steps.append(loss_of(compute(params), old, base, one["advantages"], how))
                params = descend(params, lambda p: loss_of(compute(p), old, base, one["advantages"], how)["loss"])
        runs.append({**how, "steps": steps, "params": flat(params)})
        print(how, steps)
    golden = {"rank": RANK, "scale": SCALE, "rate": RATE, "group": GROUP, "max_completion_length": MAX_LENGTH}
    golden |= {"start": {name: value.ravel().tolist() for name, value in start.items()}, "batches": batches, "runs": runs}
    (FIXTURES / "training" / "grpo.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
