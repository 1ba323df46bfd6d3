"""What a rank raises for a sibling that has failed on another rank: the same error, wherever it can be had."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from lightning_pipes.ir import PipelineError


class SiblingFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is elsewhere
    """This sibling failed on another rank; the message says where and why."""


def packed_error(error: BaseException) -> bytes:
    """An error for other ranks; nothing if it does not pickle, or would leave more than a sibling, as SystemExit."""
    if isinstance(error, Exception):
        for form in (error, _Bare(error)):
            with suppress(Exception):
                data = pickle.dumps(form)
                if str(pickle.loads(data)) == str(error):
                    return data
    return b""


def error_elsewhere(text: str, packed: bytes) -> Exception:
    """What to raise here: a copy of the error, so that `except`, and `catch` of a study, do the same on all ranks,
    whichever was first; its cause is a SiblingFailure that says `text`. That itself where there is no copy."""
    failure = SiblingFailure(text)
    with suppress(Exception):
        error: Exception = pickle.loads(packed)
        error.__cause__ = failure
        return error
    return failure


class _Bare:
    """An error that pickles although it can't be made from `args`, since its class makes them from something else."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init, (type(self._error), self._error.args, vars(self._error))


def _without_init(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error
