#!/usr/bin/env python3
"""Compares the speed of each family with that of a llama, to find parts that run without the kernels.

    cargo build --release
    python3 tools/family_speed.py
    python3 tools/family_speed.py --only mamba2 --only qwen3-next

A model is a checkpoint of tests/fixtures/tiny with larger sizes: hidden states of 2,048 numbers and
random weights. The program's errors tell which shapes it expects. `mlx convert` quantizes the model to
4 bits, and `mlx bench` measures it. A model's figure is its rate times the number of weights that a
token is multiplied with, divided by that of the llama; experts that a token does not use do not count.
The slowest models come last in the table. The exit status is 1 if a figure is below --least. Needs
Python alone, and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests/fixtures/tiny"
REFERENCE = "llama"

# The sizes of a configuration by the factor that multiplies them. Other numbers stay: those of
# layers, experts, groups and words.
FACTORS = {
    512: "attention_chunk_size index_topk",
    64: "hidden_size n_embd d_model intermediate_size intermediate_size_mlp n_inner ffn_hidden_size block_dim "
    "block_ff_dim dim_model_base prefix_dense_intermediate_size mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim "
    "shared_intermediate_size",
    16: "kv_lora_rank q_lora_rank mamba_dt_rank time_step_rank hidden_size_per_layer_input laurel_rank state_size "
    "mamba_d_state ssm_state_size a_low_rank_dim decay_low_rank_dim gate_low_rank_dim v_low_rank_dim embedding_dim "
    "linear_value_head_dim linear_key_head_dim sliding_window",
    8: "num_attention_heads num_key_value_heads n_head n_heads kv_n_heads n_kv_heads num_attention_groups "
    "num_global_key_value_heads num_attention_heads_per_layer head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim "
    "qk_head_dim v_head_dim index_head_dim kv_channels linear_head_dim linear_num_key_heads linear_num_value_heads "
    "linear_num_heads mamba_d_head mamba_n_heads mamba_head_dim mamba_num_heads rotary_dim mrope_section "
    "query_pre_attn_scalar max_position_embeddings n_positions max_seq_len original_max_position_embeddings "
    "model_max_length",
}
FACTOR = {name: factor for factor, names in FACTORS.items() for name in names.split()}
# Sizes that a fixture needs instead of multiples. Dots separate the names of nested objects.
OTHERS: dict[str, dict[str, Any]] = {
    "falcon-mamba": {"state_size": 16},
    "internlm3": {"max_position_embeddings": 2048},
    "jamba": {"mamba_d_state": 16},
    "lille-130m": {"block_size": 2048},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 64},
    # A reply must not cross the length at which the rotation changes.
    "phi3": {"original_max_position_embeddings": 2048, "rope_parameters.original_max_position_embeddings": 2048},
    "xlstm": {"hidden_size": 1024, "embedding_dim": 1024},
    "xlstm-slstm": {"hidden_size": 1024, "embedding_dim": 1024},
}
# Lists with an element for each rotated pair of a head's elements.
REPEATED = ("long_factor", "short_factor")
SKIPPED = ("vision_config", "audio_config", "quantization", "quantization_config")
# Formats, not families.
NOT_FAMILIES = re.compile(r"-(q4|q8|gguf|awq|gptq|gptq-order|fp8|mxfp4|sharded|bf16|modes|mixed)$")

Shapes = dict[str, list[int]]


def scaled(config: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name, value in config.items():
        factor = FACTOR.get(name)
        if isinstance(value, dict):
            value = value if name in SKIPPED else scaled(value)
        elif name in REPEATED:
            value = [v for v in value for _ in range(8)]
        elif factor and isinstance(value, list):
            value = [v * factor for v in value]
        elif factor and isinstance(value, int) and not isinstance(value, bool):
            value *= factor
        out[name] = value
    return out


def set_parts(config: dict[str, Any], parts: dict[str, Any]) -> None:
    for name, value in parts.items():
        *path, last = name.split(".")
        at = config
        for part in path:
            at = at[part]
        at[last] = value


def stored_shapes(directory: Path) -> Shapes:
    shapes: Shapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: part["shape"] for name, part in header.items() if name != "__metadata__"}
    return shapes


def kind_of(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"\.\d+\.", ".N.", name)


class Values:
    """Random bfloat16 numbers of any power of two as deviation, from blocks that repeat."""

    def __init__(self, size: int = 1 << 18) -> None:
        draw = random.Random(7)
        self.numbers = [draw.gauss(0.0, 1.0) for _ in range(size)]
        self.blocks: dict[tuple[int, float], bytes] = {}

    def block(self, exponent: int, mean: float) -> bytes:
        key = (exponent, mean)
        if key not in self.blocks:
            floats = array("f", [mean + math.ldexp(v, exponent) for v in self.numbers])
            words = array("H", floats.tobytes())
            self.blocks[key] = (words[1::2] if sys.byteorder == "little" else words[::2]).tobytes()
        return self.blocks[key]

    def write(self, file: Any, name: str, shape: list[int]) -> None:
        flat = len(shape) < 2 or min(shape[-2:]) == 1
        norm = flat and name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "_norm.weight", "ln_f.weight"))
        exponent = -3 if flat else round(-math.log2(shape[-1]) / 2)
        block, left = self.block(exponent, 1.0 if norm else 0.0), 2 * math.prod(shape)
        while left > 0:
            left -= file.write(block[:left])


def write_model(directory: Path, shapes: Shapes, values: Values | None) -> None:
    """Writes the tensors; without values the file has a hole in their place."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if values is None:
            file.truncate(file.tell() + at)
            return
        for name, shape in shapes.items():
            values.write(file, name, shape)


def run(program: Path, *args: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, check=False, timeout=600)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return lines[0] if lines else f"exit code {done.returncode}"


def fitted(program: Path, directory: Path, shapes: Shapes) -> Shapes:
    """The shapes that the program expects; the first guess scales what is not a number of words."""
    words = json.loads((directory / "config.json").read_text())
    vocabulary = (words.get("text_config") or words).get("vocab_size")
    shapes = {name: [d if d < 24 or d == vocabulary else 64 * d for d in shape] for name, shape in shapes.items()}
    first = stored_shapes(TINY / directory.name)
    for _ in range(400):
        write_model(directory, shapes, None)
        done = run(program, "bench", "--quiet", "--model", directory, "--prompt-tokens", 2, "--generate-tokens", 1, "--repeat", 1, "--warmup", 0)
        if done.returncode == 0:
            return shapes
        found = re.search(r"tensor `([^`]+)`: has shape \[([\d, ]+)\], expected \[([\d, ]+)\]", done.stderr)
        if not found:
            raise ValueError(error_of(done))
        name, actual, expected = found[1], *([int(d) for d in found[i].split(",")] for i in (2, 3))
        if actual == expected or name not in shapes:
            raise ValueError(error_of(done))
        # Equal parts of other layers have the same shape.
        for other, shape in shapes.items():
            if kind_of(other) == kind_of(name) and first[other] == first[name] and shape == shapes[name]:
                shapes[other] = list(expected)
    raise ValueError("no shapes fit")


def used_weights(config: dict[str, Any], shapes: Shapes) -> float:
    """The weights that a token is multiplied with."""
    text = config.get("text_config") or config
    parts = text | text.get("ffn_config", {})

    def first(*names: str) -> int:
        values = [parts[name] for name in names if parts.get(name)]
        value = values[0] if values else 1
        return value[0] if isinstance(value, list) else value

    experts = first("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
    total = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2 or re.search(r"embed_tokens|wte|wpe|embeddings|embed_in|vision|visual", name):
            continue
        routed = re.search(r"\.experts\.|switch_mlp|block_sparse_moe\.(input|output)_linear|_exps\.", name)
        total += math.prod(shape) * (chosen / experts if routed and "shared" not in name else 1.0)
    return total


def measure(program: Path, name: str, work: Path, values: Values, args: argparse.Namespace) -> dict[str, Any]:
    directory, packed = work / name, work / f"{name}-4bit"
    shutil.copytree(TINY / name, directory, ignore=shutil.ignore_patterns("*.safetensors*", "golden*"))
    try:
        config = scaled(json.loads((directory / "config.json").read_text()))
        set_parts(config, OTHERS.get(name, {}))
        (directory / "config.json").write_text(json.dumps(config))
        shapes = fitted(program, directory, stored_shapes(TINY / name))
        write_model(directory, shapes, values)
        done = run(program, "convert", "--quiet", "--model", directory, "-q", "--bits", 4, "--group-size", 64, "--output", packed)
        if done.returncode:
            raise ValueError(error_of(done))
        bench = ["bench", "--quiet", "--model", packed, "--prompt-tokens", args.prompt, "--generate-tokens", args.generate]
        done = run(program, *bench, "--repeat", args.repeat)
        if done.returncode:
            raise ValueError(error_of(done))
        result = json.loads(done.stdout)
        weights = used_weights(config, shapes)
        rates = {"prefill": result["prefill_tokens_per_second"], "decode": result["decode_tokens_per_second"]}
        return {"name": name, "weights": weights} | rates
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if args.keep is None:
            shutil.rmtree(packed, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx")
    parser.add_argument("--only", action="append", help="a fixture; may be repeated; default: all")
    parser.add_argument("--least", type=float, default=0.5, help="the least figure relative to the llama's")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="leaves the models with 4 bits in this new directory")
    parser.add_argument("--json", type=Path, help="writes all figures to a file")
    args = parser.parse_args()
    names = args.only or sorted(path.parent.name for path in TINY.glob("*/config.json"))
    names = [name for name in names if args.only or not NOT_FAMILIES.search(name)]
    values, rows, failed = Values(), [], []
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for name in [REFERENCE, *(name for name in names if name != REFERENCE)]:
            try:
                rows.append(measure(args.program, name, work, values, args))
                print(f"{name}: {rows[-1]}", file=sys.stderr)
            except (ValueError, KeyError, subprocess.TimeoutExpired) as error:
                failed.append((name, str(error)))
                print(f"{name}: {error}", file=sys.stderr)
    base = rows[0]
    for row in rows:
        for key in ("prefill", "decode"):
            row[f"{key}_ratio"] = row[key] * row["weights"] / (base[key] * base["weights"])
        row["least"] = min(row["prefill_ratio"], row["decode_ratio"])
    rows.sort(key=lambda row: -row["least"])
    print("| Family | Weights of a token, millions | Prefill, tok/s | Decode, tok/s | Beside llama |\n|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['name']} | {row['weights'] / 1e6:.1f} | {row['prefill']:.0f} | {row['decode']:.1f} | "
            f"{row['prefill_ratio']:.2f}, {row['decode_ratio']:.2f} |"
        )
    for name, error in failed:
        print(f"\n{name}: {error}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "failed": failed}, indent=1))
    return int(bool(failed) or any(row["least"] < args.least for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("MLX_NUM_THREADS", str(os.cpu_count() or 1))
    raise SystemExit(main())
