"""Numbers from Python mlx-lm: builds one of its models from named arrays, computes logits and greedy tokens.

Always on the CPU and, as the callers hand over float32 weights or scales, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

mx.set_default_device(mx.cpu)  # before mlx_lm.generate makes its stream

import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.utils import MODEL_REMAPPING  # noqa: E402


def versions() -> dict[str, str]:
    """What the numbers come from."""
    return {"mlx_lm": version("mlx-lm"), "mlx": version("mlx"), "device": "cpu", "compute": "float32"}


def empty_model(config: dict[str, Any]) -> nn.Module:
    """The mlx-lm model of a config, with weights of its own choice."""
    import importlib

    kind = MODEL_REMAPPING.get(config["model_type"], config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    return module.Model(module.ModelArgs.from_dict(config))


def dense_model(config: dict[str, Any], weights: dict[str, np.ndarray]) -> nn.Module:
    """The mlx-lm model of a config with exactly these float32 weights."""
    model = empty_model(config)
    model.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in weights.items()], strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model


def logits(model: nn.Module, ids: list[int]) -> np.ndarray:
    """Logits of every position, without a cache: float32 [len(ids), vocab]."""
    out = model(mx.array([ids]))[0]
    if out.dtype != mx.float32:
        raise ValueError(f"the model computes in {out.dtype}, not float32")
    return np.array(out)


@dataclass
class Greedy:
    """A greedy continuation and by how much each token won over the second best."""

    tokens: list[int]
    margins: list[float]


def greedy(model: nn.Module, ids: list[int], count: int) -> Greedy:
    """`count` most likely tokens after `ids` as mlx-lm generates them (end-of-text does not stop it).

    Each one is checked against a pass over the whole sequence without a cache.
    """
    tokens: list[int] = []
    margins: list[float] = []
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=count):
        top = np.sort(np.array(logprobs))[-2:]
        tokens.append(int(token))
        margins.append(float(top[1] - top[0]))
    one_pass = logits(model, ids + tokens[:-1])[len(ids) - 1 :]
    if (again := one_pass.argmax(axis=-1).tolist()) != tokens:
        raise ValueError(f"with a cache mlx-lm generates {tokens}, without one {again}: the margins are too small")
    return Greedy(tokens, margins)
