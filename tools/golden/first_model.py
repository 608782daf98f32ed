"""Makes tests/fixtures/first-model/golden.json: what mlx-lm computes from the first model's weights in float32.

The GGUF is read with the Python `gguf` package and dequantized to float32; mlx-lm's llama runs on that on the CPU.
Token ids come from plain Python (plain_bpe.py) and must equal those of `tokenizers` and, where it is installed, of
llama.cpp (llama-cpp-python). Chats are rendered by Jinja2. One prompt is computed a second time in numpy, in float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Callable

import mlx_reference as reference  # first: it chooses the CPU
import numpy as np
from tokenizers import Tokenizer

import chat
import first_model_file
import numpy_llama
from gguf_model import GgufModel
from plain_bpe import PlainBpe

ROOT = Path(__file__).resolve().parents[2]
GREEDY_TOKENS = 24
TOP = 50

PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Übung macht den Meister: 12 + 345 = ",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Name three rivers in Europe."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Hello! My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, nice to meet you!"},
        {"role": "user", "content": "What is my name?"},
    ],
]


def llama_cpp_encoder(path: Path) -> Callable[[str], list[int]] | None:
    """llama.cpp's own tokenization, if llama-cpp-python is installed."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    llama = Llama(str(path), vocab_only=True, verbose=False)
    return lambda text: llama.tokenize(text.encode(), add_bos=False, special=True)


class Encoder:
    """Encodes with every tokenizer there is; they must agree."""

    def __init__(self, model: GgufModel):
        self._plain = PlainBpe.from_gguf(model)
        fast = Tokenizer.from_str(json.dumps(model.tokenizer_json()))
        self._others = {"tokenizers": lambda text: fast.encode(text, add_special_tokens=False).ids}
        if llama_cpp := llama_cpp_encoder(model.path):
            self._others["llama-cpp-python"] = llama_cpp

    @property
    def names(self) -> list[str]:
        return ["plain Python (tools/golden/plain_bpe.py)", *self._others]

    def encode(self, text: str) -> list[int]:
        ids = self._plain.encode(text)
        for name, encode in self._others.items():
            if (other := encode(text)) != ids:
                raise SystemExit(f"{name} encodes {text!r} as {other}, plain Python as {ids}")
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._plain.decode(ids)


def digits9(value: float) -> float:
    """Nine significant digits: a float32 comes back exactly."""
    return float(f"{value:.9g}")


def numbers(model: Any, encoder: Encoder, ids: list[int], eos: int) -> dict[str, Any]:
    """Logits after `ids` and the greedy continuation."""
    last = reference.logits(model, ids)[-1]
    top = np.argsort(-last, kind="stable")[:TOP]
    wide = last.astype(np.float64)
    path = reference.greedy(model, ids, GREEDY_TOKENS)
    until_eos = path.tokens[: path.tokens.index(eos)] if eos in path.tokens else path.tokens
    return {
        "tokens": ids,
        "top": [[int(i), digits9(last[i])] for i in top],
        "summary": {
            "mean": digits9(wide.mean()),
            "std": digits9(wide.std()),
            "logsumexp": digits9(wide.max() + np.log(np.exp(wide - wide.max()).sum())),
        },
        "greedy": path.tokens,
        "greedy_text": encoder.decode(path.tokens),
        "greedy_margins": [float(f"{margin:.5g}") for margin in path.margins],
        "min_margin": float(f"{min(path.margins):.5g}"),
        "reply": encoder.decode(until_eos),
        "reply_ends": eos in path.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "golden", help="where the model is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "first-model" / "golden.json")
    args = parser.parse_args()

    source = GgufModel.open(first_model_file.fetch(args.work))
    config, weights = source.config(), source.weights()
    encoder = Encoder(source)
    eos = config["eos_token_id"]
    model = reference.dense_model(config, weights)

    plain = []
    for text in PLAIN:
        plain.append({"prompt": text, **numbers(model, encoder, encoder.encode(text), eos)})
        print(f"{text!r} -> {plain[-1]['greedy_text']!r}, min margin {plain[-1]['min_margin']}", flush=True)
    chats = []
    template = source.metadata["tokenizer.chat_template"]
    for messages in CHATS:
        text = chat.render(template, messages)
        chats.append({"messages": messages, "prompt": text, **numbers(model, encoder, encoder.encode(text), eos)})
        print(f"chat -> {chats[-1]['reply']!r}, min margin {chats[-1]['min_margin']}", flush=True)

    ids = plain[0]["tokens"]
    other = numpy_llama.forward(config, weights, ids)
    difference = float(np.abs(other - reference.logits(model, ids)).max())
    print(f"largest difference from numpy in float64: {difference:.3g}")
    if difference > 1e-3:
        raise SystemExit("numpy and mlx-lm disagree")

    golden = {
        "made_by": "tools/golden/first_model.py",
        "reference": reference.versions(),
        "model": {
            "package": f"{first_model_file.PACKAGE}=={first_model_file.VERSION}",
            "wheel_sha256": first_model_file.WHEEL_SHA256,
            "file": first_model_file.MEMBER,
            "gguf_sha256": first_model_file.GGUF_SHA256,
        },
        "tokenizers": encoder.names,
        "numpy_float64": {"prompt": PLAIN[0], "max_difference_all_positions": float(f"{difference:.3g}")},
        "eos_token": eos,
        "plain": plain,
        "chat": chats,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
