"""Reads the files of `mlx trace --save` and `mlx vindex extract` with numpy alone, and holds them against each other.

    python tools/golden/stores_read.py TRAC BNDX CTXT NDJSON      # needs numpy

The four are of one model and, but for the last, one prompt; CTXT is of tier 3 with adjacent layers. The layouts are those of
docs/probe.md. It prints one JSON object with what it counted, and ends with 1 at the first difference.
`tests/processes/vindex_numpy.rs` calls it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np


def checked(path: Path, magic: bytes, header: int) -> bytes:
    """The bytes of a file, whose hash in the last 32 bytes of the header is right."""
    data = path.read_bytes()
    assert data[:8] == magic + b"\x01\0\0\0", f"{path} begins with {data[:8]!r}"
    zeroed = data[: header - 32] + bytes(32) + data[header:]
    assert hashlib.sha256(zeroed).digest() == data[header - 32 : header], f"{path}: another hash"
    return data


def near(a: np.ndarray, b: np.ndarray, what: str) -> None:
    assert a.shape == b.shape, f"{what}: {a.shape} and {b.shape}"
    greatest = max(1.0, float(np.abs(b).max()))
    assert float(np.abs(a - b).max()) <= 1e-4 * greatest, f"{what} differs"


def trace(path: Path) -> np.ndarray:
    """`[tokens, blocks + 1, 3, width]`."""
    checked(path, b"TRAC", 64)
    _, _, width, blocks, tokens = np.fromfile(path, "<u4", 5)
    nodes = np.fromfile(path, "<f4", offset=64).reshape(tokens, blocks + 1, 3, width)
    residual, mixer, mlp = nodes.transpose(2, 0, 1, 3)
    near(residual[:, :-1] + mixer[:, 1:] + mlp[:, 1:], residual[:, 1:], "the sum of parts")
    assert not mixer[:, 0].any() and not mlp[:, 0].any()
    return nodes


def boundaries(path: Path, nodes: np.ndarray) -> int:
    checked(path, b"BNDX", 64)
    _, _, width, window, windows, tokens = (int(n) for n in np.fromfile(path, "<u4", 6))
    entries = np.fromfile(path, "<u4", 4 * windows, offset=64).reshape(windows, 4)
    starts, lengths, offsets, zeros = entries.T
    assert (lengths <= window).all() and lengths.sum() == tokens == len(nodes) and not zeros.any()
    assert (starts == np.cumsum(lengths) - lengths).all()
    first = 64 + 16 * windows
    assert (offsets == first + 4 * width * np.arange(windows)).all()
    vectors = np.fromfile(path, "<f4", offset=first).reshape(windows, width)
    near(vectors, nodes[starts + lengths - 1, -1, 0], "boundaries")
    return windows


def context(path: Path, nodes: np.ndarray) -> int:
    data = checked(path, b"CTXT", 128)
    _, _, width, blocks, window = (int(n) for n in np.fromfile(path, "<u4", 5))
    tier, count = data[20], data[21]
    layers = np.frombuffer(data, "u1", 8, 24)[:count].astype(int)
    windows, tokens = (int(n) for n in np.frombuffer(data, "<u4", 2, 32))
    assert tier == 3 and blocks == nodes.shape[1] - 1 and tokens == len(nodes)
    entry = np.dtype([("start", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("zero", "<u8")])
    entries = np.frombuffer(data, entry, windows, 128)
    ends = entries["start"] + entries["length"] - 1
    assert (entries["length"] <= window).all() and not entries["zero"].any()
    vectors = np.frombuffer(data, "<f4", offset=int(entries["offset"][0])).reshape(windows, 1 + 2 * count, width)
    near(vectors[:, 0], nodes[ends, layers[0], 0], "the state before the layers")
    near(vectors[:, 1 : 1 + count], nodes[ends][:, layers + 1, 2], "feed-forward parts")
    near(vectors[:, 1 + count :], nodes[ends][:, layers + 1, 1], "mixers")
    # What the store is for: the state after the layers is the one before them and their parts.
    near(vectors.sum(axis=1), nodes[ends, layers[-1] + 1, 0], "the reconstruction")
    return windows


def vectors(path: Path, width: int) -> int:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    header = lines[0]
    assert header["version"] == 1 and header["hidden_size"] == width
    count = pending = 0
    for line in lines[1:]:
        if "done" in line:
            assert line["vectors"] == pending
            count, pending = count + pending, 0
            continue
        vector = np.array(line["vector"], "<f4")
        assert vector.shape == (width,) and np.isfinite(vector).all()
        scores = [token["score"] for token in line["top_k"]]
        assert len(scores) == header["top_k"] and scores == sorted(scores, reverse=True)
        pending += 1
    assert pending == 0
    return count


def main() -> None:
    trac, bndx, ctxt, ndjson = (Path(argument) for argument in sys.argv[1:])
    nodes = trace(trac)
    counted = {
        "tokens": len(nodes),
        "nodes": nodes.shape[1],
        "boundaries": boundaries(bndx, nodes),
        "contexts": context(ctxt, nodes),
        "vectors": vectors(ndjson, nodes.shape[3]),
    }
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
