"""mlx-lm's side of compare_together.py: many requests together against one after another, on the CPU.

Runs in the pinned environment. Prints one JSON object of the shape that `mlx bench --together` prints. Generation is
mlx-lm's own `generate_step` and `batch_generate`, sampling its own chain. It has no classification: prompts
go through the model in one forward pass or in one each. Shorter ones are padded at their ends, which what comes before
does not see.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Callable

import mlx.core as mx


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=["cpu", "default"], default="cpu")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.device == "cpu":
        mx.set_default_device(mx.cpu)  # before mlx_lm makes its stream
    from mlx_lm import load
    from mlx_lm.generate import batch_generate, generate_step
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    # {"prompts": [[id, ...], ...], "short": [[id, ...], ...], "instruction": [id, ...], "chats": [[id, ...], ...]}, the last one
    # can be empty
    asked = json.load(sys.stdin)
    prompts, short = asked["prompts"], asked["short"]
    classified = {
        "classify": short,
        "classify_alike": [asked["instruction"] + ids for ids in short],
    }
    if asked["chats"]:
        classified["classify_chats"] = asked["chats"]
    model, _ = load(args.model)
    endless = SimpleNamespace(eos_token_ids=set(), decode=lambda ids: "")

    def one(ids: list[int], count: int, **how: object) -> float:
        """Seconds a token after the first."""
        first = last = 0.0
        for at, _ in enumerate(generate_step(mx.array(ids), model, max_tokens=count, **how)):
            last = time.perf_counter()
            first = first or last
        return (last - first) / max(at, 1)

    def timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def classify(prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts))
        padded = mx.array([ids + [0] * (longest - len(ids)) for ids in prompts])
        last = mx.array([[[len(ids) - 1]] for ids in prompts])
        mx.eval(mx.argmax(mx.take_along_axis(model(padded), last, axis=1), axis=-1))

    how = {
        "sampler": make_sampler(temp=0.8, top_p=0.95, min_p=0.02, top_k=40, xtc_probability=0.5, xtc_threshold=0.1),
        "logits_processors": make_logits_processors({5: 1.0, 6: -1.0}, 1.1, 64),
    }
    one(prompts[0], 2)
    one(prompts[0], 2, **how)
    figures: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        figures["sequential"].append(timed(lambda: [one(ids, args.max_tokens) for ids in prompts]))
        figures["together"].append(timed(lambda: batch_generate(model, endless, prompts, max_tokens=args.max_tokens)))
        for name, all_ids in classified.items():
            figures[f"{name}, each"].append(timed(lambda: [classify([ids]) for ids in all_ids]))
            figures[f"{name}, all"].append(timed(lambda: classify(all_ids)))
        figures["greedy"].append(one(prompts[0], args.max_tokens))
        figures["chain"].append(one(prompts[0], args.max_tokens, **how))
    of = {key: statistics.median(values) for key, values in figures.items()}
    tokens = len(prompts) * args.max_tokens
    report = {
        "batch": {
            "sequential_tokens_per_second": tokens / of["sequential"],
            "together_tokens_per_second": tokens / of["together"],
            "speedup": of["sequential"] / of["together"],
        },
        **{
            name: {
                "sequential_seconds": of[f"{name}, each"],
                "together_seconds": of[f"{name}, all"],
                "speedup": of[f"{name}, each"] / of[f"{name}, all"],
            }
            for name in classified
        },
        "sampling": {
            "greedy_seconds_per_token": of["greedy"],
            "chain_seconds_per_token": of["chain"],
            "overhead": of["chain"] / of["greedy"] - 1,
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
