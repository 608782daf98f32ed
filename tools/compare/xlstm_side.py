"""Times Hugging Face transformers' own xLSTM on the CPU in float32, for compare_xlstm.py: one JSON object.

The prompt goes through the model in one pass, then single tokens follow with its cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--generate-tokens", type=int, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = (torch.arange(args.prompt_tokens) * 37 % (model.config.vocab_size - 16) + 16)[None]
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
