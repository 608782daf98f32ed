"""Makes fuzz/corpus: small whole inputs for each fuzz target, from which mutations start. Needs nothing but Python.

Configurations are those of tests/fixtures/tiny, templates those of inference-text/tests/fixtures/chat_templates.json; GGUF and
safetensors files are written here, of a few kilobytes, with every type that is read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "fuzz" / "corpus"
FIXTURES = ROOT / "tests" / "fixtures" / "tiny"


def put(target: str, name: str, data: bytes) -> None:
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, 4, struct.pack("<I", value))


def f32(name: str, value: float) -> bytes:
    return key(name, 6, struct.pack("<f", value))


def string(name: str, value: str) -> bytes:
    return key(name, 8, text(value))


def array(name: str, kind: int, items: list[bytes]) -> bytes:
    return key(name, 9, struct.pack("<IQ", kind, len(items)) + b"".join(items))


# GGUF type, elements and bytes of a block.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110),
    12: (256, 144), 13: (256, 176), 14: (256, 210), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}


def gguf(keys: list[bytes], tensors: list[tuple[str, list[int], int]], version: int = 3) -> bytes:
    infos, data = b"", b""
    for name, shape, kind in tensors:
        elements, size = BLOCKS[kind]
        count = 1
        for n in shape:
            count *= n
        data += b"\0" * (-len(data) % 32)
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += struct.pack("<IQ", kind, len(data))
        length = count // elements * size
        data += bytes((i * 37 + kind) % 120 for i in range(length))
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + infos
    return head + b"\0" * (-len(head) % 32) + data


def bytes_alphabet() -> list[str]:
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names, extra = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in names:
            names[b] = chr(256 + extra)
            extra += 1
    return list(names.values())


def model_keys(architecture: str) -> list[bytes]:
    at = architecture
    return [
        string("general.architecture", at),
        u32(f"{at}.block_count", 1),
        u32(f"{at}.embedding_length", 32),
        u32(f"{at}.feed_forward_length", 32),
        u32(f"{at}.attention.head_count", 2),
        u32(f"{at}.context_length", 64),
        f32(f"{at}.attention.layer_norm_rms_epsilon", 1e-5),
        f32(f"{at}.rope.freq_base", 10000.0),
    ]


def gguf_files() -> None:
    tokens = ["<s>", "</s>", *bytes_alphabet(), "He", "Hel"]
    byte_level = [
        string("tokenizer.ggml.model", "gpt2"),
        string("tokenizer.ggml.pre", "smollm"),
        array("tokenizer.ggml.tokens", 8, [text(t) for t in tokens]),
        array("tokenizer.ggml.token_type", 5, [struct.pack("<i", 3 if i < 2 else 1) for i in range(len(tokens))]),
        array("tokenizer.ggml.merges", 8, [text("H e"), text("He l")]),
        u32("tokenizer.ggml.bos_token_id", 0),
        u32("tokenizer.ggml.eos_token_id", 1),
        key("tokenizer.ggml.add_bos_token", 7, b"\1"),
        string("tokenizer.chat_template", "{{ messages[0].content }}"),
    ]
    put("gguf", "llama", gguf(model_keys("llama") + byte_level, [
        ("token_embd.weight", [len(tokens), 32], 8), ("output_norm.weight", [32], 0), ("blk.0.attn_norm.weight", [32], 0),
        ("blk.0.attn_q.weight", [32, 32], 3), ("blk.0.attn_k.weight", [32, 32], 2), ("blk.0.ffn_up.weight", [32, 32], 6),
    ]))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "H", "e", "l", "o", "▁He", "ll", "▁Hell"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    put("gguf", "sentencepiece", gguf(model_keys("gemma2") + [
        string("tokenizer.ggml.model", "llama"),
        array("tokenizer.ggml.tokens", 8, [text(t) for t in pieces]),
        array("tokenizer.ggml.scores", 6, [struct.pack("<f", -float(i)) for i in range(len(pieces))]),
        array("tokenizer.ggml.token_type", 5, [struct.pack("<i", kind) for kind in kinds]),
        u32("tokenizer.ggml.bos_token_id", 1), u32("tokenizer.ggml.eos_token_id", 2),
        u32("tokenizer.ggml.unknown_token_id", 0),
    ], [("token_embd.weight", [len(pieces), 32], 1)]))
    put("gguf", "every-type", gguf([u32("general.alignment", 32)], [
        (f"t{kind}", [elements if elements > 1 else 4], kind) for kind, (elements, _) in BLOCKS.items()
    ]))
    put("gguf", "every-value", gguf([
        key("a.u8", 0, b"\1"), key("a.i8", 1, b"\1"), key("a.u16", 2, b"\1\0"), key("a.i16", 3, b"\1\0"), u32("a.u32", 1),
        key("a.i32", 5, b"\1\0\0\0"), f32("a.f32", 1.0), key("a.bool", 7, b"\1"), string("a.text", "text"),
        array("a.list", 4, [b"\1\0\0\0"] * 3), key("a.u64", 10, b"\1" * 8), key("a.i64", 11, b"\1" * 8),
        key("a.f64", 12, struct.pack("<d", 1.0)), array("a.none", 8, []),
    ], [], version=2))


def safetensors(header: dict, data: bytes) -> bytes:
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def safetensors_files() -> None:
    dtypes = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "I64": 8, "BOOL": 1, "F64": 8}
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for dtype, size in dtypes.items():
        header[f"t.{dtype}"] = {"dtype": dtype, "shape": [2, 3], "data_offsets": [at, at + 6 * size]}
        at += 6 * size
    put("safetensors", "every-type", safetensors(header, bytes(range(at % 256)) + bytes(at - at % 256)))
    put("safetensors", "scalar-and-empty", safetensors({
        "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "e": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]},
    }, b"\0\0\0\0"))
    put("safetensors", "none", safetensors({}, b""))


def main() -> None:
    for path in sorted(FIXTURES.glob("*/config.json")):
        put("config", path.parent.name, path.read_bytes())
    golden = json.loads((ROOT / "inference-text" / "tests" / "fixtures" / "chat_templates.json").read_text(encoding="utf-8"))
    expressions = [source for name, source in golden["templates"].items() if name.startswith("expression ")]
    for name, source in golden["templates"].items():
        if not name.startswith("expression "):
            put("template", name.replace(" ", "-"), source.encode())
    for first in range(0, len(expressions), 12):
        put("template", f"expressions-{first // 12}", "\n".join(expressions[first : first + 12]).encode())
    # Found by fuzzing: the template engine panicked.
    put("template", "backwards-through-nothing",
        b"{% for m in messages[9:][::-1] %}{{ m }}{% endfor %}{{ ''[::-1] }}{{ ()[::-1] }}\n")
    gguf_files()
    safetensors_files()


if __name__ == "__main__":
    main()
