"""Prints the traceback of a failure once: on the rank that failed first, after the others have named the failure.

Every rank of a run ends with an exception when one of them fails. The others have logged the failure in one line by
then, and their tracebacks lead to where they happened to wait.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol

TRACEBACKS = "LIGHTNING_PIPES_TRACEBACKS"
"""The environment variable that makes every rank print its traceback."""
_TRACEBACK = "Traceback (most recent call last):"


class RemoteError(Exception):
    """The base of errors that only repeat an error of another rank, which prints its traceback there."""


class KnownFailure(Protocol):
    """Keeps the failure of a run, as this rank knows it, for the output of errors."""

    def remote_failure(self) -> str | None:
        """Return the failure, if it was logged here as the failure of another rank; None otherwise."""

    def wait_for_reports(self) -> None:
        """Wait until the other ranks have logged a failure of this rank, or can't."""


_failure: KnownFailure | None = None
_previous = sys.excepthook


def limit_tracebacks(failure: KnownFailure) -> None:
    """Print exceptions that end this process depending on the failure of its run, from now on."""
    global _failure, _previous
    if _failure is None:
        _previous, sys.excepthook = sys.excepthook, _print_exception
    _failure = failure


def is_failure_remote() -> bool:
    """Return whether the failure by which this process ends is the failure of another rank."""
    return _failure is not None and _failure.remote_failure() is not None


def shows_all_tracebacks() -> bool:
    """Return whether every rank prints its traceback."""
    return os.environ.get(TRACEBACKS, "0") not in ("", "0")


def shorten_traceback(error: BaseException) -> None:
    """Take the calls that raised an error from its traceback, unless all ranks show theirs. Hydra and others print
    exceptions on their own."""
    if not shows_all_tracebacks():
        error.__traceback__, error.__suppress_context__ = None, True


def to_one_line(text: str) -> str:
    """Return the first line of a message, with the last one if it contains a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and any(_TRACEBACK in line for line in lines):
        return f"{lines[0]} {lines[-1]}"
    return next(iter(lines), "")


def _print_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    failure = None if _failure is None else _failure.remote_failure()
    if _failure is None or shows_all_tracebacks():
        _previous(kind, error, traceback)
    elif failure is None and isinstance(error, RemoteError):
        print(f"{kind.__name__}: {to_one_line(str(error))}", file=sys.stderr)
    elif failure is None:
        _failure.wait_for_reports()
        _previous(kind, error, traceback)
    elif str(error) not in failure and failure not in str(error):
        print(f"after that: {kind.__name__}: {to_one_line(str(error))}", file=sys.stderr)
