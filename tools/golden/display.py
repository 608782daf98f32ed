#!/usr/bin/env python3
"""How Python MLX prints arrays: `repr`, for arrays that can be described in a line.

Writes mlx-rs-core/tests/fixtures/display.json, a list of [dtype, shape, values, text]. Values are what the array holds,
as numbers (a complex one as [re, im]); NaN and the infinities as text.

Pins: mlx==0.30.6.
Run: python tools/golden/display.py
"""

import json
import math
from pathlib import Path

import mlx.core as mx

OUT = Path(__file__).resolve().parents[2] / "mlx-rs-core/tests/fixtures/display.json"

mx.set_default_device(mx.cpu)


def number(x):
    if isinstance(x, complex):
        return [x.real, x.imag]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def main():
    cases = []

    def add(values, shape, dtype):
        a = mx.array(values, dtype=dtype).reshape(shape)
        cases.append([str(dtype).split(".")[-1], list(shape), [number(v) for v in values], repr(a)])

    floats = [0.0, -0.0, 1.0, 0.1, -2.5, 1e10, 1e-5, 123456.0, 1234567.0, 1e38, 3.14159265, 0.0001, 0.00001234]
    odd = [math.inf, -math.inf, math.nan]
    for dtype in [mx.float32, mx.float64]:
        add(floats + odd, (16,), dtype)
        for v in floats + odd:
            add([v], (), dtype)
    for dtype in [mx.float16, mx.bfloat16]:
        half = [0.0, 1.0, 0.1, -2.5, 0.0001, 60000.0, math.inf]
        for v in half:
            add([v], (1,), dtype)
    for v in [0j, 1 + 2j, -1.5 - 0.25j, 1e10 + 1e-7j, -0.0 - 0.0j]:
        add([v], (1,), mx.complex64)
    add([True, False, True], (3,), mx.bool_)
    for dtype in [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64]:
        add([0, 1, 127], (3,), dtype)
        add([100], (), dtype)
    add([-(2**63), 2**63 - 1], (2,), mx.int64)
    for n in range(0, 12):
        add(list(range(n)), (n,), mx.int32)
    for shape in [(1, 1), (2, 3), (3, 1), (1, 6), (6, 1), (7, 2), (2, 7), (8, 9), (2, 2, 2), (1, 1, 1, 1), (2, 1, 7),
                  (7, 7, 7), (2, 3, 2, 3), (0,), (0, 3), (3, 0), (2, 0, 2)]:
        add(list(range(math.prod(shape))), shape, mx.int32)
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    OUT.write_text(f"[\n{lines}\n]\n")
    print(len(cases), "cases,", OUT.stat().st_size, "bytes")


main()
