"""Makes tests/fixtures/encoders/<name>.gguf from the directory of that name, as llama.cpp's converter lays it out: names of
the `gguf` package, and marks of words instead of pieces. JinaBERT has two forms: older converters divided the fused matrix of
gate and up projections (`jina-bert-split`), and newer ones keep it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
from safetensors.numpy import load_file

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "encoders"
JINA = gguf.MODEL_ARCH.JINA_BERT_V2
# File -> (directory, architecture)
ENCODERS = {
    "bert": ("bert", gguf.MODEL_ARCH.BERT),
    "nomic-bert": ("nomic-bert", gguf.MODEL_ARCH.NOMIC_BERT),
    "jina-bert": ("jina-bert", JINA),
    "jina-bert-split": ("jina-bert", JINA),
    "jina-bert-code": ("jina-bert-code", JINA),
    "jina-bert-code-split": ("jina-bert-code", JINA),
}


def divided(tensors: dict[str, Any], width: int) -> dict[str, Any]:
    """The tensors with separate matrices of gate (`w`) and up (`v`) projections."""
    found = {}
    for name, tensor in tensors.items():
        if "gated_layer" in name:
            at = name.split(".mlp.")[0]
            order = "vw" if "up_gated_layer" in name else "wv"
            for part, rows in zip(order, (tensor[:width], tensor[width:])):
                found[f"{at}.mlp.gated_layers_{part}.weight"] = rows
        else:
            found[name] = tensor
    return found


def wordpiece(writer: gguf.GGUFWriter, vocab: dict[str, int], types: int) -> None:
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {t for t in tokens if t.startswith("[") and t.endswith("]")}
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(types)
    written = [t if t in special else t[2:] if t.startswith("##") else "\u2581" + t for t in tokens]
    writer.add_token_list(written)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    for name, token in [("unknown", "[UNK]"), ("seperator", "[SEP]"), ("padding", "[PAD]"), ("cls", "[CLS]")]:
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocab[token])


def byte_level(writer: gguf.GGUFWriter, model: dict[str, Any], types: int) -> None:
    vocab = model["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("jina-v2-code")
    writer.add_token_type_count(types)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, token in [("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>"), ("padding", "<pad>")]:
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocab[token])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def make(source: Path, file: Path, architecture: gguf.MODEL_ARCH) -> None:
    """Writes the encoder in the directory `source` as a file. Its vectors are means of all tokens."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    if rope := config.get("rope_parameters"):
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if "merges" in tokenizer:
        byte_level(writer, tokenizer, config["type_vocab_size"])
    else:
        wordpiece(writer, tokenizer["vocab"], config["type_vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = load_file(source / "model.safetensors")
    if file.stem.endswith("-split"):
        tensors = divided(tensors, config["intermediate_size"])
    for name, tensor in tensors.items():
        if not name.startswith("pooler") and not name.endswith("position_ids"):
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    for name in parser.parse_args().names or list(ENCODERS):
        directory, architecture = ENCODERS[name]
        make(OUT / directory, OUT / f"{name}.gguf", architecture)
        print(name)


if __name__ == "__main__":
    main()
