"""The tokenizer of the tiny models: a real byte-level BPE of 300 tokens with ChatML and a chat template.

Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, then the 256 bytes, then merges.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import regex

from gguf_model import GPT2_PATTERN, tokenizer_json
from plain_bpe import PlainBpe, byte_alphabet

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, PAD = 1, 2, 0
VOCAB_SIZE = 300

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe short.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog user system assistant "
    "what is the capital of france the answer is that it is there in the end one and one are two "
) * 2

# Texts whose ids the goldens record: plain, digits and spaces, several bytes a character, special tokens inside.
TEXTS = [
    "The capital of France is",
    "  12 + 345 =\t67\n\nThere's the end.",
    "Žluťoučký 漢字 🙂 naïve",
    "<|im_start|>user\nHi<|im_end|>",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the answer?"}],
    [
        {"role": "system", "content": "You are the fox."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who are you?"},
    ],
]


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges; the most frequent pair first, ties in alphabetical order."""
    alphabet = byte_alphabet()
    tokens = [*SPECIALS, *sorted(alphabet.values())]
    merges: list[tuple[str, str]] = []
    words = Counter(regex.findall(GPT2_PATTERN, _CORPUS))
    split = {word: [alphabet[byte] for byte in word.encode()] for word in words}
    while len(tokens) < VOCAB_SIZE:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(split[word], split[word][1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        tokens.append("".join(best))
        for word, parts in split.items():
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
            split[word] = parts
    return tokens, merges


def files(pre: str) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json with the given way to split text (smollm or qwen2)."""
    tokens, merges = vocabulary()
    specials = [(i, text, True) for i, text in enumerate(SPECIALS)]
    return {
        "tokenizer.json": tokenizer_json(tokens, merges, specials, pre),
        "tokenizer_config.json": {
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": SPECIALS[BOS],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIALS[EOS],
            "model_max_length": 256,
            "pad_token": SPECIALS[PAD],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    }


def plain(pre: str) -> PlainBpe:
    """The same tokenizer in plain Python."""
    tokens, merges = vocabulary()
    return PlainBpe(tokens, merges, SPECIALS, pre)
