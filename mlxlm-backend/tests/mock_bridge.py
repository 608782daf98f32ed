"""A bridge without mlx-lm, for tests. It implements the protocol of `src/bridge.py`, and breaks it on request.

The file's name says how it starts (`ok.py`, `dies.py`, ...: the tests copy it); the field `mock` of the model's config.json
says how loading goes; a prompt says how its reply goes.
"""

import base64
import json
import os
import queue
import struct
import sys
import threading
import time

OUT = sys.stdout.buffer
START = os.path.basename(sys.argv[0]).removesuffix(".py")
FOREVER = 3600


def send(**message):
    raw(json.dumps(message).encode() + b"\n")


def raw(line):
    OUT.write(line)
    OUT.flush()


def listen(requests, cancelled):
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if message["op"] == "cancel":
            cancelled.add(message["id"])
        else:
            requests.put(message)
    os._exit(0)


def probe():
    with open(sys.argv[0] + ".probes", "a") as log:
        log.write("asked\n")
    if START == "absent":
        send(error="ModuleNotFoundError: No module named 'mlx_lm'", kind="unavailable")
    elif START == "mute":
        time.sleep(FOREVER)
    else:
        send(ok=True, python="3.x", mlx_lm="mock", mlx="mock", device="cpu")


def load(request):
    name = request["id"]
    with open(os.path.join(request["path"], "config.json")) as file:
        how = json.load(file).get("mock", "ok")
    if how == "dies":
        print("no room on the mock", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "mute":
        time.sleep(FOREVER)
    if how == "once":
        # The process exits on its second start.
        mark = os.path.join(request["path"], "loaded")
        if os.path.exists(mark):
            os._exit(4)
        open(mark, "w").close()
    if how.startswith("refuses "):
        return send(id=name, error="the mock refuses", kind=how.split()[1])
    send(
        id=name, ok=True, model_type="mock", vocab_size=100, layers=1, hidden_size=8, heads=2, kv_heads=2, head_dim=4,
        context_length=64, parameters=1000, weight_bytes=4000, compute="float32", device="cpu", has_chat_template=True,
        eos=[2],
    )


def packed(*values):
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def reply(request, cancelled):
    name, most = request["id"], request["max_tokens"]
    how = request["messages"][-1]["content"] if "messages" in request else request.get("prompt", "tokens")

    def started():
        send(id=name, started=True, prompt_tokens=3)
        send(id=name, progress=3)

    def token(number, text=None, **more):
        text = f"{number} " if text is None else text
        send(id=name, token=text, token_id=number, pending=False, **more)

    def done(reason, **more):
        send(id=name, done=True, finish_reason=reason, text="", peak_memory=2000, active_memory=1000, **more)

    if how == "refused":
        return send(id=name, error="the mock does not like it", kind="invalid_option")
    if how == "no start":
        return token(1)
    started()
    if how == "pid":
        token(1, str(os.getpid()))
        return done("stop")
    if how == "deaf":
        # Never ends, and never reads its input.
        token(1)
        time.sleep(FOREVER)
    if how in ("endless", "flood"):
        number = 0
        while name not in cancelled:
            token(number % 100)
            number += 1
            if how == "endless":
                time.sleep(0.005)
        return done("cancelled")
    if how.startswith("say "):
        words = how[4:].split("|")
        for number, word in enumerate(words[:most]):
            token(number, word)
        return done("stop" if len(words) <= most else "length")
    if how == "logits":
        token(1, logits=packed(0.5, -1.0))
        return done("stop")

    # Sends two valid tokens, and then commits the requested fault.
    token(1)
    token(2)
    end = {
        "garbage": lambda: raw(b"Traceback: this is no message\n"),
        "array": lambda: raw(b"[1, 2]\n"),
        "empty": lambda: raw(b"\n"),
        "half": lambda: (raw(b'{"id": %d, "tok' % name), os._exit(0)),
        "half and silence": lambda: raw(b'{"id": %d, "tok' % name),
        "no utf-8": lambda: raw(b'{"id": %d, "token": "\xff\xfe", "token_id": 3}\n' % name),
        "wrong id": lambda: send(id=name + 1, token="x", token_id=3),
        "no id": lambda: send(token="x", token_id=3),
        "text id": lambda: raw(b'{"id": "one"}\n'),
        "unknown field": lambda: send(id=name, surprise=1),
        "no token id": lambda: send(id=name, token="x"),
        "negative token": lambda: send(id=name, token="x", token_id=-1),
        "no reason": lambda: send(id=name, done=True),
        "odd reason": lambda: send(id=name, done=True, finish_reason="tired"),
        "bad logits": lambda: send(id=name, token="x", token_id=3, logits="???"),
        "huge": lambda: raw(b'{"id": %d, "token": "' % name + b"x" * 300_000 + b'"}\n'),
        "endless line": lambda: [raw(b"x" * 4096) for _ in iter(int, 1)],
        "deep": lambda: raw(b"{\"id\":" + b"[" * 50_000 + b"\n"),
        "death": lambda: (print("the mock is tired", file=sys.stderr, flush=True), os._exit(7)),
        "abort": os.abort,
        "closed output": lambda: (os.close(1), time.sleep(FOREVER)),
        "silence": lambda: None,
        "error": lambda: send(id=name, error="out of luck", kind="out_of_memory"),
        "afterthought": lambda: (done("stop"), send(id=name, token="late", token_id=4)),
    }
    if how in end:
        return end[how]()
    token(3)
    done("stop")


def serve():
    if START == "dies":
        print("Traceback:\n  No module named 'mlx_lm'", file=sys.stderr, flush=True)
        os._exit(1)
    if START == "mute":
        time.sleep(FOREVER)
    if START == "old":
        return send(ready=True, protocol=0)
    if START == "chatty":
        raw(b"Welcome to Python!\n")
    requests, cancelled = queue.Queue(), set()
    threading.Thread(target=listen, args=(requests, cancelled), daemon=True).start()
    send(ready=True, protocol=1, python="3.x", mlx_lm="mock", mlx="mock", device="cpu")
    while True:
        request = requests.get()
        op = request["op"]
        if op == "quit":
            if START == "stubborn":
                time.sleep(FOREVER)
            os._exit(0)
        elif op == "load":
            load(request)
        elif op in ("generate", "chat"):
            reply(request, cancelled)
        elif op == "encode":
            if request["text"] == "silence":
                time.sleep(FOREVER)
            send(id=request["id"], ok=True, tokens=[len(request["text"])])
        elif op == "decode":
            send(id=request["id"], ok=True)
        elif op == "logits":
            send(id=request["id"], started=True, prompt_tokens=2, tokens=[5, 6])
            for _ in range(2 if request["all"] else 1):
                send(id=request["id"], row=packed(0.5, -1.0, 2.0))
            send(id=request["id"], done=True, finish_reason="length")
        else:
            send(id=request["id"], error=f"the mock knows no {op}", kind="unsupported")


if START == "stubborn":
    # The process continues even after the end of its input.
    os._exit = lambda code: time.sleep(FOREVER)
probe() if sys.argv[1] == "probe" else serve()
