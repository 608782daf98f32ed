"""Writes GGUF files of known shapes with random weights, for speed only, and lets llama.cpp quantize them.

`write SHAPE OUT --vocabulary GGUF` makes the float16 file; its tokens are those of another GGUF, padded to the shape's size.
`quantize IN OUT FORMAT` runs the quantizer of the library that llama-cpp-python has compiled.
`shapes` and `formats` print what there is. Runs in the environment of llama_cpp_side.py with the `gguf` package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path
from typing import Any

FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ4_XS": 30,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4_MOE": 38,
}

# A number of weights near 1e9 where the name says nothing else. All have tied embeddings.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "architecture": "llama", "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64,
        "inner": 8192, "vocab": 49152, "context": 16384, "theta": 500000.0,
    },
    "gemma3-1b": {
        "architecture": "gemma3", "hidden": 1152, "layers": 26, "heads": 4, "kv_heads": 1, "head_dim": 256,
        "inner": 6912, "vocab": 262144, "context": 32768, "theta": 1000000.0, "window": 512,
    },
    "qwen3-0.6b": {
        "architecture": "qwen3", "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128,
        "inner": 3072, "vocab": 151936, "context": 40960, "theta": 1000000.0,
    },
    "qwen3moe-tiny": {
        "architecture": "qwen3moe", "hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "head_dim": 64,
        "inner": 3072, "vocab": 49152, "context": 32768, "theta": 1000000.0, "experts": 64, "active": 8, "expert_inner": 384,
    },
    "gpt2-medium": {
        "architecture": "gpt2", "hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 64,
        "inner": 4096, "vocab": 50257, "context": 1024,
    },
}  # fmt: skip


def metadata(writer: Any, shape: dict[str, Any]) -> None:
    """The fields that llama.cpp's converter writes for such a model."""
    architecture = shape["architecture"]
    writer.add_name("random")
    writer.add_file_type(FILE_TYPES["F16"])
    writer.add_block_count(shape["layers"])
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["heads"])
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape["theta"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    if architecture == "llama":
        writer.add_rope_dimension_count(shape["head_dim"])
    if "window" in shape:
        writer.add_sliding_window(shape["window"])
    if "experts" in shape:
        writer.add_expert_count(shape["experts"])
        writer.add_expert_used_count(shape["active"])
        writer.add_expert_feed_forward_length(shape["expert_inner"])


def tokenizer(writer: Any, size: int, source: Path) -> None:
    """The tokens and merges of another file, and as many more tokens as are wanted."""
    import gguf

    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<more{number}>" for number in range(size - len(tokens)))])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * (size - len(tokens))])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def tensors(shape: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes; one dimension means a norm or a bias."""
    architecture, hidden, inner = shape["architecture"], shape["hidden"], shape["inner"]
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    tensors: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (shape["vocab"], hidden)), ("output_norm.weight", (hidden,))]
    block: list[tuple[str, tuple[int, ...]]] = [("attn_norm.weight", (hidden,)), ("ffn_norm.weight", (hidden,))]
    if architecture == "gpt2":
        tensors += [("output_norm.bias", (hidden,)), ("position_embd.weight", (shape["context"], hidden))]
        tensors += [("output.weight", (shape["vocab"], hidden))]  # the converter writes it twice
        block += [("attn_norm.bias", (hidden,)), ("ffn_norm.bias", (hidden,))]
        for name, size in {
            "attn_qkv": (3 * hidden, hidden), "attn_output": (hidden, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        }.items():  # fmt: skip
            block += [(f"{name}.weight", size), (f"{name}.bias", size[:1])]
    else:
        block += [("attn_q.weight", (query, hidden)), ("attn_k.weight", (key, hidden)), ("attn_v.weight", (key, hidden))]
        block += [("attn_output.weight", (hidden, query))]
        if architecture != "llama":
            block += [(f"attn_{part}_norm.weight", (shape["head_dim"],)) for part in "qk"]
        if architecture == "gemma3":
            block += [("post_attention_norm.weight", (hidden,)), ("post_ffw_norm.weight", (hidden,))]
        if "experts" in shape:
            experts, inner = shape["experts"], shape["expert_inner"]
            block += [("ffn_gate_inp.weight", (experts, hidden)), ("ffn_down_exps.weight", (experts, hidden, inner))]
            block += [(f"ffn_{part}_exps.weight", (experts, inner, hidden)) for part in ("gate", "up")]
        else:
            block += [(f"ffn_{part}.weight", (inner, hidden)) for part in ("gate", "up")]
            block += [("ffn_down.weight", (hidden, inner))]
    return tensors + [(f"blk.{layer}.{name}", size) for layer in range(shape["layers"]) for name, size in block]


def write(shape: dict[str, Any], out: Path, vocabulary: Path) -> None:
    """The float16 file."""
    import gguf
    import numpy as np

    random = np.random.default_rng(7)
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape["architecture"], use_temp_file=True)
    metadata(writer, shape)
    tokenizer(writer, shape["vocab"], vocabulary)
    for name, size in tensors(shape):
        if len(size) == 1:
            value = np.full(size, 0.0 if name.endswith(".bias") else 1.0, np.float32)
        else:
            value = random.standard_normal(size, np.float32) * np.float32(0.02)
            if "ffn_gate_inp" not in name:
                value = value.astype(np.float16)
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)


def quantize(source: Path, out: Path, kind: str) -> None:
    """llama.cpp's own quantizer."""
    import llama_cpp as ll

    params = ll.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    params.nthread = os.cpu_count() or 1
    partial = out.with_suffix(".partial")
    code = ll.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params))
    if code != 0:
        raise SystemExit(f"llama.cpp cannot make {kind} of {source}: code {code}")
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    writing = actions.add_parser("write")
    writing.add_argument("shape", choices=SHAPES)
    writing.add_argument("out", type=Path)
    writing.add_argument("--vocabulary", type=Path, required=True)
    quantizing = actions.add_parser("quantize")
    quantizing.add_argument("source", type=Path)
    quantizing.add_argument("out", type=Path)
    quantizing.add_argument("format", choices=FILE_TYPES)
    actions.add_parser("shapes")
    actions.add_parser("formats")
    args = parser.parse_args()
    if args.action == "write":
        write(SHAPES[args.shape], args.out, args.vocabulary)
    elif args.action == "quantize":
        quantize(args.source, args.out, args.format)
    else:
        print(json.dumps(list(SHAPES if args.action == "shapes" else FILE_TYPES)))


if __name__ == "__main__":
    main()
