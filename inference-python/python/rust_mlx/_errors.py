"""The exception of this package. The native part raises it, too."""

from typing import Any, Tuple


class Error(Exception):
    """A call failed. The message says what is wrong, where, and what would work.

    ``kind`` is the class of the error, for programs: ``unknown_backend``, ``unavailable_backend``,
    ``no_backend``, ``duplicate_backend``, ``model_not_found``, ``invalid_model``, ``unsupported``,
    ``invalid_option``, ``cancelled``, ``deadline_exceeded``, ``out_of_memory``, ``closed``, ``io``
    or ``engine``.
    """

    kind: str

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (str(self), self.kind)
