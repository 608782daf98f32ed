"""Makes tests/fixtures/encoders/jina-bert*: tiny random JinaBERT v2 encoders as directories, with vectors and scores.

The reference is this script: numpy in float64, by the definitions of ALiBi (Press et al. 2021, arXiv:2108.12409, with
distances on both sides) and of gated feed-forward parts (Shazeer 2020, arXiv:2002.05202), and by the names and shapes of the
published checkpoints (jinaai/jina-embeddings-v2-*, arXiv:2310.19923). Tokens are those of the tokenizers package.

    python tools/golden/jina_bert.py [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import encoders  # removes this folder from sys.path, since datasets.py would hide the package of this name
import numpy as np
from safetensors.numpy import save_file

OUT = encoders.OUT
Weights = dict[str, np.ndarray]


def slopes(heads: int) -> list[float]:
    """The slopes of the paper's code for any number of heads."""
    low = 1 << (heads.bit_length() - 1)

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    return powers(low) + powers(2 * low)[::2][: heads - low]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class Network:
    """The forward pass of one text without padding."""

    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        self.config = config
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + self.config["layer_norm_eps"])
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, at: str, x: np.ndarray) -> np.ndarray:
        heads, length = self.config["num_attention_heads"], len(x)
        q, k, v = (self.linear(f"{at}.self.{name}", x) for name in ("query", "key", "value"))
        if f"{at}.self.layer_norm_q.weight" in self.weights:
            q, k = self.norm(f"{at}.self.layer_norm_q", q), self.norm(f"{at}.self.layer_norm_k", k)
        q, k, v = (part.reshape(length, heads, -1).transpose(1, 0, 2) for part in (q, k, v))
        places = np.arange(length)
        distance = np.abs(places[:, None] - places[None, :])
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        scores = scores - np.array(slopes(heads))[:, None, None] * distance
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = (shares @ v).transpose(1, 0, 2).reshape(length, -1)
        return self.norm(f"{at}.output.LayerNorm", self.linear(f"{at}.output.dense", mixed) + x)

    def gated(self, name: str, x: np.ndarray, gate_first: bool) -> np.ndarray:
        activation = gelu if self.config["feed_forward_type"] == "geglu" else lambda a: np.maximum(a, 0)
        first, second = np.split(self.linear(name, x), 2, -1)
        gate, up = (first, second) if gate_first else (second, first)
        return activation(gate) * up

    def layer(self, at: str, x: np.ndarray) -> np.ndarray:
        h = self.attention(f"{at}.attention", x)
        if f"{at}.layer_norm_1.weight" in self.weights:
            h = self.norm(f"{at}.layer_norm_1", x + h)
            inner = self.gated(f"{at}.mlp.up_gated_layer", h, gate_first=False)
            return self.norm(f"{at}.layer_norm_2", h + self.linear(f"{at}.mlp.down_layer", inner))
        if self.config["feed_forward_type"] == "original":
            inner = gelu(self.linear(f"{at}.intermediate.dense", h))
            return self.norm(f"{at}.output.LayerNorm", h + self.linear(f"{at}.output.dense", inner))
        inner = self.gated(f"{at}.mlp.gated_layers", h, gate_first=True)
        return self.norm(f"{at}.mlp.layernorm", h + self.linear(f"{at}.mlp.wo", inner))

    def states(self, ids: list[int], types: list[int]) -> np.ndarray:
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][types]
        x = self.norm("embeddings.LayerNorm", x)
        for i in range(self.config["num_hidden_layers"]):
            x = self.layer(f"encoder.layer.{i}", x)
        return x


def shapes(config: dict[str, Any], code: bool, labels: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, except norms and the biases of matrices that have one."""
    h, w = config["hidden_size"], config["intermediate_size"]
    all_shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], h),
        "embeddings.token_type_embeddings.weight": (2, h),
    }
    norms, matrices = ["embeddings.LayerNorm"], {}
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        matrices |= {f"{at}.attention.self.{name}": (h, h) for name in ("query", "key", "value")}
        matrices[f"{at}.attention.output.dense"] = (h, h)
        norms.append(f"{at}.attention.output.LayerNorm")
        if code:
            norms += [f"{at}.attention.self.layer_norm_{name}" for name in "qk"]
            norms += [f"{at}.layer_norm_1", f"{at}.layer_norm_2"]
            all_shapes[f"{at}.mlp.up_gated_layer.weight"] = (2 * w, h)
            matrices[f"{at}.mlp.down_layer"] = (h, w)
        elif config["feed_forward_type"] == "original":
            matrices |= {f"{at}.intermediate.dense": (w, h), f"{at}.output.dense": (h, w)}
            norms.append(f"{at}.output.LayerNorm")
        else:
            all_shapes[f"{at}.mlp.gated_layers.weight"] = (2 * w, h)
            matrices[f"{at}.mlp.wo"] = (h, w)
            norms.append(f"{at}.mlp.layernorm")
    if labels:
        matrices |= {"pooler.dense": (h, h), "classifier": (labels, h)}
    for name, shape in matrices.items():
        all_shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return all_shapes | {f"{name}.{part}": (h,) for name in norms for part in ("weight", "bias")}


def checkpoint(folder: Path, tokenizer: Any, code: bool = False, labels: int = 0, **fields: Any) -> Network:
    """Writes configuration, tokenizer and random weights. Norms and biases are not at ones and zeros."""
    folder.mkdir(parents=True)
    tokenizer.model_max_length = 48
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["JinaBertForSequenceClassification" if labels else "JinaBertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "position_embedding_type": "alibi",
        "emb_pooler": "mean",
        "type_vocab_size": 2,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    } | fields | ({"num_labels": labels} if labels else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rng = np.random.default_rng(7)
    weights = {}
    for name, shape in shapes(config, code, labels).items():
        noise = rng.standard_normal(shape)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        weights[name] = (1 + 0.2 * noise if is_norm else 0.25 * noise).astype(np.float32)
    prefix = "bert." if labels else ""
    stored = {name if name.startswith("classifier") else prefix + name: w for name, w in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return Network(config, weights)


def vectors(folder: Path, tokenizer: Any, network: Network) -> dict[str, Any]:
    """Adds the modules of sentence-transformers for normalized means, and returns tokens and vectors."""
    kind = "sentence_transformers.models."
    modules = [(kind + "Transformer", ""), (kind + "Pooling", "1_Pooling"), (kind + "Normalize", "2_Normalize")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": type_} for i, (type_, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": network.config["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling, indent=2) + "\n")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": false}\n')
    tokens, found = [], []
    for text in encoders.TEXTS:
        ids = tokenizer(text, truncation=True, max_length=48)["input_ids"]
        mean = network.states(ids, [0] * len(ids)).mean(0)
        tokens.append(ids)
        found.append((mean / np.linalg.norm(mean)).tolist())
    return {"texts": encoders.TEXTS, "tokens": tokens, "vectors": encoders.rounded(found)}


def scores(tokenizer: Any, network: Network) -> dict[str, Any]:
    """The scores of a classifier: a layer with tanh on the first state, and an output layer."""
    found = []
    for document in encoders.DOCUMENTS:
        pair = tokenizer(encoders.QUERY, document, truncation="longest_first", max_length=48)
        state = network.states(pair["input_ids"], pair["token_type_ids"])[0]
        found.append(float(network.linear("classifier", np.tanh(network.linear("pooler.dense", state)))[0]))
    return {"query": encoders.QUERY, "documents": encoders.DOCUMENTS, "max_length": 48, "scores": encoders.rounded(found)}


def jina_bert(folder: Path) -> dict[str, Any]:
    tokenizer = encoders.fast(encoders.wordpiece(), **encoders.BERT_NAMES)
    # The number of heads is no power of two, as in the base models.
    network = checkpoint(folder, tokenizer, hidden_size=48, num_attention_heads=3, intermediate_size=40,
                         feed_forward_type="geglu")
    return vectors(folder, tokenizer, network)


def jina_bert_code(folder: Path) -> dict[str, Any]:
    """The variant with norms of queries and keys, and byte-level tokens."""
    raw = encoders.byte_level(encoders.ROBERTA_SPECIAL, "<s>", "</s>", True)
    tokenizer = encoders.fast(raw, **encoders.ROBERTA_NAMES)
    network = checkpoint(folder, tokenizer, code=True, hidden_size=32, num_attention_heads=4, intermediate_size=48,
                         feed_forward_type="geglu")
    return vectors(folder, tokenizer, network)


def jina_bert_reglu(folder: Path) -> dict[str, Any]:
    tokenizer = encoders.fast(encoders.wordpiece(), **encoders.BERT_NAMES)
    network = checkpoint(folder, tokenizer, code=True, hidden_size=24, num_attention_heads=3, intermediate_size=40,
                         feed_forward_type="reglu", num_hidden_layers=1)
    return vectors(folder, tokenizer, network)


def jina_bert_cross(folder: Path) -> dict[str, Any]:
    """A cross-encoder whose feed-forward part is BERT's own."""
    tokenizer = encoders.fast(encoders.wordpiece(), **encoders.BERT_NAMES)
    network = checkpoint(folder, tokenizer, labels=1, hidden_size=32, num_attention_heads=4, intermediate_size=48,
                         feed_forward_type="original")
    return scores(tokenizer, network)


MODELS = {
    "jina-bert": jina_bert,
    "jina-bert-code": jina_bert_code,
    "jina-bert-reglu": jina_bert_reglu,
    "jina-bert-cross": jina_bert_cross,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the tiny models; without one, all")
    about = {
        "made_by": "tools/golden/jina_bert.py",
        "reference": {name: version(name) for name in ("numpy", "transformers", "tokenizers")},
    }
    for name in parser.parse_args().names or MODELS:
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        golden = about | MODELS[name](folder)
        (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
        print(name, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    main()
