"""Makes mlx-rs-core/tests/fixtures/ops.json: small calls of every operation, computed by numpy.

numpy (with scipy for error functions, special matrices and decompositions, and ml_dtypes for bfloat16 and 8-bit floats)
shares no code with MLX. Floats are computed in double precision and rounded once at the end. Where MLX's rules differ from
numpy's (which types results have, integer division), the rule is written out here.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ml_dtypes import float8_e4m3fn as TYPES_FP8
from scipy import special

import ops_composed
import ops_products
import ops_shapes
from ops_cases import ALL, CASES, FLOATS, INTEGERS, REAL, SIGNED, TYPES, UNSIGNED, case, each, floating, sample, to, wide

OUT = Path(__file__).parents[2] / "mlx-rs-core/tests/fixtures/ops.json"


def unary() -> None:
    f = FLOATS + ["complex64"]
    for op, function, domain, types in [
        ("arccos", np.arccos, "unit", REAL), ("arccosh", np.arccosh, "above", FLOATS + ["int32"]),
        ("arcsin", np.arcsin, "unit", REAL), ("arcsinh", np.arcsinh, "any", REAL),
        ("arctan", np.arctan, "any", REAL), ("arctanh", np.arctanh, "unit", FLOATS),
        ("cos", np.cos, "any", ALL), ("cosh", np.cosh, "any", ALL),
        ("erf", special.erf, "any", REAL), ("erfinv", special.erfinv, "unit", FLOATS),
        ("exp", np.exp, "any", ALL), ("expm1", np.expm1, "any", REAL),
        ("log", np.log, "pos", ALL), ("log10", np.log10, "pos", ALL), ("log2", np.log2, "pos", ALL),
        ("log1p", np.log1p, "pos", REAL), ("reciprocal", np.reciprocal, "pos", f),
        ("rsqrt", lambda x: 1 / np.sqrt(x), "pos", REAL), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), "any", FLOATS),
        ("sin", np.sin, "any", ALL), ("sinh", np.sinh, "any", ALL), ("sqrt", np.sqrt, "pos", ALL),
        ("tan", np.tan, "unit", ALL), ("tanh", np.tanh, "any", ALL),
        ("degrees", np.degrees, "any", REAL), ("radians", np.radians, "any", REAL),
        ("silu", lambda x: x / (1 + np.exp(-x)), "any", FLOATS),
    ]:
        each(op, types, lambda x, g=function: g(x.astype(np.float64) if not np.iscomplexobj(x) else x), domain, floating)
    each("abs", REAL, np.abs)
    each("abs", ["complex64"], np.abs, out="float32")
    each("ceil", REAL, lambda x: x if x.dtype == bool else np.ceil(x))
    each("floor", REAL, lambda x: x if x.dtype == bool else np.floor(x))
    each("negative", INTEGERS + f, np.negative)
    each("square", INTEGERS + f, np.square)
    each("sign", INTEGERS + FLOATS, np.sign)
    each("conjugate", ["complex64"], np.conj)
    each("real", ["complex64"], np.real, out="float32")
    each("imag", ["complex64"], np.imag, out="float32")
    each("logical_not", ALL, np.logical_not, out="bool")
    each("bitwise_invert", ["bool"] + INTEGERS, np.invert)
    for decimals in (0, 1, -1):
        each("round", FLOATS[2:] + SIGNED, lambda x: np.round(x, decimals), n=decimals)
    special_values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5]
    for d in FLOATS:
        a = to(np.array(special_values), d)
        for op, g in [("is_nan", np.isnan), ("is_inf", np.isinf), ("is_finite", np.isfinite), ("is_neg_inf", np.isneginf), ("is_pos_inf", np.isposinf)]:
            case(op, [a], g(a.astype(np.float64)))
        if d != "float64":
            greatest = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": float(np.finfo(np.float32).max)}[d]
            case("nan_to_num", [a], to(np.array([7, greatest, -greatest, 0, 0, 1.5]), d), n=7)
    each("is_nan", INTEGERS, np.isnan, out="bool")
    # 8-bit floats: four exponent bits, three of the fraction, no infinities.
    a = np.array([0, 0.07, -1.3, 17.6, 240, -448], np.float32)
    coded = a.astype(TYPES_FP8)
    case("to_fp8", [a], coded.view(np.uint8))
    for d in FLOATS[:3]:
        case("from_fp8", [coded.view(np.uint8)], to(coded.astype(np.float32), d), dtype=d)
    for source in ALL:
        for target in ALL:
            a = sample(source, (4,), "pos", "astype")
            with np.errstate(all="ignore"):
                w = wide(a)
                w = w.real if np.iscomplexobj(w) and target != "complex64" else w
                b = w.astype(bool) if target == "bool" else to(np.trunc(w) if target in INTEGERS and w.dtype == float else w, target)
            if source == "complex64" and target == "bool":
                continue  # numpy looks at both parts, MLX at the real one
            case("astype", [a], b, dtype=target)
    a = sample("float32", (2, 4), "any", "view")
    for target in ("uint32", "int16", "uint8", "float64", "complex64"):
        case("view", [a], a.view(TYPES[target]), dtype=target)


def binary() -> None:
    shape, row = (2, 3), (3,)

    def pair(op: str, d: str, domain: str = "any") -> tuple[np.ndarray, np.ndarray]:
        return sample(d, shape, domain, op + "a"), sample(d, row, domain, op + "b")

    for op, f, types in [
        ("add", np.add, ALL), ("subtract", np.subtract, INTEGERS + FLOATS + ["complex64"]),
        ("multiply", np.multiply, ALL), ("maximum", np.maximum, REAL), ("minimum", np.minimum, REAL),
    ]:
        for d in types:
            a, b = pair(op, d)
            with np.errstate(all="ignore"):
                case(op, [a, b], to(f(wide(a), wide(b)), d))
    for op, f, types, domain in [
        ("divide", np.divide, ALL[1:], "pos"), ("arctan2", np.arctan2, INTEGERS + FLOATS, "any"),
        ("logaddexp", np.logaddexp, INTEGERS + FLOATS, "any"),
    ]:
        for d in types:
            a, b = pair(op, d, domain)
            w = [x.astype(np.complex128 if d == "complex64" else np.float64) for x in (a, b)]
            case(op, [a, b], to(f(*w), floating(d)))
    for op, f in [
        ("equal", np.equal), ("not_equal", np.not_equal), ("greater", np.greater), ("greater_equal", np.greater_equal),
        ("less", np.less), ("less_equal", np.less_equal), ("logical_and", np.logical_and), ("logical_or", np.logical_or),
    ]:
        for d in ["bool"] + INTEGERS + FLOATS:
            a, b = pair(op, d)
            b = np.concatenate([np.broadcast_to(a, shape)[0, :1], b[1:]])
            case(op, [a, b], f(wide(a), wide(b)))
    for op, f in [("bitwise_and", np.bitwise_and), ("bitwise_or", np.bitwise_or), ("bitwise_xor", np.bitwise_xor)]:
        for d in ["bool"] + INTEGERS:
            a, b = pair(op, d)
            case(op, [a, b], f(a, b))
    for op, f in [("left_shift", np.left_shift), ("right_shift", np.right_shift)]:
        for d in INTEGERS:
            a, b = sample(d, shape, "any", op), sample(d, row, "small", op)
            case(op, [a, b], f(a, b))
    # Integers: towards zero, 0 for a division by zero; remainders have the sign of the divisor.
    for d in INTEGERS:
        limit = np.iinfo(TYPES[d])
        a = np.array([7, limit.max, limit.min, 5, 100, 9], TYPES[d])
        b = np.array([2, 3, 2, 0, 7, 1 if d in UNSIGNED else -4], TYPES[d])
        q = [0 if int(y) == 0 else abs(int(x)) // abs(int(y)) * (1 if (int(x) < 0) == (int(y) < 0) else -1) for x, y in zip(a, b)]
        r = [0 if int(y) == 0 else int(x) % int(y) for x, y in zip(a, b)]
        q, r = np.array(q, TYPES[d]), np.array(r, TYPES[d])
        case("floor_divide", [a, b], q)
        case("remainder", [a, b], r)
        case("divmod", [a, b], [q, r])
    for d in FLOATS[2:]:
        a, b = sample(d, shape, "any", "div"), sample(d, row, "pos", "div")
        q, r = np.divmod(wide(a), wide(b))
        case("floor_divide", [a, b], to(q, d))
        case("remainder", [a, b], to(r, d))
        case("divmod", [a, b], [to(q, d), to(r, d)])
    for d in FLOATS + ["complex64"]:
        a, b = sample(d, shape, "pos", "power"), sample(d, row, "pos", "power")
        case("power", [a, b], to(np.power(wide(a), wide(b)), d))
    for d in INTEGERS:
        a, b = sample(d, shape, "small", "power"), sample(d, row, "small", "power")
        case("power", [a, b], np.power(a, b))
    for d in FLOATS:
        a = to(np.array([1, 2, np.nan, np.inf, 1.001]), d)
        b = to(np.array([1, 2.5, np.nan, np.inf, 1.002]), d)
        w = [a.astype(float), b.astype(float)]
        case("is_close", [a, b], np.isclose(*w, rtol=1e-2, atol=1e-3), rtol=1e-2, atol=1e-3, nan=False)
        case("is_close", [a, b], np.isclose(*w, rtol=1e-5, atol=1e-8, equal_nan=True), rtol=1e-5, atol=1e-8, nan=True)
    for d in ALL:
        a, b = pair("where", d)
        c = sample("bool", (2, 1), "any", "where")
        case("where", [c, a, b], np.where(c, a, b))
    for d in INTEGERS + FLOATS:
        a, low, high = sample(d, shape, "any", "clip"), to(np.array(1), d), to(np.array([2, 2, 3]), d)
        case("clip", [a, low, high], to(np.clip(wide(a), wide(low), wide(high)), d))


def sum_type(d: str) -> str:
    """Small integers are summed in 32 bits."""
    if d in ("bool", "int8", "int16"):
        return "int32"
    return "uint32" if d in ("uint8", "uint16") else d


def reductions() -> None:
    shape = (2, 3, 2)
    for axes in (None, [0], [-1], [0, 2]):
        axis = None if axes is None else tuple(axes)
        keep = axes == [-1]
        p = {"axes": axes, "keep": keep}
        for d in ALL:
            a = sample(d, shape, "any", f"reduce{axes}")
            w = wide(a)
            if d == "complex64":
                case("sum", [a], to(w.sum(axis, keepdims=keep), d), **p)
                continue
            case("all", [a], w.astype(bool).all(axis, keepdims=keep), **p)
            case("any", [a], w.astype(bool).any(axis, keepdims=keep), **p)
            case("max", [a], to(w.max(axis, keepdims=keep), d), **p)
            case("min", [a], to(w.min(axis, keepdims=keep), d), **p)
            out = sum_type(d)
            case("sum", [a], to(w.sum(axis, keepdims=keep, dtype=TYPES[out] if d in INTEGERS + ["bool"] else None), out), **p)
            s = sample(d, shape, "small", f"prod{axes}")
            case("prod", [s], to(wide(s).prod(axis, keepdims=keep, dtype=TYPES[out] if d in INTEGERS + ["bool"] else None), out), **p)
            if d in INTEGERS + FLOATS:
                w = w.astype(float)
                case("mean", [a], to(w.mean(axis, keepdims=keep), floating(d)), **p)
                case("median", [a], to(np.median(w, axis, keepdims=keep), floating(d)), **p)
            if d in FLOATS:
                case("logsumexp", [a], to(special.logsumexp(w, axis, keepdims=keep), d), **p)
                case("softmax", [a], to(special.softmax(w, axis), d), axes=axes)
                case("var", [a], to(w.var(axis, keepdims=keep, ddof=1), d), ddof=1, **p)
                case("std", [a], to(w.std(axis, keepdims=keep), d), ddof=0, **p)
    for d in REAL:
        a = np.unique(sample(d, (7,), "any", "arg"))
        a = np.roll(a, 2)
        for op, f in [("argmax", np.argmax), ("argmin", np.argmin)]:
            two = np.stack([a, a[::-1]])
            case(op, [two], to(f(two, axis=-1), "uint32"), axis=-1)
            case(op + "_flat", [two], to(f(two), "uint32"))
    scans()


def scans() -> None:
    for reverse in (False, True):
        for inclusive in (True, False):
            p = {"axis": 1, "reverse": reverse, "inclusive": inclusive}
            for d in ["int32", "int64", "uint8"] + FLOATS:
                a = sample(d, (2, 4), "small", "scan")
                w = wide(a)
                w = w[:, ::-1] if reverse else w

                def scan(f, first):  # noqa: ANN001, ANN202
                    out = f(w, axis=1)
                    if not inclusive:
                        lead = np.full((2, 1), first, out.dtype)
                        out = np.concatenate([lead, out[:, :-1]], 1)
                    return out[:, ::-1] if reverse else out

                if d in INTEGERS:
                    low, high = np.iinfo(TYPES[d]).min, np.iinfo(TYPES[d]).max
                else:
                    low, high = -np.inf, np.inf
                case("cumsum", [a], to(scan(np.cumsum, 0), d), **p)
                case("cumprod", [a], to(scan(np.cumprod, 1), d), **p)
                case("cummax", [a], to(scan(np.maximum.accumulate, low), d), **p)
                case("cummin", [a], to(scan(np.minimum.accumulate, high), d), **p)
                if d in FLOATS:
                    case("logcumsumexp", [a], to(scan(np.logaddexp.accumulate, -np.inf), d), **p)


def main() -> None:
    unary()
    binary()
    reductions()
    ops_shapes.make()
    ops_products.make()
    ops_composed.make()
    made_by = {p: version(p) for p in ("numpy", "scipy", "ml_dtypes")}
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in CASES)
    OUT.write_text(f'{{"made_by":{json.dumps(made_by)},"cases":[\n{lines}\n]}}\n')
    ops = {c["op"] for c in CASES}
    print(f"{len(CASES)} cases of {len(ops)} operations, {OUT.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
