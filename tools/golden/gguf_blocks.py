#!/usr/bin/env python3
"""Golden numbers for GGUF block decoding.

Writes random blocks of every quantized type the engine reads, as hex, with the float32 numbers that the
independent Python package `gguf` decodes them to (as the hex of their little-endian bytes, so that the
comparison is exact; Q1_0, which the package cannot decode yet, by its written format), and, for the types MLX has a layout for, checks that MLX itself reads our packing.

Pins: gguf==0.19.0, numpy, mlx==0.30.6 with mlx-cpu==0.30.6 (optional: only for the check).
Run: python tools/golden/gguf_blocks.py > inference-formats/tests/fixtures/gguf_blocks.json
"""

import json
import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

TYPES = [
    T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.BF16, T.F16,
    T.MXFP4, T.IQ4_NL, T.IQ4_XS, T.TQ1_0, T.TQ2_0, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ1_S, T.IQ1_M,
    T.Q1_0,
]
# Byte offsets of float16 numbers in a block: random bytes there could be NaN or infinity.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.TQ1_0: [52], T.TQ2_0: [64], T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0],
    T.IQ3_XXS: [0], T.IQ3_S: [0], T.IQ1_S: [0], T.MXFP4: [], T.IQ1_M: [],
    T.Q1_0: [0],
}


def blocks(kind, count, rng):
    """`count` random blocks `[count, bytes]` with finite scales of both signs."""
    _, size = GGML_QUANT_SIZES[kind]
    if kind in (T.F16, T.BF16):
        halves = rng.normal(size=count * 64).astype(np.float32)
        raw = halves.astype(np.float16) if kind == T.F16 else (halves.view(np.uint32) >> 16).astype(np.uint16)
        return raw.view(np.uint8).reshape(1, -1)
    data = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = rng.normal(size=count).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(count, 2)
    if kind == T.MXFP4:
        # Powers of two whose products are finite, the two smallest among them.
        data[:, 0] = [0, 1, *rng.integers(2, 250, size=count - 2)]
    if kind == T.IQ1_M:
        # A float16 in the upper four bits of four words.
        scale = rng.normal(size=count).astype(np.float16).view(np.uint16)
        words = data[:, 48:56].copy().view("<u2") & np.uint16(0x0FFF)
        words |= np.stack([(scale >> (4 * i) & 15) << 12 for i in range(4)], axis=1)
        data[:, 48:56] = words.astype("<u2").view(np.uint8)
    return data


def decode(data, kind):
    """The numbers of blocks as float32."""
    if kind != T.Q1_0:
        return dequantize(data, kind).astype(np.float32).reshape(-1)
    # A float16 scale, and a bit for each weight from the lowest of the first byte on: 1 is plus, 0 is minus.
    scale = data[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(data[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, scale, -scale).reshape(-1)


def check_mlx_layout():
    """Elements of `bits` bits, one after another from bit 0 of a little-endian stream, are MLX's layout."""
    try:
        import mlx.core as mx
    except ImportError:
        print("mlx is not installed: layout not checked", file=sys.stderr)
        return
    rng = np.random.default_rng(7)
    for bits in (2, 4, 5, 8):
        q = rng.integers(0, 1 << bits, size=(3, 96))
        stream = ((q[:, :, None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(3, -1)
        words = np.packbits(stream, axis=1, bitorder="little").view("<u4")
        scales, biases = np.ones((3, 3), np.float32), np.zeros((3, 3), np.float32)
        got = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=32, bits=bits)
        assert (np.array(got) == q).all(), bits
        x = rng.normal(size=(2, 96)).astype(np.float32)
        out = mx.quantized_matmul(
            mx.array(x), mx.array(words), mx.array(scales), mx.array(biases), True, 32, bits
        )
        assert np.allclose(np.array(out), x @ q.T, rtol=1e-4, atol=1e-3), bits
        print(f"MLX reads the {bits}-bit layout", file=sys.stderr)


def main():
    rng = np.random.default_rng(20240229)
    cases = []
    for kind in TYPES:
        data = blocks(kind, 3, rng)
        numbers = decode(data.copy(), kind)
        assert np.isfinite(numbers).all(), kind
        cases.append({"type": int(kind), "name": kind.name, "data": data.tobytes().hex(),
                      "f32": numbers.tobytes().hex()})
    check_mlx_layout()
    json.dump({"gguf": "0.19.0", "cases": cases}, sys.stdout, indent=0)
    print()


if __name__ == "__main__":
    main()
