"""Writes DIR/greedy.json: what mlx-lm answers with the weights of DIR, a directory of a real model as the Hugging Face Hub has it.

`tests/engine/real_models.rs` compares it with the engine. The weights are computed in float32 on the CPU, quantized ones with
float32 scales. Each token is checked against a pass without a cache, and comes with its margin over the second best.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Übung macht den Meister: 12 + 345 = ",
]
QUESTION = [{"role": "user", "content": "Name three rivers in Europe."}]


def widened(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


def answers(directory: Path, count: int) -> dict[str, object]:
    model, tokenizer = load(str(directory))
    model.update(tree_map(widened, model.parameters()))
    mx.eval(model.parameters())
    prompts = [(text, tokenizer.encode(text)) for text in TEXTS]
    if getattr(tokenizer, "chat_template", None):
        prompts.append((None, tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)))
    cases = []
    for text, ids in prompts:
        greedy = reference.greedy(model, ids, count)
        cases.append({"text": text, "tokens": ids, "greedy": greedy.tokens, "margins": greedy.margins})
    return {"versions": reference.versions(), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="greedy tokens after each prompt; default: 24")
    args = parser.parse_args()
    for directory in args.directories:
        measured = answers(directory, args.tokens)
        path = directory / "greedy.json"
        path.write_text(json.dumps(measured, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        least = min(min(case["margins"]) for case in measured["cases"])
        print(f"{path}: {len(measured['cases'])} prompts, the smallest margin {least:.2g}")


if __name__ == "__main__":
    main()
