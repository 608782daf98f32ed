"""Makes tests/fixtures/tiny: tiny random checkpoints of every kind the engine loads, with mlx-lm's numbers.

Each directory holds a checkpoint as people have them (config.json, model.safetensors or model.gguf, tokenizer files)
and golden.json: logits and greedy tokens that Python mlx-lm computes from it on the CPU in float32. Weights come from a
seed; the seed is the first one whose greedy paths win by a clear margin, so that another order of adding floats cannot
change a token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import mlx_reference as reference  # first: it chooses the CPU
import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model
from mlx_lm.utils import load as mlx_lm_load
from tokenizers import Tokenizer

import chat
import tiny_tokenizer
from gguf_model import GgufModel, gguf_name, permute

DEFAULT_OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tiny"
PROMPT_LENGTHS = (7, 40)
GREEDY_TOKENS = 24
MIN_MARGIN = 0.02
MIN_DISTINCT = 8  # a greedy path that repeats itself tests little


@dataclass
class Spec:
    """One fixture: what its config says and how its weights are stored."""

    name: str
    config: dict[str, Any]
    pre: str = "smollm"
    bits: int | None = None
    group_size: int = 64
    bfloat16: bool = False
    shards: int = 1
    gguf_kinds: Callable[[str], Kind] | None = field(default=None)

    @property
    def is_gguf(self) -> bool:
        return self.gguf_kinds is not None


def config(model_type: str, small: bool = True, **more: Any) -> dict[str, Any]:
    """A config.json. Dense float32 models are smaller, for the files' size."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    base: dict[str, Any] = {
        "architectures": [f"{names[model_type]}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": 32 if small else 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64 if small else 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tiny_tokenizer.VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": tiny_tokenizer.BOS,
        "eos_token_id": tiny_tokenizer.EOS,
    }
    return base | more


def _q4_1_like_smollm(name: str) -> Kind:
    if name.endswith("norm.weight"):
        return Kind.F32
    return Kind.Q8_0 if name == "model.embed_tokens.weight" else Kind.Q4_1


def _q8_0(name: str) -> Kind:
    return Kind.F32 if name.endswith(("norm.weight", ".bias")) else Kind.Q8_0


# Context of 32 and this base put one wavelength below, one between and two above llama 3's two limits.
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}

QWEN3 = {"head_dim": 16, "rope_theta": 1000000.0, "attention_bias": False}
QWEN3_WIDE = QWEN3 | {"head_dim": 32}
QWEN2 = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 256, "max_window_layers": 2}

SPECS = [
    Spec("llama", config("llama", num_key_value_heads=4, num_hidden_layers=3)),
    Spec("llama-tied-gqa", config("llama", tie_word_embeddings=True)),
    Spec(
        "llama-rope3",
        config("llama", rope_theta=500.0, rope_scaling=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    ),
    Spec("mistral", config("mistral", head_dim=16, sliding_window=None)),
    Spec("qwen2", config("qwen2", **QWEN2), pre="qwen2"),
    Spec("qwen3", config("qwen3", tie_word_embeddings=True, **QWEN3), pre="qwen2"),
    Spec("llama-q4", config("llama", small=False, tie_word_embeddings=True), bits=4),
    Spec("llama-q8", config("llama", small=False), bits=8, group_size=32),
    Spec("qwen2-q4", config("qwen2", small=False, **QWEN2), pre="qwen2", bits=4, group_size=32),
    Spec("qwen3-q4", config("qwen3", small=False, tie_word_embeddings=True, **QWEN3_WIDE), pre="qwen2", bits=4),
    Spec("qwen3-q8", config("qwen3", small=False, **QWEN3_WIDE), pre="qwen2", bits=8),
    Spec("llama-bf16", config("llama", tie_word_embeddings=True, torch_dtype="bfloat16"), bfloat16=True),
    Spec("llama-sharded", config("llama"), shards=2),
    Spec("llama-gguf", config("llama", small=False, tie_word_embeddings=True), gguf_kinds=_q4_1_like_smollm),
    Spec("qwen2-gguf", config("qwen2", small=False, **QWEN2), pre="qwen2", gguf_kinds=_q8_0),
]


def random_weights(model_config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float32 weights that keep activations near unit size and give logits a spread of a few units."""
    rng = np.random.default_rng(seed)
    # A tied model repeats its input unless the layers outweigh the embedding.
    embedding, gain = (0.25, 2.0) if model_config["tie_word_embeddings"] else (0.5, 1.2)
    weights = {}
    for name, like in tree_flatten(reference.empty_model(model_config).parameters()):
        if name.endswith("norm.weight"):
            value = 1.0 + 0.2 * rng.standard_normal(like.shape)
        elif name.endswith(".bias"):
            value = 0.3 * rng.standard_normal(like.shape)
        elif name == "model.embed_tokens.weight":
            value = embedding * rng.standard_normal(like.shape)
        else:
            value = gain / np.sqrt(like.shape[-1]) * rng.standard_normal(like.shape)
        weights[name] = value.astype(np.float32)
    return weights


def prompts(seed: int) -> list[list[int]]:
    """Random ids without the special ones."""
    rng = np.random.default_rng(seed + 1_000_000)
    low = len(tiny_tokenizer.SPECIALS)
    return [rng.integers(low, tiny_tokenizer.VOCAB_SIZE, size=n).tolist() for n in PROMPT_LENGTHS]


def write_json(path: Path, value: Any, compact: bool = False) -> None:
    """JSON with sorted keys unless compact, which keeps the order and has no spaces."""
    if compact:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    else:
        text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def save_dense(spec: Spec, weights: dict[str, np.ndarray], out: Path) -> nn.Module:
    """Writes a dense checkpoint in one or several files; returns the model that the reference runs."""
    kind = mx.bfloat16 if spec.bfloat16 else mx.float32
    arrays = {name: mx.array(value).astype(kind) for name, value in weights.items()}
    metadata = {"format": "mlx"}
    if spec.shards == 1:
        mx.save_safetensors(str(out / "model.safetensors"), arrays, metadata=metadata)
    else:
        names = list(arrays)
        size = -(-len(names) // spec.shards)
        weight_map = {}
        for number in range(spec.shards):
            file = f"model-{number + 1:05d}-of-{spec.shards:05d}.safetensors"
            part = {name: arrays[name] for name in names[number * size : (number + 1) * size]}
            mx.save_safetensors(str(out / file), part, metadata=metadata)
            weight_map |= {name: file for name in part}
        total = sum(value.nbytes for value in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)
    save_config(dict(spec.config), out / "config.json")
    rounded = {name: np.array(value.astype(mx.float32)) for name, value in arrays.items()}
    return reference.dense_model(spec.config, rounded)


def save_quantized(spec: Spec, weights: dict[str, np.ndarray], out: Path) -> nn.Module:
    """Quantizes with mlx-lm's own function and writes as `mlx_lm.convert` does."""
    model, quantized = quantize_model(
        reference.dense_model(spec.config, weights), dict(spec.config), spec.group_size, spec.bits
    )
    mx.eval(model.parameters())
    save_model(out, model)
    save_config(quantized, out / "config.json")
    return model


def save_gguf(spec: Spec, weights: dict[str, np.ndarray], out: Path) -> nn.Module:
    """Writes model.gguf the way llama.cpp's converter lays it out; returns the model of the dequantized weights."""
    conf = spec.config
    architecture = conf["model_type"]
    tokens, merges = tiny_tokenizer.vocabulary()
    specials = len(tiny_tokenizer.SPECIALS)
    head_dim = conf["hidden_size"] // conf["num_attention_heads"]
    path = out / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {spec.name}")
    writer.add_block_count(conf["num_hidden_layers"])
    writer.add_context_length(conf["max_position_embeddings"])
    writer.add_embedding_length(conf["hidden_size"])
    writer.add_feed_forward_length(conf["intermediate_size"])
    writer.add_head_count(conf["num_attention_heads"])
    writer.add_head_count_kv(conf["num_key_value_heads"])
    writer.add_rope_freq_base(conf["rope_theta"])
    writer.add_layer_norm_rms_eps(conf["rms_norm_eps"])
    if architecture == "llama":
        writer.add_vocab_size(conf["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    else:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(spec.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * specials + [gguf.TokenType.NORMAL] * (len(tokens) - specials))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tiny_tokenizer.BOS)
    writer.add_eos_token_id(tiny_tokenizer.EOS)
    writer.add_pad_token_id(tiny_tokenizer.PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_tokenizer.CHAT_TEMPLATE)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    assert spec.gguf_kinds is not None
    for name, value in weights.items():
        if architecture == "llama" and name.endswith("q_proj.weight"):
            value = permute(value, conf["num_attention_heads"])
        elif architecture == "llama" and name.endswith("k_proj.weight"):
            value = permute(value, conf["num_key_value_heads"])
        kind = spec.gguf_kinds(name)
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = GgufModel.open(path)
    return reference.dense_model(stored.config(), stored.weights())


def digits7(values: np.ndarray) -> Any:
    """Nested lists of floats with seven significant digits."""
    if values.ndim > 1:
        return [digits7(row) for row in values]
    return [float(f"{value:.7g}") for value in values]


def numbers(model: nn.Module, seed: int) -> dict[str, Any] | None:
    """The golden numbers, or None if this seed gives no clear ones."""
    results = []
    for ids in prompts(seed):
        path = reference.greedy(model, ids, GREEDY_TOKENS)
        clear = min(path.margins) >= MIN_MARGIN and min(path.tokens) >= len(tiny_tokenizer.SPECIALS)
        if not clear or len(set(path.tokens)) < MIN_DISTINCT:
            return None
        every = reference.logits(model, ids)
        result = {
            "tokens": ids,
            "logits": digits7(every[-1]),
            "greedy": path.tokens,
            "min_margin": float(f"{min(path.margins):.4g}"),
        }
        if len(ids) == min(PROMPT_LENGTHS):
            result["logits_all"] = digits7(every)
        results.append(result)
    return {"min_margin": min(result["min_margin"] for result in results), "prompts": results}


def text_goldens(spec: Spec, tokenizer_file: dict[str, Any]) -> dict[str, Any]:
    """Ids of texts and rendered chats, on which `tokenizers` and plain Python must agree."""
    fast = Tokenizer.from_str(json.dumps(tokenizer_file))
    plain = tiny_tokenizer.plain(spec.pre)

    def encode(text: str) -> list[int]:
        ids = plain.encode(text)
        if ids != fast.encode(text, add_special_tokens=False).ids:
            raise ValueError(f"{spec.name}: tokenizers and plain BPE differ on {text!r}")
        if plain.decode(ids) != text:
            raise ValueError(f"{spec.name}: {text!r} does not come back from its ids")
        return ids

    chats = []
    for messages in tiny_tokenizer.CHATS:
        text = chat.render(tiny_tokenizer.CHAT_TEMPLATE, messages)
        chats.append({"messages": messages, "text": text, "tokens": encode(text)})
    return {"encode": [{"text": text, "tokens": encode(text)} for text in tiny_tokenizer.TEXTS], "chat": chats}


def check_loads(spec: Spec, out: Path, golden: dict[str, Any]) -> None:
    """What was written is what `mlx_lm.load` reads: same tokens after the first prompt."""
    model, tokenizer = mlx_lm_load(str(out))
    if tokenizer.eos_token_ids != {tiny_tokenizer.EOS}:
        raise ValueError(f"{spec.name}: end-of-text ids {tokenizer.eos_token_ids}")
    if spec.bfloat16:
        model.set_dtype(mx.float32)
    first = golden["prompts"][0]
    again = reference.greedy(model, first["tokens"], GREEDY_TOKENS).tokens
    if again != first["greedy"]:
        raise ValueError(f"{spec.name}: loaded from its files it generates {again}")


def make(spec: Spec, out_root: Path, first_seed: int) -> int:
    """Writes one fixture; returns its size in bytes."""
    for seed in range(first_seed, first_seed + 500):
        weights = random_weights(spec.config, seed)
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / spec.name
            out.mkdir()
            if spec.is_gguf:
                model = save_gguf(spec, weights, out)
            elif spec.bits:
                model = save_quantized(spec, weights, out)
            else:
                model = save_dense(spec, weights, out)
            result = numbers(model, seed)
            if result is None:
                continue
            tokenizer_files = tiny_tokenizer.files(spec.pre)
            golden = {
                "made_by": "tools/golden/tiny_models.py",
                "reference": reference.versions(),
                "seed": seed,
                **result,
                "text": text_goldens(spec, tokenizer_files["tokenizer.json"]),
            }
            if not spec.is_gguf:
                write_json(out / "tokenizer.json", tokenizer_files["tokenizer.json"], compact=True)
                write_json(out / "tokenizer_config.json", tokenizer_files["tokenizer_config.json"])
                check_loads(spec, out, golden)
            write_json(out / "golden.json", golden, compact=True)
            target = out_root / spec.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(out, target)
            size = sum(file.stat().st_size for file in target.iterdir())
            print(f"{spec.name}: seed {seed}, min margin {golden['min_margin']}, {size / 1024:.0f} KiB")
            return size
    raise SystemExit(f"{spec.name}: no seed from {first_seed} on gives clear margins")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: tests/fixtures/tiny")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    args = parser.parse_args()
    known = {spec.name: spec for spec in SPECS}
    if unknown := set(args.names) - set(known):
        parser.error(f"no fixture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    total = sum(make(known[name], args.out, args.seed) for name in args.names or known)
    print(f"{total / 2**20:.2f} MiB in {args.out}")


if __name__ == "__main__":
    main()
