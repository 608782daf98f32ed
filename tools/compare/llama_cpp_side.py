"""llama.cpp's side of the benchmark, through the C functions that llama-cpp-python binds: greedy, on the CPU.

`bench` prints one JSON object; `tokens` prints ids as JSON; `start` prints a token's id as soon as it is there; `version`
prints what was built. Threads are all cores, as for the others; everything else is the library's default.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as ll

WARMUP_TOKENS = 8  # as `mlx bench` does
BATCH_PROMPT = 16


@ll.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: Any) -> None:
    """Takes the library's messages."""


class Engine:
    """A model; a context for each run, since clearing one has another name in each version."""

    def __init__(self, path: str, threads: int):
        ll.llama_log_set(_quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path} cannot be loaded by llama.cpp")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.threads = threads

    def context(self, positions: int, rows: int = 1) -> Any:
        params = ll.llama_context_default_params()
        params.n_ctx = -(-positions // 256) * 256 * rows
        params.n_batch = max(params.n_batch, positions * rows)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = self.threads
        context = ll.llama_init_from_model(self.model, params)
        if not context:
            raise SystemExit("llama.cpp made no context")
        return context

    def decode(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """One pass over (id, position, row, whether its logits are needed)."""
        batch = ll.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        code = ll.llama_decode(context, batch)
        ll.llama_batch_free(batch)
        if code != 0:
            raise SystemExit(f"llama_decode failed with {code}")

    def greatest(self, context: Any, entry: int) -> int:
        """The id of the largest logit."""
        import numpy as np

        return int(np.ctypeslib.as_array(ll.llama_get_logits_ith(context, entry), shape=(self.vocab,)).argmax())

    def run(self, ids: list[int], count: int) -> tuple[list[int], dict[str, float]]:
        context = self.context(len(ids) + count)
        began = time.perf_counter()
        self.decode(context, [(t, i, 0, i + 1 == len(ids)) for i, t in enumerate(ids)])
        tokens = [self.greatest(context, len(ids) - 1)]
        first = time.perf_counter()
        while len(tokens) < count:
            self.decode(context, [(tokens[-1], len(ids) + len(tokens) - 1, 0, True)])
            tokens.append(self.greatest(context, 0))
        last = time.perf_counter()
        ll.llama_free(context)
        return tokens, {"time_to_first_token_seconds": first - began, "total_seconds": last - began}

    def together(self, ids: list[int], rows: int, count: int) -> float:
        """Tokens per second of all rows that decode together, after the first of each."""
        context = self.context(BATCH_PROMPT + count, rows)
        last: list[int] = []
        for row in range(rows):
            prompt = ids[row * BATCH_PROMPT : (row + 1) * BATCH_PROMPT]
            self.decode(context, [(t, i, row, i + 1 == len(prompt)) for i, t in enumerate(prompt)])
            last.append(self.greatest(context, len(prompt) - 1))
        began = time.perf_counter()
        for step in range(count - 1):
            self.decode(context, [(token, BATCH_PROMPT + step, row, True) for row, token in enumerate(last)])
            last = [self.greatest(context, row) for row in range(rows)]
        seconds = time.perf_counter() - began
        ll.llama_free(context)
        return rows * (count - 1) / seconds


def peak_rss_bytes() -> int:
    """This process's largest resident size."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["bench", "batch", "tokens", "start", "version"])
    parser.add_argument("--model")
    parser.add_argument("--tokens", help="ids, comma-separated; `-` reads them from standard input")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="for batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.action == "version":
        print(json.dumps({"version": ll.__version__, "system": ll.llama_print_system_info().decode().strip()}))
        return
    text = sys.stdin.read() if args.tokens == "-" else args.tokens
    ids = [int(part) for part in text.split(",")]
    start = time.perf_counter()
    engine = Engine(args.model, args.threads)
    load_seconds = time.perf_counter() - start
    if args.action == "start":
        print(engine.run(ids, 1)[0], flush=True)
    elif args.action == "tokens":
        print(json.dumps(engine.run(ids, args.max_tokens)[0]))
    elif args.action == "batch":
        print(json.dumps({"batch_tokens_per_second": engine.together(ids, args.rows, args.max_tokens)}))
    else:
        for _ in range(args.warmup):
            engine.run(ids, min(args.max_tokens, WARMUP_TOKENS))
        _, measured = engine.run(ids, args.max_tokens)
        print(json.dumps({"load_seconds": load_seconds, "runs": [measured], "peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
