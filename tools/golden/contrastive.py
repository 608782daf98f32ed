"""Makes tests/fixtures/training/contrastive.json: steps of contrastive training on the tiny encoders, on torch.

The vectors are those of sentence-transformers, and the loss is its MultipleNegativesRankingLoss. An own LoRA layer replaces some
linear layers; torch computes the gradients, and the steps are plain gradient descent in float64. Pins: requirements-encoders.txt.

    python tools/golden/contrastive.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Else datasets.py beside this file stands for the package of that name.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

try:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
except ImportError:
    from sentence_transformers.losses import MultipleNegativesRankingLoss

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
OUT = FIXTURES / "training" / "contrastive.json"
RANK, SCALE = 2, 4.0
# The loss of some random models is steep, so that longer steps would amplify rounding errors.
RATES = {"modernbert": 0.002, "embeddinggemma": 0.002}
MODELS = {
    "bert": ["query", "value", "output.dense"],
    "bert-dense": ["key", "intermediate.dense"],
    "roberta": ["query", "output.dense"],
    "xlm-roberta": ["value"],
    "modernbert": ["Wqkv", "Wo"],
    "nomic-bert": ["Wqkv", "fc11", "fc2"],
    "embeddinggemma": ["q_proj", "v_proj", "down_proj"],
}
BATCHES = [
    [
        {"anchor": "Where does water go?", "positive": "Rivers carry water to the sea."},
        {"anchor": "a fox", "positive": "The quick brown fox jumps over the dog."},
        {"anchor": "bread", "positive": "Bread is baked from flour and yeast."},
    ],
    [
        {"anchor": "the capital of France", "positive": "Paris", "negative": "Rome is in Italy."},
        {"anchor": "sleep", "positive": "A cat sleeps on the window sill.", "negative": "a list of numbers"},
    ],
    [
        {"anchor": "sort numbers", "positive": "How do I sort a list?", "negative": "salt"},
        {"anchor": "Köln", "positive": "Grüße aus Köln!", "negative": "The lazy dog."},
    ],
]


# Layers of transformers' NomicBert, with the matrix of the checkpoint and the third of its rows.
NOMIC = {
    "self_attn.q_proj": ("attn.Wqkv", 0),
    "self_attn.k_proj": ("attn.Wqkv", 1),
    "self_attn.v_proj": ("attn.Wqkv", 2),
    "self_attn.o_proj": ("attn.out_proj", None),
    "mlp.up_proj": ("mlp.fc11", None),
    "mlp.gate_proj": ("mlp.fc12", None),
    "mlp.down_proj": ("mlp.fc2", None),
}


class Lora(torch.nn.Module):
    """`W x + b + SCALE * B A x`, with a part of B's rows if the layer is a part of a matrix."""

    def __init__(self, linear: torch.nn.Linear, params: torch.nn.ParameterDict, part: int | None) -> None:
        super().__init__()
        self.linear, self.params, self.part = linear, params, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.params["a"], self.params["b"]
        if self.part is not None:
            b = b.chunk(3)[self.part]
        return self.linear(x) + SCALE * (x @ a.T) @ b.T


def matrix_of(model: str, name: str) -> tuple[str, int | None]:
    """The matrix of the checkpoint that the layer `name` has, and the third of its rows."""
    if model != "nomic-bert":
        return name, None
    layer, _, rest = name.removeprefix("layers.").partition(".")
    matrix, part = NOMIC[rest]
    return f"encoder.layers.{layer}.{matrix}", part


def adapted(model: str, network: torch.nn.Module, targets: list[str]) -> dict[str, torch.nn.Parameter]:
    """Puts LoRA layers into the network, and returns their parameters by the names of the checkpoint."""
    rng = np.random.default_rng(5)
    linears = [(n, m) for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    shared: dict[str, torch.nn.ParameterDict] = {}
    for name, linear in sorted(linears):
        if not any(c.isdigit() for c in name):
            continue
        matrix, part = matrix_of(model, name)
        if not any(matrix.endswith(f".{t}") for t in targets):
            continue
        if matrix not in shared:
            rows = linear.out_features * (1 if part is None else 3)
            draw = lambda *shape: torch.tensor(np.round(rng.normal(0, 0.1, shape), 4), dtype=torch.float64)
            shared[matrix] = torch.nn.ParameterDict({"a": draw(RANK, linear.in_features), "b": draw(rows, RANK)})
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, Lora(linear, shared[matrix], part))
    return {f"{name}.lora_{end}": pair[end] for name, pair in shared.items() for end in ("a", "b")}


def run(name: str, targets: list[str], similarity: float) -> dict[str, Any]:
    model = SentenceTransformer(str(FIXTURES / "encoders" / name), device="cpu").to(torch.float64)
    for p in model.parameters():
        p.requires_grad_(False)
    network = model[0].auto_model
    params = adapted(name, network, targets)
    loss_of = MultipleNegativesRankingLoss(model, scale=similarity)
    model.eval()
    prompt = model.prompts.get(model.default_prompt_name or "", "")
    start = {n: p.detach().numpy().ravel().tolist() for n, p in params.items()}
    losses, rate = [], RATES.get(name, 0.02)
    for batch in BATCHES:
        columns = [c for c in ("anchor", "positive", "negative") if c in batch[0]]
        features = [model.tokenize([prompt + line[c] for line in batch]) for c in columns]
        loss = loss_of(features, None)
        losses.append(float(loss))
        grads = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            for p, grad in zip(params.values(), grads):
                p -= rate * grad
    end = {n: [round(x, 7) for x in p.detach().numpy().ravel().tolist()] for n, p in params.items()}
    how = {"name": name, "targets": targets, "similarity_scale": similarity, "rate": rate}
    return {**how, "start": start, "losses": losses, "end": end}


def main() -> None:
    torch.manual_seed(0)
    runs = [run(name, targets, 20.0 if i % 2 == 0 else 5.0) for i, (name, targets) in enumerate(MODELS.items())]
    golden = {"rank": RANK, "scale": SCALE, "batches": BATCHES, "runs": runs}
    OUT.write_text(json.dumps(golden) + "\n")
    for one in runs:
        print(one["name"], one["losses"], len(one["start"]))


if __name__ == "__main__":
    main()
