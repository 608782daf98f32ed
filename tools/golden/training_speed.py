"""Steps per second of Python mlx-lm on a model directory, to set beside `cargo test --test first_model training_speed`.

    python training_speed.py DIRECTORY [STEPS]

LoRA of rank 8 on q_proj and v_proj of all blocks, four sequences of 64 tokens, AdamW, on the CPU. Numbers of half a float
become float32, which is what such a CPU is fast with.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mlx_reference  # noqa: F401  first: it chooses the CPU
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def main() -> None:
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    model, _ = load_model(Path(sys.argv[1]))
    model.set_dtype(mx.float32)
    model.freeze()
    parameters = {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    linear_to_lora_layers(model, len(model.layers), parameters)
    model.train()
    ids = mx.array([[3 + (37 * i + 11 * j * j) % 4000 for j in range(65)] for i in range(4)])
    lengths = mx.array([[1, 64]] * 4)
    step = nn.value_and_grad(model, default_loss)
    optimizer = optimizers.AdamW(learning_rate=1e-4)

    def one() -> float:
        (loss, _), gradients = step(model, ids, lengths)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        return loss.item()

    first = one()
    begin = time.perf_counter()
    losses = [one() for _ in range(steps)]
    seconds = (time.perf_counter() - begin) / steps
    print(f"mlx-lm: {1 / seconds:.3f} steps/s, {256 / seconds:.0f} tokens/s; losses {first:.4f} {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
