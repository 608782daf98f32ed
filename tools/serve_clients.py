#!/usr/bin/env python3
"""Checks `mlx serve` with the clients that people use: openai, anthropic and ollama for Python.

    python3 -m venv clients
    clients/bin/pip install openai==3.54.0 anthropic==2.12.0 ollama==0.6.3
    clients/bin/python tools/serve_clients.py target/debug/mlx [MODEL]

Each check is a function; the first that fails ends the script with its traceback and exit code 1.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import anthropic
import ollama
import openai

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]


class Server:
    """The program, serving a model on a free port."""

    def __init__(self, program, model):
        command = [program, "serve", "--port", "0", "--parallel", "4", "--quiet", model]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http://"):
            raise SystemExit("the server did not start")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def idle(self):
        """Waits until no request holds a place."""
        until = time.monotonic() + 30
        while json.loads(self.get("/ready"))["requests"]:
            assert time.monotonic() < until, "requests hang"
            time.sleep(0.02)


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def openai_chat(server, client, model):
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    reply = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=16, temperature=0
    )
    said = reply.choices[0].message.content
    assert said and reply.usage.completion_tokens <= 16, reply
    stream = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == said, (text, said)
    assert chunks[-1].usage.total_tokens == reply.usage.total_tokens
    logprobs = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, n=2, seed=1
    )
    assert len(logprobs.choices) == 2
    first = logprobs.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 3 and first.logprob <= 0


def openai_structured(server, client, model):
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is water wet? Answer in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        },
    )
    assert json.loads(reply.choices[0].message.content)["answer"] in ("yes", "no")


def openai_rest(server, client, model):
    reply = client.completions.create(model=model, prompt="One, two,", max_tokens=4, temperature=0)
    assert reply.choices[0].text
    vectors = client.embeddings.create(model=model, input=["hello", "world"])
    for item in vectors.data:
        assert abs(sum(v * v for v in item.embedding) - 1) < 1e-3


def openai_errors(server, client, model):
    create = client.chat.completions.create
    error = fails(openai.NotFoundError, lambda: create(model="other", messages=HELLO))
    assert error.code == "model_not_found"
    bad = lambda: create(model=model, messages=HELLO, temperature=7)
    assert fails(openai.BadRequestError, bad).param == "temperature"
    long = [{"role": "user", "content": "word " * 20000}]
    error = fails(openai.BadRequestError, lambda: create(model=model, messages=long))
    assert error.code == "context_length_exceeded", error


def openai_cancels(server, client, model):
    stream = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for n, _ in enumerate(stream):
        if n == 3:
            stream.close()
            break
    server.idle()
    short = client.with_options(timeout=0.5, max_retries=0)
    fails(
        openai.APITimeoutError,
        lambda: short.chat.completions.create(
            model=model, messages=HELLO, max_tokens=5000, extra_body={"ignore_eos": True}
        ),
    )
    server.idle()


def openai_together(server, client, model):
    def ask(i, out):
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Count from {i}."}],
            max_tokens=24,
            temperature=0,
        )
        out[i] = reply.choices[0].message.content

    alone, together = {}, {}
    for i in range(8):
        ask(i, alone)
    threads = [threading.Thread(target=ask, args=(i, together)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 8 and all(together.values()), together
    # Rows of a batch may round otherwise than one alone; most agree to the last token.
    same = sum(alone[i] == together[i] for i in range(8))
    assert same >= 6, (alone, together)


def anthropic_messages(server, client, model):
    reply = client.messages.create(model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY)
    said = reply.content[0].text
    assert reply.stop_reason in ("end_turn", "max_tokens") and said
    with client.messages.stream(
        model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY, system="Be kind."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text and final.usage.output_tokens > 0
    count = client.messages.count_tokens(model=model, messages=HELLO)
    assert count.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    stopped = client.messages.create(
        model=model, max_tokens=50, messages=HELLO, extra_body=GREEDY, stop_sequences=[said[3:6]]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == said[3:6]
    form = client.messages.create(
        model=model,
        max_tokens=50,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert json.loads(form.content[0].text)["answer"] in ("yes", "no")
    error = fails(
        anthropic.NotFoundError,
        lambda: client.messages.create(model="other", max_tokens=5, messages=HELLO),
    )
    assert error.body["error"]["type"] == "not_found_error"


def ollama_calls(server, client, model):
    assert [m.model for m in client.list().models] == [model]
    assert client.show(model).capabilities
    options = {"temperature": 0, "num_predict": 12}
    reply = client.chat(model=model, messages=HELLO, options=options)
    assert reply.message.content and reply.done and reply.eval_count <= 12
    parts = list(client.chat(model=model, messages=HELLO, options=options, stream=True))
    assert "".join(p.message.content for p in parts) == reply.message.content
    assert parts[-1].done and parts[-1].total_duration > 0
    text = client.generate(model=model, prompt="Hello", options=options)
    assert text.response
    form = client.chat(model=model, messages=HELLO, format=SCHEMA)
    assert json.loads(form.message.content)["answer"] in ("yes", "no")
    vectors = client.embed(model=model, input=["a", "b"])
    assert len(vectors.embeddings) == 2
    assert fails(ollama.ResponseError, lambda: client.show("other")).status_code == 404


def main():
    program, *rest = sys.argv[1:]
    server = Server(program, rest[0] if rest else "smollm2-135m-instruct")
    try:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        clients = {
            "openai": openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0),
            "anthropic": anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0),
            "ollama": ollama.Client(host=server.url),
        }
        for check in (
            openai_chat,
            openai_structured,
            openai_rest,
            openai_errors,
            openai_cancels,
            openai_together,
            anthropic_messages,
            ollama_calls,
        ):
            started = time.monotonic()
            check(server, clients[check.__name__.split("_")[0]], model)
            server.idle()
            print(f"{check.__name__:20} {time.monotonic() - started:6.1f} s")
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(timeout=60)
        assert code == 0, code
    finally:
        server.process.kill()
    print("all clients are content")


if __name__ == "__main__":
    main()
