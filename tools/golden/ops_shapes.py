"""Cases of ops.py that move, choose, order and make values rather than compute them."""

from __future__ import annotations

import numpy as np

from ops_cases import ALL, FLOATS, INTEGERS, REAL, TYPES, case, sample, to


def make() -> None:
    views()
    joins()
    choices()
    order()
    made()


def views() -> None:
    for d in ALL:
        a = sample(d, (2, 3, 2), "any", "views")
        case("transpose", [a], a.transpose())
        case("transpose_axes", [a], a.transpose(1, 2, 0), axes=[1, -1, 0])
        case("reshape", [a], a.reshape(3, 4), shape=[3, -1])
        case("contiguous", [a], a)
        case("copy", [a], a)
        case("tile", [a], np.tile(a, (2, 1, 2)), reps=[2, 1, 2])
        case("roll", [a], np.roll(a, 1, 1), shift=1, axes=[1])
        case("pad", [a], np.pad(a, [(0, 0), (1, 2), (0, 0)]), axes=[1], low=[1], high=[2], mode="zero")
        case("pad", [a], np.pad(a, [(0, 1), (1, 0), (0, 0)], "edge"), axes=[1, 0], low=[1, 0], high=[0, 1], mode="edge")
        case("repeat", [a], np.repeat(a, 2, 1), n=2, axis=1)
        case("slice", [a], a[1:, ::-2, :1], start=[1, 2, 0], stop=[2, -4, 1], strides=[1, -2, 1])
    a = sample("int32", (2, 3, 2), "any", "views")
    case("swap_axes", [a], a.swapaxes(0, 2), a=0, b=-1)
    case("move_axis", [a], np.moveaxis(a, 0, 2), a=0, b=-1)
    case("flatten", [a], a.reshape(2, 6), a=1, b=2)
    case("unflatten", [a], a.reshape(2, 3, 1, 2), axis=1, shape=[3, -1])
    case("expand_dims", [a], a[:, None], axes=[1])
    case("expand_dims", [a], a[None, ..., None], axes=[0, -1])
    b = a[:1, :, :1]
    case("squeeze", [b], b.squeeze())
    case("squeeze_axes", [b], b.squeeze((0, 2)), axes=[0, 2])
    case("broadcast_to", [a[:1]], np.broadcast_to(a[:1], (4, 2, 3, 2)), shape=[4, 2, 3, 2])
    case("as_strided", [a], np.lib.stride_tricks.as_strided(a.reshape(-1)[1:], (3, 2), (12, 4)), shape=[3, 2], strides=[3, 1], offset=1)
    case("roll", [a], np.roll(a, -5), shift=-5, axes=None)
    case("roll_axes", [a], np.roll(a, (1, -2), (0, 1)), shifts=[1, -2], axes=[0, 1])
    case("repeat_flat", [a], np.repeat(a, 3), n=3)
    case("pad_symmetric", [a], np.pad(a, 1), n=1)
    case("pad", [a, np.array(7, np.int32)], np.pad(a, [(0, 0), (0, 0), (2, 0)], constant_values=7), axes=[2], low=[2], high=[0], mode="value")
    one = np.array(3, np.int32)
    for x in (one, a[0, 0], a[0]):
        case("at_least_1d", [x], np.atleast_1d(x))
        case("at_least_2d", [x], np.atleast_2d(x))
        case("at_least_3d", [x], np.atleast_3d(x))
    case("slice_update", [a, np.array([[9], [8]], np.int32)], updated(a), start=[0, 1, 0], stop=[2, 3, 1], strides=[1, 1, 1])


def updated(a: np.ndarray) -> np.ndarray:
    b = a.copy()
    b[0:2, 1:3, 0:1] = np.array([[9], [8]])
    return b


def joins() -> None:
    for d in ALL:
        a, b = sample(d, (2, 3), "any", "join a"), sample(d, (2, 2), "any", "join b")
        case("concatenate", [a, b], np.concatenate([a, b], 1), axis=-1)
        case("stack", [a, a + a], np.stack([a, a + a], 1), axis=1)
    a, b = sample("int32", (2, 3), "any", "join a"), sample("int32", (4,), "any", "join b")
    case("concatenate_flat", [a, b], np.concatenate([a.reshape(-1), b]))
    c = sample("int32", (6, 2), "any", "split")
    case("split", [c], np.split(c, 3, 0), n=3, axis=0)
    case("split_at", [c], np.split(c, [1, 4], 0), at=[1, 4], axis=0)
    x, y = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
    for indexing in ("xy", "ij"):
        for sparse in (False, True):
            case("meshgrid", [x, y], np.meshgrid(x, y, indexing=indexing, sparse=sparse), indexing=indexing, sparse=sparse)
    case("broadcast_arrays", [x, y[:, None]], np.broadcast_arrays(x, y[:, None]))


def choices() -> None:
    for d in ALL:
        a = sample(d, (4, 3), "any", "take")
        i = np.array([[3, 0], [-1, 2]], np.int32)
        case("take", [a, i], a[i], axis=0)
        case("take", [a, i % 3], a[:, i % 3], axis=1)
        along = np.array([[2, 0], [1, 1], [0, 2], [2, 2]], np.uint32)
        case("take_along_axis", [a, along], np.take_along_axis(a, along.astype(int), 1), axis=1)
        values = sample(d, (4, 1), "any", "put")
        b = a.copy()
        np.put_along_axis(b, along[:, :1].astype(int), values, 1)
        case("put_along_axis", [a, along[:, :1], values], b, axis=1)
        mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]], bool)
        fill = sample(d, (5,), "any", "mask")
        b = a.copy()
        b[mask] = fill
        case("masked_scatter", [a, mask, fill], b)
    for d in ["int32", "uint8", "int16"] + FLOATS:
        a = sample(d, (4, 3), "any", "scatter")
        i = np.array([2, 0, 2], np.int32)
        u = sample(d, (3, 1, 3), "any", "scatter update")
        for mode, f in [("add", np.add), ("prod", np.multiply), ("max", np.maximum), ("min", np.minimum)]:
            b = a.astype(np.float64 if d in FLOATS else a.dtype)
            f.at(b, i, u[:, 0].astype(b.dtype))
            case("scatter", [a, i, u], to(b, d), axes=[0], mode=mode)
        b = a.copy()
        b[np.array([1, 3])] = u[:2, 0]
        case("scatter", [a, np.array([1, 3], np.uint32), u[:2]], b, axes=[0], mode="replace")
        b = a.astype(np.float64 if d in FLOATS else a.dtype)
        np.add.at(b, (i[:, None], np.arange(3)[None]), u[:, 0].astype(b.dtype))
        case("scatter_add_axis", [a, np.broadcast_to(i[:, None], (3, 3)), u[:, 0]], to(b, d), axis=0)
    a = sample("float32", (4, 3), "any", "gather")
    rows, columns = np.array([[3], [1]], np.int32), np.array([0, 2], np.int32)
    case("gather", [a, rows, columns], a[rows, columns][..., None, None], axes=[0, 1], sizes=[1, 1])
    case("gather", [a, np.array([1, 0], np.int32)], np.stack([a[1:3], a[0:2]]), axes=[0], sizes=[2, 3])
    start = np.array([1, 1], np.int32)
    case("slice_at", [a, start], a[1:3, 1:3], axes=[0, 1], sizes=[2, 2])
    b = a.copy()
    b[1:3, 1:2] = [[7], [8]]
    case("slice_update_at", [a, np.array([[7], [8]], np.float32), start], b, axes=[0, 1])


def order() -> None:
    rng = np.random.RandomState(0)
    for d in REAL[1:]:
        base = rng.permutation(8)[:7].astype(float) - (0 if d.startswith("u") else 3)
        a = np.stack([to(base, d), to(base[::-1], d)])
        case("sort", [a], np.sort(a, 1), axis=-1)
        case("sort", [a], np.sort(a, 0), axis=0)
        case("argsort", [a], to(np.argsort(a, 1, kind="stable"), "uint32"), axis=-1)
        case("sort_flat", [a], np.sort(a.reshape(-1)))
        # What stands around the rank is in no particular order: the test sorts both sides of it.
        case("partition", [a], np.sort(a, 1), rank=3, axis=-1)
        case("topk", [a], np.sort(a, 1)[:, -3:], k=3, axis=-1)
    unique = np.stack([rng.permutation(6), rng.permutation(6) + 6]).astype(np.int32)
    case("argsort_flat", [unique], to(np.argsort(unique.reshape(-1)), "uint32"))
    case("partition_flat", [unique], np.sort(unique.reshape(-1)), rank=4)
    case("topk_flat", [unique], np.sort(unique.reshape(-1))[-2:], k=2)


def made() -> None:
    for d in INTEGERS + FLOATS:
        case("arange", [], to(np.arange(1, 8, 2), d), start=1, stop=8, step=2, dtype=d)
        case("eye", [], np.eye(3, 4, 1, TYPES[d]), n=3, m=4, k=1, dtype=d)
        case("identity", [], np.identity(3, TYPES[d]), n=3, dtype=d)
        case("tri", [], np.tri(3, 4, -1).astype(TYPES[d]), n=3, m=4, k=-1, dtype=d)
        case("zeros", [], np.zeros((2, 1), TYPES[d]), shape=[2, 1], dtype=d)
        case("ones", [], np.ones((2, 1), TYPES[d]), shape=[2, 1], dtype=d)
        case("full", [to(np.array([1, 2]), d)], to(np.array([[1, 2]] * 3), d), shape=[3, 2], dtype=d)
    for d in ("float32", "float64", "int32"):
        case("linspace", [], to(np.linspace(-1, 2, 7) if d != "int32" else np.trunc(np.linspace(0, 12, 7)), d),
             start=-1 if d != "int32" else 0, stop=2 if d != "int32" else 12, n=7, dtype=d)
    for d in ALL:
        a = sample(d, (3, 4), "any", "diagonals")
        case("tril", [a], np.tril(a, 1), k=1)
        case("triu", [a], np.triu(a, -1), k=-1)
        case("diagonal", [a], np.diagonal(a, 1), k=1)
        case("diag", [a[0]], np.diag(a[0], -1), k=-1)
        case("diag", [a], np.diag(a, 1), k=1)
        if d in INTEGERS + FLOATS:
            case("trace", [a], to(np.trace(a.astype(float)), d), dtype=d)
