"""Golden ids of a small vocabulary as GGUF files of Gemma 4 hold one, from a plain BPE in Python.

The vocabulary has characters, with a marker in the place of spaces, merge rules learned from this script's own text, and
256 tokens for bytes. The encoder is written here from the definition: the rule of the lowest rank is applied first, of
equals the leftmost, over a whole text; what has no token becomes its bytes in UTF-8. It shares no code with `tokenizers`.

    python text_gemma4_golden.py ../../inference-text/tests/fixtures/text_gemma4_golden.json
"""

import json
import sys

MARK = "\u2581"
TEXT = """The capital of France is Paris, and the capital of Germany is Berlin.
The larger the model, the slower the step; the smaller the model, the faster it answers.

def add(a, b):
    return a + b

def sub(a, b):
    return a - b


one two  three   four    five     six
naïve café, naïve cafés; Straße und größere Straßen
""" * 3
CASES = [
    "", " ", "the", "The capital of France is", " leading", "trailing ", "two  spaces   three", "hello world",
    "line\nbreak\ttab\n\n\nend", "def add(a, b):\n    return a + b\n", "naïve café", "größer Straße", "日本語", "😀 emoji",
    "a\u2581b", "the the thethethe", "        eight", "<turn|>", "mixed 中文 the English", "Z" * 20,
]
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]


def learn(count):
    """Characters, and the rules of the most frequent pairs, of equals the least."""
    words = list(TEXT.replace(" ", MARK))
    alphabet = sorted(set(words))
    rules = []
    while len(rules) < count:
        pairs = {}
        for pair in zip(words, words[1:]):
            pairs[pair] = pairs.get(pair, 0) + 1
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        rules.append(best)
        words = merged(words, best)
    return alphabet, rules


def merged(words, pair):
    """Every pair joined, from the left."""
    out, i = [], 0
    while i < len(words):
        if tuple(words[i : i + 2]) == pair:
            out.append(words[i] + words[i + 1])
            i += 2
        else:
            out.append(words[i])
            i += 1
    return out


def encode(text, ids, ranks):
    words = [c for c in text.replace(" ", MARK)]
    while True:
        known = [(ranks[p], i) for i, p in enumerate(zip(words, words[1:])) if p in ranks]
        if not known:
            break
        _, i = min(known)
        words[i : i + 2] = [words[i] + words[i + 1]]
    out = []
    for word in words:
        out += [ids[word]] if word in ids else [ids[f"<0x{byte:02X}>"] for byte in word.encode()]
    return out


def main(out):
    alphabet, rules = learn(180)
    tokens = SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)] + alphabet
    kinds = [3, 3, 3, 2, 3] + [6] * 256 + [1] * len(alphabet)
    for left, right in rules:
        if left + right not in tokens:
            tokens.append(left + right)
            kinds.append(1)
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {}
    for rank, rule in enumerate(rules):
        ranks.setdefault(rule, rank)
    golden = {
        "tokens": tokens,
        "token_types": kinds,
        "merges": [" ".join(rule) for rule in rules],
        "texts": [{"text": text, "ids": encode(text, ids, ranks)} for text in CASES],
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")
    print(len(tokens), "tokens,", len(rules), "rules,", len(CASES), "texts")


if __name__ == "__main__":
    main(*sys.argv[1:])
