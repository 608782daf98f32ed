"""Calls everything in the module `rust_mlx`, on tiny models: calls.py FIXTURES

Expected values are those of the reference implementations, in each fixture's golden.json.
"""

import _thread
import json
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import rust_mlx

# A shell starts programs in the background with the signal ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

FIXTURES = Path(sys.argv[1])
LLAMA = FIXTURES / "tiny/llama"
BERT = FIXTURES / "encoders/bert"
GREEDY = {"max_tokens": 24, "ignore_eos": True}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def golden(path):
    return json.loads((path / "golden.json").read_text(encoding="utf-8"))


def refused(kind, part, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except rust_mlx.Error as error:
        assert error.kind == kind, (error.kind, error)
        assert part in str(error), error
    else:
        raise AssertionError(f"{arguments} {options} was not refused")


def llama(**options):
    return rust_mlx.load(LLAMA, "cpu", precision="exact", **options)


@check
def backends_are_described():
    by_name = {backend["name"]: backend for backend in rust_mlx.backends()}
    assert by_name["cpu"]["available"] and by_name["cpu"]["reason"] is None
    assert not by_name["cuda"]["available"] or by_name["cuda"]["reason"] is None
    assert sum(backend["default"] for backend in by_name.values()) == 1


@check
def a_model_has_properties():
    model = llama()
    assert model.backend == "cpu"
    assert model.info["num_layers"] == 3 and model.info["architecture"] == "llama"
    assert "tiny/llama" in repr(model)
    default = rust_mlx.load(str(LLAMA))
    assert default.backend in {backend["name"] for backend in rust_mlx.backends()}


@check
def text_becomes_the_ids_of_the_reference():
    model = llama()
    cases = golden(LLAMA)["text"]["encode"]
    for case in cases:
        assert model.tokenize(case["text"]) == case["tokens"]
    # Another text names a special token, which is left out.
    assert model.detokenize(tuple(cases[0]["tokens"])) == cases[0]["text"]
    refused("invalid_option", "4000000000", model.detokenize, [4000000000])


@check
def replies_are_those_of_the_reference():
    model = llama()
    for case in golden(LLAMA)["prompts"]:
        reply = model.generate(case["tokens"], **GREEDY)
        assert reply.tokens == case["greedy"], reply.tokens
        assert reply.finish_reason == "length"
        assert reply.prompt_tokens == len(case["tokens"])
        assert reply.completion_tokens == 24
        assert isinstance(reply, str) and reply == model.generate(case["tokens"], **GREEDY)


@check
def conversations_have_the_template_of_the_model():
    model = llama()
    case = golden(LLAMA)["text"]["chat"][0]
    first = model.generate(case["messages"], max_tokens=5, temp=0, stop="never")
    assert first.prompt_tokens == len(case["tokens"])
    same = model.generate({"messages": case["messages"]}, max_tokens=5)
    assert same == first
    raw = model.generate(case["tokens"], max_tokens=5)
    assert raw.tokens == first.tokens


@check
def pieces_are_the_reply():
    model = llama()
    whole = model.generate("The river", logprobs=2, **GREEDY)
    assert len(whole.logprobs) == 24 and len(whole.logprobs[0]["top"]) == 2
    stream = model.stream("The river", logprobs=2, **GREEDY)
    pieces = list(stream)
    assert "".join(pieces) == whole == stream.reply
    assert [piece.token for piece in pieces] == whole.tokens
    assert pieces[0].logprobs["logprob"] == whole.logprobs[0]["logprob"]
    assert next(stream, None) is None


@check
def a_stream_that_is_closed_has_what_was_read():
    model = llama()
    whole = model.generate("The river", **GREEDY)
    with model.stream("The river", **GREEDY) as stream:
        for piece in stream:
            if len(stream.reply.tokens) == 3:
                break
    assert stream.reply.tokens == whole.tokens[:3]
    assert next(stream, None) is None
    # The computation of a stream ends when the object is dropped.
    del stream
    assert model.generate("The river", **GREEDY) == whole


@check
def threads_share_a_model_and_the_lock_is_free():
    model = llama()
    expected = model.generate("The river", **GREEDY)
    replies, ticks = [], 0
    work = lambda: replies.append(model.generate("The river", **GREEDY))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ticks += 1
        time.sleep(0.001)
    assert replies == [expected] * 4 and ticks > 0


@check
def ctrl_c_ends_a_reply():
    model = llama()
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    began = time.monotonic()
    try:
        # The model never stops by itself.
        model.generate("The river", max_tokens=10_000_000, ignore_eos=True)
    except KeyboardInterrupt:
        assert time.monotonic() - began < 30
    else:
        raise AssertionError("the reply was not interrupted")
    assert model.generate("The river", **GREEDY).completion_tokens == 24


@check
def vectors_are_those_of_the_reference():
    model = rust_mlx.load(BERT, "cpu", precision="exact")
    expected = golden(BERT)
    vectors = model.embed(expected["texts"], truncate=True)
    assert len(vectors) == len(expected["vectors"])
    if "numpy" in sys.modules:
        assert (vectors.dtype.name, vectors.shape) == ("float32", (len(vectors), 32))
    else:
        assert isinstance(vectors[0][0], float)
    for row, reference in zip(vectors, expected["vectors"]):
        assert len(row) == len(reference)
        assert max(abs(a - b) for a, b in zip(row, reference)) < 2e-3
    assert len(model.embed(["A fox"], dimensions=8)[0]) == 8
    refused("invalid_option", "did you mean `dimensions`", model.embed, ["x"], dimension=3)
    refused("invalid_option", "texts[1]", model.embed, ["x", 3])
    refused("unsupported", "", model.generate, "x")


@check
def a_model_learns_and_then_replies_with_its_adapter():
    model = llama()
    before = model.generate("The river", **GREEDY)
    data = Path("data")
    data.mkdir()
    line = json.dumps({"text": "The river carries water to the sea."}) + "\n"
    (data / "train.jsonl").write_text(line * 8, encoding="utf-8")
    events = []
    run = {"iters": 2, "batch_size": 2, "num_layers": -1, "learning_rate": 0.05, "rank": 4, "alpha": 8}
    summary = model.train(data, callback=events.append, **run)
    assert summary["steps"] == 2 and not summary["interrupted"]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2] and steps[1]["loss"] < steps[0]["loss"]
    config = json.loads(Path("adapters/adapter_config.json").read_text(encoding="utf-8"))
    assert config["lora_parameters"]["rank"] == 4 and config["lora_parameters"]["scale"] == 2
    trained = model.generate("The river", **GREEDY)
    assert trained != before
    loaded = llama(adapter_path=Path("adapters"))
    assert loaded.generate("The river", **GREEDY) == trained
    refused("io", "adapters", model.train, data, **run)
    other = llama()
    other.train(data, overwrite=True, apply=False, **run)
    assert other.generate("The river", **GREEDY) == before


@check
def training_refuses_what_it_cannot_do():
    model = llama()
    for kind, part, options in [
        ("invalid_option", "itres", {"itres": 3}),
        ("invalid_option", "iters is 0", {"iters": 0}),
        ("invalid_option", "alpha and scale", {"alpha": 3, "scale": 2}),
        ("invalid_option", "loaded model", {"backend": "cpu"}),
        ("invalid_option", "preferences", {"beta": 0.1}),
        ("invalid_option", "resume and overwrite", {"resume": True, "overwrite": True}),
    ]:
        refused(kind, part, model.train, "data", adapter_path="other", **options)
    refused("invalid_option", "no such directory", model.train, "nowhere", adapter_path="other")
    assert not Path("other").exists()

    def fails(event):
        raise ValueError(event["event"])

    try:
        model.train("data", adapter_path="failed", iters=50, batch_size=2, callback=fails)
    except ValueError:
        pass
    else:
        raise AssertionError("the exception of the callback was lost")


@check
def wrong_calls_are_errors_with_their_kind():
    model = llama()
    refused("unknown_backend", "abacus", rust_mlx.load, LLAMA, "abacus")
    refused("model_not_found", "no-such-model", rust_mlx.load, "no-such-model", "cpu")
    refused("invalid_option", "kv_bits is 7", rust_mlx.load, LLAMA, "cpu", kv_bits=7)
    refused("invalid_option", "did you mean `kv_bits`", rust_mlx.load, LLAMA, kv_bit=8)
    refused("invalid_option", "did you mean `temperature`", model.generate, "x", temprature=1)
    refused("invalid_option", "top_p is 2", model.generate, "x", top_p=2)
    refused("invalid_option", "given twice", model.generate, "x", temp=1, temperature=1)
    refused("invalid_option", "messages[0]", model.generate, [{"role": 3}])
    refused("unsupported", "logits", model.generate, "x", logits=True)
    for call in [lambda: model.generate(object()), lambda: model.tokenize(3)]:
        try:
            call()
        except TypeError:
            continue
        raise AssertionError("an object was taken")
    error = pickle.loads(pickle.dumps(rust_mlx.Error("a", "io")))
    assert (str(error), error.kind) == ("a", "io")


@check
def a_closed_model_refuses():
    with llama() as model:
        model.generate("x", max_tokens=1)
    refused("closed", "", model.generate, "x")


for function in CHECKS:
    function()
print(f"{len(CHECKS)} checks passed")
