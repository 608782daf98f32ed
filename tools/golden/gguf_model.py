"""Reads a GGUF file into what Hugging Face checkpoints hold: config, named weights, tokenizer files.

For llama, qwen2 and qwen3 as llama.cpp's converter writes them. This is a reference for tests, written with the
Python `gguf` package and numpy; it is not how the engine reads GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

CONTROL = 3  # tokenizer.ggml.token_type of control tokens
USER_DEFINED = 4

# How text is split before the merges. Digits one by one, then GPT-2's own expression; or Qwen2's expression.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face weight, e.g. `model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    module, kind = name.rsplit(".", 1)
    for ours, theirs in _OUTER_NAMES.items():
        if module == theirs:
            return f"{ours}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    back = {theirs: ours for ours, theirs in _BLOCK_NAMES.items()}
    return f"blk.{layer}.{back[rest]}.{kind}"


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; `ValueError` if it has none."""
    module, kind = name.rsplit(".", 1)
    if module in _OUTER_NAMES:
        return f"{_OUTER_NAMES[module]}.{kind}"
    parts = module.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{kind}"
    raise ValueError(f"tensor {name} is of no known kind")


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama Q or K projection from halves to neighbors, as GGUF stores them: [heads * d, n] -> the same."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permute`. Works on rows of any kind, packed ones too."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@dataclass
class RawTensor:
    """One tensor under its Hugging Face name, rows already in Hugging Face's order."""

    name: str
    kind: GGMLQuantizationType
    data: np.ndarray  # float32 [rows, cols], or uint8 [rows, bytes per row] of blocks

    def dequantized(self) -> np.ndarray:
        """As float32."""
        return np.ascontiguousarray(dequantize(self.data, self.kind), dtype=np.float32)


@dataclass
class GgufModel:
    """An opened GGUF model."""

    path: Path
    metadata: dict[str, Any]
    _reader: GGUFReader = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        reader = GGUFReader(path)
        metadata = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
        return cls(path, metadata, reader)

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    def hparam(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own table."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self.path} lacks {self.architecture}.{key}")
        return value

    def config(self) -> dict[str, Any]:
        """The config.json that the metadata amounts to."""
        names = {tensor.name for tensor in self._reader.tensors}
        hidden = self.hparam("embedding_length")
        heads = self.hparam("attention.head_count")
        class_name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.architecture]
        config: dict[str, Any] = {
            "architectures": [f"{class_name}ForCausalLM"],
            "model_type": self.architecture,
            "hidden_size": hidden,
            "num_hidden_layers": self.hparam("block_count"),
            "intermediate_size": self.hparam("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.hparam("attention.head_count_kv", heads),
            "head_dim": self.hparam("attention.key_length", hidden // heads),
            # Stored as float32; the number somebody wrote is the shortest one that rounds to it.
            "rms_norm_eps": float(str(np.float32(self.hparam("attention.layer_norm_rms_epsilon")))),
            "rope_theta": self.hparam("rope.freq_base", 10000.0),
            "max_position_embeddings": self.hparam("context_length"),
            "vocab_size": len(self.metadata["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata["tokenizer.ggml.eos_token_id"],
        }
        return config

    def tensors(self) -> Iterator[RawTensor]:
        """All weights. llama's Q and K rows are brought back to halves."""
        heads = self.hparam("attention.head_count")
        kv_heads = self.hparam("attention.head_count_kv", heads)
        for tensor in self._reader.tensors:
            name = hf_name(tensor.name)
            data = np.array(tensor.data)
            if self.architecture == "llama" and ".q_proj." in name:
                data = unpermute(data, heads)
            elif self.architecture == "llama" and ".k_proj." in name:
                data = unpermute(data, kv_heads)
            yield RawTensor(name, tensor.tensor_type, data)

    def weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 under their Hugging Face names."""
        return {tensor.name: tensor.dequantized() for tensor in self.tensors()}

    def special_tokens(self) -> list[tuple[int, str]]:
        """(id, text) of control and user-defined tokens."""
        tokens = self.metadata["tokenizer.ggml.tokens"]
        types = self.metadata["tokenizer.ggml.token_type"]
        return [(i, t) for i, (t, kind) in enumerate(zip(tokens, types)) if kind in (CONTROL, USER_DEFINED)]

    def tokenizer_json(self) -> dict[str, Any]:
        """A tokenizer.json made of the metadata (byte-level BPE only)."""
        meta = self.metadata
        if meta["tokenizer.ggml.model"] != "gpt2":
            raise ValueError(f"tokenizer model {meta['tokenizer.ggml.model']} is not byte-level BPE")
        types = meta["tokenizer.ggml.token_type"]
        specials = [(i, text, types[i] == CONTROL) for i, text in self.special_tokens()]
        return tokenizer_json(
            vocab=meta["tokenizer.ggml.tokens"],
            merges=[tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]],
            specials=specials,
            pre=meta["tokenizer.ggml.pre"],
        )

    def tokenizer_config(self) -> dict[str, Any]:
        """The tokenizer_config.json that goes with it."""
        meta = self.metadata

        def text(key: str) -> str | None:
            token = meta.get(f"tokenizer.ggml.{key}_token_id")
            return None if token is None else meta["tokenizer.ggml.tokens"][token]

        return {
            "add_bos_token": meta.get("tokenizer.ggml.add_bos_token", False),
            "add_prefix_space": False,
            "bos_token": text("bos"),
            "chat_template": meta.get("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "eos_token": text("eos"),
            "model_max_length": self.hparam("context_length"),
            "pad_token": text("padding"),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": text("unknown"),
        }


def tokenizer_json(
    vocab: list[str], merges: list[tuple[str, str]], specials: list[tuple[int, str, bool]], pre: str
) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json. `specials`: (id, text, control or not); `pre`: llama.cpp's name of the split."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    normalizer = None
    if pre == "smollm":
        split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    elif pre == "qwen2":
        pattern = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [pattern, byte_level | {"use_regex": False}]}
        normalizer = {"type": "NFC"}
    else:
        raise ValueError(f"pre-tokenizer {pre} is neither smollm nor qwen2")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": control,
            }
            for i, text, control in specials
        ],
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(vocab)},
            "merges": [list(pair) for pair in merges],
        },
    }
