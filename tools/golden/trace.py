"""Makes tests/fixtures/trace.json: what transformers sees inside the tiny checkpoints.

For one prompt of each fixture that transformers loads: the output of every block at the last position, the residual stream
between its attention and its feed-forward part, and the attention weights of the last token. The states come from hooks on
the modules and not from `output_hidden_states`, whose last entry is after the final norm. Quantized fixtures and GGUF files
are not here: transformers does not read MLX's packing.

    python tools/golden/trace.py            # needs requirements-transformers.txt
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny"

# Where the second norm of a block reads the residual stream: it stands before the feed-forward part.
BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm")
# Blocks without a norm that reads the stream there: norms after the parts, or both parts from one input.
WITHOUT = {"olmo2", "olmo3", "exaone4", "cohere2"}


def digits7(values: torch.Tensor) -> list[Any]:
    return [float(f"{x:.7g}") for x in values.detach().float().flatten().tolist()]


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    lists = [
        module
        for name, module in model.named_modules()
        if name.split(".")[-1] in ("layers", "h", "blocks") and "vision" not in name
    ]
    return next(module for module in lists if isinstance(module, torch.nn.ModuleList))


def trace(path: Path) -> dict[str, Any] | None:
    config = json.loads((path / "config.json").read_text())
    if any(key in config for key in ("quantization", "quantization_config")) or not list(path.glob("*.safetensors")):
        return None
    kind = config["model_type"]
    recurrent = kind in ("xlstm", "lfm2", "lfm2_moe")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=None if recurrent else "eager"
    ).eval()
    golden = json.loads((path / "golden.json").read_text())
    tokens = max((p["tokens"] for p in golden["prompts"]), key=len)
    first, after, between = [], [], []
    handles = []
    for i, block in enumerate(blocks(model)):
        if i == 0:
            handles.append(
                block.register_forward_pre_hook(
                    lambda _, args, kwargs: first.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            )
        handles.append(
            block.register_forward_hook(lambda _, __, out: after.append(out[0] if isinstance(out, tuple) else out))
        )
        norm = next((getattr(block, n) for n in BEFORE_MLP if hasattr(block, n)), None)
        if norm is not None and kind not in WITHOUT:
            handles.append(norm.register_forward_pre_hook(lambda _, args: between.append(args[0])))
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_attentions=not recurrent, use_cache=False)
    traced: dict[str, Any] = {
        "tokens": tokens,
        "embedding": digits7(first[0][0, -1]),
        "blocks": [digits7(x[0, -1]) for x in after],
    }
    # A norm that is called once a block, with the stream of all positions.
    if len(between) == len(after) and all(x.shape == after[0].shape for x in between):
        traced["between"] = [digits7(x[0, -1]) for x in between]
    if not recurrent and out.attentions and all(a is not None for a in out.attentions):
        traced["weights"] = [[digits7(head) for head in layer[0, :, -1, : len(tokens)]] for layer in out.attentions]
    return traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/trace.json")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    torch.manual_seed(0)
    models: dict[str, Any] = {}
    for path in sorted(TINY.iterdir()):
        # transformers has no sLSTM blocks.
        if path.name == "xlstm-slstm" or (args.names and path.name not in args.names):
            continue
        try:
            traced = trace(path)
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            print(f"{path.name}: left out: {str(error).splitlines()[0]}")
            continue
        if traced is not None:
            models[path.name] = traced
            print(f"{path.name}: {len(traced['blocks'])} blocks, {sorted(traced)}")
    reference = {"transformers": version("transformers"), "torch": version("torch"), "compute": "float32"}
    golden = {"made_by": "tools/golden/trace.py", "reference": reference, "models": models}
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
