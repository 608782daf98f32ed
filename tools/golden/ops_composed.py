"""Cases of the operations that MLX has since 0.32, by numpy."""

from __future__ import annotations

import numpy as np

from ops_cases import ALL, FLOATS, INTEGERS, REAL, SIGNED, case, sample, to, wide


def make() -> None:
    for d in REAL:
        a = sample(d, (2, 5), "any", "composed")
        if d in INTEGERS + FLOATS:
            case("trunc", [a], to(np.trunc(wide(a)), d))
        for axis in (0, 1):
            case("flip", [a], np.flip(a, axis), axes=[axis])
            case("unstack", [a], list(np.moveaxis(a, axis, 0)), axis=axis)
            case("count_nonzero", [a], to(np.count_nonzero(a, axis), "int32"), axes=[axis], keep=False)
        case("flip", [a], np.flip(a), axes=None)
        case("count_nonzero", [a], to(np.count_nonzero(a, keepdims=True), "int32"), axes=None, keep=True)
        if d in SIGNED + FLOATS:
            for times in (0, 1, 3):
                case("diff", [a], to(np.diff(wide(a), times, 1), d), times=times, axis=-1)
        b = sample(d, (5,), "any", "composed too")
        for name, f in (("slice_add", np.add), ("slice_multiply", np.multiply), ("slice_maximum", np.maximum), ("slice_minimum", np.minimum)):
            if d in SIGNED + FLOATS:
                out = wide(a).copy()
                out[:, 1:5:2] = f(out[:, 1:5:2], wide(b[:2]))
                case(name, [a, b[:2]], to(out, d), start=[0, 1], stop=[2, 5], strides=[1, 2])
        v = np.sort(sample(d, (9,), "small", "sorted"))
        values = np.concatenate([v[[0, 4, 8]], sample(d, (4,), "any", "values")])
        for side in ("left", "right"):
            case("searchsorted", [v, values], to(np.searchsorted(v, values, side), "uint32"), side=side)
    for d in ALL:
        a, b = sample(d, (2, 3), "any", "xor"), sample(d, (3,), "any", "xor too")
        b[1] = 0
        case("logical_xor", [a, b], np.logical_xor(a, b))
        if d in SIGNED + FLOATS + ["complex64"]:
            case("vecdot", [a, b], to(np.vecdot(wide(a), wide(b)), d), axis=-1)
    nan = np.array([1, 2, np.nan, np.nan], np.float32)
    case("searchsorted", [nan, nan], to(np.searchsorted(nan, nan), "uint32"), side="left")
    case("searchsorted", [nan, nan], to(np.searchsorted(nan, nan, "right"), "uint32"), side="right")
    for n in (0, 1, 2, 7):
        for name in ("bartlett", "blackman", "hamming", "hanning"):
            case(name, [], to(getattr(np, name)(n), "float32"), tol=1e-6, n=n)
    for n in (1, 6, 7):
        case("fftfreq", [], to(np.fft.fftfreq(n, 0.25), "float32"), n=n, d=0.25)
        case("rfftfreq", [], to(np.fft.rfftfreq(n, 0.25), "float32"), n=n, d=0.25)
    for d in ("float32", "float64"):
        a = sample(d, (3, 4, 4), "any", "determinants")
        a[1, 2] = a[1, 0]  # singular
        case("det", [a], to(np.linalg.det(wide(a)), d), tol=1e-5)
        regular = a[[0, 2]]
        case("slogdet", [regular], [to(part, d) for part in np.linalg.slogdet(wide(regular))], tol=1e-5)
    for d in FLOATS:
        a, t = sample(d, (2, 3, 5), "any", "loss"), sample("int32", (2, 3), "small", "loss")
        w = wide(a)
        loss = np.log(np.exp(w).sum(-1)) - np.take_along_axis(w, t[..., None], -1)[..., 0]
        case("cross_entropy", [a, t], to(loss, d))
