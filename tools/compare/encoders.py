"""Texts a second of all-MiniLM-L6-v2: `mlx embed` beside sentence-transformers on torch and onnxruntime.

All read the same token ids' texts, of about 16, 128 and 512 tokens, one at a time and 64 together. Each runs on the
cores that the process has. The program is measured in one process, through `mlx serve`'s library by the example
`embed_speed`; the others in this one. The order of the engines changes from round to round, and the best round of
each counts.

    python tools/compare/encoders.py --mlx target/release/examples/embed_speed --model DIR [--onnx FILE]

Needs requirements-encoders.txt of tools/golden, and onnxruntime with onnx and onnxscript for --onnx.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

WORDS = "the river carries water from mountains to sea and bread is baked with salt in every city of france".split()
SIZES = [16, 128, 512]
COUNTS = [1, 64]


def texts(tokens: int, count: int) -> list[str]:
    """Texts of about `tokens` tokens, with the two around them; each word is one token."""
    return [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(tokens - 2)) for i in range(count)]


def best(run: Callable[[list[str]], Any], inputs: list[str], seconds: float) -> float:
    """Texts a second in the best of several runs."""
    run(inputs)
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run(inputs)
        fastest = min(fastest, time.perf_counter() - start)
    return len(inputs) / fastest


def torch_engine(model: Path) -> Callable[[list[str]], Any]:
    from sentence_transformers import SentenceTransformer

    pipeline = SentenceTransformer(str(model), device="cpu")
    pipeline.max_seq_length = 512
    return lambda inputs: pipeline.encode(inputs, batch_size=64)


def export(model: Path, file: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.network(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    sample = AutoTokenizer.from_pretrained(model)(["a b", "c"], padding=True, return_tensors="pt")
    axes = {name: {0: "texts", 1: "tokens"} for name in [*names, "states"]}
    inputs = tuple(sample[name] for name in names)
    torch.onnx.export(
        States(), inputs, str(file), input_names=names, output_names=["states"], dynamic_axes=axes, opset_version=17,
        dynamo=False,
    )


def onnx_engine(model: Path, file: Path) -> Callable[[list[str]], Any]:
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    if not file.exists():
        export(model, file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding()
    names = {i.name for i in session.get_inputs()}

    def run(inputs: list[str]) -> Any:
        encoded = tokenizer.encode_batch(inputs)
        feed = {
            "input_ids": np.array([e.ids for e in encoded]),
            "attention_mask": np.array([e.attention_mask for e in encoded]),
            "token_type_ids": np.array([e.type_ids for e in encoded]),
        }
        states = session.run(None, {k: v for k, v in feed.items() if k in names})[0]
        mask = feed["attention_mask"][..., None]
        pooled = (states * mask).sum(1) / mask.sum(1)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx", type=Path, required=True, help="the example embed_speed, built with --release")
    parser.add_argument("--model", type=Path, required=True, help="the directory of all-MiniLM-L6-v2")
    parser.add_argument("--onnx", type=Path, help="where the exported network is, or shall be")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    engines = {"torch": torch_engine(args.model)}
    if args.onnx:
        engines["onnxruntime"] = onnx_engine(args.model, args.onnx)

    def ours(inputs: list[str]) -> float:
        command = [args.mlx, args.model, str(args.seconds)]
        done = subprocess.run(command, input=json.dumps(inputs), text=True, capture_output=True, check=True)
        return float(done.stdout)

    rows: dict[tuple[int, int], dict[str, float]] = {}
    for turn in range(args.rounds):
        for tokens in SIZES:
            for count in COUNTS:
                inputs = texts(tokens, count)
                row = rows.setdefault((tokens, count), {})
                order = ["mlx", *engines]
                for name in order if turn % 2 == 0 else order[::-1]:
                    speed = ours(inputs) if name == "mlx" else best(engines[name], inputs, args.seconds)
                    row[name] = max(row.get(name, 0.0), speed)
    print("| tokens | texts | " + " | ".join(["mlx", *engines]) + " | mlx / best |")
    print("|--:|--:|" + "--:|" * (len(engines) + 2))
    for (tokens, count), row in rows.items():
        others = max(speed for name, speed in row.items() if name != "mlx")
        speeds = " | ".join(f"{row[name]:.1f}" for name in ["mlx", *engines])
        print(f"| {tokens} | {count} | {speeds} | {row['mlx'] / others:.2f} |")


if __name__ == "__main__":
    main()
