"""What a case of ops.py is, and the small arrays that cases are made of."""

from __future__ import annotations

import zlib
from typing import Any, Callable

import ml_dtypes
import numpy as np

TYPES: dict[str, Any] = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
}
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
SIGNED = ["int8", "int16", "int32", "int64"]
INTEGERS = UNSIGNED + SIGNED
FLOATS = ["float16", "bfloat16", "float32", "float64"]
REAL = ["bool"] + INTEGERS + FLOATS
ALL = REAL + ["complex64"]

CASES: list[dict[str, Any]] = []


def type_name(a: np.ndarray) -> str:
    return next(n for n, t in TYPES.items() if a.dtype == np.dtype(t))


def number(v: Any) -> Any:
    if isinstance(v, (bool, np.bool_)):
        return int(v)
    if isinstance(v, (int, np.integer)):
        return int(v)
    v = float(v)
    if v != v:
        return "nan"
    if v in (float("inf"), float("-inf")):
        return "inf" if v > 0 else "-inf"
    return int(v) if v == int(v) and abs(v) < 2**53 and not (v == 0 and np.signbit(v)) else v


def encode(a: np.ndarray) -> list[Any]:
    """[type, shape, values]: complex numbers as pairs, floats with the digits that their type needs."""
    name = type_name(a)
    flat = np.ascontiguousarray(a).reshape(-1)
    if name == "complex64":
        flat = flat.view(np.float32)
    if name in ("float16", "bfloat16"):
        flat = flat.astype(np.float32)
    if flat.dtype == np.float32:
        values = [number(float(str(v))) for v in flat]
    else:
        values = [number(v) for v in flat]
    return [name, list(a.shape), values]


def case(op: str, inputs: list[np.ndarray], outputs: Any, tol: float | None = None, **params: Any) -> None:
    """One call and what it must give; `tol` replaces the tolerance of the type."""
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    c: dict[str, Any] = {"op": op, "in": [encode(np.asarray(a)) for a in inputs]}
    if params:
        c["p"] = params
    c["out"] = [encode(np.asarray(a)) for a in outputs]
    if tol is not None:
        c["tol"] = tol
    CASES.append(c)


def sample(dtype: str, shape: tuple[int, ...], domain: str = "any", key: str = "") -> np.ndarray:
    """The same numbers every time, in `domain`, exactly as `dtype` holds them."""
    rng = np.random.RandomState(zlib.crc32(f"{dtype}{shape}{domain}{key}".encode()))
    n = int(np.prod(shape))
    t = TYPES[dtype]
    if dtype == "bool":
        return rng.rand(n).reshape(shape) > 0.5
    if dtype in INTEGERS:
        low = {"any": -9, "pos": 1, "unit": 0, "above": 1, "small": 0}[domain]
        high = {"any": 10, "pos": 10, "unit": 2, "above": 10, "small": 4}[domain]
        low = max(low, 0) if dtype in UNSIGNED else low
        return rng.randint(low, high, n).astype(t).reshape(shape)
    span = {"any": (-3, 3), "pos": (0.1, 4), "unit": (-0.95, 0.95), "above": (1.05, 4), "small": (0, 3)}[domain]
    values = rng.uniform(*span, n)
    if dtype == "complex64":
        return (values + 1j * rng.uniform(*span, n)).astype(t).reshape(shape)
    return values.astype(t).reshape(shape)


def wide(a: np.ndarray) -> np.ndarray:
    """As many digits as numpy has, to compute in."""
    if np.iscomplexobj(a):
        return a.astype(np.complex128)
    if a.dtype == np.bool_ or np.issubdtype(a.dtype, np.integer):
        return a
    return a.astype(np.float64)


def floating(dtype: str) -> str:
    """The type of functions that give floats."""
    return dtype if dtype in FLOATS + ["complex64"] else "float32"


def to(a: Any, dtype: str) -> np.ndarray:
    a = np.asarray(a)
    if dtype in INTEGERS and np.issubdtype(a.dtype, np.integer):
        return a.astype(TYPES[dtype])  # wraps
    if dtype in ("float16", "bfloat16"):
        a = a.astype(np.float32)
    return a.astype(TYPES[dtype])


def each(op: str, dtypes: list[str], f: Callable[[np.ndarray], Any], domain: str = "any", out: Any = None, **p: Any) -> None:
    """`f` of one array of every type; `out` is the type of the result, or gives it."""
    for d in dtypes:
        a = sample(d, (2, 3), domain, op)
        result = out(d) if callable(out) else (out or d)
        with np.errstate(all="ignore"):
            case(op, [a], to(f(wide(a)), result), **p)
