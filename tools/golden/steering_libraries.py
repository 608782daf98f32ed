"""Makes tests/fixtures/steering_libraries.json: edits of the tiny checkpoints, by TransformerLens and by nnsight.

The cases are those of steering.py. TransformerLens computes the network with its own code (HookedTransformer, nothing
folded), and edits at its hooks. nnsight edits the modules of transformers in traces. Neither needs a network. The script
ends with an error where the two differ by more than 1e-5 of the greatest logit.

    python tools/golden/steering_libraries.py  # needs requirements-steering.txt
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable

os.environ["HF_HUB_OFFLINE"] = "1"
# TransformerLens imports the package `datasets`, not the script of that name beside this one.
HERE = sys.path.pop(0)

import torch
from nnsight import NNsight
from tokenizers import Tokenizer
from transformer_lens import HookedTransformer, HookedTransformerConfig, patching
from transformer_lens.pretrained.weight_conversions import (
    convert_gemma_weights,
    convert_gpt2_weights,
    convert_llama_weights,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, HERE)
from steering import GENERATED, PROMPT, ROOT, TINY, cases, numbers, positions

MODELS = ("llama", "gemma3-text", "gpt2")
# Every how many logits one is kept.
STRIDE = 11
Edits = list[dict[str, Any]]


class Lens:
    """TransformerLens."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        gemma = config.model_type.startswith("gemma")
        known: dict[str, Any] = {
            "d_model": config.hidden_size,
            "n_heads": config.num_attention_heads,
            "n_layers": config.num_hidden_layers,
            "n_ctx": config.max_position_embeddings,
            "d_vocab": config.vocab_size,
            "default_prepend_bos": False,
        }
        if config.model_type == "gpt2":
            known |= {
                "d_head": config.hidden_size // config.num_attention_heads,
                "d_mlp": 4 * config.hidden_size,
                "act_fn": config.activation_function,
                "eps": config.layer_norm_epsilon,
                "normalization_type": "LN",
            }
            convert: Callable[..., dict[str, torch.Tensor]] = convert_gpt2_weights
        else:
            heads, groups = config.num_attention_heads, config.num_key_value_heads
            dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            known |= {
                "d_head": dim,
                "d_mlp": config.intermediate_size,
                "act_fn": "gelu_pytorch_tanh" if gemma else config.hidden_act,
                "eps": config.rms_norm_eps,
                "n_key_value_heads": groups if groups != heads or gemma else None,
                "normalization_type": "RMS",
                "final_rms": True,
                "gated_mlp": True,
                "positional_embedding_type": "rotary",
                "rotary_dim": dim,
            }
            convert = convert_llama_weights
        if config.model_type == "llama":
            known["rotary_base"] = config.rope_parameters["rope_theta"]
        if gemma:
            rope = config.rope_parameters
            known |= {
                "rotary_base": rope["full_attention"]["rope_theta"],
                "rotary_base_local": rope["sliding_attention"]["rope_theta"],
                "use_normalization_before_and_after": True,
                "use_qk_norm": True,
                "window_size": config.sliding_window,
                "use_local_attn": True,
                "attn_types": ["global" if kind == "full_attention" else "local" for kind in config.layer_types],
            }
            convert = convert_gemma_weights
        self.model = HookedTransformer(HookedTransformerConfig(**known))
        self.model.load_and_process_state_dict(
            convert(model, self.model.cfg),
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
        )
        self.model.eval()

    @staticmethod
    def place(edit: dict[str, Any], layer: int) -> str:
        inside = {"z": "attn.hook_z", "mlp_post": "mlp.hook_post"}
        return f"blocks.{layer}.{inside.get(edit['hook'], 'hook_' + edit['hook'])}"

    def run(self, tokens: list[int], edits: Edits, prompt: int) -> torch.Tensor:
        hooks = []
        for edit in edits:
            for layer in sorted(numbers(edit["layers"], self.model.cfg.n_layers)):
                name = self.place(edit, layer)
                source = None
                if edit["op"] == "patch":
                    source = self.model.run_with_cache(torch.tensor([edit["tokens"]]), names_filter=name)[1][name]
                hooks.append((name, self.hook(edit, positions(edit, len(tokens), prompt), source)))
        return self.model.run_with_hooks(torch.tensor([tokens]), fwd_hooks=hooks)[0]

    @staticmethod
    def hook(edit: dict[str, Any], chosen: list[int], source: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        units = edit.get("heads", edit.get("neurons", slice(None)))

        def change(value: torch.Tensor, hook: Any) -> torch.Tensor:
            for n, at in enumerate(chosen):
                # [heads, head_dim] at z, [width] elsewhere.
                old = value[0, at, units]
                if edit["op"] == "add":
                    new = old + edit.get("coefficient", 1.0) * torch.tensor(edit["vector"]).view_as(old)
                elif edit["op"] == "scale":
                    new = edit["factor"] * old
                elif edit["op"] == "zero":
                    new = 0.0 * old
                elif edit["op"] == "replace":
                    new = torch.tensor(edit["vector"]).view_as(old)
                else:
                    other = edit["from"][n] if "from" in edit else at
                    other = source.shape[1] - 1 if edit.get("positions") == "last" else other
                    new = source[0, other, units] if other < source.shape[1] else old
                value[0, at, units] = new
            return value

        return change


class Insight:
    """nnsight, around the modules of transformers."""

    # In the order in which a block computes them.
    HOOKS = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post")

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.model = NNsight(model)
        self.heads = self.config.num_attention_heads

    def blocks(self) -> Any:
        return self.model.transformer.h if self.config.model_type == "gpt2" else self.model.model.layers

    def states(self, block: Any, hook: str) -> torch.Tensor:
        """The tensor of a hook, to be read or written in place, within a trace."""
        if self.config.model_type == "gpt2":
            attention, output, feed, down = block.attn, block.attn.c_proj, block.mlp, block.mlp.c_proj
            after, between, ends = attention, block.ln_2, feed
        else:
            attention, output, feed, down = block.self_attn, block.self_attn.o_proj, block.mlp, block.mlp.down_proj
            after, between, ends = attention, block.post_attention_layernorm, feed
            if self.config.model_type.startswith("gemma"):
                after, between = block.post_attention_layernorm, block.pre_feedforward_layernorm
                ends = block.post_feedforward_layernorm
        if hook == "resid_pre":
            return block.input
        if hook == "z":
            return output.input
        if hook == "attn_out":
            return after.output[0] if after is attention else after.output
        if hook == "resid_mid":
            # The residual is this tensor, too.
            return between.input
        if hook == "mlp_post":
            return down.input
        if hook == "mlp_out":
            return ends.output
        return block.output

    def captured(self, tokens: list[int], layer: int, hook: str) -> torch.Tensor:
        with torch.no_grad(), self.model.trace(torch.tensor([tokens]), use_cache=False):
            states = self.states(self.blocks()[layer], hook).clone().save()
        return states

    def run(self, tokens: list[int], edits: Edits, prompt: int) -> torch.Tensor:
        layers = self.config.num_hidden_layers
        plan = []
        for edit in edits:
            for layer in sorted(numbers(edit["layers"], layers)):
                source = self.captured(edit["tokens"], layer, edit["hook"]) if edit["op"] == "patch" else None
                plan.append((layer, edit, source))
        plan.sort(key=lambda one: (one[0], self.HOOKS.index(one[1]["hook"])))
        with torch.no_grad(), self.model.trace(torch.tensor([tokens]), use_cache=False):
            for layer, edit, source in plan:
                self.write(self.states(self.blocks()[layer], edit["hook"]), edit, len(tokens), prompt, source)
            logits = self.model.output.logits[0].save()
        return logits

    def write(self, x: torch.Tensor, edit: dict[str, Any], total: int, prompt: int, source: torch.Tensor | None) -> None:
        columns = torch.arange(x.shape[-1])
        if "heads" in edit:
            columns = columns.view(self.heads, -1)[edit["heads"]].flatten()
        elif "neurons" in edit:
            columns = torch.tensor(edit["neurons"])
        chosen = positions(edit, total, prompt)
        if edit["op"] == "patch":
            there = edit.get("from", [len(edit["tokens"]) - 1] if edit.get("positions") == "last" else chosen)
            pairs = [(at, n) for at, n in zip(chosen, there) if n < len(edit["tokens"])]
            chosen, there = [at for at, _ in pairs], [n for _, n in pairs]
            new = source[0][there][:, columns]
        else:
            old = x[0][chosen][:, columns]
            new = {
                "add": lambda: old + torch.tensor(edit["vector"]) * edit.get("coefficient", 1.0),
                "scale": lambda: old * edit["factor"],
                "zero": lambda: torch.zeros_like(old),
                "replace": lambda: torch.tensor(edit["vector"]).expand_as(old),
            }[edit["op"]]()
        rows = torch.tensor(chosen)[:, None]
        x[0, rows, columns[None]] = new


def reply(library: Any, edits: Edits) -> tuple[torch.Tensor, list[int]]:
    tokens, logits = list(PROMPT), None
    for _ in range(GENERATED):
        out = library.run(tokens, edits, len(PROMPT))[-1]
        logits = out if logits is None else logits
        tokens.append(int(out.argmax()))
    return logits, tokens[len(PROMPT) :]


def patched(name: str, model: PreTrainedModel, lens: Lens, insight: Insight) -> dict[str, Any]:
    """Activation patching by TransformerLens's own functions, and by traces of nnsight."""
    tokenizer = Tokenizer.from_file(str(TINY / name / "tokenizer.json"))
    texts = ["two cats", "two maps"]
    clean, corrupted = (tokenizer.encode(text).ids for text in texts)
    good, cache = lens.model.run_with_cache(torch.tensor([clean]))
    bad = lens.model(torch.tensor([corrupted]))
    answer, against = int(good[0, -1].argmax()), int(bad[0, -1].argmax())
    assert answer != against

    def difference(logits: torch.Tensor) -> torch.Tensor:
        return logits[..., -1, answer] - logits[..., -1, against]

    low, high = difference(bad[0]), difference(good[0])

    def recovered(logits: torch.Tensor) -> torch.Tensor:
        return (difference(logits[0]) - low) / (high - low)

    ids = torch.tensor([corrupted])
    functions = {
        "resid_pre": patching.get_act_patch_resid_pre,
        "resid_mid": patching.get_act_patch_resid_mid,
        "attn_out": patching.get_act_patch_attn_out,
        "mlp_out": patching.get_act_patch_mlp_out,
    }
    tables = {hook: make(lens.model, ids, cache, recovered).tolist() for hook, make in functions.items()}
    # [layer, position, head]
    by_head = patching.get_act_patch_attn_head_out_by_pos(lens.model, ids, cache, recovered).tolist()
    others: dict[str, Any] = {}
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    for hook in functions:
        rows = []
        for layer in range(layers):
            patch = {"layers": layer, "hook": hook, "op": "patch", "tokens": clean}
            edits = [patch | {"positions": at} for at in range(len(corrupted))]
            rows.append([float(recovered(insight.run(corrupted, [one], len(corrupted))[None])) for one in edits])
        others[hook] = rows
    patch = {"hook": "z", "op": "patch", "tokens": clean}
    heads_too = [
        [
            [
                float(recovered(insight.run(corrupted, [patch | {"layers": n, "positions": at, "heads": [h]}], 1)[None]))
                for h in range(heads)
            ]
            for at in range(len(corrupted))
        ]
        for n in range(layers)
    ]
    for a, b in [(tables[hook], others[hook]) for hook in functions] + [(by_head, heads_too)]:
        off = (torch.tensor(a) - torch.tensor(b)).abs().max()
        assert off < 1e-4, f"patching: {off}"
    short = lambda table: [short(row) if isinstance(row, list) else round(row, 6) for row in table]  # noqa: E731
    return {
        "model": name,
        "texts": texts,
        "tokens": clean,
        "corrupted": corrupted,
        "answer": answer,
        "against": against,
        "differences": [float(high), float(low)],
        "transformer_lens": {hook: short(table) for hook, table in tables.items()} | {"z by head": short(by_head)},
        "nnsight": {hook: short(table) for hook, table in others.items()} | {"z by head": short(heads_too)},
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/steering_libraries.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    worst, table = 0.0, {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(
            TINY / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        lens, insight = Lens(model), Insight(model)
        cfg = lens.model.cfg
        plain = lens.run(PROMPT, [], len(PROMPT))[-1]
        results[name] = {}
        for case, edits in cases(cfg.d_model, cfg.n_heads, cfg.d_head, cfg.d_mlp).items():
            by_lens, by_insight = reply(lens, edits), reply(insight, edits)
            greatest = max(1.0, float(by_lens[0].abs().max()))
            off = float((by_lens[0] - by_insight[0]).abs().max()) / greatest
            assert off < 1e-5, f"{name}, {case}: TransformerLens and nnsight differ by {off}"
            assert by_lens[1] == by_insight[1], f"{name}, {case}"
            assert (by_lens[0] - plain).abs().max() > 1e-2, f"{name}, {case}: the edit changes nothing"
            worst = max(worst, off)
            sampled = lambda logits: [float(f"{x:.7g}") for x in logits[::STRIDE].tolist()]  # noqa: E731
            results[name][case] = {
                "steering": {"edits": edits},
                "transformer_lens": sampled(by_lens[0]),
                "nnsight": sampled(by_insight[0]),
                "reply": by_lens[1],
            }
        print(f"{name}: {len(results[name])} cases")
        if name == "llama":
            table = patched(name, model, lens, insight)
    libraries = ("transformer-lens", "nnsight", "transformers", "torch")
    golden = {
        "made_by": "tools/golden/steering_libraries.py",
        "reference": {library: version(library) for library in libraries} | {"compute": "float32"},
        "prompt": PROMPT,
        "stride": STRIDE,
        "models": results,
        "patching": table,
    }
    print(f"the two libraries differ by {worst:.1e} of the greatest logit")
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
