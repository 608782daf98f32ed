"""Makes tests/fixtures/steering.json: what transformers computes when hooks change states inside the tiny checkpoints.

Each case is a steering file of ours, a prompt, the logits of its last position and a few greedy tokens. The edits are made by
hooks of PyTorch on the modules of transformers; the whole sequence is computed again for each token.

    python tools/golden/steering.py            # needs requirements-transformers.txt
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny"
PROMPT = [5, 17, 42, 99, 7, 63]
SOURCE = [8, 21, 4, 77, 130, 12, 9]
GENERATED = 4
# Every how many logits one is kept.
STRIDE = 3


def numbers(which: Any, count: int) -> set[int]:
    if which == "all":
        return set(range(count))
    if isinstance(which, int):
        return {which}
    if isinstance(which, list):
        return set(which)
    first, last = which.split("-")
    return set(range(int(first), int(last) + 1 if last else count))


def positions(edit: dict[str, Any], total: int, prompt: int) -> list[int]:
    which = edit.get("positions", "all")
    words = {"prompt": range(prompt), "last": [prompt - 1], "reply": range(prompt - 1, total)}
    positions = words[which] if isinstance(which, str) and which in words else numbers(which, total)
    return sorted(p for p in positions if p < total)


class Edited:
    """A model of transformers whose states can be captured and changed."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.gpt2 = self.model.config.model_type == "gpt2"
        self.gemma = self.model.config.model_type.startswith("gemma")
        inner = self.model.transformer if self.gpt2 else self.model.model
        self.blocks = inner.h if self.gpt2 else inner.layers
        self.head_dim = getattr(self.model.config, "head_dim", None) or (
            self.model.config.hidden_size // self.model.config.num_attention_heads
        )

    def parts(self, block: torch.nn.Module) -> dict[str, torch.nn.Module]:
        if self.gpt2:
            return {"attn": block.attn, "z": block.attn.c_proj, "mlp": block.mlp, "post": block.mlp.c_proj}
        after_attention = block.post_attention_layernorm if self.gemma and hasattr(block, "pre_feedforward_layernorm") else block.self_attn
        after_mlp = getattr(block, "post_feedforward_layernorm", block.mlp)
        return {"attn": after_attention, "z": block.self_attn.o_proj, "mlp": after_mlp, "post": block.mlp.down_proj}

    def run(self, tokens: list[int], change: Any) -> torch.Tensor:
        """Logits of all positions; `change(layer, hook, x)` gives the states in the place of x."""
        handles = []
        for layer, block in enumerate(self.blocks):
            parts, seen = self.parts(block), {}

            def first(out: Any) -> torch.Tensor:
                return out[0] if isinstance(out, tuple) else out

            def like(out: Any, x: torch.Tensor) -> Any:
                return (x, *out[1:]) if isinstance(out, tuple) else x

            def before(_: Any, args: Any, kwargs: Any, layer: int = layer, seen: dict = seen) -> Any:
                x = change(layer, "resid_pre", args[0] if args else kwargs["hidden_states"])
                seen["x"] = x
                return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

            def attention(_: Any, __: Any, out: Any, layer: int = layer, seen: dict = seen) -> Any:
                changed = change(layer, "attn_out", first(out))
                middle = change(layer, "resid_mid", seen["x"] + changed)
                return like(out, middle - seen["x"])

            def hook(name: str, layer: int = layer) -> Any:
                return lambda _, __, out: like(out, change(layer, name, first(out)))

            def pre(name: str, layer: int = layer) -> Any:
                return lambda _, args: (change(layer, name, args[0]), *args[1:])

            handles += [
                block.register_forward_pre_hook(before, with_kwargs=True),
                parts["attn"].register_forward_hook(attention),
                parts["mlp"].register_forward_hook(hook("mlp_out")),
                block.register_forward_hook(hook("resid_post")),
                parts["z"].register_forward_pre_hook(pre("z")),
                parts["post"].register_forward_pre_hook(pre("mlp_post")),
            ]
        try:
            with torch.no_grad():
                return self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()

    def capture(self, tokens: list[int]) -> dict[tuple[int, str], torch.Tensor]:
        captured: dict[tuple[int, str], torch.Tensor] = {}

        def keep(layer: int, hook: str, x: torch.Tensor) -> torch.Tensor:
            captured[layer, hook] = x.clone()
            return x

        self.run(tokens, keep)
        return captured

    def edited(self, tokens: list[int], edits: list[dict[str, Any]], prompt: int) -> torch.Tensor:
        sources = [self.capture(e["tokens"]) if e["op"] == "patch" else None for e in edits]

        def change(layer: int, hook: str, x: torch.Tensor) -> torch.Tensor:
            for edit, source in zip(edits, sources):
                if edit["hook"] != hook or layer not in numbers(edit["layers"], len(self.blocks)):
                    continue
                x = x.clone()
                units = edit.get("heads", edit.get("neurons"))
                width = self.head_dim if hook == "z" else 1
                columns = (
                    list(range(x.shape[-1]))
                    if units is None
                    else [n * width + i for n in units for i in range(width)]
                )
                chosen = positions(edit, x.shape[1], prompt)
                for at, p in enumerate(chosen):
                    old = x[0, p, columns]
                    if edit["op"] == "add":
                        old = old + torch.tensor(edit["vector"]) * edit.get("coefficient", 1.0)
                    elif edit["op"] == "scale":
                        old = old * edit["factor"]
                    elif edit["op"] == "zero":
                        old = torch.zeros_like(old)
                    elif edit["op"] == "replace":
                        old = torch.tensor(edit["vector"])
                    else:
                        states = source[layer, hook][0]
                        last = len(states) - 1 if edit.get("positions") == "last" else p
                        n = edit["from"][at] if "from" in edit else last
                        old = states[n, columns] if n < len(states) else old
                    x[0, p, columns] = old
            return x

        return self.run(tokens, change)


def cases(hidden: int, heads: int, head_dim: int, inner: int) -> dict[str, list[dict[str, Any]]]:
    def vector(n: int, seed: int) -> list[float]:
        return [round(((i * 37 + seed * 11) % 41 - 20) / 20, 2) for i in range(n)]

    every = {}
    for hook in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"):
        every[f"add {hook}"] = [
            {"layers": [1], "hook": hook, "positions": [1, 3, 5], "op": "add", "vector": vector(hidden, 1), "coefficient": 1.5}
        ]
    return every | {
        "scale": [{"layers": "all", "hook": "attn_out", "op": "scale", "factor": 0.5}],
        "replace": [{"layers": 0, "hook": "mlp_out", "positions": "2-4", "op": "replace", "vector": vector(hidden, 2)}],
        "heads off": [{"layers": "0-", "hook": "z", "heads": [heads - 1, 0], "op": "zero"}],
        "a head": [{"layers": 1, "hook": "z", "heads": [2], "op": "add", "vector": vector(head_dim, 3), "positions": "prompt"}],
        "neurons off": [{"layers": [0, 1], "hook": "mlp_post", "neurons": [0, 5, inner - 1], "op": "zero"}],
        "neurons": [{"layers": 0, "hook": "mlp_post", "neurons": [7, 3], "op": "replace", "vector": [2.5, -1.0], "positions": "reply"}],
        "last": [{"layers": 1, "hook": "resid_post", "positions": "last", "op": "add", "vector": vector(hidden, 4)}],
        "prompt": [{"layers": 0, "hook": "resid_post", "positions": "prompt", "op": "scale", "factor": -1.0}],
        "reply": [{"layers": 0, "hook": "resid_pre", "positions": "reply", "op": "add", "vector": vector(hidden, 5)}],
        "patch": [{"layers": 0, "hook": "resid_post", "positions": [2, 5], "op": "patch", "tokens": SOURCE, "from": [3, 6]}],
        "patch all": [{"layers": 1, "hook": "attn_out", "op": "patch", "tokens": SOURCE}],
        "patch last": [{"layers": 0, "hook": "resid_mid", "positions": "last", "op": "patch", "tokens": SOURCE}],
        "patch a head": [{"layers": 0, "hook": "z", "heads": [1], "positions": [4], "op": "patch", "tokens": SOURCE}],
        "several": [
            {"layers": 0, "hook": "resid_post", "op": "add", "vector": vector(hidden, 6)},
            {"layers": 0, "hook": "resid_post", "positions": "3-", "op": "scale", "factor": 0.25},
            {"layers": 1, "hook": "mlp_out", "op": "scale", "factor": 2.0},
        ],
    }


def patching(name: str) -> dict[str, Any]:
    """Of each layer and position how much of a difference of logits the clean states bring back."""
    edited = Edited(TINY / name)
    tokenizer = Tokenizer.from_file(str(TINY / name / "tokenizer.json"))
    texts = ["two cats", "two maps"]
    clean, corrupted = (tokenizer.encode(text).ids for text in texts)
    length = min(len(clean), len(corrupted))
    assert len(clean) == len(corrupted), (clean, corrupted)
    good, bad = edited.edited(clean, [], length)[-1], edited.edited(corrupted, [], length)[-1]
    answer, against = int(good.argmax()), int(bad.argmax())
    assert answer != against

    def difference(logits: torch.Tensor) -> float:
        return float(logits[answer] - logits[against])

    span = difference(good) - difference(bad)
    tables = {}
    for hook in ("resid_post", "z", "mlp_out"):
        tables[hook] = []
        for layer in range(len(edited.blocks)):
            row = []
            for position in range(length):
                edit = {"layers": layer, "hook": hook, "positions": position, "op": "patch", "tokens": clean}
                out = edited.edited(corrupted, [edit], length)[-1]
                row.append(round((difference(out) - difference(bad)) / span, 6))
            tables[hook].append(row)
    return {
        "texts": texts,
        "tokens": clean,
        "corrupted": corrupted,
        "answer": answer,
        "against": against,
        "difference": difference(good),
        "recovered": tables,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/steering.json")
    args = parser.parse_args()
    models: dict[str, Any] = {}
    for name in ("llama", "gemma3-text", "gpt2"):
        edited = Edited(TINY / name)
        config = edited.model.config
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        shape = (config.hidden_size, config.num_attention_heads, edited.head_dim, inner)
        plain = edited.edited(PROMPT, [], len(PROMPT))[-1]
        result = {}
        for case, edits in cases(*shape).items():
            tokens, logits = list(PROMPT), None
            for _ in range(GENERATED):
                out = edited.edited(tokens, edits, len(PROMPT))[-1]
                logits = out if logits is None else logits
                tokens.append(int(out.argmax()))
            assert (logits - plain).abs().max() > 1e-2, f"{name}, {case}: the edit changes nothing"
            values = [float(f"{x:.7g}") for x in logits[::STRIDE].tolist()]
            result[case] = {"steering": {"edits": edits}, "logits": values, "reply": tokens[len(PROMPT) :]}
        models[name] = result
        print(f"{name}: {len(result)} cases")
    reference = {"transformers": version("transformers"), "torch": version("torch"), "compute": "float32"}
    golden = {
        "made_by": "tools/golden/steering.py",
        "reference": reference,
        "prompt": PROMPT,
        "stride": STRIDE,
        "models": models,
        "patching": patching("llama"),
    }
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
