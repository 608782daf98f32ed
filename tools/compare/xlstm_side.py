"""Times Hugging Face transformers' own xLSTM on the CPU in float32, for compare_xlstm.py: one JSON object.

The prompt goes through the model in one pass, then single tokens follow with its cache. --products compares the processor
time of both with that of the matrix products alone, on one thread: what remains of it if nothing else took time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def shares(model: Any, ids: torch.Tensor, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of one thread, medians: of the model, and of its products with the head at the last position only."""
    torch.set_num_threads(1)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    head = model.get_output_embeddings()
    seconds: dict[str, dict[str, list[float]]] = {"prefill": {}, "token": {}}

    def add(phase: str, what: str, begin: float) -> None:
        seconds[phase].setdefault(what, []).append(time.thread_time() - begin)

    def products(phase: str, length: int) -> None:
        inputs = {layer.in_features: torch.randn(1, length, layer.in_features) for layer in layers}
        begin = time.thread_time()
        for layer in layers:
            x = inputs[layer.in_features]
            layer(x[:, -1:] if layer is head else x)
        add(phase, "products", begin)

    # The first round prepares.
    for _ in range(rounds + 1):
        products("prefill", ids.shape[1])
        begin = time.thread_time()
        out = model(input_ids=ids, use_cache=True)
        add("prefill", "model", begin)
        for _ in range(tokens):
            products("token", 1)
            begin = time.thread_time()
            out = model(input_ids=ids[:, :1], cache_params=out.cache_params, use_cache=True)
            add("token", "model", begin)
    skipped = {"prefill": 1, "token": tokens}
    return {
        phase: {what: statistics.median(times[skipped[phase] :]) for what, times in all_of.items()}
        for phase, all_of in seconds.items()
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--generate-tokens", type=int, required=True)
    parser.add_argument("--products", type=int, metavar="ROUNDS", help="compare with the products alone, in this number of rounds")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = (torch.arange(args.prompt_tokens) * 37 % (model.config.vocab_size - 16) + 16)[None]
    if args.products:
        print(json.dumps(shares(model, ids, args.generate_tokens, args.products)))
        return
    model(input_ids=ids[:, : min(16, args.prompt_tokens)], use_cache=True)  # what the first call prepares
    begin = time.perf_counter()
    out = model(input_ids=ids, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    prefilled = time.perf_counter()
    for _ in range(args.generate_tokens):
        out = model(input_ids=token, cache_params=out.cache_params, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    end = time.perf_counter()
    rates = {
        "prefill": args.prompt_tokens / (prefilled - begin),
        "decode": args.generate_tokens / (end - prefilled),
    }
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
