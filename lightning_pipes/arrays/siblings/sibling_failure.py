"""The error that a rank raises for a sibling that has failed on another one: the same error, wherever it can be had."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from lightning_pipes.engine.watch import plain
from lightning_pipes.ir import PipelineError


class SiblingFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is elsewhere
    """This sibling failed on another rank; the message says where and why."""


def packed_error(error: BaseException) -> bytes:
    """An error for other ranks, as the name of its class and data; nothing if that does not make it, or it would leave
    more than a sibling, as SystemExit."""
    kind = type(error)
    with suppress(Exception):
        args = error.__reduce__()[1] if isinstance(error, OSError) else error.args  # which lack its path
        data = plain.dumps((kind.__module__, kind.__qualname__, args, vars(error)))
        if str(_made(data)) == str(error):
            return data
    return b""


def error_from_peer(text: str, packed: bytes) -> Exception:
    """The error to raise here: a copy of the other rank's, so that `except`, and `catch` of a study, do the same on all
    ranks, whichever was first; its cause is a SiblingFailure that says `text`. That itself where there is no copy."""
    failure = SiblingFailure(text)
    with suppress(Exception):
        error = _made(packed)
        error.__cause__ = failure
        return error
    return failure


def _made(packed: bytes) -> Exception:
    """The error, of a class that is known here already; without its `__init__`, which may do anything, if it has one of
    its own."""
    module, name, args, state = plain.loads(packed)
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is no error")
    error: Exception = kind(*args) if module == "builtins" else kind.__new__(kind, *args)
    vars(error).update(state)
    return error
