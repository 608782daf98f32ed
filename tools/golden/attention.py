"""Makes metal-backend/tests/fixtures/attention.json: attention over 2,048 keys, by numpy in float64.

The inputs are not in the file: `metal-backend/src/nn/attention_tests.rs` makes the same ones with the same generator.

    python tools/golden/attention.py            # needs numpy
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 64, 2048
# Queries are long: scores reach 40, so that their rounding shows in the weights.
FACTOR = np.float32(24)
POSITIONS = [700, 2047]
SHOWN_HEADS = [0, 3]


def numbers(count: int, seed: int) -> np.ndarray:
    """Pseudo-random numbers in -1..1, 24 bits each."""
    state, values = seed, []
    for _ in range(count):
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        values.append(np.float32(state >> 40) / np.float32(2**23) - np.float32(1))
    return np.array(values, np.float32)


def main() -> None:
    width = (HEADS + 2 * KV_HEADS) * DIM
    rows = np.stack([numbers(width, i + 1) for i in range(LENGTH)])
    rows[:, : HEADS * DIM] *= FACTOR
    rows = rows.astype(np.float64).reshape(LENGTH, HEADS + 2 * KV_HEADS, DIM)
    queries, keys, values = np.split(rows, [HEADS, HEADS + KV_HEADS], axis=1)
    heads_out = []
    for position in POSITIONS:
        for head in SHOWN_HEADS:
            group = head // (HEADS // KV_HEADS)
            seen = slice(0, position + 1)
            scores = keys[seen, group] @ queries[position, head] / np.sqrt(np.float64(DIM))
            weights = np.exp(scores - scores.max())
            outputs = weights @ values[seen, group] / weights.sum()
            heads_out.append({"position": position, "head": head, "outputs": outputs.tolist()})
    golden = {"made_by": "tools/golden/attention.py", "numpy": np.__version__, "length": LENGTH, "found": heads_out}
    path = ROOT / "metal-backend/tests/fixtures/attention.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
