"""Deferred handling of Ctrl-C, SIGTERM and SLURM's SIGUSR1 during work that cannot be stopped at an arbitrary point."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from lightning_pipes.engine.watch.launcher import signal_launched
from lightning_pipes.engine.watch.process_exit import abandon_thread, give_up
from lightning_pipes.engine.watch.slurm import requeue_slurm_job, slurm_job
from lightning_pipes.trainer.loop.stopping import sigterm_error


class Interrupts:
    """Defer Ctrl-C, SIGTERM and SLURM's SIGUSR1 between `open` and `close`.

    The first Ctrl-C is only counted, and the caller raises KeyboardInterrupt at a point where nothing is running. The
    second Ctrl-C raises KeyboardInterrupt immediately. SIGTERM is recorded if the running work stops at SIGTERM on its
    own; otherwise, it is raised immediately. In a SLURM job, SIGUSR1 is handled like SIGTERM if it has no other
    handler, because Lightning installs its handler only for a Trainer in the main thread. Signal handlers are installed
    only if `open` is called from the main thread.

    Args:
        is_heeded: returns whether the running work ends on its own after SIGTERM, as siblings do at the end of a batch.

    Attributes:
        count: number of times that Ctrl-C was pressed.
        terminated: whether SIGTERM or SIGUSR1 has arrived.
        is_requeue: whether SIGUSR1 has arrived, after which the job is to be requeued.
        raised_at_once: whether a signal handler raised an exception while work may have been running.
    """

    def __init__(self, is_heeded: Callable[[], bool]) -> None:
        self.count = 0
        self.terminated = False
        self.raised_at_once = False
        self.is_requeue = False
        self._is_heeded = is_heeded
        self._opened = False

    def open(self) -> None:
        """Reset all counts and install the signal handlers."""
        self.count, self.terminated, self.raised_at_once, self.is_requeue = 0, False, False, False
        if threading.current_thread() is threading.main_thread():
            self._opened = True
            handlers = {signal.SIGINT: self._note, signal.SIGTERM: self._note_sigterm}
            if slurm_job() is not None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                handlers[signal.SIGUSR1] = self._note_requeue
            self._before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._opened:
            self._opened = False
            for signum, handler in self._before.items():
                signal.signal(signum, handler)

    def raise_later(self) -> None:
        """Raise SIGTERM again if it arrived before `close`. Call this after `close`."""
        if self.terminated and not self.is_requeue:  # what has ended does not need another attempt
            signal.raise_signal(signal.SIGTERM)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self.raised_at_once = True
            raise KeyboardInterrupt

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self.is_requeue = True
        if not self._is_heeded() and os.environ["SLURM_PROCID"] == "0":
            requeue_slurm_job()
        self._note_sigterm(signal.SIGTERM, frame)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if not self.terminated:
            signal_launched(signum)
        self.terminated = True
        if not self._is_heeded():
            self.raised_at_once = True
            give_up()
            abandon_thread()
            raise sigterm_error()
