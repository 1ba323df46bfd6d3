"""Functions in threads of which only one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.engine.watch.fault_points import fault_point


class Runner:
    """Run a function in its own thread, but only between `resume_thread` and its next call of `pause_thread`.

    The random states of torch, Python and NumPy belong to the running function. After a pause, a function finds its
    random states as they were before, no matter which code ran in the meantime. Context variables are also separate,
    and start as copies of the caller's variables. If a function selects a GPU, that GPU is also selected in the
    caller's thread from then on, as if the function had run there. A new thread selects the caller's GPU first, because
    it would otherwise begin with GPU 0, which may belong to another rank.

    Args:
        fn: the function. It has to store its result or its exception itself.
        name: the name of the thread.
        state: the initial random state of the function.

    Attributes:
        ended: whether the function has returned or raised an exception.
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
        """Whether the caller runs in the function's thread."""
        return threading.current_thread() is self._thread

    def resume_thread(self) -> None:
        """Run the function until it pauses or ends."""
        self._go.release()
        self._back.acquire()
        _choose(self._device)
        if self.ended:
            self._thread.join()

    def pause_thread(self) -> None:
        """Pause the function until the next `resume_thread`. Only the function itself may call this method.

        The random state may have changed when the call returns.
        """
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
    """Return the state of all random generators that this thread uses."""
    return random_state(_device())


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state that `read_random_state` returned."""
    set_random_state(state, _device())


def _device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _choose(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
