"""Makes tests/fixtures/prompt-cache/: computed prompts as Python mlx-lm writes them, and what it says after them.

`golden.json` has for each file the model, the flags that loading needs, the prompt's ids, the ids that go on, and the
greedy tokens after both. Weights are cast to float32 and run on the CPU. A case counts only if each token wins clearly.

`--check MODEL FILE IDS N` reads a file with mlx-lm's own functions instead, and prints the N greedy tokens after IDS.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load

ROOT = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
OUT = ROOT / "prompt-cache"
# The least lead of a greedy token over the next.
LEAD = 0.05
TOKENS = 16

# File: model, prompt tokens, tokens that go on, options of mlx-lm, our flags.
CASES: dict[str, tuple[str, int, int, dict[str, Any], list[str]]] = {
    "growing": ("llama", 20, 3, {}, []),
    # A window of 16, of which the prompt is longer.
    "rotating": ("olmo3", 37, 3, {}, []),
    # The reply goes beyond the bound; mlx-lm masks the kept positions in longer steps.
    "bounded": ("qwen3", 20, 1, {"max_kv_size": 24}, ["--ctx-size", "24"]),
    "packed": (
        "qwen3-q4",
        20,
        3,
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
        ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"],
    ),
}


def model_at(path: Path) -> Any:
    """The model in float32."""
    model, _ = load(str(path))
    model.set_dtype(mx.float32)
    return model


def run(model: Any, cache: list[Any], ids: list[int], n: int, **options: Any) -> tuple[list[int], float]:
    """Greedy tokens after `ids`, and the least lead."""
    options.pop("max_kv_size", None)
    tokens, lead = [], float("inf")
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=n, prompt_cache=cache, **options):
        top = mx.sort(logprobs)[-2:].tolist()
        lead = min(lead, top[1] - top[0])
        tokens.append(int(token))
    return tokens, lead


def make(name: str) -> dict[str, Any]:
    """Writes a case's file."""
    directory, length, more, options, flags = CASES[name]
    model = model_at(ROOT / "tiny" / directory)
    file = OUT / f"{name}.safetensors"
    for seed in range(1000):
        draw = random.Random(seed)
        ids = [draw.randrange(5, 290) for _ in range(length + more)]
        cache = make_prompt_cache(model, options.get("max_kv_size"))
        run(model, cache, ids[:length], 0, **options)
        save_prompt_cache(str(file), cache, {"model": directory, "tokenizer_config": "{}"})
        after = load_prompt_cache(str(file))
        greedy, lead = run(model, after, ids[length:], TOKENS, **options)
        if lead >= LEAD:
            print(f"{name}: seed {seed}, lead {lead:.3f}, {[type(c).__name__ for c in cache]}")
            return {
                "file": file.name,
                "model": directory,
                "flags": flags,
                "prompt": ids[:length],
                "more": ids[length:],
                "greedy": greedy,
            }
    raise SystemExit(f"{name}: no seed wins clearly")


def main() -> None:
    """Makes all files, or checks one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs=4, metavar=("MODEL", "FILE", "IDS", "N"))
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if args.check:
        directory, file, ids, n = args.check
        cache = load_prompt_cache(file)
        tokens, _ = run(model_at(Path(directory)), cache, json.loads(ids), int(n))
        print(json.dumps(tokens))
        return
    OUT.mkdir(exist_ok=True)
    golden = [make(name) for name in CASES]
    (OUT / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
