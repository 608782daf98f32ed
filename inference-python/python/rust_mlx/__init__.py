"""Language models on Apple's MLX, and on every other backend of rust-mlx.

>>> import rust_mlx
>>> model = rust_mlx.load("smollm2")
>>> reply = model.generate([{"role": "user", "content": "What is the capital of France?"}])
>>> print(reply, reply.completion_tokens, reply.finish_reason)

The names of options are those of ``mlx generate`` and of the HTTP API, with underscores:
``max_tokens``, ``temperature``, ``top_p``, ``stop``, ``seed``. Calls that compute release the
interpreter's lock. Ctrl-C ends a reply, an embedding or a training run.
"""

import json
import os
from array import array
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Union

from . import _native
from ._errors import Error

__version__: str = _native.__version__

__all__ = ["Error", "Model", "Piece", "Reply", "Stream", "backends", "load"]

Message = Dict[str, Any]
#: A text, a list of token ids, a list of messages, or a dictionary with ``messages`` and optionally
#: ``tools``, ``chat_template_kwargs`` and ``continue_final_message``.
Prompt = Union[str, Sequence[int], Sequence[Message], Dict[str, Any]]


def _json(value: Any) -> str:
    # A path becomes its text; other objects are a TypeError.
    return json.dumps(value, default=os.fspath)


def backends() -> List[Dict[str, Any]]:
    """Describe all backends, sorted by name.

    Each is a dictionary with ``name``, ``available``, ``default`` (whether it is chosen without a
    name), ``reason`` (why it is unavailable, or None), ``device`` and ``capabilities``.
    """
    infos: List[Dict[str, Any]] = json.loads(_native.backends())
    return infos


def load(
    name_or_path: Union[str, "os.PathLike[str]"],
    backend: Optional[str] = None,
    **options: Any,
) -> "Model":
    """Load a model.

    ``name_or_path`` is a directory, a .gguf file, a known name, or ``owner/name`` of the Hugging
    Face Hub. A model that is not on this machine is downloaded. ``backend`` is a backend's name;
    with None, the best available one is chosen. ``options`` are load options, such as
    ``context_len``, ``kv_bits``, ``adapter_path``, ``dtype`` or ``draft_model``.

    Raises Error: for an unknown or unavailable backend, a model that is not found or damaged, and
    an option that is unknown or out of range.
    """
    return Model(_native.load(os.fspath(name_or_path), backend, _json(options)))


class Reply(str):
    """The text of a reply, with its tokens and the reason of its end."""

    #: The ids of the tokens.
    tokens: List[int]
    #: ``stop``, ``length``, or ``cancelled`` for a stream that was closed; None before the end.
    finish_reason: Optional[str]
    #: The token or string that stopped the reply, such as ``{"eos": 2}``.
    stop: Optional[Dict[str, Any]]
    #: The number of tokens of the prompt.
    prompt_tokens: int
    #: The number of generated tokens.
    completion_tokens: int
    #: Log-probabilities for each token, if the option ``logprobs`` asks for them.
    logprobs: List[Dict[str, Any]]
    #: Times in seconds, rates in tokens a second, memory in bytes.
    metrics: Dict[str, Any]

    @classmethod
    def _read(cls, text: str) -> "Reply":
        fields = json.loads(text)
        reply = cls(fields["text"])
        reply.tokens = fields["tokens"]
        reply.finish_reason = fields["finish_reason"]
        reply.stop = fields["stop"]
        reply.logprobs = fields.get("logprobs", [])
        reply.metrics = fields["metrics"]
        reply.prompt_tokens = fields["metrics"]["prompt_tokens"]
        reply.completion_tokens = len(reply.tokens)
        return reply


class Piece(str):
    """The text that one token adds to a reply. It may be empty, as a character can have several
    tokens."""

    #: The id of the token.
    token: int
    #: Its log-probability and those of alternatives, if the option ``logprobs`` asks for them.
    logprobs: Optional[Dict[str, Any]]


class Stream:
    """The pieces of a reply, as an iterator. Closing or deleting it ends the reply; it is also a
    context manager."""

    def __init__(self, native: _native.Stream) -> None:
        self._native = native

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        item = self._native.next()
        if item is None:
            raise StopIteration
        text, token, logprobs = item
        piece = Piece(text)
        piece.token = token
        piece.logprobs = None if logprobs is None else json.loads(logprobs)
        return piece

    @property
    def reply(self) -> Reply:
        """The whole reply after the last piece; before it, the text and tokens that were read."""
        return Reply._read(self._native.reply())

    def close(self) -> None:
        """End the reply."""
        self._native.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A loaded model. Threads may share it. ``with rust_mlx.load(...) as model`` closes it."""

    def __init__(self, native: _native.Model) -> None:
        self._native = native

    def __repr__(self) -> str:
        return f"<rust_mlx.Model {self.name!r} on {self.backend}>"

    @property
    def name(self) -> str:
        """The path or name by which the model was loaded."""
        return self._native.name

    @property
    def backend(self) -> Optional[str]:
        """The name of the backend."""
        return self._native.backend

    @property
    def info(self) -> Dict[str, Any]:
        """Architecture, sizes, types and device."""
        info: Dict[str, Any] = json.loads(self._native.info())
        return info

    def tokenize(self, text: str, add_special: bool = True) -> List[int]:
        """Convert text to token ids. ``add_special`` adds the special tokens that the model expects
        around a text."""
        return self._native.tokenize(text, add_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Convert token ids to text, without special tokens."""
        return self._native.detokenize(list(ids))

    def generate(self, prompt: Prompt, **options: Any) -> Reply:
        """Generate a reply.

        A text or a list of token ids is continued, and a conversation is answered with the model's
        chat template. ``options`` are generation options, such as ``max_tokens`` (256),
        ``temperature`` (0), ``top_p``, ``top_k``, ``min_p``, ``repeat_penalty``, ``stop``, ``seed``,
        ``logprobs`` or ``grammar``.

        Raises Error: for an option that is unknown or out of range, or that the backend does not
        support, and if the engine fails.
        """
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.reply

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Generate a reply piece by piece. The arguments are those of ``generate``."""
        return Stream(self._native.stream(_json(prompt), _json(options)))

    def embed(self, texts: Sequence[Union[str, Sequence[int]]], **options: Any) -> Any:
        """Embed texts, or lists of token ids: one vector for each.

        The result is a numpy array of float32 with the shape ``(texts, dimensions)``. Without numpy
        it is a list of lists. ``options`` are ``pooling``, ``normalize``, ``dimensions``,
        ``max_length``, ``truncate``, ``prompt`` and ``prompt_name``.
        """
        values, rows, dimensions = self._native.embed(_json(list(texts)), _json(options))
        try:
            import numpy
        except ImportError:
            flat = array("f", values).tolist()
            return [flat[row * dimensions : (row + 1) * dimensions] for row in range(rows)]
        return numpy.frombuffer(values, numpy.float32).reshape(rows, dimensions).copy()

    def train(
        self,
        data: Union[str, "os.PathLike[str]"],
        *,
        adapter_path: Union[str, "os.PathLike[str]"] = "adapters",
        resume: bool = False,
        overwrite: bool = False,
        apply: bool = True,
        callback: Optional[Callable[[Dict[str, Any]], object]] = None,
        **options: Any,
    ) -> Dict[str, Any]:
        """Train an adapter (LoRA, or DoRA with ``fine_tune_type="dora"``) on the lines of
        ``data/train.jsonl``, and write it to ``adapter_path``.

        ``options`` are those of ``mlx train``, with underscores: ``iters``, ``batch_size``,
        ``learning_rate``, ``num_layers``, ``rank``, ``scale``, ``alpha``, ``keys``, ``mask_prompt``,
        ``method``. ``lr_schedule`` and ``optimizer_config`` are dictionaries, as in a config file.

        ``resume`` continues an interrupted run, and ``overwrite`` replaces an earlier one.
        ``callback`` receives each event as a dictionary with ``event``: ``step``, ``train``,
        ``judging``, ``validation``, ``test``, ``best``, ``saved`` or ``stopped_early``. An exception
        in it, or Ctrl-C, ends the run after a save. With ``apply``, this model then has the adapter.

        The run loads weights of its own, so memory must hold the model twice. Returns the summary of
        ``mlx train --json``, and ``notes`` about data and options.
        """
        if resume and overwrite:
            raise Error("resume and overwrite are both given; leave one of them out", "invalid_option")
        start = "resume" if resume else "overwrite" if overwrite else "fresh"
        options = {"data": data, "adapter_path": adapter_path, **options}

        def told(event: str) -> None:
            if callback is not None:
                callback(json.loads(event))

        receiver = None if callback is None else told
        done = self._native.train(_json(options), start, apply, receiver)
        summary: Dict[str, Any] = json.loads(done)
        return summary

    def close(self) -> None:
        """Free the model's memory after running calls have ended. Later calls raise Error."""
        self._native.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
