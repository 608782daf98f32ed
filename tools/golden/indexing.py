#!/usr/bin/env python3
"""Golden cases of indexing, from numpy: random reads and updates, and the indices numpy refuses.

Writes mlx-rs-core/tests/fixtures/indexing.json, one case a line:
  {"shape", "index", "part": [shape, values]}                       a read of arange(size).reshape(shape)
  {"shape", "index", "update", "value": [shape, values], "after"}   an update of it
  {"shape", "index", "error": true}                                 refused by numpy
An index is a list of: an integer, {"slice": [start, stop, step]}, "...", null (new axis),
{"ids": [shape, values]}, {"mask": [shape, values]}, true or false.

Pins: numpy==2.4.6.
Run: python tools/golden/indexing.py
"""

import json
import random
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parents[2] / "mlx-rs-core/tests/fixtures/indexing.json"
rng = random.Random(20240607)


def flat(a):
    return [list(a.shape), a.astype(np.int64).ravel().tolist()]


def iota(shape):
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


def random_shape(n, empty=0.04):
    return [0 if rng.random() < empty else rng.randint(1, 4) for _ in range(n)]


def random_slice(n):
    bound = lambda: rng.choice([None, None, rng.randint(-n - 2, n + 2), rng.randint(-n - 2, n + 2)])
    return slice(bound(), bound(), rng.choice([None, None, 1, 2, 3, -1, -1, -2, -3]))


def random_index(shape):
    """Entries for some of the axes; index arrays share a shape up to broadcasting."""
    entries, axis = [], 0
    common = [rng.randint(1, 3) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.04:
        common = [0]
    masked = False
    until = rng.randint(0, len(shape))
    while axis < until:
        n, kind = shape[axis], rng.random()
        if kind < 0.30:
            entries.append(random_slice(n))
        elif kind < 0.50 and n:
            entries.append(rng.randint(-n, n - 1))
        elif kind < 0.85:
            dims = [1 if rng.random() < 0.25 else d for d in common[rng.randint(0, len(common)):]]
            if n == 0 and 0 not in dims:
                entries.append(slice(None))
            else:
                size = int(np.prod(dims))
                values = [rng.randint(-n, n - 1) if n else 0 for _ in range(size)]
                entries.append(np.array(values, dtype=np.int64).reshape(dims))
        elif not masked:
            masked = True
            k = rng.randint(1, until - axis)
            dims = shape[axis : axis + k]
            size = int(np.prod(dims))
            wanted = common[-1] if common and rng.random() < 0.7 else rng.randint(0, 3)
            mask = np.zeros(size, dtype=bool)
            mask[rng.sample(range(size), min(size, wanted))] = True
            entries.append(mask.reshape(dims))
            axis += k - 1
        else:
            entries.append(slice(None))
        axis += 1
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        entries.insert(rng.randint(0, len(entries)), None)
    if rng.random() < 0.03:
        entries.insert(rng.randint(0, len(entries)), rng.random() < 0.7)
    if rng.random() < 0.35:
        # The entries behind it move to the last axes, where they may not fit: then numpy refuses.
        at = len(entries) if until < len(shape) and rng.random() < 0.6 else rng.randint(0, len(entries))
        entries.insert(at, Ellipsis)
    return entries


def written(entries):
    out = []
    for e in entries:
        if e is Ellipsis:
            out.append("...")
        elif isinstance(e, slice):
            out.append({"slice": [e.start, e.stop, e.step]})
        elif isinstance(e, np.ndarray):
            out.append({"mask" if e.dtype == bool else "ids": flat(e)})
        else:
            out.append(e)
    return out


def out_of_range(entries):
    """The entries with one integer pushed out of range, or None when there is none to push."""
    bad = [e.copy() if isinstance(e, np.ndarray) else e for e in entries]
    for at in rng.sample(range(len(bad)), len(bad)):
        push = rng.choice([-9, 9])
        if isinstance(bad[at], int) and not isinstance(bad[at], bool):
            bad[at] += push
            return bad
        if isinstance(bad[at], np.ndarray) and bad[at].dtype != bool and bad[at].size:
            bad[at].flat[rng.randrange(bad[at].size)] += push
            return bad
    return None


def random_value(shape):
    """Of a shape that broadcasts to `shape`, now and then with a leading one too many."""
    dims = [1 if rng.random() < 0.2 else d for d in shape[rng.randint(0, len(shape)) :]]
    if shape and len(dims) == len(shape) and rng.random() < 0.1:
        dims = [1] + dims
    size = int(np.prod(dims))
    return np.array([rng.randint(-9, 99) for _ in range(size)], dtype=np.int32).reshape(dims)


UFUNCS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


def main():
    reads, writes, errors = [], [], []
    while len(reads) < 700 or len(writes) < 500:
        shape = random_shape(rng.choice([0, 1, 1, 2, 2, 3, 3, 3, 4]))
        entries = random_index(shape)
        index = tuple(entries)
        case = {"shape": shape, "index": written(entries)}
        a = iota(shape)
        try:
            part = a[index]
        except IndexError:
            if len(errors) < 120:
                errors.append({**case, "error": True})
            continue
        part = np.asarray(part)
        if part.size > 100:
            continue
        if len(errors) < 120 and (bad := out_of_range(entries)):
            try:
                a[tuple(bad)]
            except IndexError:
                errors.append({"shape": shape, "index": written(bad), "error": True})
        if len(reads) < 700:
            reads.append({**case, "part": flat(part)})
        elif len(writes) < 500:
            value = random_value(part.shape)
            update = rng.choice(["set", "set", "set", *UFUNCS])
            if update == "set":
                a[index] = value
            else:
                # ufunc.at wants no leading one too many.
                if value.ndim > part.ndim:
                    value = value[0]
                UFUNCS[update].at(a, index, value)
            writes.append({**case, "update": update, "value": flat(value), "after": flat(a)[1]})
    # What random cases seldom hit: out of range on each side, two ellipses, too many indices, shapes
    # that do not broadcast, masks of another shape.
    a = iota([2, 3])
    for index in [
        (2,), (-3,), (0, 3), (0, -4), (0, 0, 0), (Ellipsis, Ellipsis), (np.array([0, 2]),),
        (np.array([0, -3]),), (slice(None), np.array([3])), (np.array([0, 1]), np.array([0, 1, 2])),
        (np.array([True]),), (np.ones((3, 2), bool),), (np.ones((2, 3, 1), bool),),
        (0, np.array([True, True])), (None, 0, 0, 0), (False, np.array([0, 1])),
    ]:
        try:
            a[index]
            raise SystemExit(f"numpy takes {index}")
        except IndexError:
            errors.append({"shape": [2, 3], "index": written(index), "error": True})
    cases = reads + writes + errors
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    OUT.write_text(f'{{"numpy":"{np.__version__}","cases":[\n{lines}\n]}}\n')
    print(len(reads), "reads,", len(writes), "updates,", len(errors), "errors,", OUT.stat().st_size, "bytes")


main()
