"""Makes tests/fixtures/longrope.json: replies of the tiny Phi-3 that begin before LongRoPE's switch and end after it.

The reference is transformers' `generate`, which computes the cache again where a sequence grows beyond
`original_max_position_embeddings`, so that all positions have the long factors. Each reply must also be what passes without a
cache give. Prompts that do not cross the switch, or that begin beyond it, are there too.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tiny_tokenizer

FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures"
LENGTHS = [20, 28, 31, 32, 33, 50]
NEW_TOKENS = 16
MIN_MARGIN = 0.02


@torch.no_grad()
def reply(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float] | None:
    """Greedy tokens and their least margin, or None where they are unclear."""
    made = model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens = made[0, len(ids) :].tolist()
    margins = []
    for i in range(NEW_TOKENS):
        row = model(input_ids=torch.tensor([ids + tokens[:i]]), use_cache=False).logits[0, -1]
        top = torch.topk(row, 2)
        if int(top.indices[0]) != tokens[i]:
            raise SystemExit(f"a prompt of {len(ids)}, token {i}: the cache changes the reply")
        margins.append(float(top.values[0] - top.values[1]))
    clear = min(margins) >= MIN_MARGIN and len(set(tokens)) >= NEW_TOKENS // 2
    return (tokens, min(margins)) if clear else None


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        FIXTURES / "tiny/phi3", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases = []
    for length in LENGTHS:
        for seed in range(1000):
            random = np.random.default_rng([length, seed])
            ids = random.integers(len(tiny_tokenizer.SPECIALS), model.config.vocab_size, length).tolist()
            answer = reply(model, ids)
            if answer is not None:
                tokens, margin = answer
                cases.append({"tokens": ids, "greedy": tokens, "min_margin": float(f"{margin:.4g}")})
                break
        else:
            raise SystemExit(f"no clear reply to a prompt of {length}")
    golden = {
        "made_by": "tools/golden/longrope.py",
        "reference": {"transformers": version("transformers"), "torch": version("torch")},
        "switch": model.config.rope_parameters["original_max_position_embeddings"],
        "prompts": cases,
    }
    (FIXTURES / "longrope.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
