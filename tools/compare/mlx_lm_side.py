"""mlx-lm's side of the benchmark: its own load and generate_step, greedy, default settings, on the CPU.

Runs in the pinned environment. `bench` and `batch` print one JSON object; `tokens` prints ids as JSON; `start` prints the text of
the first token as soon as it is there; `encode` prints the ids of a text.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

WARMUP_TOKENS = 8  # as `mlx bench` does
BATCH_PROMPT = 16  # likewise


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["bench", "batch", "tokens", "start", "encode"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=["cpu", "default"], default="cpu")
    parser.add_argument("--tokens", help="ids, comma-separated; `-` reads them from standard input")
    parser.add_argument("--text", help="for encode")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1, help="runs of 8 tokens that are not measured")
    parser.add_argument("--rows", type=int, default=8, help="for batch")
    return parser.parse_args()


def peak_rss_bytes() -> int:
    """This process's largest resident size."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def together(model: Any, ids: list[int], rows: int, count: int) -> float:
    """Tokens per second of all rows that decode together, after the first of each."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=count)
    uids = set(generator.insert([ids[row * BATCH_PROMPT : (row + 1) * BATCH_PROMPT] for row in range(rows)], count))
    seen: set[int] = set()
    began, counted = None, 0
    while responses := generator.next():
        if began is not None:
            counted += len(responses)
        seen |= {response.uid for response in responses}
        if began is None and seen == uids:
            began = time.perf_counter()
    assert began is not None, "no step had all rows"
    return counted / (time.perf_counter() - began)


def main() -> None:
    args = parse()
    if args.device == "cpu":
        mx.set_default_device(mx.cpu)  # before mlx_lm makes its stream
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    start = time.perf_counter()
    model, tokenizer = load(args.model)
    load_seconds = time.perf_counter() - start

    if args.action == "encode":
        ids = tokenizer.encode(args.text)
        print(json.dumps({"tokens": ids, "eos": sorted(tokenizer.eos_token_ids), "vocab": model.args.vocab_size}))
        return

    text = sys.stdin.read() if args.tokens == "-" else args.tokens
    ids = mx.array([int(part) for part in text.split(",")])

    def run(count: int) -> tuple[list[int], dict[str, Any]]:
        tokens: list[int] = []
        began = time.perf_counter()
        first = last = began
        for token, _ in generate_step(ids, model, max_tokens=count):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(int(token))
        return tokens, {"time_to_first_token_seconds": first - began, "total_seconds": last - began}

    if args.action == "start":
        token, _ = next(generate_step(ids, model, max_tokens=1))
        print(tokenizer.decode([int(token)]), flush=True)
    elif args.action == "batch":
        print(json.dumps({"batch_tokens_per_second": together(model, ids.tolist(), args.rows, args.max_tokens)}))
    elif args.action == "tokens":
        print(json.dumps(run(args.max_tokens)[0]))
    else:
        for _ in range(args.warmup):
            run(min(args.max_tokens, WARMUP_TOKENS))
        _, measured = run(args.max_tokens)
        print(
            json.dumps(
                {
                    "device": str(mx.default_device()),
                    "load_seconds": load_seconds,
                    "runs": [measured],
                    "peak_memory_bytes": mx.get_peak_memory(),
                    "peak_rss_bytes": peak_rss_bytes(),
                }
            )
        )


if __name__ == "__main__":
    main()
