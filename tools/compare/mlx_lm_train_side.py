"""mlx-lm's side of the training benchmark: its own data, adapters and training loop, with their defaults.

Runs in the pinned environment. Takes the options of a run as JSON (names of mlx-lm's config) and prints one JSON object:
each step's seconds, loss and counted tokens, and the most memory of MLX that was in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "default"], default="cpu")
    parser.add_argument("options", help="a JSON object")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.device == "cpu":
        mx.set_default_device(mx.cpu)  # before mlx_lm makes its stream
    import numpy as np
    from mlx_lm import load
    from mlx_lm.lora import CONFIG_DEFAULTS, train_model
    from mlx_lm.tuner.datasets import load_dataset
    from mlx_lm.tuner.trainer import TrainingCallback

    options = SimpleNamespace(**(CONFIG_DEFAULTS | json.loads(args.options) | {"train": True, "steps_per_report": 1}))
    steps: list[dict[str, Any]] = []

    class Keep(TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            seconds = 1 / info["iterations_per_second"]
            tokens = round(info["tokens_per_second"] * seconds)
            steps.append({"seconds": seconds, "loss": info["train_loss"], "tokens": tokens})

    # What it tells on the way is not our output.
    with contextlib.redirect_stdout(sys.stderr):
        start = time.perf_counter()
        np.random.seed(options.seed)  # as mlx_lm.lora does
        model, tokenizer = load(options.model)
        load_seconds = time.perf_counter() - start
        train_set, _, _ = load_dataset(options, tokenizer)
        mx.reset_peak_memory()
        train_model(options, model, train_set, [], Keep())
    print(json.dumps({"steps": steps, "load_seconds": load_seconds, "peak_memory_bytes": mx.get_peak_memory()}))


if __name__ == "__main__":
    main()
