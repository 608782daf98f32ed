"""Computes the steps of random programs with NumPy and compares them with MLX's results.

    pip install numpy==2.4.6 scipy==1.17.1 ml_dtypes==0.6.0
    MLX_PROGRAMS_JSON=steps.jsonl MLX_PROGRAMS_SECONDS=60 cargo test -p rust-mlx-core --test programs
    python tools/programs.py steps.jsonl

Each line of the file is one step: its name, its numbers, and its arguments and results as bytes.
`mlx-rs-core/tests/programs/apply.rs` says what each name means.
"""

import collections
import json
import sys
import warnings

import ml_dtypes
import numpy as np
import scipy.special

warnings.filterwarnings("ignore")

TYPES = {
    "bool": np.bool_, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "uint64": np.uint64, "int8": np.int8, "int16": np.int16, "int32": np.int32,
    "int64": np.int64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32, "float64": np.float64, "complex64": np.complex64,
}
EPSILON = {
    "float16": 1e-3, "bfloat16": 8e-3, "float32": 1.2e-7, "complex64": 1.2e-7,
    # MLX computes elementary functions of double precision in single precision.
    "float64": 1.2e-7,
}
SKIP = object()


def array(value):
    dtype, shape, data = value
    return np.frombuffer(bytes.fromhex(data), TYPES[dtype]).reshape(shape)


def wide(a):
    """Floats in double precision, other types unchanged."""
    if a.dtype == np.complex64:
        return a.astype(np.complex128)
    if a.dtype in (np.float16, np.float32) or a.dtype == ml_dtypes.bfloat16:
        return a.astype(np.float64)
    return a


def inexact(a):
    """As `wide`, with integers and booleans as floats."""
    a = wide(a)
    return a if a.dtype.kind in "fc" else a.astype(np.float64)


def axes_of(a, axes):
    return tuple(axes) if axes else tuple(range(a.ndim))


def lengths(index, length):
    index = np.where(index < 0, index.astype(np.int64) + length, index.astype(np.int64))
    return np.clip(index, 0, length - 1)


def slices(a, p):
    parts = []
    for n, start, stop, step in zip(a.shape, *p):
        stop = None if step < 0 and stop < -n else stop
        parts.append(slice(start, stop, step))
    return tuple(parts)


def convolve(step, x, w, p, transposed):
    """The direct sum: y[n, o, c] += x[n, i, d] w[c, t, d] where s o + k t = b i + low."""
    stride, padding, dilation, between, extra, (groups, flip) = p
    x, w = wide(x), wide(w)
    dims = x.ndim - 2
    low, high, steps, spread = [], [], [], []
    for i in range(dims):
        span = dilation[i] * (w.shape[i + 1] - 1)
        if transposed:
            low.append(span - padding[i])
            high.append(span - padding[i] + extra[i])
            steps.append(1)
            spread.append(stride[i])
        else:
            low.append(padding[i])
            high.append(padding[i])
            steps.append(stride[i])
            spread.append(between[i])
    flip = bool(flip) != transposed
    shape = [x.shape[0]]
    for i in range(dims):
        shape.append((x.shape[i + 1] - 1) * spread[i] + 1 + max(low[i], 0) + max(high[i], 0))
    big = np.zeros((*shape, x.shape[-1]))
    big[(slice(None), *(
        slice(max(low[i], 0), max(low[i], 0) + (x.shape[i + 1] - 1) * spread[i] + 1, spread[i])
        for i in range(dims)
    ))] = x
    big = big[(slice(None), *(
        slice(-min(low[i], 0), big.shape[i + 1] + min(high[i], 0)) for i in range(dims)
    ))]
    if flip:
        w = np.flip(w, tuple(range(1, dims + 1)))
    out = []
    for i in range(dims):
        span = dilation[i] * (w.shape[i + 1] - 1) + 1
        out.append((big.shape[i + 1] - span) // steps[i] + 1)
    y = np.zeros((x.shape[0], *out, w.shape[0]))
    inputs, outputs = w.shape[-1], w.shape[0] // max(groups, 1)
    for t in np.ndindex(*w.shape[1:-1]):
        part = big[(slice(None), *(
            slice(t[i] * dilation[i], t[i] * dilation[i] + (out[i] - 1) * steps[i] + 1, steps[i])
            for i in range(dims)
        ))]
        for g in range(max(groups, 1)):
            y[..., g * outputs:(g + 1) * outputs] += np.tensordot(
                part[..., g * inputs:(g + 1) * inputs],
                w[(slice(g * outputs, (g + 1) * outputs), *t)], (-1, -1))
    return y


def scan(x, p, function, start):
    axis, reverse, inclusive = p[0][:3]
    x = np.moveaxis(x, axis, -1)
    x = x[..., ::-1] if reverse else x
    y = function(x)
    if not inclusive:
        first = np.full_like(y[..., :1], start)
        y = np.concatenate([first, y[..., :-1]], -1)
    y = y[..., ::-1] if reverse else y
    return np.moveaxis(y, -1, axis)


def promoted(*arrays):
    """MLX's common type, in double precision where it is of floats."""
    return [wide(a) for a in arrays]


def gather(x, indices, axes, sizes):
    indices = np.broadcast_arrays(*[wide(i) for i in indices]) if indices else []
    lead = indices[0].shape if indices else ()
    out = np.zeros((*lead, *sizes), x.dtype)
    for at in np.ndindex(*lead):
        start = [0] * x.ndim
        for index, axis in zip(indices, axes):
            i = int(index[at])
            i = i + x.shape[axis] if i < 0 else i
            start[axis] = min(max(i, 0), x.shape[axis] - sizes[axis])
        out[at] = x[tuple(slice(s, s + n) for s, n in zip(start, sizes))]
    return out


def scatter(x, indices, updates, axes, mode):
    indices = np.broadcast_arrays(*[wide(i) for i in indices]) if indices else []
    lead = indices[0].shape if indices else ()
    sizes = updates.shape[len(lead):]
    out = wide(x).copy()
    updates = wide(updates)
    for at in np.ndindex(*lead):
        start = [0] * x.ndim
        for index, axis in zip(indices, axes):
            i = int(index[at])
            i = i + x.shape[axis] if i < 0 else i
            start[axis] = min(max(i, 0), x.shape[axis] - sizes[axis])
        place = tuple(slice(s, s + n) for s, n in zip(start, sizes))
        function = [None, np.add, np.maximum, np.minimum][mode]
        if x.dtype == np.bool_ and mode == 1:
            function = np.logical_or
        out[place] = function(out[place], updates[at])
    return out


def integers(*arrays):
    return all(a.dtype.kind in "iub" for a in arrays)


def compute(step, a, dtype):
    name, p = step["name"], step["p"]
    x = a[0]
    # What order, decompositions and maxima make of these is not told.
    strange = any(v.dtype.kind in "fcV" and not np.isfinite(inexact(v)).all() for v in a)
    if strange and name in ("qr", "cholesky", "inv", "solve", "singular_values", "scatter", "fft",
                            "rfft", "irfft", "fftn", "rfftn", "irfftn", "median"):
        return SKIP
    if name in ("sin", "cos", "tan") and (np.abs(inexact(x)) > 1e4).any():
        return SKIP  # MLX reduces such angles coarsely
    if name == "sign" and strange or name == "var" and (np.abs(inexact(x)) > 1e6).any():
        return SKIP
    if x.ndim == 0 and name in ("pad", "fftshift", "fftn", "rfftn", "irfftn"):
        return SKIP
    unary = {
        "abs": np.abs, "negative": lambda v: -v, "square": lambda v: v * v, "sqrt": np.sqrt,
        "exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
        "erf": scipy.special.erf, "log1p": np.log1p, "expm1": np.expm1, "arctan": np.arctan,
        "arcsinh": np.arcsinh, "cosh": np.cosh, "sinh": np.sinh, "tan": np.tan, "log2": np.log2,
        "log10": np.log10, "degrees": np.degrees, "radians": np.radians, "arccos": np.arccos,
        "arcsin": np.arcsin, "arctanh": np.arctanh, "erfinv": scipy.special.erfinv,
        "sigmoid": scipy.special.expit, "silu": lambda v: v * scipy.special.expit(v),
        "reciprocal": lambda v: 1 / v, "rsqrt": lambda v: 1 / np.sqrt(v),
    }
    if name in unary:
        if name in ("abs", "negative", "square") and x.dtype.kind in "iub":
            if x.dtype == np.bool_:
                return SKIP
            return unary[name](x)
        if x.dtype.kind == "c" and name in ("erf", "erfinv", "sigmoid", "silu", "degrees", "radians"):
            return SKIP
        if x.dtype.kind == "c":
            return SKIP if name not in ("abs", "negative", "square", "exp", "sin", "cos") else unary[name](wide(x))
        return unary[name](inexact(x))
    if name in ("floor", "ceil"):
        return x if x.dtype.kind in "iub" else SKIP if x.dtype.kind == "c" else getattr(np, name)(wide(x))
    if name == "sign":
        return SKIP if x.dtype.kind in "cb" else np.sign(wide(x))
    if name in ("logical_not", "is_nan", "is_finite", "is_inf"):
        f = {"logical_not": np.logical_not, "is_nan": np.isnan, "is_finite": np.isfinite, "is_inf": np.isinf}[name]
        return f(inexact(x) if name != "logical_not" else wide(x))
    if name in ("real", "imag", "conjugate"):
        return {"real": np.real, "imag": np.imag, "conjugate": np.conj}[name](wide(x))
    if name == "bitwise_invert":
        return SKIP if x.dtype == np.bool_ else ~x
    if name == "round":
        return SKIP if x.dtype.kind == "c" else x if x.dtype.kind in "iub" else np.round(wide(x) * 10) / 10
    if name == "nan_to_num":
        return SKIP
    if name in ("contiguous", "copy"):
        return x
    if name in ("transpose_axes", "reshape", "broadcast_to"):
        return {"transpose_axes": np.transpose, "reshape": np.reshape, "broadcast_to": np.broadcast_to}[name](x, p[0])
    if name == "slice":
        return x[slices(x, p)]
    if name == "slice_axis":
        axis, start, stop = p[0]
        return x[(*[slice(None)] * axis, slice(start, stop))]
    if name == "expand_dims":
        return np.expand_dims(x, p[0][0])
    if name == "squeeze_axis":
        return np.squeeze(x, p[0][0])
    if name == "squeeze":
        return np.squeeze(x)
    if name == "flatten":
        s, e = p[0]
        return x.reshape(*x.shape[:s], -1 if x.size else int(np.prod(x.shape[s:e + 1])), *x.shape[e + 1:]) if x.ndim else x.reshape(1)
    if name == "split":
        return np.split(x, p[0][1], p[0][0])
    if name == "split_at":
        return np.split(x, p[1], p[0][0])
    if name == "as_strided":
        flat = np.ascontiguousarray(x).reshape(-1)[p[2][0]:]
        index = sum(np.arange(n).reshape([-1 if i == j else 1 for j in range(len(p[0]))]) * s
                    for i, (n, s) in enumerate(zip(p[0], p[1])))
        return np.ascontiguousarray(x).reshape(-1)[index + p[2][0]]
    if name in ("swap_axes", "move_axis"):
        return (np.swapaxes if name == "swap_axes" else np.moveaxis)(x, *p[0])
    if name == "diagonal":
        return np.diagonal(x, *p[0])
    if name == "unflatten":
        axis = p[0][0]
        return x.reshape(*x.shape[:axis], *p[1], *x.shape[axis + 1:])
    if name == "view":
        return np.ascontiguousarray(x).view(TYPES[step["dtype"]]) if x.ndim else SKIP

    if name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "remainder",
                "floor_divide", "arctan2", "logaddexp", "divmod"):
        b = a[1]
        if integers(x, b):
            t = dtype[0]
            if name in ("divide", "arctan2", "logaddexp"):
                x, b = x.astype(np.float64), b.astype(np.float64)
                return {"divide": np.divide, "arctan2": np.arctan2, "logaddexp": np.logaddexp}[name](x, b)
            if t == np.bool_ or np.dtype(t).kind == "f" or name == "power":
                return SKIP
            x, b = x.astype(t), b.astype(t)
            if name in ("floor_divide", "remainder", "divmod"):
                return SKIP
            return getattr(np, name)(x, b)
        if "c" in x.dtype.kind + b.dtype.kind and name not in ("add", "subtract", "multiply", "divide"):
            return SKIP
        # The common type is what counts, also of an integer that it cannot hold.
        t = dtype[0]
        x, b = wide(x.astype(t)), wide(b.astype(t))
        if name in ("remainder", "floor_divide", "divmod"):
            return SKIP
        return getattr(np, name)(x, b)
    if name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
        b = a[1]
        if x.dtype != b.dtype or "c" in x.dtype.kind:
            return SKIP
        return getattr(np, name)(wide(x), wide(b))
    if name in ("logical_and", "logical_or"):
        return getattr(np, name)(wide(x).astype(bool), wide(a[1]).astype(bool))
    if name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        t = dtype[0]
        return getattr(np, name)(x.astype(t), a[1].astype(t))
    if name in ("left_shift", "right_shift", "is_close"):
        return SKIP
    if name == "kron":
        if integers(*a):
            return np.kron(x.astype(dtype[0]), a[1].astype(dtype[0])) if dtype[0] != np.bool_ else SKIP
        return np.kron(wide(x.astype(dtype[0])), wide(a[1].astype(dtype[0])))

    if name in ("sum", "prod", "mean", "max", "min", "all", "any", "var", "std", "logsumexp", "median", "softmax", "norm"):
        axes = axes_of(x, p[0]) if name not in ("var", "std") else axes_of(x, p[0])
        keep = bool(p[1][0]) if name != "softmax" else True
        if x.dtype.kind == "c" and name not in ("sum", "prod", "mean"):
            return SKIP
        if name in ("sum", "prod"):
            t = dtype[0]
            return getattr(np, name)(x.astype(t), axis=axes, keepdims=keep, dtype=t) if integers(x) else getattr(np, name)(wide(x), axis=axes, keepdims=keep)
        if name in ("max", "min") and (x.size == 0 or x.dtype.kind == "c"):
            return SKIP
        if name in ("max", "min"):
            return getattr(np, name)(wide(x), axis=axes, keepdims=keep)
        if name in ("all", "any"):
            return getattr(np, name)(wide(x).astype(bool), axis=axes, keepdims=keep)
        x = inexact(x)
        if name == "norm":
            return np.sqrt(np.sum(x * x, axis=axes, keepdims=keep))
        if name == "logsumexp":
            return scipy.special.logsumexp(x, axis=axes, keepdims=keep) if x.size and axes else SKIP
        if name == "softmax":
            return scipy.special.softmax(x, axis=axes) if x.size and axes else SKIP
        if name == "median":
            return np.median(x, axis=axes, keepdims=keep) if x.size else SKIP
        return getattr(np, name)(x, axis=axes, keepdims=keep)
    if name in ("argmax", "argmin"):
        if x.dtype.kind == "c" or np.isnan(inexact(x)).any():
            return SKIP
        return getattr(np, name)(wide(x), axis=p[0][0], keepdims=bool(p[0][1]))
    if name in ("cumsum", "cumprod"):
        t = dtype[0] if integers(x) else None
        f = getattr(np, name)
        x = x.astype(t) if t else wide(x)
        if t == np.bool_:
            return SKIP
        return scan(x, p, lambda v: f(v, axis=-1, dtype=x.dtype), 0 if name == "cumsum" else 1)
    if name in ("cummax", "cummin"):
        if x.dtype.kind in "cb" or np.isnan(inexact(x)).any():
            return SKIP
        low = name == "cummax"
        if x.dtype.kind in "iu":
            start = np.iinfo(x.dtype).min if low else np.iinfo(x.dtype).max
        else:
            start = -np.inf if low else np.inf
        function = np.maximum if low else np.minimum
        return scan(wide(x), p, lambda v: function.accumulate(v, axis=-1), start)
    if name == "logcumsumexp":
        if x.dtype.kind == "c":
            return SKIP
        return scan(inexact(x), p, lambda v: np.logaddexp.accumulate(v, axis=-1) if v.size else v, -np.inf)
    if name in ("sort", "partition", "argpartition"):
        return SKIP if x.dtype.kind == "c" else np.sort(wide(x), axis=p[0][0])
    if name == "sort_flat":
        return SKIP if x.dtype.kind == "c" else np.sort(wide(x), axis=None)
    if name in ("argsort", "argsort_flat"):
        axis = p[0][0] if name == "argsort" else None
        return SKIP if x.dtype.kind == "c" else np.argsort(wide(x), axis=axis, kind="stable")
    if name == "topk":
        axis, k = p[0][:2]
        n = x.shape[axis]
        return SKIP if x.dtype.kind == "c" else np.take(np.sort(wide(x), axis=axis), np.arange(n - k, n), axis=axis)
    if name == "roll":
        return np.roll(x, p[0][1], p[0][0])
    if name == "repeat":
        return np.repeat(x, p[0][1], p[0][0])
    if name == "where":
        return np.where(x.astype(bool), a[1].astype(dtype[0]), a[2].astype(dtype[0])) if x.dtype.kind != "c" else SKIP
    if name == "astype":
        t = TYPES[step["dtype"]]
        if x.dtype.kind == "c" or t == np.complex64:
            return SKIP
        if np.dtype(t).kind in "iu" and x.dtype.kind not in "iub":
            info, v = np.iinfo(t), inexact(x)
            if not (np.isfinite(v).all() and (v >= info.min).all() and (v <= info.max / 2).all()):
                return SKIP
        return wide(x).astype(t) if t != np.bool_ else wide(x) != 0
    if name in ("take", "take_clamped"):
        n = x.shape[p[0][0]]
        index = a[1].astype(np.int64)
        index = np.where(index < 0, index + n, index) if name == "take" else np.clip(index, 0, n - 1)
        return np.take(x, index, axis=p[0][0])
    if name == "take_along_axis":
        n = x.shape[p[0][0]]
        return np.take_along_axis(x, np.clip(a[1].astype(np.int64), 0, n - 1), p[0][0])
    if name == "put_along_axis":
        x = x.copy()
        np.put_along_axis(x, a[1].astype(np.int64), a[2], p[0][0])
        return x
    if name == "scatter_add_axis":
        y, axis = wide(x).copy(), p[0][0]
        if x.dtype == np.bool_:
            return SKIP
        for at in np.ndindex(*a[1].shape):
            to = list(at)
            to[axis] = int(a[1][at])
            y[tuple(to)] += wide(a[2])[at]
        return y
    if name == "gather":
        return gather(x, a[1:], *p)
    if name == "scatter":
        return SKIP if x.dtype.kind == "c" else scatter(x, a[1:-1], a[-1], p[0], p[1][0])
    if name == "slice_update":
        x = x.copy()
        x[slices(x, p)] = a[1]
        return x
    if name in ("slice_at", "slice_update_at"):
        sizes = p[1] if name == "slice_at" else list(a[2].shape)
        start = [0] * x.ndim
        for axis, s in zip(p[0], a[1].reshape(-1)):
            start[axis] = min(max(int(s), 0), x.shape[axis] - sizes[axis])
        place = tuple(slice(s, s + n) for s, n in zip(start, sizes))
        if name == "slice_at":
            return x[place]
        x = x.copy()
        x[place] = a[2]
        return x
    if name == "masked_scatter":
        mask, rows = a[1], a[2]
        y = x.copy()
        if y.size:
            number = np.clip(np.cumsum(mask.reshape(-1)) - 1, 0, rows.shape[0] - 1).reshape(mask.shape)
            y[mask] = rows[number[mask]]
        return y
    if name == "concatenate":
        return np.concatenate([v.astype(dtype[0]) for v in a], p[0][0])
    if name == "stack":
        return np.stack([v.astype(dtype[0]) for v in a], p[0][0])
    if name == "pad":
        widths = [(0, 0)] * x.ndim
        for axis, low, high in zip(*p[:3]):
            widths[axis] = (low, high)
        return np.pad(x, widths, mode="edge" if p[3][0] else "constant")
    if name == "tile":
        return np.tile(x, p[0])
    if name == "clip":
        if x.dtype != a[1].dtype or x.dtype != a[2].dtype or x.dtype.kind == "c":
            return SKIP
        return np.minimum(np.maximum(wide(x), wide(a[1])), wide(a[2]))
    if name in ("matmul", "inner", "outer", "tensordot", "einsum", "addmm"):
        t = dtype[0]
        if name == "outer" and integers(*a):
            return np.outer(x.astype(t), a[1].astype(t)) if t != np.bool_ else SKIP
        if len({b.dtype for b in a}) > 1:
            return SKIP  # parts of it are computed in the narrower type
        v = [wide(b.astype(t)) for b in a]
        if name == "addmm":
            return 0.5 * (v[1] @ v[2]) + 2.0 * v[0]
        if name == "tensordot":
            return np.tensordot(v[0], v[1], (p[0], p[1]))
        if name == "einsum":
            text = ["ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "ij,ij->j", "ii,ij->j", "bij,kj->bki"]
            return np.einsum(text[p[0][0]], *v)
        return {"matmul": np.matmul, "inner": np.inner, "outer": np.outer}[name](*v)
    if name in ("tril", "triu"):
        return getattr(np, name)(x, p[0][0])
    if name in ("conv", "conv_transpose"):
        return convolve(step, *a, p, name != "conv")
    if name in ("fft", "rfft", "irfft"):
        if name == "irfft":
            x = x.astype(np.complex64)
        elif name == "rfft" and x.dtype.kind == "c":
            return SKIP
        return getattr(np.fft, name)(inexact(x), axis=p[0][0])
    if name in ("fftn", "rfftn", "irfftn"):
        if name == "rfftn" and x.dtype.kind == "c":
            return SKIP
        return getattr(np.fft, name)(inexact(x), axes=p[0])
    if name == "fftshift":
        return np.fft.fftshift(x, p[0]) if p[0] else x
    if name in ("inv", "solve", "cholesky"):
        m = wide(x)
        m = m @ np.swapaxes(m, -1, -2) + 4 * np.eye(m.shape[-1])
        if name == "cholesky":
            c = np.linalg.cholesky(m)
            return np.swapaxes(c, -1, -2) if p[0][0] else c
        return np.linalg.inv(m) if name == "inv" else np.linalg.solve(m, wide(a[1]))
    if name == "qr":
        return x
    if name == "singular_values":
        return np.linalg.svd(wide(x), compute_uv=False)
    if name == "cross":
        if integers(*a) or x.shape[-1] == 2 or a[1].shape[-1] == 2:
            return SKIP
        return np.cross(wide(x), wide(a[1]))
    if name == "rms_norm":
        v = wide(x)
        y = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-3)
        return y * wide(a[1]) if len(a) > 1 else y
    if name == "layer_norm":
        v = wide(x)
        y = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-3)
        y = y * wide(a[1]) if len(a) > 1 else y
        return y + wide(a[2]) if len(a) > 2 else y
    if name == "attention":
        q, k, v = (wide(b) for b in a[:3])
        k, v = (np.repeat(b, q.shape[1] // k.shape[1], 1) for b in (k, v))
        s = 0.5 * q @ np.swapaxes(k, -1, -2)
        l, n = s.shape[-2:]
        if p[0][0] == 1:
            s = np.where(np.arange(n) <= np.arange(l)[:, None] + n - l, s, -np.inf)
        elif p[0][0] == 2:
            s = np.where(a[3], s, -np.inf) if a[3].dtype == np.bool_ else s + wide(a[3])
        if np.isinf(s).all(-1).any():
            return SKIP
        return scipy.special.softmax(s, -1) @ v
    if name == "gather_mm":
        i, j = np.broadcast_arrays(a[2].astype(int), a[3].astype(int))
        return wide(x)[np.clip(i, 0, x.shape[0] - 1)] @ wide(a[1])[np.clip(j, 0, a[1].shape[0] - 1)]
    if name == "block_masked_mm":
        def masked(v, m):
            m = np.repeat(np.repeat(m.astype(np.float64), 32, -1), 32, -2)
            return v * m[..., :v.shape[-2], :v.shape[-1]]
        y = masked(wide(x), a[2]) @ masked(wide(a[1]), a[3])
        return masked(y, a[4]) if len(a) > 4 else y
    if name == "segmented_mm":
        k = x.shape[-1]
        limit = np.clip(a[2].astype(np.int64), 0, k)
        out = np.zeros((*a[2].shape[:-1], x.shape[0], a[1].shape[1]), np.complex128 if x.dtype.kind == "c" else float)
        for at in np.ndindex(*a[2].shape[:-1]):
            s, e = limit[at]
            if e > s:
                out[at] = wide(x)[:, s:e] @ wide(a[1])[s:e]
        return out
    if name == "hadamard":
        n = x.shape[-1]
        if n & (n - 1):
            return SKIP
        h = np.ones((1, 1))
        while h.shape[0] < n:
            h = np.block([[h, h], [h, -h]])
        return wide(x) @ h / np.sqrt(n)
    return SKIP


def rope(step, x):
    dims, traditional, offset = step["p"][0]
    x = wide(x)
    y = x.copy()
    at = np.arange(x.shape[-2]) + offset
    angle = at[:, None] * 100.0 ** (-np.arange(dims // 2) * 2.0 / dims)
    c, s = np.cos(angle), np.sin(angle)
    if traditional:
        u, v = x[..., 0:dims:2], x[..., 1:dims:2]
        y[..., 0:dims:2], y[..., 1:dims:2] = u * c - v * s, u * s + v * c
    else:
        u, v = x[..., :dims // 2], x[..., dims // 2:dims]
        y[..., :dims // 2], y[..., dims // 2:dims] = u * c - v * s, u * s + v * c
    return y


def room(step, a, expected):
    """What two right results may be apart."""
    name = step["out"][0][0]
    if name not in EPSILON:
        return 0.0
    if step["name"] in ("sort", "concatenate", "slice", "max", "min", "take", "gather"):
        return 0.0
    sizes = [np.abs(inexact(v))[np.isfinite(inexact(v))].max(initial=1.0) for v in a]
    count = max([v.size for v in a] + [1])
    scale = np.abs(expected)[np.isfinite(expected)].max(initial=0.0)
    product = float(np.prod(sizes))
    if step["name"] in ("inv", "solve", "cholesky", "singular_values", "qr"):
        return EPSILON[name] * 500 * max(product, 1) ** 2
    if step["name"] in ("var", "std", "norm", "rms_norm", "layer_norm"):
        product *= product
    return EPSILON[name] * (16 * scale + 4 * product * (count if count < 64 else count ** 0.75))


def main():
    count, skipped = collections.Counter(), collections.Counter()
    counts = collections.Counter()
    for line in open(sys.argv[1], encoding="utf-8"):
        try:
            step = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off where a process ended
        name = step["name"]
        a = [array(v) for v in step["args"]]
        out = [array(v) for v in step["out"]]
        count[name] += 1
        if name == "rope":
            expected = rope(step, a[0])
        else:
            try:
                expected = compute(step, a, [v.dtype.type for v in out])
            except Exception as e:
                counts[name, "failed"] += 1
                if counts[name, "failed"] <= 2:
                    print(f"{name} failed: {e!r} p {step['p']} args {[(v.dtype.name, v.shape) for v in a]}")
                continue
        if expected is SKIP:
            skipped[name] += 1
            continue
        expected = expected if isinstance(expected, (list, tuple)) else [expected]
        for e, o in zip(expected, out):
            e = np.asarray(e)
            why = None
            if e.shape != o.shape:
                why = f"shape {o.shape}, not {e.shape}"
            elif o.dtype.kind in "iub":
                wrong = e.astype(o.dtype) != o
                if wrong.any():
                    i = np.argwhere(np.atleast_1d(wrong))[0]
                    why = f"{wrong.sum()} of {o.size}, first {np.atleast_1d(o)[tuple(i)]}, not {np.atleast_1d(e)[tuple(i)]}"
            else:
                limit = room(step, a, e)
                if o.dtype in (np.float16,) or o.dtype == ml_dtypes.bfloat16:
                    narrow = e.astype(np.float32).astype(o.dtype)
                    limit = max(limit, 0.0)
                    e = np.where(np.isinf(inexact(narrow)), inexact(narrow), e)
                elif o.dtype != np.float64:
                    e = e.astype(o.dtype)
                e, w = inexact(e), inexact(o)
                relative = 8 * EPSILON.get(step["out"][0][0], 0) * np.abs(e)
                with np.errstate(all="ignore"):
                    same = (e == w) | (np.isnan(e) & np.isnan(w)) | (np.abs(e - w) <= limit + relative)
                    edge = (np.abs(e) > 3e4) & ~np.isfinite(w) & (o.dtype == np.float16)
                if not (same | edge).all():
                    i = np.argwhere(np.atleast_1d(~(same | edge)))[0]
                    why = (f"{(~same).sum()} of {o.size}, first {np.atleast_1d(w)[tuple(i)]}, "
                           f"not {np.atleast_1d(e)[tuple(i)]}, room {limit:.2e}")
            if why:
                counts[name, o.dtype.name] += 1
                if counts[name, o.dtype.name] <= 2:
                    args = [(v.dtype.name, v.shape) for v in a]
                    print(f"seed {step['seed']} {name} {step['p']} {args}: {why}")
                break
    total, left = sum(count.values()), sum(skipped.values())
    print(f"{total} steps, {left} without a reference, {sum(counts.values())} differ")
    for key, n in sorted(counts.items()):
        print("differ", n, *key)
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()
