"""Turns a GGUF of Q4_1, Q4_0 and Q8_0 blocks into an MLX checkpoint directory, without loss.

Runs in the pinned environment (tools/golden/requirements.txt). Each kind has an MLX affine twin in groups of 32: q * scale + bias with
  Q4_1: 4 bits, scale d, bias m;  Q4_0: 4 bits, scale d, bias -8 d;  Q8_0: 8 bits, scale d, bias -128 d, q + 128.
Scales and biases are stored as float32 (half types are emulated on many CPUs, and both sides shall have the same).
The result is compared with the GGUF's dequantized weights, bit for bit, before it is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from gguf_model import GgufModel, RawTensor  # noqa: E402

GROUP = 32
BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}


def _halves(blocks: np.ndarray) -> np.ndarray:
    """float16 fields, given as pairs of bytes, as float32: [..., 2] -> [...]."""
    return np.ascontiguousarray(blocks).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Elements 0..15 are the low nibbles, 16..31 the high ones: uint8 [..., 16] -> [..., 32]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack(tensor: RawTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weight uint32 [rows, cols * bits / 32], scales [rows, cols / 32], biases likewise)."""
    rows = tensor.data.shape[0]
    size = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[tensor.kind]
    blocks = tensor.data.reshape(rows, -1, size)
    scales = _halves(blocks[..., :2])
    if tensor.kind == Kind.Q8_0:
        elements, biases = blocks[..., 2:] ^ 0x80, scales * np.float32(-128)  # two's complement + 128
    elif tensor.kind == Kind.Q4_1:
        elements, biases = _nibbles(blocks[..., 4:]), _halves(blocks[..., 2:4])
    else:
        elements, biases = _nibbles(blocks[..., 2:]), scales * np.float32(-8)
    flat = elements.reshape(rows, -1)
    if BITS[tensor.kind] == 4:
        flat = flat[:, 0::2] | (flat[:, 1::2] << 4)  # element i at bits 4 i: the lower one first
    return np.ascontiguousarray(flat).view("<u4"), scales, biases


def convert(source: Path, out: Path) -> None:
    """Writes the directory `out`, replacing an unfinished one."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = GgufModel.open(source)
    arrays: dict[str, np.ndarray] = {}
    bits: dict[str, int] = {}
    for tensor in model.tensors():
        if tensor.kind in (Kind.F32, Kind.F16):
            arrays[tensor.name] = tensor.data.astype(np.float32)
        elif tensor.kind in BITS:
            module = tensor.name.removesuffix(".weight")
            bits[module] = BITS[tensor.kind]
            weight, scales, biases = pack(tensor)
            back = mx.dequantize(
                mx.array(weight), mx.array(scales), mx.array(biases), group_size=GROUP, bits=bits[module]
            )
            if not np.array_equal(np.array(back), tensor.dequantized()):
                raise SystemExit(f"{tensor.name} would not be the same after conversion")
            arrays |= {f"{module}.weight": weight, f"{module}.scales": scales, f"{module}.biases": biases}
        else:
            raise SystemExit(f"{source}: {tensor.name} is {tensor.kind.name}; known are F32, F16, Q4_0, Q4_1, Q8_0")
    config = model.config()
    if bits:
        common = Counter(bits.values()).most_common(1)[0][0]
        quantization: dict[str, object] = {"group_size": GROUP, "bits": common, "mode": "affine"}
        for module, width in bits.items():
            if width != common:
                quantization[module] = {"group_size": GROUP, "bits": width, "mode": "affine"}
        config["quantization"] = config["quantization_config"] = quantization
    save_file(arrays, partial / "model.safetensors", metadata={"format": "mlx"})
    for name, value in {
        "config.json": config,
        "tokenizer.json": model.tokenizer_json(),
        "tokenizer_config.json": model.tokenizer_config(),
    }.items():
        (partial / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.gguf, args.out)


if __name__ == "__main__":
    main()
