"""The Python side of the backend `mlx_lm`: serves mlx-lm by JSON Lines on standard input and output.

Run by the crate mlxlm-backend, never by hand: `bridge.py probe` says whether mlx_lm can be imported;
`bridge.py serve [cpu]` answers requests, one JSON object a line, until `quit` or the end of its input.

One thread reads requests, so that a cancellation is seen while another request runs and the death of the
parent (the end of the input) ends this process at once. The main thread does the work and is the only one
that writes. Whatever else prints goes to standard error: the two ends of the protocol are private copies.
"""

import json
import os
import queue
import signal
import sys
import threading
import time

PROTOCOL = 1
PREFILL_STEP = 512


class Refused(Exception):
    """A request that cannot be served. `kind` is the error kind of the contract."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class Cancelled(Exception):
    """Ends the running request after its cancellation."""


class Wire:
    """The two pipes of the protocol. No other code of this process can use them."""

    def __init__(self):
        self._in = os.fdopen(os.dup(0), "rb")
        self._out = os.fdopen(os.dup(1), "wb")
        # Child processes do not inherit the copies. What libraries print goes to standard error.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self.requests = queue.Queue()
        self._cancelled = set()
        self._lock = threading.Lock()

    def send(self, **message):
        # ASCII with escapes, so that no byte of a message is a line end or invalid UTF-8.
        self._out.write(json.dumps(message).encode("ascii") + b"\n")
        self._out.flush()

    def listen(self):
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            for line in self._in:
                message = json.loads(line)
                if message.get("op") == "cancel":
                    with self._lock:
                        self._cancelled.add(message["id"])
                else:
                    self.requests.put(message)
        finally:
            # The parent closed its end or has died, so this process has no more work.
            left_alone()

    def check(self, request):
        with self._lock:
            if request in self._cancelled:
                raise Cancelled

    def forget(self, request):
        # Ids only grow, so this also removes cancellations that came too late.
        with self._lock:
            self._cancelled = {r for r in self._cancelled if r > request}


def leave():
    """Ends the process without a message."""
    os._exit(0)


def left_alone():
    """Ends the process when its input has ended. Deletes the script if the parent has died and cannot do it."""
    script = os.path.abspath(__file__)
    room = os.path.dirname(script)
    # A dying parent closes its files shortly before its end. A living parent ends this process itself.
    until = time.monotonic() + 1
    while os.getppid() == PARENT and time.monotonic() < until:
        time.sleep(0.005)
    # Deletes only a script that the crate extracted to its own directory.
    if os.getppid() != PARENT and os.path.basename(room).startswith("mlxlm-bridge-"):
        # Both threads may reach this point. The first one deletes the script.
        for remove, path in ((os.unlink, script), (os.rmdir, room)):
            try:
                remove(path)
            except OSError:
                pass
    leave()


def device_name(mx):
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def versions():
    """Imports mlx_lm, and returns its version and device."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step  # noqa: F401
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p  # noqa: F401

    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "mlx_lm": mlx_lm.__version__,
        "mlx": getattr(mx, "__version__", "unknown"),
        "device": device_name(mx),
    }


def described(error):
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Text:
    """Text of a growing sequence of ids; put together it is the decoding of all of them.

    Of each step only the ids since the last two releases are decoded.
    """

    # An incomplete character has at most three tokens. With more tokens, the bytes are no character.
    PATIENCE = 16

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids = []
        self._start = self._read = 0

    def _fresh(self):
        old = decode(self._tokenizer, self._ids[self._start : self._read])
        new = decode(self._tokenizer, self._ids[self._start :])
        return new[len(old) :], new.endswith("\ufffd")

    def push(self, token):
        """Returns the text, and whether a later token completes it."""
        self._ids.append(token)
        text, broken = self._fresh()
        if broken and len(self._ids) - self._read < self.PATIENCE:
            return "", True
        if text:
            self._start, self._read = self._read, len(self._ids)
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return text, False

    def rest(self):
        return self._fresh()[0]


def decode(tokenizer, ids, special=False):
    if not ids:
        return ""
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def check_files(path):
    """Refuses files that would run code, are truncated or do not fit into memory, before mlx-lm reads them."""
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise Refused("invalid_model", f"config.json cannot be read: {described(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise Refused("invalid_model", "config.json has no model_type")
    if config.get("model_file") is not None:
        # mlx-lm would run this Python file.
        raise Refused("unsupported", "config.json names code of its own (model_file), which is never run")
    total = 0
    # These are the files that mlx-lm reads.
    weights = [e for e in os.scandir(path) if e.name.startswith("model") and e.name.endswith(".safetensors")]
    for entry in weights:
        try:
            size = os.stat(entry.path).st_size
            check_safetensors(entry.path, size)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise Refused("invalid_model", f"{entry.name} is damaged: {described(error)}") from error
        total += size
    if not weights:
        raise Refused("invalid_model", "there is no model*.safetensors")
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return
    if total > memory:
        raise Refused("out_of_memory", f"the weights need about {total} bytes, more than the {memory} bytes of memory")


def check_safetensors(path, size):
    """Checks that a file is as long as its header says, which MLX's reader does not check."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, 100_000_000):
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
    spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    at = 0
    for start, end in spans:
        if start != at or end < start:
            raise ValueError("the tensors overlap or leave a gap")
        at = end
    if 8 + length + at != size:
        raise ValueError(f"it is {size} bytes long, but its header describes {8 + length + at}")


class Model:
    """A loaded model, and the requests that it serves."""

    def __init__(self, request):
        import mlx.core as mx
        from mlx.utils import tree_flatten
        from mlx_lm.utils import load

        path = request["path"]
        check_files(path)
        try:
            self.model, self.tokenizer, self.config = load(
                path,
                # Code in the model's directory must never run.
                tokenizer_config={"trust_remote_code": False},
                adapter_path=request.get("adapter"),
                return_config=True,
            )
            if request.get("dtype"):
                self.model.set_dtype(getattr(mx, request["dtype"]))
            mx.eval(self.model.parameters())
        except (MemoryError, Refused):
            raise
        except Exception as error:
            text = described(error)
            kind = "unsupported" if "not supported" in text else "invalid_model"
            if "malloc" in text or "allocate" in text:
                kind = "out_of_memory"
            raise Refused(kind, f"mlx-lm cannot load the model: {text}") from error
        self.mx = mx
        self.context_len = request.get("context_len")
        self.kv_bits, self.kv_group_size = request.get("kv_bits"), request.get("kv_group_size") or 64
        self.quantized_kv_start = request.get("quantized_kv_start") or 0
        heads, hidden = self._fact("num_attention_heads", "n_head"), self._fact("hidden_size", "n_embd")
        self.head_dim = self._fact("head_dim") or (hidden // heads if heads else 0)
        if self.kv_bits and self.head_dim % self.kv_group_size:
            raise Refused(
                "invalid_option",
                f"kv_group_size is {self.kv_group_size}, which does not divide this model's heads of {self.head_dim} elements",
            )
        weights = [array for _, array in tree_flatten(self.model.parameters())]
        floats = [a.dtype for a in weights if mx.issubdtype(a.dtype, mx.floating)]
        self.compute = str(max(set(floats), key=floats.count)).split(".")[-1] if floats else None
        self.weight_bytes = sum(array.nbytes for array in weights)
        self.vocab = self._fact("vocab_size") or len(self.tokenizer.get_vocab())
        # If config and tokenizer name different end tokens, each of them ends a reply.
        known = {*self.tokenizer.eos_token_ids, self.tokenizer.eos_token_id}
        self.eos = {int(i) for i in known if i is not None}

    def _fact(self, *names):
        for table in (self.config, self.config.get("text_config") or {}):
            for name in names:
                value = table.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return 0

    def info(self):
        from mlx_lm.utils import get_total_parameters

        try:
            parameters = int(get_total_parameters(self.model))
        except Exception:  # a layer that mlx-lm does not know
            parameters = 0
        heads = self._fact("num_attention_heads", "n_head")
        quantization = self.config.get("quantization") or {}
        return {
            "model_type": str(self.config.get("model_type", "")),
            "vocab_size": self.vocab,
            "layers": self._fact("num_hidden_layers", "n_layer"),
            "hidden_size": self._fact("hidden_size", "n_embd"),
            "heads": heads,
            "kv_heads": self._fact("num_key_value_heads") or heads,
            "head_dim": self.head_dim,
            "context_length": self._fact("max_position_embeddings", "n_positions") or None,
            "quantization_bits": quantization.get("bits"),
            "quantization_group": quantization.get("group_size"),
            "parameters": parameters,
            "weight_bytes": self.weight_bytes,
            "compute": self.compute,
            "device": device_name(self.mx),
            "has_chat_template": bool(self.tokenizer.has_chat_template),
            "eos": sorted(self.eos),
        }

    def new_cache(self):
        """The KV cache of one request. A bounded cache also keeps the first few positions, if the bound allows it."""
        from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

        caches, bound = make_prompt_cache(self.model), self.context_len
        if bound is None:
            return caches
        # mlx-lm's max_kv_size has no effect on families that create their own caches, such as llama.
        keep = 4 if bound >= 8 else 0
        return [RotatingKVCache(max_size=bound, keep=keep) if type(c) is KVCache else c for c in caches]

    def encode(self, text, add_special):
        # A text that already starts with the begin token does not get a second one.
        bos = self.tokenizer.bos_token
        add_special = add_special and not (bos and text.startswith(bos))
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=add_special)]

    def decode(self, ids):
        for i in ids:
            if self.tokenizer.convert_ids_to_tokens(i) is None:
                raise Refused("invalid_option", f"token {i} is not in the tokenizer's vocabulary")
        return decode(self.tokenizer, ids)

    def render(self, messages, generation_prompt):
        if not self.tokenizer.has_chat_template:
            raise Refused("unsupported", "the model has no chat template; use a raw prompt")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:
            raise Refused(
                "invalid_option", f"the model's chat template refuses the messages: {described(error)}"
            ) from error

    def prepare_chat(self, messages, generation_prompt=True):
        """Text and ids of a conversation. Text of a message never becomes a control token."""
        special = [t for t in self.tokenizer.all_special_tokens if t]
        special += [str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        special = sorted(set(special), key=len, reverse=True)
        spelled, hidden = [], []
        for message in messages:
            if any(token in message["role"] for token in special):
                raise Refused("invalid_option", "the role of a message holds a control token")
            content = message["content"]
            for token in special:
                while token in content:
                    mark = "x" + os.urandom(16).hex() + "x"
                    content = content.replace(token, mark, 1)
                    spelled.append((mark, token))
            hidden.append({"role": message["role"], "content": content})
        text = self.render(hidden, generation_prompt)
        if not spelled:
            return text, self.encode(text, False)
        # Markup of the template becomes control tokens. Text of messages stays ordinary text.
        pieces = [(text, False)]
        for mark, token in spelled:
            cut = []
            for piece, plain in pieces:
                parts = piece.split(mark)
                for n, part in enumerate(parts):
                    if n:
                        cut.append((token, True))
                    cut.append((part, plain))
            pieces = cut
        ids = []
        for piece, plain in pieces:
            if not piece:
                continue
            if plain:
                part = self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
                forbidden = {self.tokenizer.convert_tokens_to_ids(token) for token in special}
                if forbidden & set(part):
                    raise Refused("invalid_option", f"a message spells the control token {piece!r}")
                ids += [int(i) for i in part]
            else:
                ids += self.encode(piece, False)
        return "".join(piece for piece, _ in pieces), ids

    def prompt_ids(self, request):
        if "messages" in request:
            _, ids = self.prepare_chat(request["messages"])
        elif "tokens" in request:
            ids = request["tokens"]
        else:
            ids = self.encode(request["prompt"], True)
        if not ids:
            raise Refused("invalid_option", "the prompt is empty; give at least one token")
        for i in ids:
            if not 0 <= i < self.vocab:
                raise Refused("invalid_option", f"token {i} is outside the vocabulary of {self.vocab} tokens")
        named = [*request.get("logit_bias", ()), *request.get("forced_tokens", ())]
        for i in map(int, named):
            if i >= self.vocab:
                raise Refused("invalid_option", f"token {i} is outside the vocabulary of {self.vocab} tokens")
        return ids

    def generate(self, wire, request):
        from mlx_lm.generate import generate_step

        mx, name = self.mx, request["id"]
        ids = self.prompt_ids(request)
        most = request["max_tokens"]
        wire.send(id=name, started=True, prompt_tokens=len(ids))
        mx.random.seed(request["seed"] if request.get("seed") is not None else int.from_bytes(os.urandom(8), "little"))
        mx.reset_peak_memory()
        kept = []
        processors = changes(mx, ids, request, self.eos, self.vocab)
        if request["logits"] or request["logprobs"] is not None:
            # The first processor sees the model's own logits. It copies them, because later ones write in place.
            def keep(_, row):
                kept.append(row + 0)
                return row

            processors.insert(0, keep)

        def progress(done, _):
            wire.check(name)
            wire.send(id=name, progress=int(done))

        stops = set(request["stop_tokens"])
        if not request["ignore_eos"]:
            stops |= self.eos
        text, produced, reason = Text(self.tokenizer), 0, "length"
        steps = None
        try:
            if most > 0:
                steps = generate_step(
                    mx.array(ids),
                    self.model,
                    max_tokens=most,
                    sampler=sampler(mx, request, self.vocab),
                    logits_processors=processors,
                    prompt_cache=self.new_cache(),
                    prefill_step_size=request["prefill_step_size"],
                    kv_bits=self.kv_bits,
                    kv_group_size=self.kv_group_size,
                    quantized_kv_start=self.quantized_kv_start,
                    prompt_progress_callback=progress,
                )
                for token, _ in steps:
                    wire.check(name)
                    token = int(token)
                    extra = self._seen(request, token, kept.pop(0)) if kept else {}
                    if token in stops:
                        reason = "stop"
                        break
                    produced += 1
                    piece, pending = text.push(token)
                    wire.send(id=name, token=piece, token_id=token, pending=pending, **extra)
                    if produced >= most:
                        break
        except Cancelled:
            reason = "cancelled"
        finally:
            if steps is not None:
                steps.close()
        wire.send(
            id=name,
            done=True,
            finish_reason=reason,
            text=text.rest(),
            peak_memory=int(mx.get_peak_memory()),
            active_memory=int(mx.get_active_memory()),
        )

    def _seen(self, request, token, row):
        """The requested data about the logits from which a token was sampled."""
        mx, seen = self.mx, {}
        if request["logits"]:
            seen["logits"] = packed(mx, row)
        if request["logprobs"] is not None:
            row = row.reshape(-1).astype(mx.float32)
            logprobs = row - mx.logsumexp(row)
            count = min(request["logprobs"], row.size)
            best = mx.argsort(-logprobs)[:count].tolist() if count else []
            values = mx.take(logprobs, mx.array([token, *best])).tolist()
            seen["logprob"] = packed(mx, mx.array(values))
            seen["top"] = [[int(i), decode(self.tokenizer, [int(i)], special=True)] for i in best]
        return seen

    def logits(self, wire, request):
        mx, name = self.mx, request["id"]
        ids = self.prompt_ids(request)
        wire.send(id=name, started=True, prompt_tokens=len(ids), tokens=ids)
        cache = self.new_cache()
        for start in range(0, len(ids), PREFILL_STEP):
            wire.check(name)
            part = ids[start : start + PREFILL_STEP]
            rows = self.model(mx.array([part]), cache=cache)[0]
            last = start + len(part) == len(ids)
            mx.eval([c.state for c in cache])
            if request["all"]:
                for n in range(len(part)):
                    wire.send(id=name, row=packed(mx, rows[n]))
            elif last:
                wire.send(id=name, row=packed(mx, rows[-1]))
        wire.send(id=name, done=True, finish_reason="length")


def packed(mx, row):
    """Encodes values as little-endian float32 in base64."""
    import base64

    row = row.reshape(-1).astype(mx.float32)
    mx.eval(row)
    data = memoryview(row).cast("B").tobytes()
    return base64.b64encode(data).decode("ascii")


def sampler(mx, request, vocab):
    """Samples with top-p, min-p, XTC, top-k and temperature, in this order. Only XTC may remove the likeliest token."""
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    temperature, top_p, min_p, top_k = (request[key] for key in ("temperature", "top_p", "min_p", "top_k"))
    chance, threshold = request["xtc_probability"], request["xtc_threshold"]
    forced = list(request["forced_tokens"])

    def sample(logprobs):
        best = mx.argmax(logprobs, axis=-1, keepdims=True)
        kept = logprobs
        if 0 < top_p < 1:
            kept = apply_top_p(kept, top_p)
        if min_p > 0:
            kept = apply_min_p(kept, min_p)
        top = mx.take_along_axis(logprobs, best, axis=-1)
        kept = mx.put_along_axis(kept, best, top, axis=-1)
        if chance > 0:
            # Exclude Top Choices: among the tokens that reach the threshold, only the least probable one stays.
            probs = mx.softmax(kept, axis=-1)
            least = mx.where(probs >= threshold, probs, mx.inf).min(axis=-1, keepdims=True)
            without = mx.where(probs > least, -mx.inf, kept)
            kept = mx.where(mx.random.uniform() < chance, without, kept)
        if 0 < top_k < vocab:
            kept = apply_top_k(kept, top_k)
        top = kept.max(axis=-1, keepdims=True)
        return mx.random.categorical((kept - top) * (1 / temperature))

    # Below this, 1 / temperature overflows float32. The most probable token is then certain.
    draw = (lambda logprobs: mx.argmax(logprobs, axis=-1)) if temperature < 1e-30 else sample

    def choose(logprobs):
        return mx.array([forced.pop(0)]) if forced else draw(logprobs)

    return choose


def changes(mx, prompt, request, eos, vocab):
    """The functions that change logits, in the order of the contract."""
    made = []
    if request["repeat_penalty"] != 1.0:
        made.append(penalty(mx, prompt, request["repeat_penalty"], request["repeat_window"]))
    presence, frequency = request["presence_penalty"], request["frequency_penalty"]
    if presence or frequency:

        said = reply()

        def discourage(tokens, logits):
            tokens = said(tokens)
            if tokens.size == 0:
                return logits
            counts = mx.zeros(logits.shape[-1]).at[tokens].add(1.0)
            off = presence * (counts > 0) + frequency * counts
            return logits - off.astype(logits.dtype)

        made.append(discourage)
    if request["logit_bias"]:
        places = mx.array([int(i) for i in request["logit_bias"]])
        amounts = mx.array([float(x) for x in request["logit_bias"].values()])
        made.append(lambda _, logits: logits.at[..., places].add(amounts.astype(logits.dtype)))

    def forbid(ids, until=None):
        places, said = mx.array(sorted(ids)), reply()

        def apply(tokens, logits):
            if until is not None and said(tokens).size >= until:
                return logits
            return mx.put_along_axis(logits, places[None], mx.array(-mx.inf, logits.dtype), axis=-1)

        made.append(apply)

    banned = {i for i in request["banned_tokens"] if i < vocab}
    if banned:
        forbid(banned)
    ends = set(request["stop_tokens"]) | (set() if request["ignore_eos"] else eos)
    ends = {i for i in ends if i < vocab}
    if request["min_tokens"] and ends:
        forbid(ends, request["min_tokens"])
    return made


def reply():
    """The tokens of the reply, among the tokens that mlx-lm passes to a processor.

    Before them stands the prompt's last token or, since mlx-lm 0.32, the whole prompt: what there is at the first call.
    """
    before = []

    def said(tokens):
        if not before:
            before.append(tokens.size)
        return tokens[before[0] :]

    return said


def penalty(mx, prompt, factor, window):
    """The repetition penalty of CTRL (Keskar et al. 2019) over prompt and reply. Each token counts once.

    mlx-lm's own sees of the prompt what it gives to processors, which differs between its versions.
    """
    said = reply()

    def apply(tokens, logits):
        tokens = said(tokens)
        seen = mx.concatenate([mx.array(prompt, dtype=tokens.dtype), tokens])
        if window:
            seen = seen[-window:]
        seen = seen[None]
        chosen = mx.take_along_axis(logits, seen, axis=-1)
        chosen = mx.where(chosen < 0, chosen * factor, chosen / factor)
        return mx.put_along_axis(logits, seen, chosen, axis=-1)

    return apply


def serve(wire):
    wire.send(ready=True, protocol=PROTOCOL, **versions())
    model = None
    while True:
        request = wire.requests.get()
        name, op = request.get("id"), request.get("op")
        if op == "quit":
            leave()
        try:
            if op == "load":
                model = Model(request)
                wire.send(id=name, ok=True, **model.info())
            elif model is None:
                raise Refused("engine", f"{op} before a model was loaded")
            elif op in ("generate", "chat"):
                model.generate(wire, request)
            elif op == "logits":
                model.logits(wire, request)
            elif op == "info":
                wire.send(id=name, ok=True, **model.info())
            elif op == "encode":
                wire.send(id=name, ok=True, tokens=model.encode(request["text"], request["add_special"]))
            elif op == "decode":
                wire.send(id=name, ok=True, text=model.decode(request["tokens"]))
            elif op == "render":
                text, ids = model.prepare_chat(request["messages"], request["add_generation_prompt"])
                wire.send(id=name, ok=True, text=text, tokens=ids)
            else:
                raise Refused("engine", f"the bridge knows no {op!r}")
        except Cancelled:
            wire.send(id=name, done=True, finish_reason="cancelled", text="")
        except Refused as error:
            wire.send(id=name, error=str(error), kind=error.kind)
        except MemoryError as error:
            wire.send(id=name, error=described(error), kind="out_of_memory")
        except Exception as error:  # the process stays usable
            import traceback

            traceback.print_exc()
            kind = "unsupported" if isinstance(error, NotImplementedError) else "engine"
            wire.send(id=name, error=described(error), kind=kind)
        finally:
            wire.forget(name or 0)


def main():
    # The parent handles Ctrl-C, and cancels requests itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import faulthandler

    faulthandler.enable()
    wire = Wire()
    if sys.argv[1:2] == ["probe"]:
        try:
            wire.send(ok=True, **versions())
        except Exception as error:
            wire.send(error=described(error), kind="unavailable")
        return
    wire.listen()
    try:
        import mlx.core as mx

        if sys.argv[2:3] == ["cpu"]:
            mx.set_default_device(mx.cpu)  # before mlx_lm creates its stream
        if mx.default_device().type == mx.DeviceType.cpu:
            # On a CPU, MLX would run a C++ compiler and load its output, so compilation is disabled.
            mx.disable_compile()
        serve(wire)
    except BrokenPipeError:
        left_alone()


PARENT = os.getppid()
main()
