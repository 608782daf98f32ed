#!/usr/bin/env python3
"""A tiny xLSTM with `use_bias`, and its logits from a computation of its own in float64.

It takes the fixture `tests/fixtures/tiny/xlstm` of architectures.py, adds a bias wherever transformers has one with
`use_bias` (projections, norms of blocks, feed-forward parts; not the norm behind the blocks), and computes every position one after another by the formulas of the
papers (Beck et al. 2024, arXiv:2405.04517, section 2.3; arXiv:2503.13427). The same code without biases must give the
logits that transformers gave for the fixture: else it writes nothing. Needs numpy.

    python tools/golden/xlstm_bias.py
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
SOURCE, TARGET = FIXTURES / "tiny" / "xlstm", FIXTURES / "xlstm_bias"
SEED = 39
GREEDY = 12
Arrays = dict[str, np.ndarray]


def read(path: Path) -> Arrays:
    """The tensors of a file of bfloat16, in float64."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    golden = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        assert about["dtype"] == "BF16", about
        begin, end = (8 + size + at for at in about["data_offsets"])
        bits = np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16
        golden[name] = bits.view("<f4").astype(np.float64).reshape(about["shape"])
    return golden


def write(path: Path, tensors: Arrays) -> None:
    """Writes numbers that bfloat16 has exactly."""
    header, parts, at = {}, [], 0
    for name, values in sorted(tensors.items()):
        part = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def short(values: np.ndarray) -> np.ndarray:
    """Cut to bfloat16."""
    return (values.astype("<f4").view("<u4") & 0xFFFF0000).astype("<u4").view("<f4").astype(np.float64)


def with_biases(tensors: Arrays) -> Arrays:
    """A bias beside each weight that has one with `use_bias` and none without."""
    draw = np.random.default_rng(SEED)
    tensors_by_name = dict(tensors)
    for name, values in tensors.items():
        bias = name.replace(".weight", ".bias")
        if name.startswith(("lm_head", "backbone.embeddings", "backbone.out_norm")) or bias in tensors:
            continue
        tensors_by_name[bias] = short(draw.normal(0.0, 0.2, values.shape[0]))
    return tensors_by_name


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


class Model:
    def __init__(self, tensors: Arrays, config: dict) -> None:
        self.t, self.c = tensors, config

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self.t[f"{name}.weight"] @ x
        return y + self.t.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x / np.sqrt(np.mean(x * x) + self.c["norm_eps"])
        return x * self.t[f"{name}.weight"] + self.t.get(f"{name}.bias", 0.0)

    def mixer(self, name: str, x: np.ndarray, state: dict) -> np.ndarray:
        heads, cap = self.c["num_heads"], self.c["gate_soft_cap"]
        by_head = lambda part: self.linear(f"{name}.{part}", x).reshape(heads, -1)  # noqa: E731
        q, k, v = by_head("q"), by_head("k"), by_head("v")
        q = q / np.sqrt(q.shape[1])
        soft = lambda gate: cap * np.tanh(gate / cap)  # noqa: E731
        i = soft(self.linear(f"{name}.igate_preact", x))
        f = -np.logaddexp(0.0, -soft(self.linear(f"{name}.fgate_preact", x)))
        if not state:
            state |= {"C": np.zeros((heads, k.shape[1], v.shape[1])), "n": np.zeros_like(k), "m": np.zeros(heads)}
        m = np.maximum(f + state["m"], i)
        keep, take = np.exp(f + state["m"] - m), np.exp(i - m)
        memory = keep[:, None, None] * state["C"] + take[:, None, None] * k[:, :, None] * v[:, None, :]
        n = keep[:, None] * state["n"] + take[:, None] * k
        state |= {"C": memory, "n": n, "m": m}
        size = np.maximum(np.abs(np.sum(q * n, axis=1)), np.exp(-m)) + self.c["eps"]
        h = np.einsum("hk,hkv->hv", q, memory) / size[:, None]
        h = h - h.mean(axis=1, keepdims=True)
        h = h / np.sqrt(np.mean(h * h, axis=1, keepdims=True) + self.c["norm_eps"])
        h = h.reshape(-1) * self.t[f"{name}.multihead_norm.weight"] + self.t.get(f"{name}.multihead_norm.bias", 0.0)
        return self.linear(f"{name}.out_proj", h * sigmoid(self.linear(f"{name}.ogate_preact", x)))

    def step(self, token: int, states: list[dict]) -> np.ndarray:
        x = self.t["backbone.embeddings.weight"][token]
        for block, state in enumerate(states):
            name = f"backbone.blocks.{block}"
            x = x + self.mixer(f"{name}.mlstm_layer", self.norm(f"{name}.norm_mlstm", x), state)
            y = self.norm(f"{name}.norm_ffn", x)
            gate = self.linear(f"{name}.ffn.proj_up_gate", y)
            up = self.linear(f"{name}.ffn.proj_up", y)
            x = x + self.linear(f"{name}.ffn.proj_down", gate * sigmoid(gate) * up)
        logits = self.linear("lm_head", self.norm("backbone.out_norm", x))
        cap = self.c["output_logit_soft_cap"]
        return cap * np.tanh(logits / cap)

    def states(self) -> list[dict]:
        return [{} for _ in range(self.c["num_blocks"])]

    def logits(self, tokens: list[int]) -> np.ndarray:
        states = self.states()
        return np.stack([self.step(token, states) for token in tokens])

    def greedy(self, tokens: list[int]) -> tuple[list[int], float]:
        """The most probable continuation, and the least distance to a second one."""
        states, said, margin = self.states(), [], np.inf
        for token in tokens:
            logits = self.step(token, states)
        for _ in range(GREEDY):
            second, first = np.sort(logits)[-2:]
            margin = min(margin, first - second)
            said.append(int(np.argmax(logits)))
            logits = self.step(said[-1], states)
        return said, float(margin)


def rounded(values: np.ndarray) -> list:
    return [float(f"{v:.7g}") for v in values]


def main() -> None:
    config = json.loads((SOURCE / "config.json").read_text())
    golden = json.loads((SOURCE / "golden.json").read_text())
    plain = read(SOURCE / "model.safetensors")
    for case in golden["prompts"]:
        ours = Model(plain, config).logits(case["tokens"])
        difference = np.abs(ours[-1] - np.array(case["logits"])).max()
        assert difference < 1e-4, f"not what transformers gave: {difference}"
    TARGET.mkdir(exist_ok=True)
    biased = with_biases(plain)
    write(TARGET / "model.safetensors", biased)
    (TARGET / "config.json").write_text(json.dumps(config | {"use_bias": True}, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (TARGET / name).write_bytes((SOURCE / name).read_bytes())
    model, prompts = Model(biased, config), []
    for case in golden["prompts"]:
        tokens = case["tokens"]
        all_logits = model.logits(tokens)
        said, margin = model.greedy(tokens)
        prompts.append({"tokens": tokens, "logits_all": [rounded(row) for row in all_logits], "greedy": said, "margin": margin})
    made = {"made_by": "tools/golden/xlstm_bias.py", "reference": {"numpy": np.__version__, "compute": "float64"}}
    (TARGET / "golden.json").write_text(json.dumps(made | {"prompts": prompts}) + "\n")
    print([(len(p["tokens"]), p["greedy"], p["margin"]) for p in prompts])


if __name__ == "__main__":
    main()
