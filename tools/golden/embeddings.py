"""Makes tests/fixtures/embeddings.json: means of transformers' last hidden states for tiny checkpoints.

The reference is Hugging Face transformers on torch, eager attention, float32 on the CPU. Pins:
requirements-transformers.txt.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModel

ROOT = Path(__file__).resolve().parents[2]
TINY = ["llama", "qwen3", "gemma2", "gpt2", "olmo2"]
# Longer than the window of 16 that gemma2 has.
LENGTHS = [1, 7, 40]


def prompt(n: int) -> list[int]:
    return [5 + (n * 31 + i * 7 + i * i % 11) % 90 for i in range(n)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "embeddings.json")
    args = parser.parse_args()
    cases = []
    for name in TINY:
        path = ROOT / "tests" / "fixtures" / "tiny" / name
        model, info = AutoModel.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"]:
            raise SystemExit(f"{name}: {info['missing_keys']} are not in the file")
        model.eval()
        for n in LENGTHS:
            with torch.no_grad():
                states = model(torch.tensor([prompt(n)]), use_cache=False).last_hidden_state[0]
            case = {"model": name, "tokens": prompt(n)}
            case["mean"] = [float(f"{v:.9g}") for v in states.mean(0).tolist()]
            case["last"] = [float(f"{v:.9g}") for v in states[-1].tolist()]
            cases.append(case)
            print(name, n, case["mean"][:4])
    golden = {
        "made_by": "tools/golden/embeddings.py",
        "reference": {"transformers": version("transformers"), "torch": version("torch"), "compute": "float32"},
        "cases": cases,
    }
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
