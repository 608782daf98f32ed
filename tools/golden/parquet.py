"""Makes tests/fixtures/parquet: examples of training data in Parquet files, and rows.json with their rows.

pyarrow writes the files as `datasets` and the Hugging Face Hub do: the codecs are those of the Hub, and one file has two parts. A
column of the last file has a type without a counterpart in JSON. rows.json has what pyarrow reads back, without nulls:

    pip install pyarrow==26.0.1
    python tools/golden/parquet.py
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "parquet"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    {"messages": [said("user", f"Say {name}"), said("assistant", f"Ahoy, {name}!" + " The sea is wide." * n)]}
    for n, name in enumerate(["one", "two", "three", "four", "fünf"])
]
# The second line has no system message and no tools.
CHATS[0]["messages"].insert(0, said("system", "Be brief."))
REPLIES = [{"prompt": f"What is {n} + 1?", "completion": str(n + 1), "system": "Add." if n % 2 else None} for n in range(4)]
TEXTS = [{"text": f"Call me number {n}. " * (n + 1)} for n in range(4)]
PAIRS = [
    {"chosen": [said("user", f"Hi {n}"), said("assistant", "Ahoy")], "rejected": [said("user", f"Hi {n}"), said("assistant", "Hello")]}
    for n in range(3)
]
VERDICTS = [{"prompt": f"Hi {n}", "completion": "Ahoy" if n % 2 else "Hello", "label": bool(n % 2)} for n in range(4)]
PROMPTS = [
    {
        "prompt": f"What is {n} / 4?",
        "answer": n / 4,
        "count": n - 2,
        "big": 2**63 + n,
        "half": n / 2,
        "hints": [["a", None], []] if n else None,
        "when": datetime.datetime(2024, 5, 1 + n),
        "raw": b"\xff\x00",
        "flags": [("k", n)],
    }
    for n in range(3)
]
PROMPT_TYPES = {
    "prompt": pa.large_string(),
    "answer": pa.float64(),
    "count": pa.int8(),
    "big": pa.uint64(),
    "half": pa.float32(),
    "hints": pa.list_(pa.list_(pa.string())),
    "when": pa.timestamp("us"),
    "raw": pa.binary(),
    "flags": pa.map_(pa.string(), pa.int32()),
}
UNREADABLE = {"when", "raw", "flags"}


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None and k not in UNREADABLE}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def main() -> None:
    OUT.mkdir(exist_ok=True)
    prompts = pa.schema(list(PROMPT_TYPES.items()))
    files = {
        "train-00000-of-00002.parquet": (CHATS[:3], "snappy", {}),
        "train-00001-of-00002.parquet": (CHATS[3:], "zstd", {"data_page_version": "2.0"}),
        "validation.parquet": (REPLIES, "gzip", {"row_group_size": 3}),
        "test.parquet": (TEXTS, "none", {"use_dictionary": False}),
        "pairs.parquet": (PAIRS, "snappy", {}),
        "verdicts.parquet": (VERDICTS, "snappy", {}),
        "prompts.parquet": (PROMPTS, "zstd", {"schema": prompts}),
    }
    rows = {}
    for name, (lines, codec, options) in files.items():
        table = pa.Table.from_pylist(lines, schema=options.pop("schema", None))
        pq.write_table(table, OUT / name, compression=codec, **options)
        rows[name] = without_nulls(pq.read_table(OUT / name).to_pylist())
    (OUT / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
