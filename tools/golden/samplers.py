#!/usr/bin/env python3
"""Golden numbers for sampling: every stage on adversarial logits, and whole chains.

The stages are written here a second time, from their definitions, as plain loops in float64: nothing is shared
with MLX or with the engine. Logits hold ties, infinities of both signs, a single finite token, numbers at the ends
of float32, and flat and peaked distributions; parameters stand at their ends. A case in which rounding to float32
could decide (a sum closer than 3e-7 to its bound) is left out, unless the sums are exact.

Pins: numpy==2.4.6 (for float32 and nothing else).
Run: python tools/golden/samplers.py > metal-backend/tests/fixtures/samplers.json
"""

import json
import math
import random
import sys

import numpy as np

INF = math.inf
MARGIN = 3e-7
# The other order of a chain: temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC.
FIRST = {"sampler_order": "temperature_first"}
BIG = float(np.finfo(np.float32).max)


def f32(x):
    return float(np.float32(x))


def softmax(row):
    """Probabilities in float64; infinite logits share everything."""
    top = max(row)
    if top == -INF:
        return [0.0] * len(row)
    if top == INF:
        n = row.count(INF)
        return [1.0 / n if x == INF else 0.0 for x in row]
    weights = [math.exp(max(x - top, -800.0)) if x > -INF else 0.0 for x in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


class Doubtful(Exception):
    """Rounding could decide this case."""


def compare(a, b, exact):
    if a != b and abs(a - b) < MARGIN and not exact:
        raise Doubtful
    return a > b


def top_p(row, p):
    """Drop tokens from the least probable on (of equal ones the first) while their sum is at most 1 - p."""
    if max(row) == -INF:
        return list(row)
    probabilities = softmax(row)
    order = sorted(range(len(row)), key=lambda i: (row[i], i))
    # Multiples of a power of two are exact in float32 too.
    exact = all(q in (0.0, 1.0) or math.log2(q).is_integer() for q in probabilities)
    spare = 1.0 - f32(p)
    out, gone = list(row), 0.0
    for i in order[:-1]:
        gone += probabilities[i]
        if compare(gone, spare, exact or gone == 0.0):
            break
        out[i] = -INF
    return out


def min_p(row, p):
    """Keep what is at least p times as probable as the best."""
    probabilities = softmax(row)
    best = max(probabilities)
    if best == 0.0:
        return list(row)
    out = []
    for x, q in zip(row, probabilities):
        ratio = q / best
        # A ratio of exactly 1 between different logits is rounding as well.
        if x != max(row) and abs(ratio - f32(p)) < MARGIN * ratio:
            raise Doubtful
        out.append(-INF if ratio < f32(p) else x)
    return out


def top_n_sigma(row, n):
    """Keep logits at most n standard deviations below the best; deviations are of what is possible."""
    best = max(row)
    if best == -INF:
        return list(row)
    below = [0.0 if x == best else x - best for x in row]
    possible = [r for r in below if r > -INF]
    deviation = float(np.std(np.array(possible, dtype=np.float64)))
    least = -f32(n) * deviation
    if deviation > 0 and any(abs(r - least) < 1e-5 * (1 + abs(least)) for r in possible):
        raise Doubtful
    return [-INF if r < least else x for x, r in zip(row, below)]


def typical_p(row, p):
    """Keep tokens whose surprise is nearest to the entropy until they have the probability p, and their equals."""
    if max(row) == -INF:
        return list(row)
    probabilities = softmax(row)
    entropy = -math.fsum(q * math.log(q) for q in probabilities if q > 0)
    distances = [abs(-math.log(q) - entropy) if q > 0 else INF for q in probabilities]
    total, limit = 0.0, 0.0
    for i in sorted(range(len(row)), key=lambda i: distances[i]):
        limit = distances[i]
        total += probabilities[i]
        if total == f32(p) or abs(total - f32(p)) < MARGIN:
            raise Doubtful
        if total > f32(p):
            break
    last = {x for x, d in zip(row, distances) if d == limit}
    if any(abs(d - limit) < 1e-5 * (1 + limit) and x not in last for x, d in zip(row, distances)) or len(last) > 1:
        raise Doubtful
    return [-INF if d > limit else x for x, d in zip(row, distances)]


def top_k(row, k):
    """Keep the k greatest: which of equals is not said."""
    order = sorted(range(len(row)), key=lambda i: row[i])
    out = list(row)
    for i in order[: max(len(row) - k, 0)]:
        out[i] = -INF
    return out


def xtc(row, threshold, spared):
    probabilities = softmax(row)
    t = f32(threshold)
    if any(q != t and abs(q - t) < MARGIN for q in probabilities):
        raise Doubtful
    above = [q for q in probabilities if q > t]
    if not above:
        return list(row)
    least = min(above)
    if any(q != least and abs(q - least) < MARGIN for q in above):
        raise Doubtful
    return [-INF if q > least and i not in spared else x for i, (x, q) in enumerate(zip(row, probabilities))]


def temperature(row, t):
    return [f32(x / f32(t)) if math.isfinite(x) else x for x in row]


def repeat_penalty(row, history, penalty):
    out = list(row)
    for i in set(history):
        out[i] = f32(row[i] * penalty if row[i] < 0 else row[i] / penalty)
    return out


def count_penalty(row, tokens, presence, frequency):
    return [f32(x - presence * (tokens.count(i) > 0) - frequency * tokens.count(i)) for i, x in enumerate(row)]


def bias(row, biases):
    return [f32(x + biases.get(i, 0.0)) for i, x in enumerate(row)]


def logprobs(row):
    return [math.log(q) if q > 0 else -INF for q in softmax(row)]


def rows(rng):
    normal = lambda n, s: [f32(rng.gauss(0, s)) for _ in range(n)]
    return {
        "plain": normal(24, 2.0),
        "peaked": normal(24, 12.0),
        "flat": normal(24, 1e-3),
        "all equal": [1.5] * 8,
        "all equal, not a power of two": [-2.0] * 7,
        "pairs": [x for v in normal(8, 1.5) for x in (v, v)],
        "equal best": [3.0, 1.0, 3.0, 0.0, 3.0, -1.0],
        "equal least": [4.0, -1.0, -1.0, -1.0, -1.0, 2.0],
        "one finite": [-INF, -INF, -7.25, -INF, -INF],
        "two finite": [-INF, 0.5, -INF, -0.5, -INF],
        "nothing": [-INF] * 5,
        "holes": [x if i % 3 else -INF for i, x in enumerate(normal(18, 2.0))],
        "one infinite": [0.0, INF, 3.0, -INF],
        "two infinite": [INF, 5.0, -INF, INF, 1.0, 0.0],
        "ends of float32": [BIG, -BIG, 0.0, BIG, -BIG, 1.0],
        "one at the end": [-BIG, BIG, 0.0, 1.0],
        "far apart": [0.0, -30.0, -60.0, -90.0, -200.0, -1e30],
        "tiny": [1e-40, -1e-40, 0.0, -0.0],
        "single": [0.25],
        "certain": [20.0] + [0.0] * 15,
        "ladder": [f32(math.log(2.0**-k)) for k in range(1, 9)],
    }


def number(x):
    return x if math.isfinite(x) else ("inf" if x > 0 else "-inf")


def numbers(row):
    return [number(x) for x in row]


def main():
    rng = random.Random(20_260_101)
    cases, doubtful = [], 0

    def add(stage, name, row, parameters, make, unordered=False):
        nonlocal doubtful
        try:
            expected = make()
        except Doubtful:
            doubtful += 1
            return
        case = {"stage": stage, "logits": name, **parameters, "expected": numbers(expected)}
        if unordered:
            case["unordered"] = True
        cases.append(case)

    logits = rows(rng)
    for name, row in logits.items():
        n = len(row)
        for p in (1e-9, 0.05, 0.25, 0.5, 0.9, 0.999, 1.0):
            add("top_p", name, row, {"p": p}, lambda: top_p(row, p))
        for p in (0.0, 1e-9, 0.05, 0.5, 1.0):
            add("min_p", name, row, {"p": p}, lambda: min_p(row, p))
        # Differences beyond float32 are infinite there.
        if all(not math.isfinite(x) or abs(x) < 1e18 for x in row):
            for deviations in (0.3, 1.0, 2.0):
                add("top_n_sigma", name, row, {"n": deviations}, lambda: top_n_sigma(row, deviations))
        for p in (1e-3, 0.2, 0.5, 0.9, 0.99):
            add("typical_p", name, row, {"p": p}, lambda: typical_p(row, p))
        for k in (1, 2, n - 1, n, n + 3):
            if k > 0:
                add("top_k", name, row, {"k": k}, lambda: top_k(row, k), unordered=len(set(row)) < n)
        for t in (0.0, 0.1, 0.3, 0.5):
            for spared in ([], [0, n - 1]):
                add("xtc", name, row, {"threshold": t, "spared": spared}, lambda: xtc(row, t, spared))
        for t in (0.5, 1.0, 2.0):
            if all(not math.isfinite(x) or abs(x) < 1e38 for x in row):
                add("temperature", name, row, {"t": t}, lambda: temperature(row, t))
        history = [0, n - 1, 0, n // 2]
        for penalty in (1.0, 1.25, 0.5):
            if all(not math.isfinite(x) or abs(x) < 1e38 for x in row):
                parameters = {"history": history, "penalty": penalty}
                add("repeat_penalty", name, row, parameters, lambda: repeat_penalty(row, history, penalty))
        for presence, frequency in ((1.0, 0.0), (0.0, 0.5), (-1.0, 0.25)):
            parameters = {"tokens": history, "presence": presence, "frequency": frequency}
            add("count_penalty", name, row, parameters, lambda: count_penalty(row, history, presence, frequency))
        biases = {0: 2.5, n - 1: -1.0} if n > 1 else {0: 2.5}
        parameters = {"biases": [[i, b] for i, b in biases.items()]}
        add("bias", name, row, parameters, lambda: bias(row, biases))
        if max(row) > -INF:
            add("logprobs", name, row, {}, lambda: logprobs(row))

    chains = []
    base = [f32(math.log(q)) for q in (0.02, 0.3, 0.08, 0.2, 0.1, 0.25, 0.05)]
    for options in (
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.72, "min_p": 0.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.95, "min_p": 0.3, "top_k": 6},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.15},
        {"temperature": 1.2, "top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.22, "top_k": 3},
        {"temperature": 1.0, "logit_bias": {"0": 3.0, "1": -2.0}, "banned_tokens": [5]},
        {"temperature": 1e-3},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 2.5, "top_p": 0.7, **FIRST},
        {"temperature": 0.4, "top_p": 0.8, **FIRST},
        {"temperature": 1.7, "min_p": 0.4, **FIRST},
        {"temperature": 1.7, "top_p": 0.75, "min_p": 0.55, "top_k": 5, **FIRST},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 4, **FIRST},
        {"temperature": 2.0, "top_k": 6, "xtc_probability": 1.0, "xtc_threshold": 0.17, **FIRST},
        {"temperature": 1.5, "xtc_probability": 1.0, "xtc_threshold": 0.15, **FIRST},
        {"temperature": 1.3, "top_p": 0.95, "xtc_probability": 1.0, "xtc_threshold": 0.2, **FIRST},
        {"temperature": 1.4, "top_n_sigma": 1.1},
        {"temperature": 1.0, "top_n_sigma": 1.5, "top_k": 4, "top_p": 0.85},
        {"temperature": 0.9, "typical_p": 0.5},
        {"temperature": 1.3, "typical_p": 0.8, "top_k": 3},
        {"temperature": 1.0, "typical_p": 0.78, "min_p": 0.3, "xtc_probability": 1.0, "xtc_threshold": 0.25},
        {"temperature": 1.8, "top_n_sigma": 1.1, "top_p": 0.8, **FIRST},
        {"temperature": 1.6, "typical_p": 0.6, **FIRST},
        {"temperature": 0.5, "typical_p": 0.55, "top_k": 5, **FIRST},
        {"temperature": 1.2, "top_p": 0.95, "typical_p": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.2, **FIRST},
    ):
        row = list(base)
        row = bias(row, {int(i): b for i, b in options.get("logit_bias", {}).items()})
        for i in options.get("banned_tokens", []):
            row[i] = -INF
        first = "sampler_order" in options
        if first:
            row = temperature(row, options["temperature"])
        if options.get("top_n_sigma"):
            row = top_n_sigma(row, options["top_n_sigma"])
        if "typical_p" in options and not first:
            row = typical_p(row, options["typical_p"])
        if first:
            row = top_k(row, options["top_k"]) if options.get("top_k") else row
        row = top_p(row, options.get("top_p", 1.0))
        row = min_p(row, options.get("min_p", 0.0))
        if "typical_p" in options and first:
            row = typical_p(row, options["typical_p"])
        if options.get("xtc_probability"):
            row = xtc(row, options["xtc_threshold"], [])
        if not first:
            row = top_k(row, options["top_k"]) if options.get("top_k") else row
            row = [x / options["temperature"] for x in row]
        chains.append({"options": options, "probabilities": softmax(row)})

    print(f"{len(cases)} cases, {doubtful} left out as doubtful, {len(chains)} chains", file=sys.stderr)
    out = {
        "numpy": np.__version__,
        "logits": {name: numbers(row) for name, row in logits.items()},
        "cases": cases,
        "chain_logits": base,
        "chains": chains,
    }
    # A case a line, so that changes can be read.
    text = json.dumps(out, separators=(",", ":")).replace('{"stage"', '\n{"stage"').replace('{"options"', '\n{"options"')
    print(text)


if __name__ == "__main__":
    main()
