"""Makes tests/fixtures/training/orpo.json and kto.json: steps of both methods on the tiny llama, in plain numpy.

An own computation in float64 with the model of dpo.py: the losses of the papers (ORPO: Hong et al. 2024, arXiv:2403.07691,
equations 6 and 7; KTO: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8), slopes by central differences, and plain gradient
descent. As in TRL, ORPO's first term also covers the prompt by default, and KTO pairs each prompt with the reply before it in the
batch to estimate the divergence. No framework is needed:

    pip install numpy==2.4.6 safetensors==0.8.0
    python tools/golden/orpo_kto.py
"""

from __future__ import annotations

import json
from typing import Any, Callable

import numpy as np
from dpo import FIXTURES, LAYERS, RANK, SCALE, Model, Params, log_sigmoid, pairs

BETA, RATE, STEPS, DIFFERENCE = 0.3, 0.5, 3, 1e-5


def sigmoid(x: float) -> float:
    return float(np.exp(log_sigmoid(x)))


def orpo(model: Model, params: Params, batch: list[dict[str, Any]], learn_prompt: bool) -> dict[str, float]:
    """The loss of a batch of pairs, and its rewards."""
    nll, counted, terms, rewards = 0.0, 0, [], []
    for pair in batch:
        start = pair["from"]
        means = {n: model.logprob(params, pair[n], start) / (len(pair[n]) - start) for n in ("chosen", "rejected")}
        first = 1 if learn_prompt else start
        nll -= model.logprob(params, pair["chosen"], first)
        counted += len(pair["chosen"]) - first
        odds = {n: mean - np.log(1 - np.exp(mean)) for n, mean in means.items()}
        terms.append(log_sigmoid(odds["chosen"] - odds["rejected"]))
        rewards.append((BETA * means["chosen"], BETA * means["rejected"]))
    return {
        "loss": nll / counted - BETA * float(np.mean(terms)),
        "chosen": float(np.mean([r[0] for r in rewards])),
        "rejected": float(np.mean([r[1] for r in rewards])),
        "accuracy": float(np.mean([r[0] > r[1] for r in rewards])),
    }


def replies(seed: int, vocab: int) -> list[dict[str, Any]]:
    """Three replies, of which some are desirable."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(3):
        prompt = rng.integers(3, vocab, int(rng.integers(2, 5))).tolist()
        ids = prompt + rng.integers(3, vocab, int(rng.integers(2, 6))).tolist()
        made.append({"from": len(prompt), "ids": ids, "desirable": bool((i + seed) % 3 != 0)})
    return made


def mismatched(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt with the reply of the example before it."""
    return [
        {"from": one["from"], "ids": one["ids"][: one["from"]] + before["ids"][before["from"] :]}
        for one, before in zip(batch, batch[-1:] + batch[:-1])
    ]


def kto_reference(model: Model, params: Params, batch: list[dict[str, Any]]) -> float:
    """The divergence from the base model, estimated on mismatched replies. It has no slope."""
    each = [model.logprob(params, m["ids"], m["from"]) - model.logprob(None, m["ids"], m["from"]) for m in mismatched(batch)]
    return max(0.0, float(np.mean(each)))


def kto(model: Model, params: Params, batch: list[dict[str, Any]], reference: float, weights: tuple[float, float]) -> dict[str, float]:
    losses, right = [], []
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for one in batch:
        ratio = model.logprob(params, one["ids"], one["from"]) - model.logprob(None, one["ids"], one["from"])
        gain = BETA * (ratio - reference)
        if one["desirable"]:
            losses.append(weights[0] * (1 - sigmoid(gain)))
        else:
            losses.append(weights[1] * (1 - sigmoid(-gain)))
        right.append((gain > 0) == one["desirable"])
        rewards[one["desirable"]].append(BETA * ratio)
    mean = lambda values: float(np.mean(values)) if values else 0.0
    return {
        "loss": mean(losses),
        "chosen": mean(rewards[True]),
        "rejected": mean(rewards[False]),
        "accuracy": mean(right),
        "reference": reference,
    }


def descend(params: Params, loss: Callable[[Params], float]) -> Params:
    """A step of gradient descent, with slopes by central differences."""
    slopes = {}
    for name, value in params.items():
        slope = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            element = value[at]
            ends = []
            for side in (DIFFERENCE, -DIFFERENCE):
                value[at] = element + side
                ends.append(loss(params))
            value[at] = element
            slope[at] = (ends[0] - ends[1]) / (2 * DIFFERENCE)
        slopes[name] = slope
    return {name: value - RATE * slopes[name] for name, value in params.items()}


def flat(params: Params) -> dict[str, list[float]]:
    return {name: [round(x, 9) for x in value.ravel().tolist()] for name, value in params.items()}


def main() -> None:
    model = Model()
    # The last block is enough, and base log-probabilities are computed once.
    seen: dict[tuple[int, ...], float] = {}
    plain = model.logprob

    def logprob(params: Params | None, ids: list[int], start: int) -> float:
        if params is not None:
            return plain(params, ids, start)
        key = (start, *ids)
        if key not in seen:
            seen[key] = plain(None, ids, start)
        return seen[key]

    model.logprob = logprob  # type: ignore[method-assign]
    rng = np.random.default_rng(11)
    start: Params = {}
    for layer in LAYERS:
        rows = model.base[f"{layer}.weight"].shape[0]
        start[f"{layer}.lora_a"] = np.round(rng.normal(0, 0.1, (RANK, model.config["hidden_size"])), 4)
        start[f"{layer}.lora_b"] = np.round(rng.normal(0, 0.1, (rows, RANK)), 4)
    head = {"rank": RANK, "scale": SCALE, "beta": BETA, "rate": RATE}
    head["start"] = {name: value.ravel().tolist() for name, value in start.items()}
    vocab = model.config["vocab_size"]

    batches = [pairs(23 + i, vocab) for i in range(STEPS)]
    runs = []
    for learn_prompt in (True, False):
        params = {name: value.copy() for name, value in start.items()}
        steps = []
        for batch in batches:
            steps.append(orpo(model, params, batch, learn_prompt))
            params = descend(params, lambda p: orpo(model, p, batch, learn_prompt)["loss"])
        runs.append({"learn_prompt": learn_prompt, "steps": steps, "params": flat(params)})
    golden = {**head, "batches": batches, "runs": runs}
    (FIXTURES / "training" / "orpo.json").write_text(json.dumps(golden) + "\n")

    batches = [replies(43 + i, vocab) for i in range(STEPS)]
    runs = []
    for weights in ((1.0, 1.0), (1.5, 0.5)):
        params = {name: value.copy() for name, value in start.items()}
        steps = []
        for batch in batches:
            reference = kto_reference(model, params, batch)
            steps.append(kto(model, params, batch, reference, weights))
            params = descend(params, lambda p: kto(model, p, batch, reference, weights)["loss"])
        runs.append({"desirable_weight": weights[0], "undesirable_weight": weights[1], "steps": steps, "params": flat(params)})
    golden = {**head, "batches": batches, "runs": runs}
    (FIXTURES / "training" / "kto.json").write_text(json.dumps(golden) + "\n")
    for run in runs:
        print(run["steps"])


if __name__ == "__main__":
    main()
