"""Makes calls that may never return, such as calls of torch's store to a stopped process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from lightning_pipes.engine.watch.process_exit import abandon_thread

T = TypeVar("T")
_POLL_SECONDS = 0.1


class SerialCaller:
    """Makes calls one after the other, in a thread that the end of the process does not wait for. A `with` block ends
    the thread after the last call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SerialCaller:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)

    def __call__(self, call: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """Return the result of `call`, or raise its error. `meanwhile` is called repeatedly until then; an error of it
        is raised instead, and ends the caller."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="lightning_pipes asking", daemon=True)
            self._thread.start()
        made: Future[T] = Future()
        self._calls.put((call, made))
        while True:
            try:
                return made.result(_POLL_SECONDS)
            except TimeoutError:
                if made.done():
                    raise
            try:
                meanwhile()
            except BaseException:
                abandon_thread()
                raise

    def _make(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, made = asked
            try:
                made.set_result(call())
            except BaseException as error:
                made.set_exception(error)
