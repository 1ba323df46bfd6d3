"""Functions in threads of which one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.engine.watch.fault_points import fault_point


class Runner:
    """A function in a thread of its own, which runs only between `resume_thread` and the next `pause_thread` in it.

    The random state of torch, Python and NumPy belongs to the running function: a function finds it after a pause as it
    was before, whatever ran meanwhile. So do context variables, which start as copies of the caller's. The GPU that a
    function has chosen is the caller's, too, from then on, as if it had run there: a thread begins with number 0, which
    may be another rank's.

    Args:
        fn: runs to its end, or to an exception, both of which are for `fn` to keep.
        state: what its random numbers start from.
    """

    def __init__(self, fn: Callable[[], None], name: str, state: Mapping[str, Any]) -> None:
        self.ended = False
        self._fn = fn
        self._state = state
        self._device = _device()
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._main), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is the function's thread."""
        return threading.current_thread() is self._thread

    def resume_thread(self) -> None:
        """Let the function run until it pauses or ends."""
        self._go.release()
        self._back.acquire()
        _choose(self._device)
        if self.ended:
            self._thread.join()

    def pause_thread(self) -> None:
        """Called by the function: returns at the next `resume_thread`. The random state may be another then."""
        self._device = _device()
        fault_point("sibling.pause")
        self._back.release()
        self._go.acquire()

    def _main(self) -> None:
        self._go.acquire()
        _choose(self._device)
        set_random_state(self._state, _device())
        try:
            self._fn()
        finally:
            self.ended = True
            self._device = _device()
            self._back.release()


def read_random_state() -> Mapping[str, Any]:
    """Return the state of all generators that this thread uses."""
    return random_state(_device())


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state of `read_random_state`."""
    set_random_state(state, _device())


def _device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _choose(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
