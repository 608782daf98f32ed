"""Golden ids of a small SentencePiece BPE vocabulary, from SentencePiece itself.

Trains a vocabulary as Llama's was made (BPE, byte fallback, a space in front, nothing normalized) on this
script's own sentences, and writes its pieces, scores and types as a GGUF would hold them, with encoded texts.

    pip install sentencepiece==0.2.1
    python text_sentencepiece_golden.py ../../inference-text/tests/fixtures/text_sentencepiece_golden.json
"""

import io
import json
import random
import sys

import sentencepiece as spm

WORDS = """the of and to in a is that it was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little work
know place year live me back give most very after thing our just name good sentence man think say great where help
through much before line right too mean old any same tell boy follow came want show also around form three small set put
end does another well large must big even such because turn here why ask went men read need land different home us move
try kind hand picture again change off play spell air away animal house point page letter mother answer found study still
learn should America world naïve café Straße größer""".split()

TEXTS = [
    "", " ", "the", "The capital of France is", " leading", "trailing ", "two  spaces   three", "hello world",
    "learning learned learner", "aaaaaaaaaaaaaaaa", "the the thethethe", "line\nbreak\ttab", "1234567890", "naïve café",
    "größer Straße", "日本語", "😀 emoji 👨‍👩‍👧", "(a) [b] {c} <d>", "don't can't won't", "▁marker", "a▁b", "x" * 50,
    "another different sentence, because mothers should study!", "\u0000\u0007", "mixed 中文 English", "zzz qqq", "<s> </s> <unk>",
]


def main(out):
    rng = random.Random(7)
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(3000)]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False, character_coverage=1.0,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = []
    for i in range(len(sp)):
        kinds.append(2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1)
    golden = {
        "tokens": [sp.id_to_piece(i) for i in range(len(sp))],
        "scores": [sp.get_score(i) for i in range(len(sp))],
        "token_types": kinds,
        "texts": [{"text": t, "ids": sp.encode(t), "decoded": sp.decode(sp.encode(t))} for t in TEXTS],
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")
    print(len(sp), "pieces,", len(TEXTS), "texts")


if __name__ == "__main__":
    main(*sys.argv[1:])
