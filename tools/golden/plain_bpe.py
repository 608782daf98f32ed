"""Byte-level BPE in plain Python: an encoder that shares no code with the `tokenizers` library.

Used to check tokenizations that the engine (which does use that library) must reproduce. Slow, and for no other use.
"""

from __future__ import annotations

import unicodedata

import regex

from gguf_model import GPT2_PATTERN, QWEN2_PATTERN, GgufModel


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return table


class PlainBpe:
    """Encodes and decodes with a vocabulary, ranked merges and special tokens."""

    def __init__(self, vocab: list[str], merges: list[tuple[str, str]], specials: list[str], pre: str):
        self._ids = {text: i for i, text in enumerate(vocab)}
        self._texts = vocab
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._specials = set(specials)
        self._special_pattern = regex.compile("(" + "|".join(map(regex.escape, specials)) + ")") if specials else None
        self._pre = pre
        self._alphabet = byte_alphabet()
        self._bytes = {char: byte for byte, char in self._alphabet.items()}

    @classmethod
    def from_gguf(cls, model: GgufModel) -> "PlainBpe":
        meta = model.metadata
        return cls(
            meta["tokenizer.ggml.tokens"],
            [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]],
            [text for _, text in model.special_tokens()],
            meta["tokenizer.ggml.pre"],
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it count as such. None is added."""
        pieces = self._special_pattern.split(text) if self._special_pattern else [text]
        ids: list[int] = []
        for piece in pieces:
            if piece in self._specials:
                ids.append(self._ids[piece])
            elif piece:
                for word in self._split(piece):
                    ids.extend(self._ids[part] for part in self._merge(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        raw = bytearray()
        for i in ids:
            text = self._texts[i]
            raw += text.encode() if text in self._specials else bytes(self._bytes[char] for char in text)
        return raw.decode(errors="replace")

    def _split(self, text: str) -> list[str]:
        if self._pre == "qwen2":
            return regex.findall(QWEN2_PATTERN, unicodedata.normalize("NFC", text))
        # smollm: every digit alone, what is between them by GPT-2's expression
        words: list[str] = []
        for part in regex.split(r"(\p{N})", text):
            if part:
                words.extend(regex.findall(GPT2_PATTERN, part))
        return words

    def _merge(self, word: str) -> list[str]:
        parts = [self._alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranked = [(self._ranks.get(pair, len(self._ranks)), pair) for pair in zip(parts, parts[1:])]
            rank, best = min(ranked)
            if rank == len(self._ranks):
                break
            merged: list[str] = []
            at = 0
            while at < len(parts):
                if tuple(parts[at : at + 2]) == best:
                    merged.append(parts[at] + parts[at + 1])
                    at += 2
                else:
                    merged.append(parts[at])
                    at += 1
            parts = merged
        return parts
