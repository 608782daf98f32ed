"""Makes tests/fixtures/encoders/<name>.gguf from the directory of that name, as llama.cpp's converter lays it out: names of
the `gguf` package, and marks of words instead of pieces.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
from safetensors.numpy import load_file

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "encoders"
ENCODERS = {"bert": gguf.MODEL_ARCH.BERT, "nomic-bert": gguf.MODEL_ARCH.NOMIC_BERT}


def make(source: Path, file: Path, architecture: gguf.MODEL_ARCH) -> None:
    """Writes the encoder in the directory `source` as a file. Its vectors are means of all tokens."""
    config = json.loads((source / "config.json").read_text())
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {t for t in tokens if t.startswith("[") and t.endswith("]")}
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
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(config["type_vocab_size"])
    written = [t if t in special else t[2:] if t.startswith("##") else "\u2581" + t for t in tokens]
    writer.add_token_list(written)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    for name, token in [("unknown", "[UNK]"), ("seperator", "[SEP]"), ("padding", "[PAD]"), ("cls", "[CLS]")]:
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocab[token])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
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
        make(OUT / name, OUT / f"{name}.gguf", ENCODERS[name])
        print(name)


if __name__ == "__main__":
    main()
