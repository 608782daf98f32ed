#!/usr/bin/env python3
"""Small files in the formats of mlx-rs-core's `io`, written by numpy and by Python MLX.

Writes mlx-rs-core/tests/fixtures/io/. Every array of numbers is arange(6).reshape(2, 3) in its type unless
its name says otherwise (booleans: its elements modulo 2; complex: plus twice as much j).

Pins: numpy==2.4.6, mlx==0.30.6.
Run: python tools/golden/io.py
"""

from pathlib import Path

import mlx.core as mx
import numpy as np

OUT = Path(__file__).resolve().parents[2] / "mlx-rs-core/tests/fixtures/io"

NUMPY = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def every_type():
    base = np.arange(6).reshape(2, 3)
    arrays = {name: base.astype(name) for name in NUMPY}
    arrays["bool"] = base % 2 == 1
    arrays["complex64"] = (base + 2j * base).astype(np.complex64)
    return arrays


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    arrays = every_type()
    np.savez(OUT / "numpy.npz", **arrays)
    np.savez_compressed(OUT / "numpy_compressed.npz", **arrays)

    f = arrays["float32"]
    np.save(OUT / "rows.npy", f)
    np.save(OUT / "columns.npy", np.asfortranarray(f))
    np.save(OUT / "big_endian.npy", arrays["complex64"].astype(">c8"))
    np.save(OUT / "vector.npy", np.arange(3, dtype=np.int64))
    np.save(OUT / "scalar.npy", np.float64(2.5))
    np.save(OUT / "empty.npy", np.zeros((0, 4), np.uint8))
    with open(OUT / "version3.npy", "wb") as file:
        np.lib.format.write_array(file, f, version=(3, 0))

    np.save(OUT / "refused_object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(OUT / "refused_record.npy", np.zeros(2, dtype=[("a", "<f4"), ("b", "<i4")]))
    np.save(OUT / "refused_text.npy", np.array(["ab", "c"]))
    np.save(OUT / "refused_complex128.npy", np.array([1j]))

    ours = {name: mx.array(a) for name, a in arrays.items() if name != "float64"}
    ours["bfloat16"] = mx.arange(6).reshape(2, 3).astype(mx.bfloat16)
    with mx.stream(mx.cpu):
        ours["float64"] = mx.arange(6).reshape(2, 3).astype(mx.float64)
        mx.eval(ours)
    mx.savez(str(OUT / "mlx.npz"), **ours)
    del ours["float64"]  # which its writer of safetensors refuses
    mx.save_safetensors(str(OUT / "mlx.safetensors"), ours, {"format": "mlx"})
    mx.save_safetensors(str(OUT / "mlx_no_metadata.safetensors"), {"a": ours["int32"]})


if __name__ == "__main__":
    main()
