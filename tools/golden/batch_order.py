"""Makes metal-backend/tests/fixtures/batch_order.json: the batches of mlx-lm's own `train`, in its order.

Runs `mlx_lm.tuner.trainer.train` for some steps on the tiny llama, with validations between, and writes down what its
`iterate_batches` gave to each training step. Lines have different numbers of fields, by which mlx-lm 0.30.7 sorts.

    target/golden/venv/bin/python tools/golden/batch_order.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_reference as reference  # first: it chooses the CPU
import mlx.optimizers as optimizers
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.datasets import CacheDataset, load_local_dataset
from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tests/fixtures/tiny/llama"
OUT = ROOT / "metal-backend/tests/fixtures/batch_order.json"
WORDS = "the quick brown fox jumps over a lazy dog while nobody looks at it".split()
# Lines to learn from, to validate on, rows of a batch, batches, batches from a validation to the next, seed, batches of a
# validation.
CASES = [
    (7, 5, 2, 12, 4, 0, 25),
    (7, 5, 2, 12, 4, 0, 0),
    (9, 4, 2, 13, 1, 3, 1),
    (6, 0, 3, 9, 2, 7, 25),
    (8, 4, 4, 7, 100, 1, -1),
]


def lines(n: int) -> list[dict[str, Any]]:
    """Texts of different lengths, of which some have one or two fields more."""
    all_lines = []
    for i in range(n):
        line: dict[str, Any] = {"text": " ".join(WORDS[: 1 + (i * 5) % len(WORDS)])}
        for extra in range((i * 2) % 3):
            line[f"extra{extra}"] = i
        all_lines.append(line)
    return all_lines


def case(train_lines: int, valid_lines: int, size: int, iters: int, every: int, seed: int, val: int) -> dict[str, Any]:
    model, _ = load_model(ROOT / MODEL)
    model.freeze()
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    tokenizer = load_tokenizer(ROOT / MODEL)
    parts = {"train": lines(train_lines), "valid": lines(valid_lines)}
    config = SimpleNamespace(mask_prompt=False)
    seen: list[list[list[int]]] = []

    def watched(*args: Any, loop: bool = False, **kwargs: Any):
        for batch, spans in iterate_batches(*args, loop=loop, **kwargs):
            if loop:
                rows = zip(np.array(batch).tolist(), np.array(spans).tolist())
                seen.append([row[:length] for row, (_, length) in rows])
            yield batch, spans

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name, content in parts.items():
            if content:
                text = "".join(json.dumps(line) + "\n" for line in content)
                (directory / f"{name}.jsonl").write_text(text)
        data = load_local_dataset(directory, tokenizer, config)
        # As mlx_lm.lora does.
        np.random.seed(seed)
        train(
            model=model,
            optimizer=optimizers.Adam(learning_rate=1e-5),
            train_dataset=CacheDataset(data[0]),
            val_dataset=CacheDataset(data[1]) if data[1] else [],
            args=TrainingArgs(
                batch_size=size,
                iters=iters,
                val_batches=val if data[1] else 0,
                steps_per_report=100,
                steps_per_eval=every,
                steps_per_save=1000,
                max_seq_length=64,
                adapter_file=str(directory / "adapters.safetensors"),
            ),
            iterate_batches=watched,
        )
    return {
        "train": parts["train"],
        "valid": parts["valid"],
        "batch_size": size,
        "iters": iters,
        "steps_per_eval": every,
        "seed": seed,
        "val_batches": val,
        "batches": seen[:iters],
    }


def main() -> None:
    golden = {"versions": reference.versions(), "model": MODEL, "cases": [case(*one) for one in CASES]}
    OUT.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
