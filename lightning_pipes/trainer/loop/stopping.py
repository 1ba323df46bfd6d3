"""Stops that one rank wants become stops of all: `should_stop`, SIGTERM, a SLURM requeue."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipes.engine.watch.launcher import TERMINATED, signal_launched
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.ranks.control import Control


class StopAgreement:
    """Has all ranks stop after the same batch. Signal handlers set a flag, which `agree_on_stop` exchanges.

    Args:
        is_terminated: returns whether the process got SIGTERM without the Trainer's handler, as in a job array.
        patches: Lightning's own signal handlers and broadcast are back when they are closed.

    Attributes:
        terminated: Lightning is about to raise SIGTERMException, on every rank after the same batch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        control: Control,
        writing_at_once: Callable[[], AbstractContextManager[None]],
        is_terminated: Callable[[], bool],
        patches: Patches,
    ) -> None:
        self._trainer = trainer
        self._control = control
        self.terminated = False
        self._writing_at_once = writing_at_once
        self._is_terminated = is_terminated
        self._sigterm = False
        self._requeue: tuple[int, FrameType | None] | None = None
        self._requeue_handler = private.replace_signal_handlers(trainer, self._note_sigterm, self._note_requeue)
        private.silence_sigterm_broadcast(trainer)
        patches.callback(private.restore_signal_handlers, trainer)
        patches.callback(private.restore_sigterm_broadcast, trainer)

    def agree_on_stop(self) -> None:
        """Make every rank stop, or none.

        Raises:
            PipelineError: the epoch ends here on some ranks only.
        """
        self.apply_flags(self._control.any(*self.stop_flags()))

    def stop_flags(self) -> tuple[bool, ...]:
        """Return the flags of this rank, for `apply_flags`."""
        last = self._trainer.is_last_batch
        return self._trainer.should_stop, self._is_to_end, self._requeue is not None, last, not last

    def apply_flags(self, found: Sequence[bool], batch: int | None = None) -> None:
        """Apply the flags of all ranks, raised after batch number `batch`, by default this one.

        Raises:
            PipelineError: the epoch ends there on some ranks only.
        """
        requeue = self._requeue
        stop, sigterm, requeued, *_ = found
        check_ends(found, self._trainer.fit_loop.batch_idx if batch is None else batch)
        if stop:
            self._trainer.should_stop = True
        if requeued:
            self._requeue = None
            with self._writing_at_once():  # the job is gone soon
                self._requeue_handler(*(requeue or (0, None)))
        if sigterm:
            self._terminate()

    def agree_to_leave(self, pipeline: Control) -> None:
        """Agree on SIGTERM alone, where nothing is trained.

        Replicas may evaluate different numbers of batches, so each pipeline agrees by itself.
        """
        if any(pipeline.any(self._is_to_end)):
            self._terminate()

    def end_run(self) -> None:
        """End the process if SIGTERM arrived after the last batch."""
        if self._sigterm and not self.terminated and private.ends_at_sigterm(self._trainer):
            end_as_terminated()

    @property
    def _is_to_end(self) -> bool:
        return self._sigterm or self._is_terminated()

    def _terminate(self) -> None:
        if not self.terminated:
            step = self._trainer.global_step
            rank_zero_info(f"All ranks end after SIGTERM, at global step {step}; the exit status is {TERMINATED}")
        self.terminated = True
        private.set_received_sigterm(self._trainer)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if not self._sigterm:
            signal_launched(signum)
        self._sigterm = True

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._requeue = (signum, frame)


def end_as_terminated() -> None:
    """End the process, or let it go on where it can't be in the thread that asks."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def as_terminated(error: SIGTERMException) -> SIGTERMException:
    """Give Lightning's exception, which exits with 0, the exit status of a terminated process."""
    error.code = TERMINATED
    return error


def sigterm_error() -> SIGTERMException:
    """Return the error that Lightning raises after SIGTERM, with its exit status."""
    return as_terminated(SIGTERMException())


def check_ends(found: Sequence[bool], batch: int) -> None:
    """Raise PipelineError if the epoch ends with that batch on some ranks only, by the flags of all."""
    *_, some_last, some_not = found
    if some_last and some_not:
        raise PipelineError(
            f"the training data of some ranks end with batch {batch}, those of others go on; "
            "every rank of a pipeline must load the same batches"
        )


class LateAgreement:
    """Has ranks agree on stops where they are not at the same batch.

    A rank asks after each batch, and reads the answer some batches later, when all ranks have asked: so none waits.
    After a flush they agree at once.

    Args:
        max_lag: batches that ranks may be apart.
        is_flushed: whether all ranks are at the same batch, and through with it.
        flush: brings them there.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        stops: StopAgreement,
        control: Control,
        max_lag: int,
        is_flushed: Callable[[], bool],
        flush: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._stops = stops
        self._control = control
        self._max_lag = max_lag
        self._is_flushed = is_flushed
        self._flush = flush
        self._pending: deque[tuple[int, Callable[[], list[bool]]]] = deque()  # by batch

    def agree_on_stop(self) -> None:
        """Make every rank stop, or none.

        Raises:
            PipelineError: an epoch has ended on some ranks only.
        """
        flags = self._stops.stop_flags()
        self._trainer.should_stop = False  # not before the others
        self._pending.append((self._trainer.fit_loop.batch_idx, self._control.start_any(*flags)))
        while self._pending and (self._is_flushed() or len(self._pending) > self._max_lag):
            batch, answer = self._pending.popleft()
            found = answer()
            if any(found[:3]):
                self._flush()  # all ranks are here, and know it after the same batch
                found[:3] = [any(flags) for flags in zip(found[:3], *(a()[:3] for _, a in self._pending), strict=True)]
                self._pending.clear()
            self._stops.apply_flags(found, batch)
