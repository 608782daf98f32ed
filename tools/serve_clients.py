#!/usr/bin/env python3
"""Checks the server with the clients that people use: openai, anthropic, ollama, litellm and
langchain-openai for Python. `serve_clients.mjs` does the same with openai for Node.

    python3 -m venv target/clients
    target/clients/bin/pip install -r tools/serve_clients.txt
    target/clients/bin/pip install litellm==1.109.1 langchain-openai==1.7.4  # more, if wanted
    target/clients/bin/python tools/serve_clients.py target/debug/examples/scripted
    target/clients/bin/python tools/serve_clients.py target/debug/mlx [MODEL]

The first program is the scripted model of the server's tests, which calls tools when it is told to:

    cargo build -p rust-mlx-inference-server --example scripted

`--clients openai,anthropic` names the clients to check; without it, all that are installed. Each
client chats, streams, calls a tool and answers with its result, keeps to a schema, makes vectors,
gets errors of its own types, and cancels, as far as its API has it. The first check that fails ends
the script with its traceback and exit code 1.
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request

SCHEMA = {
    "title": "answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIPTION = "The temperature in a city."
TOOL = {
    "type": "function",
    "function": {"name": "warmth", "description": DESCRIPTION, "parameters": PARAMETERS},
}
ARGUMENTS = {"city": "Paris"}


class Server:
    """The program, serving a model on a free port."""

    def __init__(self, program, model):
        self.scripted = program.endswith("scripted")
        command = [program]
        if not self.scripted:
            command += ["serve", "--port", "0", "--parallel", "4", "--quiet", model]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http://"):
            raise SystemExit("the server did not start")
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]
        shown = self.post("/api/show", {"model": self.model})
        self.has_tools = "tools" in shown["capabilities"]

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def idle(self):
        """Waits until no request holds a place."""
        until = time.monotonic() + 30
        while json.loads(self.get("/ready"))["requests"]:
            assert time.monotonic() < until, "requests hang"
            time.sleep(0.02)

    def stop(self):
        if self.scripted:
            self.process.stdin.close()
        else:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        assert code == 0, code

    # What is said to the model. The scripted one says what stands after the last `say:`.

    def hello(self):
        return "say:Hello there." if self.scripted else "Say hello in one short sentence."

    def long(self):
        return "!long" if self.scripted else "Write a very long story."

    def call(self):
        said = json.dumps({"name": "warmth", "arguments": ARGUMENTS})
        return f"say:<tool_call>{said}</tool_call>" if self.scripted else "How warm is Paris?"

    def result(self):
        return "say:It is 12 degrees." if self.scripted else "12 degrees"

    def is_reply(self, text):
        assert text, "an empty reply"
        assert not self.scripted or text == "Hello there.", text

    def is_answer(self, text):
        """The reply to the result of the tool."""
        assert text and (not self.scripted or text == "It is 12 degrees."), text

    def is_structured(self, value):
        """The scripted model knows one object only."""
        assert value == {"a": 1} if self.scripted else value["answer"] in ("yes", "no"), value

    def is_vectors(self, vectors, count):
        assert len(vectors) == count and all(vectors)
        if not self.scripted:
            for vector in vectors:
                assert abs(sum(v * v for v in vector) - 1) < 1e-3


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def user(text):
    return {"role": "user", "content": text}


def wants_json():
    form = {"name": "answer", "strict": True, "schema": SCHEMA}
    return {"type": "json_schema", "json_schema": form}


class OpenAi:
    """The openai package: chats, completions, responses, embeddings."""

    package = "openai"

    def __init__(self, server):
        self.server, self.model = server, server.model
        self.module = importlib.import_module("openai")
        base = server.url + "/v1"
        self.client = self.module.OpenAI(base_url=base, api_key="none", max_retries=0)
        self.create = self.client.chat.completions.create

    def ask(self, text, **more):
        defaults = {"model": self.model, "max_tokens": 24, "temperature": 0}
        return self.create(messages=[user(text)], **(defaults | more))

    def chat(self):
        assert self.model in [m.id for m in self.client.models.list()]
        assert self.client.models.retrieve(self.model).id == self.model
        reply = self.ask(self.server.hello())
        self.server.is_reply(reply.choices[0].message.content)
        assert 0 < reply.usage.completion_tokens <= 24, reply
        both = self.ask(self.server.hello(), n=2, seed=1, logprobs=True, top_logprobs=3)
        assert len(both.choices) == 2
        first = both.choices[0].logprobs.content[0]
        assert len(first.top_logprobs) == 3 and first.logprob <= 0

    def stream(self):
        reply = self.ask(self.server.hello())
        chunks = list(
            self.ask(self.server.hello(), stream=True, stream_options={"include_usage": True})
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == reply.choices[0].message.content, text
        assert chunks[-1].usage.total_tokens == reply.usage.total_tokens

    def tools(self):
        question = self.server.call()
        reply = self.ask(question, tools=[TOOL], max_tokens=200)
        (call,) = reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls"
        assert (call.function.name, json.loads(call.function.arguments)) == ("warmth", ARGUMENTS)
        # The library puts the parts of a streamed call together.
        with self.client.chat.completions.stream(
            model=self.model, messages=[user(question)], tools=[TOOL], max_tokens=200
        ) as stream:
            parts = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0].message
        (streamed,) = final.tool_calls
        assert json.loads(streamed.function.arguments) == ARGUMENTS
        assert len(parts) > 1, "the arguments came in one piece"
        message = reply.choices[0].message.model_dump(exclude_none=True)
        answer = {"role": "tool", "tool_call_id": call.id, "content": self.server.result()}
        reply = self.create(
            model=self.model, messages=[user(question), message, answer], tools=[TOOL]
        )
        self.server.is_answer(reply.choices[0].message.content)

    def structured(self):
        reply = self.ask(
            "Is water wet? Answer in JSON.", response_format=wants_json(), max_tokens=100
        )
        self.server.is_structured(json.loads(reply.choices[0].message.content))

    def rest(self):
        """Completions and responses."""
        reply = self.client.completions.create(
            model=self.model, prompt=self.server.hello(), max_tokens=12, temperature=0
        )
        self.server.is_reply(reply.choices[0].text)
        response = self.client.responses.create(model=self.model, input=self.server.hello())
        counted = self.client.responses.input_tokens.count(
            model=self.model, input=self.server.hello()
        )
        assert counted.input_tokens == response.usage.input_tokens, counted
        self.server.is_reply(response.output_text)
        events = list(
            self.client.responses.create(
                model=self.model, input=self.server.hello(), stream=True
            )
        )
        assert events[-1].type == "response.completed"
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == events[-1].response.output_text

    def embeddings(self):
        vectors = self.client.embeddings.create(model=self.model, input=["hello", "world"])
        self.server.is_vectors([item.embedding for item in vectors.data], 2)

    def errors(self):
        error = fails(self.module.NotFoundError, lambda: self.ask("x", model="other"))
        assert error.code == "model_not_found"
        error = fails(self.module.BadRequestError, lambda: self.ask("x", temperature=7))
        assert error.param == "temperature"
        long = "word " * 50_000
        error = fails(self.module.BadRequestError, lambda: self.ask(long))
        assert error.code == "context_length_exceeded", error

    def cancel(self):
        endless = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        stream = self.ask(self.server.long(), stream=True, **endless)
        for n, _ in enumerate(stream):
            if n == 3:
                stream.close()
                break
        self.server.idle()
        short = self.client.with_options(timeout=0.3).chat.completions.create
        fails(
            self.module.APITimeoutError,
            lambda: short(
                model=self.model,
                messages=[user(self.server.long())],
                max_tokens=50_000 if self.server.scripted else 5000,
                extra_body={"ignore_eos": True},
            ),
        )

    def together(self):
        """Eight at a time get what they get alone."""

        def ask(i, out):
            text = f"say:number {i}" if self.server.scripted else f"Count from {i}."
            out[i] = self.ask(text).choices[0].message.content

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
        assert same >= (8 if self.server.scripted else 6), (alone, together)

    checks = (
        chat, stream, tools, structured, rest, embeddings, errors, cancel, together
    )  # fmt: skip


class Anthropic:
    """The anthropic package, whose API has no embeddings."""

    package = "anthropic"

    def __init__(self, server):
        self.server, self.model = server, server.model
        self.module = importlib.import_module("anthropic")
        self.client = self.module.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.tool = {"name": "warmth", "description": DESCRIPTION, "input_schema": PARAMETERS}

    def ask(self, text, **more):
        # The package has no temperature.
        defaults = {"model": self.model, "max_tokens": 24, "extra_body": {"temperature": 0}}
        return self.client.messages.create(messages=[user(text)], **(defaults | more))

    def chat(self):
        reply = self.ask(self.server.hello())
        said = reply.content[0].text
        self.server.is_reply(said)
        assert reply.stop_reason in ("end_turn", "max_tokens")
        asked = [user(self.server.hello())]
        count = self.client.messages.count_tokens(model=self.model, messages=asked)
        used = reply.usage
        assert count.input_tokens == used.input_tokens + used.cache_read_input_tokens
        stopped = self.ask(self.server.hello(), stop_sequences=[said[3:6]])
        assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == said[3:6]

    def stream(self):
        with self.client.messages.stream(
            model=self.model,
            max_tokens=24,
            messages=[user(self.server.hello())],
            system="Be kind.",
            extra_body={"temperature": 0},
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.server.is_reply(text)
        assert final.content[0].text == text and final.usage.output_tokens > 0

    def tools(self):
        question = [user(self.server.call())]
        given = {"model": self.model, "tools": [self.tool], "max_tokens": 200}
        reply = self.client.messages.create(messages=question, **given)
        assert reply.stop_reason == "tool_use"
        (call,) = reply.content
        assert (call.name, call.input) == ("warmth", ARGUMENTS)
        with self.client.messages.stream(messages=question, **given) as stream:
            parts = [e for e in stream if e.type == "input_json"]
            (streamed,) = stream.get_final_message().content
        assert streamed.input == ARGUMENTS
        assert len(parts) > 1, "the arguments came in one piece"
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": self.server.result(),
        }
        blocks = [block.model_dump() for block in reply.content]
        turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        reply = self.client.messages.create(messages=question + turns, **given)
        self.server.is_answer(reply.content[0].text)

    def structured(self):
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        reply = self.ask("Is water wet?", output_config=form, max_tokens=100)
        self.server.is_structured(json.loads(reply.content[0].text))

    def errors(self):
        error = fails(self.module.NotFoundError, lambda: self.ask("x", model="other"))
        assert error.body["error"]["type"] == "not_found_error"
        fails(self.module.BadRequestError, lambda: self.ask("x", extra_body={"top_p": 3}))

    def cancel(self):
        with self.client.messages.stream(
            model=self.model, max_tokens=5000, messages=[user(self.server.long())]
        ) as stream:
            for n, _ in enumerate(stream.text_stream):
                if n == 3:
                    break

    checks = (chat, stream, tools, structured, errors, cancel)


class Ollama:
    """The ollama package."""

    package = "ollama"
    options = {"temperature": 0, "num_predict": 24}

    def __init__(self, server):
        self.server, self.model = server, server.model
        self.module = importlib.import_module("ollama")
        self.client = self.module.Client(host=server.url)

    def ask(self, text, **more):
        defaults = {"model": self.model, "messages": [user(text)], "options": self.options}
        return self.client.chat(**(defaults | more))

    def chat(self):
        assert self.model in [m.model for m in self.client.list().models]
        assert self.client.show(self.model).capabilities
        reply = self.ask(self.server.hello())
        self.server.is_reply(reply.message.content)
        assert reply.done and 0 < reply.eval_count <= 24
        text = self.client.generate(
            model=self.model, prompt=self.server.hello(), options=self.options
        )
        assert text.response and self.client.ps().models

    def stream(self):
        parts = list(self.ask(self.server.hello(), stream=True))
        text = "".join(p.message.content for p in parts)
        assert text == self.ask(self.server.hello()).message.content
        assert parts[-1].done and parts[-1].total_duration > 0

    def tools(self):
        question, options = user(self.server.call()), {"num_predict": 200}
        given = {"model": self.model, "tools": [TOOL], "options": options}
        message = self.client.chat(messages=[question], **given).message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("warmth", ARGUMENTS)
        parts = self.client.chat(messages=[question], stream=True, **given)
        (streamed,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert streamed.function.arguments == ARGUMENTS
        result = {"role": "tool", "tool_name": "warmth", "content": self.server.result()}
        reply = self.client.chat(messages=[question, message, result], **given)
        self.server.is_answer(reply.message.content)

    def structured(self):
        reply = self.ask("Is water wet?", format=SCHEMA, options={"num_predict": 100})
        self.server.is_structured(json.loads(reply.message.content))

    def embeddings(self):
        vectors = self.client.embed(model=self.model, input=["a", "b"])
        self.server.is_vectors(vectors.embeddings, 2)

    def errors(self):
        error = fails(self.module.ResponseError, lambda: self.client.show("other"))
        assert error.status_code == 404
        bad = lambda: self.ask("x", options={"temperature": -1})
        assert fails(self.module.ResponseError, bad).status_code == 400

    def cancel(self):
        parts = self.ask(self.server.long(), stream=True, options={"num_predict": 5000})
        for n, _ in enumerate(parts):
            if n == 3:
                parts.close()
                break

    checks = (chat, stream, tools, structured, embeddings, errors, cancel)


class LiteLlm:
    """The litellm package, by its route for servers like OpenAI's."""

    package = "litellm"

    def __init__(self, server):
        self.server = server
        # Prices of models would come from the network.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        self.module = importlib.import_module("litellm")
        self.module.suppress_debug_info = True
        self.to = {
            "model": f"openai/{server.model}",
            "api_base": server.url + "/v1",
            "api_key": "none",
            "max_retries": 0,
        }

    def ask(self, text, **more):
        given = {"messages": [user(text)], "max_tokens": 24, "temperature": 0}
        return self.module.completion(**(self.to | given | more))

    def chat(self):
        reply = self.ask(self.server.hello())
        self.server.is_reply(reply.choices[0].message.content)
        assert reply.usage.completion_tokens > 0

    def stream(self):
        chunks = self.ask(self.server.hello(), stream=True)
        self.server.is_reply("".join(c.choices[0].delta.content or "" for c in chunks))

    def tools(self):
        question = user(self.server.call())
        given = {"tools": [TOOL], "max_tokens": 200}
        message = self.ask("", messages=[question], **given).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == ARGUMENTS
        chunks = list(self.ask("", messages=[question], stream=True, **given))
        built = self.module.stream_chunk_builder(chunks, messages=[question])
        (streamed,) = built.choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == ARGUMENTS
        answer = {"role": "tool", "tool_call_id": call.id, "content": self.server.result()}
        turns = [question, message.model_dump(exclude_none=True), answer]
        reply = self.ask("", messages=turns, **given)
        self.server.is_answer(reply.choices[0].message.content)

    def structured(self):
        reply = self.ask("Is water wet?", response_format=wants_json(), max_tokens=100)
        self.server.is_structured(json.loads(reply.choices[0].message.content))

    def embeddings(self):
        vectors = self.module.embedding(**self.to, input=["a", "b"], encoding_format="float")
        self.server.is_vectors([item["embedding"] for item in vectors.data], 2)

    def errors(self):
        fails(self.module.NotFoundError, lambda: self.ask("x", model="openai/other"))
        fails(self.module.BadRequestError, lambda: self.ask("x", temperature=7))

    def cancel(self):
        stream = self.ask(self.server.long(), stream=True, max_tokens=5000)
        for n, _ in enumerate(stream):
            if n == 3:
                stream.completion_stream.close()
                break

    checks = (chat, stream, tools, structured, embeddings, errors, cancel)


class LangChain:
    """The langchain-openai package."""

    package = "langchain_openai"

    def __init__(self, server):
        self.server = server
        self.module = importlib.import_module("langchain_openai")
        self.openai = importlib.import_module("openai")
        self.to = {
            "model": server.model,
            "base_url": server.url + "/v1",
            "api_key": "none",
            "max_retries": 0,
        }
        self.model = self.of(max_tokens=200)

    def of(self, **more):
        return self.module.ChatOpenAI(**(self.to | {"temperature": 0} | more))

    def chat(self):
        reply = self.model.invoke(self.server.hello())
        self.server.is_reply(reply.content)
        assert reply.usage_metadata["output_tokens"] > 0

    def stream(self):
        self.server.is_reply("".join(c.content for c in self.model.stream(self.server.hello())))

    def tools(self):
        messages = importlib.import_module("langchain_core.messages")
        model = self.model.bind_tools([TOOL])
        question = messages.HumanMessage(self.server.call())
        message = model.invoke([question])
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("warmth", ARGUMENTS)
        parts = list(model.stream([question]))
        streamed = sum(parts[1:], parts[0])
        assert streamed.tool_calls[0]["args"] == ARGUMENTS
        answer = messages.ToolMessage(self.server.result(), tool_call_id=call["id"])
        self.server.is_answer(model.invoke([question, message, answer]).content)

    def structured(self):
        model = self.model.with_structured_output(SCHEMA, method="json_schema")
        self.server.is_structured(model.invoke("Is water wet?"))

    def embeddings(self):
        # Their tokens would be those of another model.
        vectors = self.module.OpenAIEmbeddings(**self.to, check_embedding_ctx_length=False)
        self.server.is_vectors(vectors.embed_documents(["a", "b"]), 2)

    def errors(self):
        fails(self.openai.NotFoundError, lambda: self.of(model="other").invoke("x"))
        fails(self.openai.BadRequestError, lambda: self.of(temperature=7).invoke("x"))

    def cancel(self):
        stream = self.of(max_tokens=5000).stream(self.server.long())
        for n, _ in enumerate(stream):
            if n == 3:
                stream.close()
                break

    checks = (chat, stream, tools, structured, embeddings, errors, cancel)


CLIENTS = {
    "openai": OpenAi,
    "anthropic": Anthropic,
    "ollama": Ollama,
    "litellm": LiteLlm,
    "langchain": LangChain,
}


def installed(client):
    return importlib.util.find_spec(client.package) is not None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--clients", help="names, separated by commas")
    given = parser.parse_args()
    if given.clients:
        chosen = {name: CLIENTS[name] for name in given.clients.split(",")}
    else:
        chosen = {name: client for name, client in CLIENTS.items() if installed(client)}
    if not chosen:
        parser.error("no client is installed")
    server = Server(given.program, given.model)
    try:
        for name, make in chosen.items():
            client = make(server)
            for check in client.checks:
                if check.__name__ == "tools" and not server.has_tools:
                    print(f"{name:10} tools: the model has none")
                    continue
                started = time.monotonic()
                check(client)
                server.idle()
                print(f"{name:10} {check.__name__:12} {time.monotonic() - started:6.1f} s")
        server.stop()
    finally:
        server.process.kill()
    print("all clients are content:", ", ".join(chosen))


if __name__ == "__main__":
    main()
