"""Makes tests/fixtures/perplexity.json: perplexities of fixed texts as mlx-lm's own `eval_ppl` computes them.

Tiny checkpoints are given the ids of the text by their own tokenizer.json; the first model is read from its GGUF,
dequantized to float32. Everything runs on the CPU in float32. Pins: requirements.txt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
from mlx_lm.perplexity import eval_ppl
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

import first_model_file
from gguf_model import GgufModel
from plain_bpe import PlainBpe

ROOT = Path(__file__).resolve().parents[2]
TINY = ["llama", "qwen3", "qwen3-q8", "mixtral"]
TEXT = (
    "The sea was calm that morning, and the old harbor smelled of salt and tar. A boy of nine sat on the wall and "
    "counted the boats as they came in: one, two, three. His grandfather had told him that every boat has a story, "
    "and that a good listener can hear it in the way the water strikes the hull.\n\nIn 1869 the first steamer had "
    "passed through the canal; it carried 42 passengers, a crate of oranges and a letter that nobody ever opened. "
    "What does such a letter say? Perhaps it says that the world is larger than we think, and that patience is the "
    "best of all companions. Perhaps it is only a bill. The boy laughed when he thought of it, jumped down from the "
    "wall, and ran home along the narrow street, where the bakers were already setting out their bread."
)


def measured(model: Any, ids: list[int], length: int) -> dict[str, Any]:
    """Of the whole pieces of `length` tokens; what is left over is not part of `tokens`."""
    ids = ids[: len(ids) // length * length]
    perplexity, error = eval_ppl(model, mx.array(ids).reshape(-1, length), batch_size=8)
    return {"tokens": ids, "sequence_length": length, "perplexity": perplexity, "standard_error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "golden", help="where the model is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "perplexity.json")
    args = parser.parse_args()

    cases = []
    for name in TINY:
        path = ROOT / "tests" / "fixtures" / "tiny" / name
        model, _ = load_model(path)
        model.set_dtype(mx.float32)
        ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
        cases.append({"model": name, **measured(model, ids, 64)})
    source = GgufModel.open(first_model_file.fetch(args.work))
    model = reference.dense_model(source.config(), source.weights())
    ids = PlainBpe.from_gguf(source).encode(TEXT)
    first = measured(model, ids, 64)
    for case in [*cases, first]:
        print(case.get("model", "first model"), len(case["tokens"]), case["perplexity"], case["standard_error"])
    golden = {
        "made_by": "tools/golden/perplexity.py",
        "reference": reference.versions(),
        "text": TEXT,
        "tiny": cases,
        "first_model": first,
    }
    args.out.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
