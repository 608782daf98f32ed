"""Golden numbers of training data: ids, mask offsets and batches of mlx-lm's own data sets.

Runs mlx-lm's `tuner/datasets.py` and `iterate_batches` on a tiny model's tokenizer and a few lines of each format.

    target/golden/venv/bin/python tools/golden/datasets.py

mlx-lm 0.30.7 cannot mask prompts of completions: it gives one message to the template where a list belongs. Those
offsets are asked for with the list, which is what it gives to chats.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.datasets import CacheDataset, ChatDataset, CompletionsDataset, TextDataset
from mlx_lm.tuner.trainer import iterate_batches

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tests/fixtures/tiny/llama"
OUT = ROOT / "metal-backend/tests/fixtures/datasets.json"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = [
    {"messages": [say("user", "Hi"), say("assistant", "Hello!")]},
    {"messages": [say("system", "You are the fox."), say("user", "Who are you?"), say("assistant", "The fox.")]},
    {"messages": [say("user", "one"), say("assistant", "two"), say("user", "and?"), say("assistant", "")]},
    {"messages": [say("user", "the lazy dog"), say("assistant", "naïve 漢字 🙂"), say("user", "last word is the user's")]},
]
COMPLETIONS = [
    {"prompt": "What is the capital of France?", "completion": "Paris."},
    {"prompt": "", "completion": " spaces  \n"},
    {"prompt": "12 + 30 =", "completion": "42"},
]
TEXT = [
    {"text": "the quick brown fox"},
    {"text": "<|im_start|>user\nHi<|im_end|>"},
    {"text": " \n"},
]
LENGTHS = [70, 3, 33, 32, 64, 65, 5, 90, 31, 12, 8]


def batches(tokens: list[list[int]], cached: bool, size: int, most: int, seed: int) -> list[dict]:
    """Two epochs. Ids of row n are all n + 1."""
    rows = [(ids, 2) for ids in tokens]

    class Lines:
        """As mlx-lm's data sets: an item is a line of JSON, here with one field."""

        def __getitem__(self, n):
            return {"n": n}

        def __len__(self):
            return len(rows)

        def process(self, line):
            return rows[line["n"]]

    data = CacheDataset(Lines()) if cached else rows
    if seed == 0:
        # `iterate_batches` takes 0 for no seed; the program that calls it has seeded before.
        np.random.seed(0)
    stream = iterate_batches(data, size, most, loop=True, seed=seed)
    out = []
    for _ in range(2 * (len(rows) // size)):
        batch, spans = next(stream)
        out.append({"width": batch.shape[1], "tokens": np.array(batch).ravel().tolist(), "spans": spans.tolist()})
    return out


def main() -> None:
    tokenizer = load_tokenizer(ROOT / MODEL)
    cases = []
    for mask in (False, True):
        data = ChatDataset(CHAT, tokenizer, mask_prompt=mask)
        cases += [(line, mask, *data.process(line)) for line in CHAT]
    data = CompletionsDataset(COMPLETIONS, tokenizer, "prompt", "completion", False)
    for line in COMPLETIONS:
        ids, offset = data.process(line)
        cases.append((line, False, ids, offset))
        ask = [say("user", line["prompt"])]
        offset = len(tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_dict=False))
        cases.append((line, True, ids, offset))
    data = TextDataset(TEXT, tokenizer)
    cases += [(line, False, *data.process(line)) for line in TEXT]

    tokens = [[n + 1] * length for n, length in enumerate(LENGTHS)]
    streams = []
    for cached, size, most, seed in [(False, 2, 2048, 1), (False, 3, 64, 0), (True, 4, 80, 7), (True, 1, 33, 2**32 - 1)]:
        streams.append({
            "by_length": not cached, "batch_size": size, "max_seq_length": most, "seed": seed,
            "batches": batches(tokens, cached, size, most, seed),
        })
    permutations = []
    for seed in (0, 1, 42, 2**32 - 1):
        np.random.seed(seed)
        permutations.append({"seed": seed, "orders": [np.random.permutation(n).tolist() for n in (5, 1, 32, 33, 100)]})

    golden = {
        "made_by": {name: version(name) for name in ("mlx-lm", "transformers", "tokenizers", "numpy")},
        "model": MODEL,
        "lines": [{"line": line, "mask": mask, "ids": ids, "offset": offset} for line, mask, ids, offset in cases],
        "lengths": LENGTHS,
        "streams": streams,
        "permutations": permutations,
    }
    OUT.write_text(json.dumps(golden, separators=(",", ":"), ensure_ascii=False) + "\n")
    print(OUT.relative_to(ROOT), OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
