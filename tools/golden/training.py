"""Makes tests/fixtures/training: adapters, losses and gradients of Python mlx-lm on the tiny checkpoints.

Each directory holds an adapter as mlx-lm writes it, the gradients of its numbers on the first batch, and golden.json:
the batches, the logits with that adapter, and the loss of each of ten steps. muon.json holds such losses of some of them with
Muon, which looks at the form of a matrix. optimizers.json holds what MLX's optimizers
make of two parameters. All on the CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
STEPS = 10


def rate_of(name: str) -> float:
    """A rate at which ten steps go far; smaller for gemma3, where mlx-lm rounds the factor on embeddings to bfloat16
    whatever it computes in, and a larger one would show that more than the training."""
    return 4e-3 if name.startswith("gemma3") else 1e-2


ATTENTION = ["self_attn.q_proj", "self_attn.v_proj"]
# Name, checkpoint, kind, batch size, blocks, layers.
CASES = [
    ("llama-1", "llama", "lora", 1, 3, ATTENTION + ["mlp.down_proj"]),
    ("llama-4", "llama", "lora", 4, 2, ATTENTION),
    ("llama-dora", "llama", "dora", 2, 2, ATTENTION),
    ("gemma3-1", "gemma3-text", "lora", 1, 7, ATTENTION),
    ("gemma3-4", "gemma3-text", "lora", 4, 3, ATTENTION),
    ("qwen3-moe-1", "qwen3-moe", "lora", 1, 2, ATTENTION),
    ("qwen3-moe-4", "qwen3-moe", "lora", 4, 2, ["self_attn.k_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj"]),
    ("qwen3-q4", "qwen3-q4", "lora", 4, 2, ATTENTION + ["mlp.up_proj"]),
    ("llama-q4-1", "llama-q4", "lora", 1, 2, ATTENTION + ["mlp.down_proj"]),
    ("gemma3-q4-4", "gemma3-text-q4", "lora", 4, 3, ATTENTION),
    ("mixtral-q4-4", "mixtral-q4", "lora", 4, 1, ["self_attn.q_proj", "block_sparse_moe.switch_mlp.gate_proj"]),
    ("llama-tied-table", "llama-tied-gqa", "lora", 2, 1, ["self_attn.q_proj", "model.embed_tokens"]),
    ("llama-full", "llama", "full", 2, 1, []),
]


def batches(seed: int, size: int, vocab: int) -> list[list[dict[str, Any]]]:
    """Three batches again and again: sequences of various lengths, some with a prompt that is not learned."""
    rng = np.random.default_rng(seed)
    different = [
        [
            {"ids": rng.integers(3, vocab, int(rng.integers(6, 24))).tolist(), "from": int(rng.integers(1, 5))}
            for _ in range(size)
        ]
        for _ in range(3)
    ]
    return [different[i % 3] for i in range(STEPS)]


def padded(batch: list[dict[str, Any]]) -> tuple[mx.array, mx.array]:
    """A batch as mlx-lm has it. Its loss counts targets of steps within the bounds, both included."""
    longest = max(len(one["ids"]) for one in batch)
    ids = mx.array([one["ids"] + [0] * (longest - len(one["ids"])) for one in batch])
    return ids, mx.array([[one["from"], len(one["ids"]) - 1] for one in batch])


def case(out: Path, name: str, checkpoint: str, kind: str, size: int, layers: int, keys: list[str]) -> None:
    """One directory."""
    mx.random.seed(7)
    model, config = load_model(FIXTURES / "tiny" / checkpoint)
    model.set_dtype(mx.float32)
    model.freeze()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    if kind == "full":
        for block in model.layers[-layers:]:
            block.unfreeze()
    else:
        linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
    # With B at zero the gradients of A would be zero too.
    started = [
        (path, 0.05 * mx.random.normal(value.shape) if path.endswith("lora_b") else value)
        for path, value in tree_flatten(model.trainable_parameters())
    ]
    model.load_weights(started, strict=False)
    model.train()
    directory = out / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), dict(started))
    settings = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")

    data = batches(11, size, config["vocab_size"])
    logits = reference.logits(model, data[0][0]["ids"])[-1]
    step = nn.value_and_grad(model, default_loss)
    optimizer = optimizers.AdamW(learning_rate=rate_of(name))
    losses = []
    for i, batch in enumerate(data):
        (loss, _), gradients = step(model, *padded(batch))
        if i == 0:
            mx.save_safetensors(str(directory / "gradients.safetensors"), dict(tree_flatten(gradients)))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
    golden = {
        "made_with": reference.versions(),
        "checkpoint": checkpoint,
        "rate": rate_of(name),
        "batches": data,
        "logits": [round(float(x), 6) for x in logits],
        "losses": losses,
    }
    (directory / "golden.json").write_text(json.dumps(golden) + "\n")


# Cases that Muon trains: matrices of both forms, experts, a table, and whole weights.
MUON = ["llama-1", "llama-dora", "qwen3-moe-4", "llama-tied-table", "llama-full"]


def muon_losses(out: Path, name: str) -> list[float]:
    """The losses of a case's batches, from its adapter, with Muon."""
    _, checkpoint, kind, _, layers, keys = next(one for one in CASES if one[0] == name)
    golden = json.loads((out / name / "golden.json").read_text())
    model, _ = load_model(FIXTURES / "tiny" / checkpoint)
    model.set_dtype(mx.float32)
    model.freeze()
    if kind == "full":
        for block in model.layers[-layers:]:
            block.unfreeze()
    else:
        parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
        linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
    model.load_weights(str(out / name / "adapters.safetensors"), strict=False)
    model.train()
    step = nn.value_and_grad(model, default_loss)
    optimizer = optimizers.Muon(learning_rate=MUON_RATE)
    losses = []
    for batch in golden["batches"]:
        (loss, _), gradients = step(model, *padded(batch))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses


MUON_RATE = 2e-3


OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (optimizers.AdamW, {"bias_correction": True}),
    "adamw_plain": (optimizers.AdamW, {"weight_decay": 0.1}),
    "adam": (optimizers.Adam, {"bias_correction": True}),
    "sgd": (optimizers.SGD, {}),
    "sgd_momentum": (optimizers.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "sgd_nesterov": (optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
    "lion": (optimizers.Lion, {"weight_decay": 0.1}),
    "adafactor": (optimizers.Adafactor, {"relative_step": False}),
    "adafactor_relative": (optimizers.Adafactor, {"relative_step": True, "beta_1": 0.9, "weight_decay": 0.1}),
    "muon": (optimizers.Muon, {}),
}


def optimizer_numbers() -> dict[str, Any]:
    """Two parameters after five steps of each optimizer."""
    rng = np.random.default_rng(3)
    shapes = {"matrix": (3, 5), "tall": (6, 2), "vector": (4,)}
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    steps = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(5)]
    listed = lambda tree: {name: np.array(value).ravel().tolist() for name, value in tree.items()}  # noqa: E731
    results = {}
    for name, (kind, settings) in OPTIMIZERS.items():
        rate = None if settings.get("relative_step") else 0.05
        optimizer = kind(learning_rate=rate, **settings)
        parameters = {name: mx.array(value) for name, value in start.items()}
        for gradients in steps:
            parameters = optimizer.apply_gradients({n: mx.array(g) for n, g in gradients.items()}, parameters)
            mx.eval(parameters, optimizer.state)
        results[name] = listed(parameters)
    clipped, norm = optimizers.clip_grad_norm({n: mx.array(g) for n, g in steps[0].items()}, 1.5)
    return {
        "made_with": reference.versions(),
        "shapes": shapes,
        "start": listed(start),
        "gradients": [listed(step) for step in steps],
        "results": results,
        "clipped": listed(clipped),
        "norm": norm.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FIXTURES / "training")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for one in CASES:
        case(out, *one)
    losses = {name: muon_losses(out, name) for name in MUON}
    (out / "muon.json").write_text(
        json.dumps({"made_with": reference.versions(), "rate": MUON_RATE, "losses": losses}) + "\n"
    )
    (out / "optimizers.json").write_text(json.dumps(optimizer_numbers()) + "\n")


if __name__ == "__main__":
    main()
