"""Makes tests/fixtures/tiny/llama-{gptq,gptq-order,awq,fp8}: tiny checkpoints in the formats of other quantizers.

numpy quantizes random weights and packs the codes as the formats say; nothing is unpacked again. The numbers are mlx-lm's
for the dense model of the same values, `scale * (code - zero)`. mlx-lm also reads the AWQ files, and must generate the same.

- GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [in * bits / 32, out], low bits first along the inputs; `qzeros` int32
  [groups, out * bits / 32], which format 1 stores less one; `scales` float16 [groups, out]; `g_idx` int32 [in].
- AWQ (AutoAWQ, GEMM): `qweight` int32 [in, out / 8], whose words hold outputs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits up;
  `qzeros` int32 [groups, out / 8] in the same order; `scales` float16 [groups, out].
- FP8 (DeepSeek): `weight` E4M3 [out, in], `weight_scale_inv` float32 for each block.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable

import mlx_reference as reference  # first: it chooses the CPU
import ml_dtypes
import numpy as np
from mlx_lm.utils import load as mlx_lm_load

import tiny_tokenizer
from tiny_models import DEFAULT_OUT, GREEDY_TOKENS, Spec, config, numbers, random_weights, text_goldens, write_json

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CONFIG = config("llama", small=False, tie_word_embeddings=True)
# What these tools leave dense.
DENSE = ("embed_tokens", "lm_head", "norm")

Tensors = dict[str, np.ndarray]


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as int32 words, low bits first."""
    per = 32 // bits
    codes = codes.reshape(*codes.shape[:-1], -1, per).astype(np.uint64)
    shifts = np.arange(per, dtype=np.uint64) * np.uint64(bits)
    return (codes << shifts).sum(axis=-1).astype(np.uint32).view(np.int32)


def quantize(weight: np.ndarray, groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [in, out], zero points [groups, out], scales [groups, out]; `groups` has the group of each input."""
    inputs = weight.T
    top = 2**bits - 1
    codes = np.zeros(inputs.shape, np.int64)
    count = groups.max() + 1
    zeros, scales = np.zeros((count, inputs.shape[1]), np.int64), np.zeros((count, inputs.shape[1]), np.float16)
    for group in range(count):
        part = inputs[groups == group]
        low, high = np.minimum(part.min(axis=0), 0), np.maximum(part.max(axis=0), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, top).astype(np.int64)
        codes[groups == group] = np.clip(np.round(part / scale.astype(np.float32)) + zero, 0, top)
        zeros[group], scales[group] = zero, scale
    return codes, zeros, scales


def values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The weights [out, in]."""
    return ((codes - zeros[groups]) * scales[groups].astype(np.float32)).T.astype(np.float32)


def gptq(weight: np.ndarray, bits: int, size: int, shuffled: np.random.Generator | None) -> tuple[Tensors, np.ndarray]:
    groups = np.arange(weight.shape[1]) // size
    if shuffled:
        groups = shuffled.permutation(groups)
    codes, zeros, scales = quantize(weight, groups, bits)
    packed = {
        "qweight": np.ascontiguousarray(words(codes.T, bits).T),
        "qzeros": words((zeros - 1) % 2**bits, bits),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }
    dense = values(codes, zeros, scales, groups)
    # The engine keeps such matrices in float16.
    return packed, dense.astype(np.float16).astype(np.float32) if shuffled else dense


def awq(weight: np.ndarray, size: int) -> tuple[Tensors, np.ndarray]:
    groups = np.arange(weight.shape[1]) // size
    codes, zeros, scales = quantize(weight, groups, 4)

    def ordered(codes: np.ndarray) -> np.ndarray:
        return words(codes.reshape(codes.shape[0], -1, 8)[..., AWQ_ORDER].reshape(codes.shape), 4)

    return {"qweight": ordered(codes), "qzeros": ordered(zeros), "scales": scales}, values(codes, zeros, scales, groups)


def fp8(weight: np.ndarray, block: int) -> tuple[Tensors, np.ndarray]:
    rows, cols = (-(-n // block) for n in weight.shape)
    codes, dense = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros(weight.shape, np.float32)
    scales = np.zeros((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scales[i, j] = np.abs(weight[at]).max() / 448
            codes[at] = (weight[at] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            dense[at] = codes[at].astype(np.float32) * scales[i, j]
    # The engine keeps such matrices in bfloat16.
    return {"weight": codes, "weight_scale_inv": scales}, dense.astype(ml_dtypes.bfloat16).astype(np.float32)


# Name: quantization_config, and what it does with a matrix and its number.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray, int], tuple[Tensors, np.ndarray]]]] = {
    "llama-gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda weight, _: gptq(weight, 4, 32, None),
    ),
    # Groups of inputs that are not neighbors, 8 bits.
    "llama-gptq-order": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": False},
        lambda weight, number: gptq(weight, 8, 32, np.random.default_rng(number)),
    ),
    # A group for all inputs: 64, and 128 in the down projection.
    "llama-awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        lambda weight, _: awq(weight, 64),
    ),
    # Blocks that do not divide the matrices.
    "llama-fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 24]},
        lambda weight, _: fp8(weight, 24),
    ),
}

TYPES = {"int32": "I32", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """By hand: the package does not know numpy arrays of FP8."""
    header, offset = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": TYPES[str(value.dtype)], "shape": value.shape, "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def make(name: str, out_root: Path, first_seed: int) -> None:
    quantization, pack = FORMATS[name]
    for seed in range(first_seed, first_seed + 500):
        stored: Tensors = {}
        dense: Tensors = {}
        for number, (tensor, weight) in enumerate(random_weights(CONFIG, seed).items()):
            if any(part in tensor for part in DENSE):
                # Halves keep the file small.
                stored[tensor] = weight.astype(np.float16)
                dense[tensor] = stored[tensor].astype(np.float32)
                continue
            parts, dense[tensor] = pack(weight, number)
            prefix = tensor.removesuffix("weight")
            stored |= {prefix + part: value for part, value in parts.items()}
        result = numbers(reference.dense_model(CONFIG, dense), seed)
        if result is None:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / name
            out.mkdir()
            write_safetensors(out / "model.safetensors", stored)
            write_json(out / "config.json", CONFIG | {"quantization_config": quantization})
            spec = Spec(name, CONFIG)
            files = tiny_tokenizer.files(spec.pre)
            write_json(out / "tokenizer.json", files["tokenizer.json"], compact=True)
            write_json(out / "tokenizer_config.json", files["tokenizer_config.json"])
            golden = {
                "made_by": "tools/golden/packed.py",
                "reference": reference.versions(),
                "seed": seed,
                **result,
                "text": text_goldens(spec, files["tokenizer.json"]),
            }
            if quantization["quant_method"] == "awq":
                model, _ = mlx_lm_load(str(out))
                model.set_dtype(reference.mx.float32)
                for prompt in golden["prompts"]:
                    again = reference.greedy(model, prompt["tokens"], GREEDY_TOKENS).tokens
                    if again != prompt["greedy"]:
                        raise SystemExit(f"{name}: mlx-lm generates {again} from the packed files")
            write_json(out / "golden.json", golden, compact=True)
            target = out_root / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(out, target)
            size = sum(file.stat().st_size for file in target.iterdir())
            print(f"{name}: seed {seed}, min margin {golden['min_margin']}, {size / 1024:.0f} KiB")
            return
    raise SystemExit(f"{name}: no seed from {first_seed} on gives clear margins")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: tests/fixtures/tiny")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    args = parser.parse_args()
    for name in args.names or FORMATS:
        make(name, args.out, args.seed)


if __name__ == "__main__":
    main()
