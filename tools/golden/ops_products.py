"""Cases of ops.py that multiply: matrices, contractions, convolutions, transforms, factorizations, and MLX's fused kernels."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import linalg, special

from ops_cases import FLOATS, case, sample, to, wide


def make() -> None:
    matrices()
    convolutions()
    transforms()
    algebra()
    fused()
    quantized()


def matrices() -> None:
    for d in FLOATS + ["complex64"]:
        a, b = sample(d, (2, 2, 3), "any", "mm a"), sample(d, (3, 4), "any", "mm b")
        w = wide(a) @ wide(b)
        case("matmul", [a, b], to(w, d))
        case("inner", [a[0], b.T], to(wide(a[0]) @ wide(b), d))
        case("outer", [a[0, 0], b[0]], to(np.outer(wide(a[0, 0]), wide(b[0])), d))
        case("kron", [a[0], b[:2, :2]], to(np.kron(wide(a[0]), wide(b[:2, :2])), d))
        case("tensordot", [a, b], to(np.tensordot(wide(a), wide(b), 1), d), n=1)
        case("tensordot_axes", [a, b], to(np.tensordot(wide(a), wide(b), ([2], [0])), d), a=[2], b=[0])
        case("einsum", [a, b], to(np.einsum("bij,jk->kb", wide(a), wide(b)), d), subscripts="bij,jk->kb")
        if d == "complex64":
            continue
        c = sample(d, (2, 4), "any", "mm c")
        case("addmm", [c, a[0], b], to(0.5 * wide(c) + 2 * (wide(a[0]) @ wide(b)), d), alpha=2, beta=0.5)
        if d != "float32":
            continue
        i, j = np.array([1, 0, 1], np.uint32), np.array([0, 0, 1], np.uint32)
        stack = sample(d, (2, 3, 4), "any", "gather mm")
        case("gather_mm", [a, stack, i, j], to(wide(a)[i] @ wide(stack)[j], d))
    a, b = sample("float32", (2, 6), "any", "seg a"), sample("float32", (6, 3), "any", "seg b")
    segments = np.array([[0, 2], [2, 6], [3, 3]], np.uint32)
    case("segmented_mm", [a, b, segments], np.stack([wide(a)[:, s:e] @ wide(b)[s:e] for s, e in segments]).astype(np.float32))
    a, b = sample("float32", (40, 33), "unit", "block a"), sample("float32", (33, 35), "unit", "block b")
    mask = np.array([[1, 0], [1, 1]], bool)
    full = np.kron(mask, np.ones((32, 32)))[:40, :35]
    # The products are too many numbers to keep; their sums over rows do.
    case("block_masked_mm", [a[:, :1], b[:1], mask], ((wide(a[:, :1]) @ wide(b[:1])) * full).sum(1).astype(np.float32))
    for n in (8,):
        a = sample("float32", (2, n), "any", "hadamard")
        h = linalg.hadamard(8) if n == 8 else None
        if h is not None:
            case("hadamard_transform", [a], (wide(a) @ h / np.sqrt(n)).astype(np.float32))
    ids = sample("int32", (3, 4), "any", "einsum")
    case("einsum", [wide(ids).astype(np.float32)], np.einsum("ij->j", wide(ids)).astype(np.float32), subscripts="ij->j")
    e = sample("float32", (3, 3), "any", "einsum")
    case("einsum", [e], np.array(np.trace(wide(e)), np.float32), subscripts="ii")
    case("einsum", [e, e], np.einsum("ab,cb->ac", wide(e), wide(e)).astype(np.float32), subscripts="...b,cb->...c")


def conv(x: np.ndarray, w: np.ndarray, stride, low, high, dilation, inputs, groups: int, flip: bool) -> np.ndarray:  # noqa: ANN001
    """Convolution from its definition, channels last."""
    axes = x.ndim - 2
    spread = np.zeros((x.shape[0], *[(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], inputs)], x.shape[-1]))
    spread[(slice(None), *[slice(None, None, d) for d in inputs])] = x
    spread = np.pad(spread, [(0, 0), *zip(low, high), (0, 0)])
    if flip:
        w = np.flip(w, tuple(range(1, axes + 1)))
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(spread.shape[1:-1], w.shape[1:-1], dilation, stride)]
    y = np.zeros((x.shape[0], *out, w.shape[0]))
    per_in, per_out = x.shape[-1] // groups, w.shape[0] // groups
    for place in itertools.product(*map(range, out)):
        for tap in itertools.product(*map(range, w.shape[1:-1])):
            at = tuple(p * s + t * d for p, s, t, d in zip(place, stride, tap, dilation))
            for g in range(groups):
                part = spread[(slice(None), *at, slice(g * per_in, (g + 1) * per_in))]
                kernel = w[(slice(g * per_out, (g + 1) * per_out), *tap)]
                y[(slice(None), *place, slice(g * per_out, (g + 1) * per_out))] += part @ kernel.T
    return y


def convolutions() -> None:
    for d in ("float32", "float16", "bfloat16"):
        x, w = sample(d, (1, 5, 2), "unit", "conv x"), sample(d, (2, 2, 2), "unit", "conv w")
        case("conv", [x, w], to(conv(wide(x), wide(w), [1], [0], [0], [1], [1], 1, False), d))
    for shape, kernel in [((2, 7, 2), (4, 3, 2)), ((1, 5, 4, 2), (2, 2, 3, 2)), ((1, 3, 3, 4, 1), (2, 2, 2, 2, 1))]:
        x, w = sample("float32", shape, "unit", "conv x"), sample("float32", kernel, "unit", "conv w")
        n = len(shape) - 2
        for stride, pad, dilation, inputs, flip in [(1, 0, 1, 1, False), (2, 1, 1, 1, False), (1, 2, 2, 1, True), (1, 1, 1, 2, False)]:
            y = conv(wide(x), wide(w), [stride] * n, [pad] * n, [pad] * n, [dilation] * n, [inputs] * n, 1, flip)
            case("conv", [x, w], y.astype(np.float32), stride=[stride], padding=[pad], dilation=[dilation], input_dilation=[inputs], flip=flip)
        for stride, pad, dilation, extra in [(1, 0, 1, 0), (2, 1, 1, 1), (2, 0, 1, 0)]:
            k = [dilation * (k - 1) for k in kernel[1:-1]]
            low, high = [k - pad for k in k], [k - pad + extra for k in k]
            y = conv(wide(x), wide(w), [1] * n, low, high, [dilation] * n, [stride] * n, 1, True)
            case("conv_transpose", [x, w], y.astype(np.float32), stride=[stride], padding=[pad], dilation=[dilation], output_padding=[extra])
    for shape, kernel in [((2, 6, 4), (4, 3, 2)), ((1, 4, 4, 4), (2, 2, 2, 2))]:
        x, w = sample("float32", shape, "unit", "group x"), sample("float32", kernel, "unit", "group w")
        n = len(shape) - 2
        y = conv(wide(x), wide(w), [1] * n, [1] * n, [1] * n, [1] * n, [1] * n, 2, False)
        case("conv", [x, w], y.astype(np.float32), padding=[1], groups=2)


def transforms() -> None:
    for d in ("float32", "complex64"):
        a = sample(d, (2, 6), "any", "fft")
        for op in ("fft", "ifft"):
            for n in (None, 4, 8):
                case(op, [a], getattr(np.fft, op)(wide(a), n).astype(np.complex64), n=n, axis=-1)
        cube = sample(d, (2, 3, 4), "any", "fftn")
        for op in ("fftn", "ifftn"):
            case(op, [cube], getattr(np.fft, op)(wide(cube), axes=(0, 2)).astype(np.complex64), axes=[0, 2])
            case(op[:-1] + "2", [cube], getattr(np.fft, op)(wide(cube), (2, 5), axes=(-2, -1)).astype(np.complex64), n=[2, 5], axes=[-2, -1])
        case("fftshift", [cube], np.fft.fftshift(cube), axes=None)
        case("ifftshift", [cube], np.fft.ifftshift(cube, (1,)), axes=[1])
    for n in (None, 5, 8):
        a = sample("float32", (2, 6), "any", "rfft")
        case("rfft", [a], np.fft.rfft(wide(a), n).astype(np.complex64), n=n, axis=-1)
        c = np.fft.rfft(wide(a)).astype(np.complex64)
        case("irfft", [c], np.fft.irfft(wide(c), n).astype(np.float32), n=n, axis=-1)
    cube = sample("float32", (2, 3, 4), "any", "rfftn")
    spectrum = np.fft.rfftn(wide(cube), axes=(1, 2)).astype(np.complex64)
    case("rfftn", [cube], spectrum, axes=[1, 2])
    case("irfftn", [spectrum], np.fft.irfftn(wide(spectrum), (3, 4), (1, 2)).astype(np.float32), n=[3, 4], axes=[1, 2])
    case("rfft2", [cube], np.fft.rfftn(wide(cube), axes=(0, 1)).astype(np.complex64), n=None, axes=[0, 1])
    case("irfft2", [spectrum], np.fft.irfftn(wide(spectrum), axes=(1, 2)).astype(np.float32), n=None, axes=[1, 2])


def algebra() -> None:
    for d in ("float32", "float64"):
        a = sample(d, (2, 3, 3), "any", "linalg") + 3 * np.eye(3, dtype=d)
        b = sample(d, (2, 3, 2), "any", "linalg b")
        s = (a @ a.swapaxes(1, 2)).astype(d)
        case("inv", [a], to(np.linalg.inv(wide(a)), d))
        case("solve", [a, b], to(np.linalg.solve(wide(a), wide(b)), d))
        case("solve", [a[0], b[0, :, 0]], to(np.linalg.solve(wide(a[0]), wide(b[0, :, 0])), d))
        for upper in (False, True):
            t = np.triu(a) if upper else np.tril(a)
            f = np.linalg.cholesky(wide(s))
            f = f.swapaxes(1, 2) if upper else f
            case("cholesky", [s], to(f, d), upper=upper)
            case("cholesky_inv", [to(f, d)], to(np.linalg.inv(wide(s)), d), upper=upper)
            case("tri_inv", [t], to(np.linalg.inv(wide(t)), d), upper=upper)
            case("solve_triangular", [t, b], to(np.linalg.solve(wide(t), wide(b)), d), upper=upper)
        case("eigvalsh", [s], to(np.linalg.eigvalsh(wide(s)), d))
        case("singular_values", [b], to(np.linalg.svd(wide(b), compute_uv=False), d))
        case("pinv", [b], to(np.linalg.pinv(wide(b)), d))
        for p in (0, 1, 2, 3, "inf", "-inf"):
            o = float(p)
            case("norm", [b], to(np.linalg.norm(wide(b), o, axis=1), d), p=p, axes=[1], keep=False)
        for p in (1, -1, 2, -2, "inf", "-inf", "fro", "nuc"):
            o = p if p in ("fro", "nuc") else float(p)
            case("norm", [b], to(np.linalg.norm(wide(b), o, axis=(0, 2), keepdims=True), d), p=p, axes=[0, 2], keep=True)
        case("norm", [b], to(np.linalg.norm(wide(b).reshape(-1)), d), p=None, axes=None, keep=False)
        case("cross", [a, a[::-1]], to(np.cross(wide(a), wide(a[::-1])), d), axis=-1)
    p, l, u = linalg.lu(wide(a[0]))
    case("lu", [a[0]], [to(np.argmax(p, 1), "uint32"), l, u])
    lu, pivots = linalg.lu_factor(wide(a[0]))
    case("lu_factor", [a[0]], [lu, to(pivots, "uint32")])


def rope(x: np.ndarray, dims: int, traditional: bool, base: float, scale: float, offset: int) -> np.ndarray:
    half = dims // 2
    angles = (np.arange(x.shape[-2]) + offset)[:, None] * scale * base ** (-np.arange(half) * 2 / dims)
    c, s = np.cos(angles), np.sin(angles)
    y = x.copy()
    first, second = (x[..., 0:dims:2], x[..., 1:dims:2]) if traditional else (x[..., :half], x[..., half:dims])
    a, b = first * c - second * s, first * s + second * c
    if traditional:
        y[..., 0:dims:2], y[..., 1:dims:2] = a, b
    else:
        y[..., :half], y[..., half:dims] = a, b
    return y


def fused() -> None:
    for d in FLOATS[:3]:
        x, w, b = (sample(d, s, "any", f"norm{i}") for i, s in enumerate([(2, 8), (8,), (8,)]))
        v = wide(x)
        case("rms_norm", [x, w], to(v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * wide(w), d))
        n = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-5)
        case("layer_norm", [x, w, b], to(n * wide(w) + wide(b), d))
        q = sample(d, (1, 2, 3, 8), "any", "rope")
        for traditional in (False, True):
            for dims in (8, 4):
                y = rope(wide(q), dims, traditional, 100.0, 0.5, 3)
                case("rope", [q], to(y, d), dims=dims, traditional=traditional, base=100, scale=0.5, offset=3)
        q, k, v = (sample(d, (1, h, n, 4), "unit", f"sdpa{h}{n}{i}") for i, (h, n) in enumerate([(4, 3), (2, 5), (2, 5)]))
        sinks = sample(d, (4,), "unit", "sinks")
        boolean = sample("bool", (3, 5), "any", "mask") | np.eye(3, 5, dtype=bool)
        additive = sample(d, (1, 1, 3, 5), "unit", "mask")
        kk, vv = (np.repeat(wide(t), 2, 1) for t in (k, v))
        scores = wide(q) @ kk.swapaxes(2, 3) * 0.5
        causal = np.tril(np.ones((3, 5), bool), 2)

        def attend(s: np.ndarray, sink: np.ndarray | None = None) -> np.ndarray:
            if sink is not None:
                s = np.concatenate([np.broadcast_to(wide(sink)[None, :, None, None], (1, 4, 3, 1)), s], -1)
            p = special.softmax(s, -1)
            return to((p[..., 1:] if sink is not None else p) @ vv, d)

        case("attention", [q, k, v], attend(scores), mask="none", scale=0.5)
        case("attention", [q, k, v], attend(np.where(causal, scores, -np.inf)), mask="causal", scale=0.5)
        case("attention", [q, k, v, boolean], attend(np.where(boolean, scores, -np.inf)), mask="array", scale=0.5)
        case("attention", [q, k, v, additive], attend(scores + wide(additive)), mask="array", scale=0.5)
        case("attention", [q, k, v, sinks], attend(scores, sinks), mask="sinks", scale=0.5)


def quantized() -> None:
    """Affine quantization written out: packed 32-bit words, first element in the lowest bits."""
    for bits in (2, 4, 8):
        rng = np.random.RandomState(bits)
        q = rng.randint(0, 2**bits, (2, 32))
        per = 32 // bits
        packed = (q.reshape(2, -1, per).astype(np.uint64) << (np.arange(per, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32)
        scales, biases = rng.rand(2, 1).astype(np.float32), rng.rand(2, 1).astype(np.float32) - 1
        w = q * scales.astype(float) + biases
        case("dequantize", [packed, scales, biases], w.astype(np.float32), bits=bits)
        x = sample("float32", (2, 32), "unit", "qmm")
        case("quantized_matmul", [x, packed, scales, biases], (wide(x) @ w.T).astype(np.float32), bits=bits)
        y = sample("float32", (3, 2), "unit", "qmm back")
        case("quantized_matmul_back", [y, packed, scales, biases], (wide(y) @ w).astype(np.float32), bits=bits)
