#!/usr/bin/env python3
"""Hostile clients against the server, and a check that nothing of them stays.

    cargo build -p rust-mlx-inference-server --example scripted
    tools/serve_hostile.py target/debug/examples/scripted
    tools/serve_hostile.py target/release/mlx --minutes 5 [--model MODEL] [--pause 0.05]

It needs Python alone, and Linux for `/proc`. Threads attack at random: slow headers, endless
headers, half bodies, 10,000 connections that say nothing, huge, deep and wide JSON, schemas with
long chains of references, deep nesting, many members and huge patterns, requests of bad types,
readers that do not read or read a few bytes at a time, and disconnects in every phase of a request:
while it is sent, in prefill, in decode and while its answer is read. (Where the system allows fewer open files, fewer
connections.) Another client behaves, and must be served
within a minute, or be told that the queue is full.

The attacks come in rounds. After each, the server must be idle: no request waits or runs, no keys
and values are reserved, no other connection is open. The first two rounds fill caches; open files,
threads and memory after them are compared with those after the last. The script ends with exit
code 1 if the server ended, failed with a status of 500, or keeps more than it had: 4 files,
8 threads, or 32 MiB. glibc is told to give freed memory back at once, so that what stays is held
by the server.

`--pause` is the time between two attacks of a thread; it keeps the load of a long run low.
"""

import argparse
import collections
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

THREADS = 6
CROWD = 10_000
# Seconds of a round.
ROUND = 60


class Server:
    """The program on a free port."""

    def __init__(self, program, model):
        self.scripted = os.path.basename(program) == "scripted"
        command = [program]
        if not self.scripted:
            command += ["serve", "--port", "0", "--parallel", "4", "--ctx-size", "512", "--quiet"]
            command += [model] if model else []
        # One arena, and numbers instead of glibc's own, which grow with the largest block freed.
        env = os.environ | {
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_TRIM_THRESHOLD_": "131072",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http://"):
            raise SystemExit("the server did not start")
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        self.address = (host, int(port))

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def connect(self):
        connection = socket.create_connection(self.address, timeout=20)
        connection.settimeout(2)
        return connection

    def held(self):
        """Open files, threads, and resident memory in KiB."""
        place = f"/proc/{self.process.pid}"
        with open(f"{place}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        return (
            len(os.listdir(f"{place}/fd")),
            int(status["Threads"]),
            int(status["VmRSS"].split()[0]),
        )

    def idle(self):
        """Waits until no request holds a place, and no other connection is open. Returns what is
        wrong."""
        until, state = time.monotonic() + 120, "no answer"
        while time.monotonic() < until:
            try:
                requests = json.loads(self.get("/ready"))["requests"]
                text = self.get("/metrics")
                names = ["requests_running", "requests_queued", "kv_reserved_bytes", "connections"]
                parts = [text.split(f"\ninference_{name} ")[1] for name in names]
                counts = [requests, *(int(part.split()[0]) for part in parts)]
                # The one connection is that of this question.
                if counts == [0, 0, 0, 0, 1]:
                    return None
                state = ", ".join(f"{n} {name}" for n, name in zip(counts, ["requests", *names]))
            except OSError as e:
                state = f"no answer: {e}"
            time.sleep(0.2)
        return f"the server is not idle after 120 s: {state}"

    def stop(self):
        if self.scripted:
            self.process.stdin.close()
        else:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0, self.process.returncode


def chain(n):
    """A schema with a chain of references."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    definitions[f"d{n}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested(n):
    schema = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def schemas():
    return [
        chain(50),
        chain(5000),
        nested(25),
        {"type": "string", "pattern": "(a*)*" * 200 + "b"},
        {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
        {"type": "string", "minLength": 10**9, "maxLength": 10**9},
        {"enum": [f"value{i}" for i in range(5000)]},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6},
        {"type": {"type": "type"}},
        # Wide: many members, many values, many descriptions.
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}},
        {"enum": [{"": 0}] * 100_000},
        {"anyOf": [{"const": i} for i in range(20_000)]},
        {"type": "object", "description": "a" * 1_000_000},
    ]


CHAT = "/v1/chat/completions"


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def bodies():
    """Whole bodies that a server must refuse, or answer within its bounds."""
    deep = "[" * 100_000
    yield CHAT, deep.encode()
    yield CHAT, ('{"a":' * 50_000).encode()
    yield CHAT, ('{"messages": ' + "[" * 63 + "]" * 63 + "}").encode()
    yield CHAT, b"\xff\xfe" * 1000
    yield CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    yield CHAT, json.dumps(chat("a" * 3_000_000)).encode()
    yield CHAT, json.dumps(chat("x", stop=["a" * 500] * 10_000)).encode()
    yield CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}] * 100_000}).encode()
    yield CHAT, (b'{"messages": [' + b"9" * 1_000_000 + b"]}")
    for field in ["n", "max_tokens", "temperature", "top_p", "seed", "top_k", "logprobs"]:
        for value in [-1, 10**18, 1e308, "a", [], {}, None, True]:
            yield CHAT, json.dumps(chat("hi", **{"max_tokens": 4, field: value})).encode()
    # Wide: bytes that become hundreds of times as much memory, where values are made of them.
    wide = b'[' + b'{"":0},' * 900_000 + b'0]'
    text = json.dumps('{"x":[' + '{"":0},' * 700_000 + '0]}').encode()
    hi = b'"messages":[{"role":"user","content":"say:hi"}],"max_tokens":4'
    yield CHAT, b'{%s,"chat_template_kwargs":{"x":%s}}' % (hi, wide)
    yield CHAT, b'{%s,"unknown":%s}' % (hi, wide)
    call = b'{"id":"1","type":"function","function":{"name":"f","arguments":%s}}' % text
    yield CHAT, b'{"messages":[{"role":"assistant","tool_calls":[%s]}]}' % call
    yield "/v1/responses", b'{"input":"say:hi","metadata":{"x":%s}}' % wide
    yield "/completion", b'{"prompt":"say:hi","logit_bias":%s}' % wide
    result = b'{"type":"tool_result","tool_use_id":"x","content":['
    small = result * 29 + b"[]," * 2_000_000 + b"[]" + b"]}" * 29
    yield "/v1/messages", b'{"max_tokens":1,"messages":[{"role":"user","content":[%s]}]}' % small
    numbers = b"1," * 250_000 + b"1"
    yield "/detokenize", b'{"tokens":[%s]}' % numbers
    yield "/v1/completions", b'{"prompt":[%s],"max_tokens":4}' % numbers
    bias = {str(i): 100 for i in range(100_000)}
    yield CHAT, json.dumps(chat("hi", logit_bias=bias, max_tokens=4)).encode()
    for schema in schemas():
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        yield CHAT, json.dumps(chat("hi", response_format=form, max_tokens=8)).encode()
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield CHAT, json.dumps(chat("hi", tools=[tool], max_tokens=8)).encode()
        yield "/api/chat", json.dumps(chat("hi", format=schema)).encode()
    yield "/v1/embeddings", json.dumps({"input": ["a"] * 100_000}).encode()
    yield "/tokenize", json.dumps({"content": "a " * 1_000_000, "with_pieces": True}).encode()
    yield "/detokenize", json.dumps({"tokens": [2**32 - 1] * 100_000}).encode()
    yield "/v1/messages", json.dumps(chat("hi", max_tokens=10**18)).encode()
    yield "/v1/responses", json.dumps({"input": [{"type": "a"}] * 50_000}).encode()
    yield "/api/pull", b'{"model": "../../etc/passwd"}'
    yield "/v1/completions", b'{"prompt": "a", "model": "../../../etc/passwd"}'


BODIES = list(bodies())


class Attacks:
    """One random attack a call."""

    def __init__(self, server, seed, counts):
        self.server = server
        self.counts = counts
        self.dice = random.Random(seed)
        self.kinds = [
            self.slow_head,
            self.endless_head,
            self.half_body,
            self.garbage,
            self.bad_body,
            self.bad_body,
            self.bad_body,
            self.leave,
            self.leave,
            self.leave,
            self.deaf,
            self.drip,
            self.log_probabilities,
            self.lying_length,
            self.chunks,
            self.burst,
        ]

    def run(self):
        attack = self.dice.choice(self.kinds)
        self.counts[attack.__name__] += 1
        try:
            attack()
        except OSError:
            # Refused, reset or timed out, as it should be.
            pass

    def head(self, path, length, more=""):
        host, port = self.server.address
        lines = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n"
        return f"{lines}Content-Type: application/json\r\n{more}\r\n".encode()

    def answered(self, connection):
        """Reads an answer to its end, or for two seconds of silence."""
        first = b""
        while part := connection.recv(65536):
            first = first or part
        if first.startswith(b"HTTP/1.1 500"):
            raise AssertionError(first.decode(errors="replace"))

    def slow_head(self):
        with self.server.connect() as connection:
            for byte in b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: bbbbbbb":
                connection.sendall(bytes([byte]))
                time.sleep(self.dice.random() * 0.05)

    def endless_head(self):
        with self.server.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            for i in range(500):
                value = "y" * self.dice.randrange(2000)
                connection.sendall(f"x-{i}: {value}\r\n".encode())
            self.answered(connection)

    def half_body(self):
        path, body = self.dice.choice(BODIES)
        with self.server.connect() as connection:
            connection.sendall(self.head(path, len(body)))
            connection.sendall(body[: self.dice.randrange(max(len(body) // 2, 1))])
            time.sleep(self.dice.random() * 0.2)

    def garbage(self):
        with self.server.connect() as connection:
            connection.sendall(self.dice.randbytes(self.dice.randrange(1, 20_000)))
            self.answered(connection)

    def bad_body(self):
        path, body = self.dice.choice(BODIES)
        with self.server.connect() as connection:
            connection.sendall(self.head(path, len(body), "Connection: close\r\n") + body)
            connection.settimeout(30)
            self.answered(connection)

    def leave(self):
        """A good request, left after a random number of bytes sent or of answers read."""
        story = self.dice.choice(["!long Tell a story.", "!prefill Tell a story."])
        body = json.dumps(chat(story, stream=self.dice.random() < 0.7, n=2))
        request = self.head(CHAT, len(body)) + body.encode()
        with self.server.connect() as connection:
            if self.dice.random() < 0.3:
                connection.sendall(request[: self.dice.randrange(len(request))])
                return
            connection.sendall(request)
            for _ in range(self.dice.randrange(4)):
                connection.recv(200)
            time.sleep(self.dice.random() * 0.1)
            if self.dice.random() < 0.5:
                # A reset instead of an end.
                linger = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def deaf(self):
        """Asks much at once, and does not read."""
        body = json.dumps(chat("!long Tell a story.", stream=True, max_tokens=400))
        with self.server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall((self.head(CHAT, len(body)) + body.encode()) * 3)
            time.sleep(self.dice.random())

    def drip(self):
        """Reads a long answer a few bytes at a time."""
        body = json.dumps({"content": "a " * 500_000, "with_pieces": True}).encode()
        with self.server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(self.head("/tokenize", len(body)) + body)
            for _ in range(self.dice.randrange(200)):
                connection.recv(16)
                time.sleep(0.01)

    def log_probabilities(self):
        """The largest whole answer, of which a little is read."""
        more = {"logprobs": True, "top_logprobs": 20, "max_tokens": self.dice.choice([400, 10_000])}
        body = json.dumps(chat("!long Tell a story.", n=2, **more)).encode()
        with self.server.connect() as connection:
            connection.settimeout(30)
            connection.sendall(self.head(CHAT, len(body)) + body)
            connection.recv(1000)

    def lying_length(self):
        more = self.dice.choice(
            ["Content-Length: 7\r\n", "Transfer-Encoding: chunked\r\n", "Expect: 100-continue\r\n"]
        )
        with self.server.connect() as connection:
            connection.sendall(self.head("/v1/completions", 2, more) + b'{"prompt": "a"}')
            self.answered(connection)

    def chunks(self):
        host, port = self.server.address
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        with self.server.connect() as connection:
            connection.sendall(head.encode())
            for _ in range(self.dice.randrange(200)):
                connection.sendall(b"1\r\n \r\n")
            if self.dice.random() < 0.5:
                connection.sendall(b"ffffffffffffffff\r\n")
            self.answered(connection)

    def burst(self):
        """Many small requests over one connection, without waiting for answers."""
        with self.server.connect() as connection:
            for _ in range(100):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(self.dice.randrange(1, 4000))


def crowd(server, n):
    """Connections that say nothing. The server serves some of them at a time, the system keeps a
    queue, and the rest is refused."""
    connections = []
    for _ in range(n):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(server.address)
        connections.append(connection)
    time.sleep(1)
    for connection in connections:
        connection.close()


def polite(server, until, served, faults):
    """A client that behaves. The system may reset its connection while a crowd fills the queue of
    connections, so it tries again; it must be served at least once a minute."""
    last = time.monotonic()
    body = json.dumps(chat("say:still here", max_tokens=4)).encode()
    while time.monotonic() < until:
        request = urllib.request.Request(server.url + CHAT, body)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                reply = json.loads(answer.read())
                assert reply["choices"][0]["message"]["role"] == "assistant", reply
                served.append(1)
                last = time.monotonic()
        except urllib.error.HTTPError as e:
            if e.code != 429:
                faults.append(f"a good request got {e.code}: {e.read()[:300]}")
                return
            last = time.monotonic()
        except OSError as e:
            if time.monotonic() > last + 60:
                faults.append(f"good requests failed for a minute: {e}")
                return
        time.sleep(0.2)


def round_of(server, seconds, seed, pause, crowd_size, served, faults, counts):
    until = time.monotonic() + seconds

    def attack(number):
        attacks = Attacks(server, f"{seed}-{number}", counts)
        while time.monotonic() < until and not faults:
            try:
                attacks.run()
            except AssertionError as e:
                faults.append(f"a fault of the server: {e}")
            time.sleep(pause)

    def crowds():
        crowd(server, crowd_size)
        counts["crowd"] += 1

    threads = [threading.Thread(target=attack, args=(i,)) for i in range(THREADS)]
    threads.append(threading.Thread(target=crowds))
    threads.append(threading.Thread(target=polite, args=(server, until, served, faults)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if server.process.poll() is not None:
        faults.append(f"the server ended with {server.process.returncode}")
    if not faults and (fault := server.idle()):
        faults.append(fault)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="mlx, or the example `scripted` of the server")
    parser.add_argument("--model", help="the model of mlx; without it, the first known one")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.01)
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    crowd_size = max(1, min(CROWD, files - 500))
    print(f"connections of a crowd: {crowd_size}", file=sys.stderr)
    server = Server(options.program, options.model)
    served, faults, counts = [], [], collections.Counter()
    until, sockets = time.monotonic() + options.minutes * 60, []
    while not faults and (len(sockets) < 3 or time.monotonic() < until):
        seconds = min(ROUND, options.minutes * 20)
        seed = f"{options.seed}-{len(sockets)}"
        round_of(server, seconds, seed, options.pause, crowd_size, served, faults, counts)
        if not faults:
            sockets.append(server.held())
            print(f"round {len(sockets)}: files, threads, KiB: {sockets[-1]}", file=sys.stderr)
    if not faults:
        print(f"attacks: {dict(counts)}; good requests served: {len(served)}", file=sys.stderr)
        for i, (what, more) in enumerate((("files", 4), ("threads", 8), ("KiB", 32 << 10))):
            before, after = max(h[i] for h in sockets[:2]), sockets[-1][i]
            if after > before + more:
                faults.append(f"{what}: {before} became {after}")
        if not served:
            faults.append("no good request was served")
        server.stop()
    else:
        server.process.kill()
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
