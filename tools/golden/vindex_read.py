"""Reads a directory of `mlx vindex build` with numpy alone, and holds it against the model's safetensors file.

    python tools/golden/vindex_read.py VINDEX MODEL      # needs numpy; MODEL has model.safetensors with plain numbers

It reads every file: features against the transposed matrices, tensors of the manifest against those of the same name, the
table of what features say against the logits of the head. It prints one JSON object with what it counted, and ends with 1 at
the first difference. `tests/cli/vindex.rs` calls it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from feed_forward import tensors


def matrix(w: dict[str, np.ndarray], layer: int, name: str, experts: int) -> np.ndarray:
    """Of one layer, `[features, hidden]`: rows of gate and up, columns of down."""
    plain = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}[name]
    mixtral = {"gate": "w1", "up": "w3", "down": "w2"}[name]
    at = f"model.layers.{layer}"
    if experts:
        parts = [w[f"{at}.block_sparse_moe.experts.{e}.{mixtral}.weight"] for e in range(experts)]
    else:
        parts = [w[f"{at}.{plain}.weight"]]
    return np.concatenate([p.T if name == "down" else p for p in parts])


def main() -> None:
    directory, model = Path(sys.argv[1]), Path(sys.argv[2])
    w = tensors(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    index = json.loads((directory / "index.json").read_text())["index"]
    hidden = index["about"]["hidden_size"]
    numbers = {"float32": "<f4", "float16": "<f2"}[index.get("dtype", "float32")]
    level = index.get("level", "inference")
    counted = {"level": level, "features": 0, "tensors": 0, "tokens": 0, "files": 0}

    def same(values: np.ndarray, wanted: np.ndarray, what: str) -> None:
        wanted = wanted.astype("<f4").astype(numbers)
        assert values.shape == wanted.shape and np.array_equal(values, wanted), f"{what} differs"

    files = {"gate": "gate_vectors.bin", "up": "up_features.bin", "down": "down_features.bin"}
    for name, file in files.items():
        data, at = np.fromfile(directory / file, numbers), 0
        for i, layer in enumerate(index["layers"]):
            if level == "browse" and name != "gate":
                continue
            n = layer["num_features"]
            experts = layer.get("experts", {"count": 0})["count"]
            values = data[at : at + n * hidden].reshape(n, hidden)
            same(values, matrix(w, i, name, experts), f"{file}, layer {i}")
            part = hashlib.sha256(values.tobytes()).hexdigest()
            assert part == layer["sha256"][file], f"{file}, layer {i}: another hash"
            at += n * hidden
            counted["features"] += n
        assert at == len(data), f"{file} has more than the index says"
    manifest = json.loads((directory / "weight_manifest.json").read_text())["tensors"]
    ends: dict[str, int] = {}
    for t in manifest:
        dtype = {"float32": "<f4", "float16": "<f2"}[t["dtype"]]
        values = np.fromfile(directory / t["file"], dtype, int(np.prod(t["shape"])), offset=t["offset"])
        same(values.reshape(t["shape"]), w[t["name"]], t["name"])
        ends[t["file"]] = t["offset"] + t["bytes"]
        counted["tensors"] += 1
    for file, end in ends.items():
        assert end == (directory / file).stat().st_size, f"{file} has more than the manifest says"
    if level == "all":
        have = {t["name"] for t in manifest}
        for name in w:
            feature = ".experts." in name or (".mlp." in name and "_proj" in name)
            assert feature or name in have, f"{name} is nowhere"
    # What features say: the norm and the head on each column.
    meta = (directory / "down_meta.bin").read_bytes()
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    assert meta[:4] == b"DMET"
    _, layers, most = np.frombuffer(meta[4:16], "<u4")
    assert layers == len(index["layers"])
    at = 16
    for i, layer in enumerate(index["layers"]):
        experts = layer.get("experts", {"count": 0})["count"]
        for column in matrix(w, i, "down", experts):
            x = column / np.sqrt((column * column).mean() + config["rms_norm_eps"]) * w["model.norm.weight"]
            logits = head @ x
            n = meta[at + 8]
            assert n == min(most, len(logits))
            pairs = np.frombuffer(meta[at + 9 : at + 9 + 8 * n], [("token", "<u4"), ("logit", "<f4")])
            assert np.abs(pairs["logit"] - np.sort(logits)[::-1][:n]).max(initial=0) < 1e-4
            assert np.abs(logits[pairs["token"]] - pairs["logit"]).max(initial=0) < 1e-4
            at += 9 + 8 * int(n)
            counted["tokens"] += int(n)
    assert at == len(meta)
    json.loads((directory / "tokenizer.json").read_text())
    counted["files"] = len(list(directory.iterdir()))
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
