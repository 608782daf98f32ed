"""Makes tests/fixtures/convert.json: what mlx-lm's own `convert` makes of tiny checkpoints, for tests/files/convert.rs.

For each case the arguments of `mlx convert`, what mlx-lm writes as `quantization`, and name, type, shape and the first half of the SHA-256 of the
bytes of every tensor. Equal tensors and an equal configuration are the same model to mlx-lm, so nothing needs to be loaded
to know that it computes the same.

With `--check DIR...` it loads directories that `mlx convert` made with mlx-lm and prints the greatest difference of their
logits from the golden numbers of the fixture that each is named after (`DIR` ends in `<fixture>` or `<fixture>.<anything>`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import numpy as np
from mlx_lm.convert import convert
from mlx_lm.utils import load as mlx_lm_load

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"

# Fixture, the arguments of `mlx convert`, those of mlx-lm's.
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("llama", [], {}),
    ("llama", ["--dtype", "float16"], {"dtype": "float16"}),
    ("llama", ["--quantize", "--group-size", "32"], {"quantize": True, "q_bits": 4, "q_group_size": 32}),
    (
        "llama-tied-gqa",
        ["--quantize", "--bits", "3", "--group-size", "32", "--dtype", "bfloat16"],
        {"quantize": True, "q_bits": 3, "q_group_size": 32, "dtype": "bfloat16"},
    ),
    ("qwen3", ["--quantize", "--mode", "mxfp4"], {"quantize": True, "q_mode": "mxfp4", "q_bits": None, "q_group_size": None}),
    ("qwen3", ["--quantize", "--mode", "mxfp8"], {"quantize": True, "q_mode": "mxfp8", "q_bits": None, "q_group_size": None}),
    ("llama-bf16", ["--quantize", "--mode", "nvfp4"], {"quantize": True, "q_mode": "nvfp4", "q_bits": None, "q_group_size": None}),
    *(
        (
            "llama",
            ["--quantize", "--group-size", "32", "--quant-predicate", recipe],
            {"quantize": True, "q_group_size": 32, "quant_predicate": recipe},
        )
        for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
    ),
    (
        "mixtral",
        ["--quantize", "--bits", "8", "--group-size", "32"],
        {"quantize": True, "q_bits": 8, "q_group_size": 32},
    ),
    # Experts that share a tensor. The routers of the first two are too narrow for mlx-lm to quantize.
    ("gemma4-large", [], {}),
    ("granitemoe", [], {}),
    ("dbrx", ["--quantize", "--bits", "8", "--group-size", "32"], {"quantize": True, "q_bits": 8, "q_group_size": 32}),
    ("llama-q8", ["--dequantize"], {"dequantize": True}),
    ("llama-modes", ["--dequantize"], {"dequantize": True}),
]


def described(directory: Path) -> dict[str, Any]:
    """The tensors in the safetensors files of a directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            start, end = (8 + length + at for at in entry["data_offsets"])
            digest = hashlib.sha256(data[start:end]).hexdigest()[:32]
            tensors[name] = [entry["dtype"], entry["shape"], digest]
    return dict(sorted(tensors.items()))


def make() -> None:
    cases = []
    for fixture, ours, theirs in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "mlx"
            convert(str(FIXTURES / "tiny" / fixture), str(out), **theirs)
            config = json.loads((out / "config.json").read_text(encoding="utf-8"))
            cases.append(
                {
                    "fixture": fixture,
                    "arguments": ours,
                    "quantization": config.get("quantization"),
                    "tensors": described(out),
                }
            )
    text = json.dumps({"versions": reference.versions(), "cases": cases}, indent=0)
    (FIXTURES / "convert.json").write_text(text + "\n", encoding="utf-8")


def check(directories: list[Path]) -> None:
    for directory in directories:
        fixture = directory.name.split(".")[0]
        model, tokenizer = mlx_lm_load(str(directory))
        golden = json.loads((FIXTURES / "tiny" / fixture / "golden.json").read_text(encoding="utf-8"))
        worst = 0.0
        for case in golden["prompts"]:
            ours = np.array(model(mx.array([case["tokens"]]))[0, -1].astype(mx.float32))
            worst = max(worst, float(np.abs(ours - np.array(case["logits"], dtype=np.float32)).max()))
        for case in golden.get("text", {}).get("encode", []):
            if tokenizer.encode(case["text"], add_special_tokens=False) != case["tokens"]:
                raise ValueError(f"{directory}: {case['text']!r} becomes other ids")
        for case in golden.get("text", {}).get("chat", []):
            if tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True) != case["tokens"]:
                raise ValueError(f"{directory}: a chat becomes other ids")
        print(f"{directory.name} {worst:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="DIR", help="load these instead")
    directories = parser.parse_args().check
    check(directories) if directories else make()


if __name__ == "__main__":
    main()
