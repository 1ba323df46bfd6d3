"""Prints the traceback of a failure only on the rank that failed first.

When one rank of a run fails, every rank ends with an exception. The other ranks have already logged the failure in one
line, and their own tracebacks only show where they were waiting. The traceback of the failed rank is printed after the
other ranks have logged the failure.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol

TRACEBACKS_VARIABLE = "LIGHTNING_PIPES_TRACEBACKS"
"""The environment variable that makes all ranks print their tracebacks."""
_TRACEBACK_LINE = "Traceback (most recent call last):"


class RemoteError(Exception):
    """Base class of errors that only repeat an error of another rank. The other rank prints the traceback."""


class KnownFailure(Protocol):
    """Provides the failure of a run, as recorded by this rank, to the code that prints errors."""

    def remote_failure(self) -> str | None:
        """Return the failure of another rank if this rank has logged one. Otherwise, return None."""

    def wait_for_reports(self) -> None:
        """Wait until each other rank has logged the failure of this rank, or can't log it any more."""


_failure: KnownFailure | None = None
_previous = sys.excepthook


def limit_tracebacks(failure: KnownFailure) -> None:
    """Install an exception hook that prints an uncaught exception depending on the failure of the run.

    Args:
        failure: provides the failure of the run. A later call replaces it.
    """
    global _failure, _previous
    if _failure is None:
        _previous, sys.excepthook = sys.excepthook, _print_exception
    _failure = failure


def is_failure_remote() -> bool:
    """Return whether another rank caused the failure by which this process ends."""
    return _failure is not None and _failure.remote_failure() is not None


def shows_all_tracebacks() -> bool:
    """Return whether all ranks print their tracebacks."""
    return os.environ.get(TRACEBACKS_VARIABLE, "0") not in ("", "0")


def shorten_traceback(error: BaseException) -> None:
    """Remove the traceback of an error and suppress its context, unless all ranks print their tracebacks.

    This affects code that prints exceptions without the exception hook, such as Hydra.
    """
    if not shows_all_tracebacks():
        error.__traceback__, error.__suppress_context__ = None, True


def to_one_line(text: str) -> str:
    """Return the first line of a message, followed by the last line if the message contains a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and any(_TRACEBACK_LINE in line for line in lines):
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
