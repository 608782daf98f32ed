#!/usr/bin/env python3
"""The speed of xLSTM: prefill in chunks and in single positions, decode at two positions, and beside transformers.

Writes random checkpoints of 162M parameters, of xLSTM and of a llama shape of the same size, and takes the tiny fixture.
Interleaved rounds run `mlx bench` with chunks of 64 and of 1, `mlx bench` after short and long prompts, and transformers'
own xLSTM (compare/xlstm_side.py). Prints a Markdown table of medians. Exit status 1 if a bar is missed: a prompt of 2,048
tokens 5 times as fast in chunks as in single positions, decode and memory within 5 % at positions 100 and 20,000, and 5
times the tokens per second of transformers in both phases. The llama shape has no bar. Needs numpy; --python names an
environment with transformers and torch (golden/requirements-transformers.txt).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
TINY = ROOT / "tests" / "fixtures" / "tiny" / "xlstm"
SIDE = TOOLS / "compare" / "xlstm_side.py"

# 12 blocks of 768 with the ratios of xLSTM 7B.
SIZES = {
    "hidden_size": 768,
    "embedding_dim": 768,
    "num_blocks": 12,
    "num_hidden_layers": 12,
    "num_heads": 4,
    "vocab_size": 50304,
    "ffn_proj_factor": 2.667,
    "chunk_size": 64,
}
# The same widths, with attention in place of mLSTM: the two have as many parameters to within 0.1 %.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
# Bars.
CHUNKS, STEADY, TRANSFORMERS = 5.0, 0.05, 5.0
SHORT, LONG = 100, 20_000
# Tokens decoded there: fewer are at the mercy of the host.
REPLY = 160
# The peak of a request is that of a prefill step of 512 positions: the first prompt that has a whole one.
WHOLE_STEP = 600


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx", type=Path, default=ROOT / "target" / "release" / "mlx", help="the program, built for release")
    parser.add_argument("--python", type=Path, help="a Python with transformers and torch; without it they are left out")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare-xlstm", help="where checkpoints are written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=LONG, help="the later position of the two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    return parser.parse_args()


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint in the layout of transformers."""
    hidden, heads = config["hidden_size"], config["num_heads"]
    qk, value = int(hidden * config["qk_dim_factor"]), int(hidden * config["v_dim_factor"])
    multiple = config["ffn_round_up_to_multiple_of"]
    width = -(-int(hidden * config["ffn_proj_factor"]) // multiple) * multiple
    out: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (config["vocab_size"], hidden),
        "backbone.out_norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for i in range(config["num_blocks"]):
        block = f"backbone.blocks.{i}"
        layer = f"{block}.mlstm_layer"
        out |= {f"{block}.{norm}.weight": (hidden,) for norm in ("norm_mlstm", "norm_ffn")}
        out |= {f"{layer}.{name}.weight": (qk, hidden) for name in ("q", "k")}
        out |= {f"{layer}.{name}.weight": (value, hidden) for name in ("v", "ogate_preact")}
        for gate in ("igate_preact", "fgate_preact"):
            out |= {f"{layer}.{gate}.weight": (heads, hidden), f"{layer}.{gate}.bias": (heads,)}
        out |= {
            f"{layer}.multihead_norm.weight": (value,),
            f"{layer}.out_proj.weight": (hidden, value),
            f"{block}.ffn.proj_up_gate.weight": (width, hidden),
            f"{block}.ffn.proj_up.weight": (width, hidden),
            f"{block}.ffn.proj_down.weight": (hidden, width),
        }
    return out


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the llama shape."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out |= {f"{layer}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        out |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        out |= {f"{layer}.mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        out[f"{layer}.mlp.down_proj.weight"] = (hidden, width)
    return out


def write_checkpoint(out: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    """Random weights in float32; gates of xLSTM keep some hundred positions."""
    if (out / "model.safetensors").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    header, data, offset = {}, [], 0
    for name, shape in tensors.items():
        if name.endswith("norm.weight"):
            values = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            values = np.full(shape, 5.0 if "fgate" in name else -2.0, np.float32)
        else:
            values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
        data.append(values)
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in data:
            file.write(values.tobytes())
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, out / name)


def one_by_one(model: Path) -> Path:
    """The same checkpoint with chunks of one position."""
    out = model.with_name(f"{model.name}-steps")
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "golden.json":
            (out / file.name).unlink(missing_ok=True)
            shutil.copy(file, out / file.name)
    config = json.loads((model / "config.json").read_text()) | {"chunk_size": 1}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def output(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def bench(args: argparse.Namespace, model: Path, prompt: int, tokens: int) -> dict[str, Any]:
    lengths = ["--prompt-tokens", str(prompt), "--generate-tokens", str(tokens)]
    # A long prompt warms up by itself.
    once = ["--repeat", "1", "--warmup", "0" if prompt > 4096 else "1", "--quiet", "--backend", "cpu"]
    return output([str(args.mlx), "bench", "--model", str(model), *lengths, *once])


def transformers(args: argparse.Namespace, model: Path, prompt: int, tokens: int) -> dict[str, Any]:
    lengths = ["--prompt-tokens", str(prompt), "--generate-tokens", str(tokens)]
    return output([str(args.python), str(SIDE), "--model", str(model), *lengths])


def rounds(args: argparse.Namespace, xlstm: Path, steps: Path, llama: Path, tiny: Path) -> dict[str, list[float]]:
    """Every figure of every round."""
    values: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)

    for _ in range(args.rounds):
        add("chunks", bench(args, xlstm, 2048, 2)["prefill_tokens_per_second"])
        add("steps", bench(args, steps, 2048, 2)["prefill_tokens_per_second"])
        for name, model in (("xLSTM", xlstm), ("llama", llama)):
            for place, prompt in (("short", SHORT), ("long", args.long)):
                run = bench(args, model, prompt, REPLY)
                add(f"{name} {place} decode", run["decode_tokens_per_second"])
                add(f"{name} {place} memory", run["decode_peak_memory_bytes"] / 2**20)
                add(f"{name} {place} request memory", run["peak_memory_bytes"] / 2**20)
            full_step = bench(args, model, WHOLE_STEP, 2)
            add(f"{name} step request memory", full_step["peak_memory_bytes"] / 2**20)
        for name, model in (("tiny", tiny), ("162M", xlstm)) if args.python else ():
            run = bench(args, model, 512, 64)
            other = transformers(args, model, 512, 64)
            for phase in ("prefill", "decode"):
                add(f"{name} {phase}", run[f"{phase}_tokens_per_second"])
                add(f"{name} {phase}, transformers", other[phase])
    return values


def main() -> None:
    args = parse()
    xlstm, llama, tiny = (args.work / name for name in ("xlstm-162m", "llama-162m", "xlstm-tiny"))
    config = json.loads((TINY / "config.json").read_text()) | SIZES | {"dtype": "float32"}
    write_checkpoint(xlstm, config, shapes(config))
    write_checkpoint(llama, LLAMA, llama_shapes(LLAMA))
    if not tiny.is_dir():
        shutil.copytree(TINY, tiny)
    measured = rounds(args, xlstm, one_by_one(xlstm), llama, tiny)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=2))
    median = {name: statistics.median(values) for name, values in measured.items()}
    missed = []
    print("| Figure | `mlx` | Other | Ratio | Bar |\n|---|--:|--:|--:|--:|")

    def row(figure: str, ours: float, other: str, against: float, bar: str, met: bool) -> None:
        print(f"| {figure} | {ours:,.1f} | {other} {against:,.1f} | {ours / against:.2f} | {bar} |")
        if not met:
            missed.append(figure)

    chunks, single = median["chunks"], median["steps"]
    row("Prefill of 2,048 in chunks, tok/s", chunks, "single positions", single, f"{CHUNKS:g}", chunks >= CHUNKS * single)
    row("The same, tok/s", chunks, "one token a pass, with its logits", median["xLSTM short decode"], "", True)
    for name in ("xLSTM", "llama"):
        decode, memory, request = ("decode", "tok/s"), ("memory", "MiB"), ("request memory", "MiB")
        figures = ((decode, "short", SHORT), (memory, "short", SHORT), (request, "short", SHORT), (request, "step", WHOLE_STEP))
        for (figure, unit), first, at in figures:
            early, late = median[f"{name} {first} {figure}"], median[f"{name} long {figure}"]
            kind = {"decode": "decode", "memory": "peak memory in decode", "request memory": "peak memory of the request"}[figure]
            has_bar = name == "xLSTM" and figure in ("decode", "memory")
            met = not has_bar or abs(late / early - 1) <= STEADY
            label = f"{name}: {kind} at position {args.long:,}, {unit}"
            row(label, late, f"at {at}", early, "within 5 %" if has_bar else "", met)
    for model in ("tiny", "162M") if args.python else ():
        for phase in ("prefill", "decode"):
            ours, other = median[f"{model} {phase}"], median[f"{model} {phase}, transformers"]
            label = f"{phase.capitalize()}, {model}, tok/s"
            row(label, ours, "transformers", other, f"{TRANSFORMERS:g}", ours >= TRANSFORMERS * other)
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
