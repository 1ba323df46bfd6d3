"""Agreement of all ranks on a stop that one rank requests: `should_stop`, SIGTERM, or a SLURM requeue."""

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

from lightning_pipes.engine.watch.launcher import TERMINATED_STATUS, signal_launched
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.user.patches import Patches


class StopAgreement:
    """Stop all ranks after the same batch. Signal handlers only set a flag, and `agree_on_stop` exchanges the flags.

    Args:
        trainer: the trainer to stop.
        control: the collectives of all ranks.
        writing_at_once: returns a context in which checkpoints are written immediately.
        is_terminated: returns whether the process received SIGTERM but the Trainer's handler did not, as in a job
            array.
        patches: restores Lightning's own signal handlers and broadcast when it is closed.

    Attributes:
        terminated: whether Lightning is about to raise SIGTERMException, on every rank after the same batch.
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
        """Stop all ranks or none of them.

        Raises:
            PipelineError: the epoch ends here on some ranks only.
        """
        self.apply_flags(self._control.any(*self.stop_flags()))

    def stop_flags(self) -> tuple[bool, ...]:
        """Return the flags of this rank, for `apply_flags`."""
        last = self._trainer.is_last_batch
        return self._trainer.should_stop, self._is_to_end, self._requeue is not None, last, not last

    def apply_flags(self, found: Sequence[bool], batch: int | None = None) -> None:
        """Apply the flags that all ranks exchanged.

        Args:
            found: for each flag of `stop_flags`, whether any rank has set it.
            batch: the number of the batch after which the flags were set. By default, it is the current batch.

        Raises:
            PipelineError: the epoch ends with that batch on some ranks only.
        """
        requeue = self._requeue
        stop, sigterm, requeued, *_ = found
        check_ends(found, self._trainer.fit_loop.batch_idx if batch is None else batch)
        if stop:
            self._trainer.should_stop = True
        if requeued:
            self._requeue = None
            with self._writing_at_once():  # the job ends soon
                self._requeue_handler(*(requeue or (0, None)))
        if sigterm:
            self._terminate()

    def agree_to_leave(self, pipeline: Control) -> None:
        """Agree on SIGTERM alone, for methods that do not train.

        Replicas may evaluate different numbers of batches, so each pipeline agrees separately.
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
            rank_zero_info(
                f"All ranks end after SIGTERM, at global step {step}; the exit status is {TERMINATED_STATUS}"
            )
        self.terminated = True
        private.set_received_sigterm(self._trainer)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if not self._sigterm:
            signal_launched(signum)
        self._sigterm = True

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._requeue = (signum, frame)


def end_as_terminated() -> None:
    """End the process as SIGTERM does, unless the calling thread is not the main thread and cannot do so."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def as_terminated(error: SIGTERMException) -> SIGTERMException:
    """Set the exit status of a terminated process in Lightning's exception, which would otherwise exit with 0."""
    error.code = TERMINATED_STATUS
    return error


def sigterm_error() -> SIGTERMException:
    """Return the error that Lightning raises after SIGTERM, with the exit status of a terminated process."""
    return as_terminated(SIGTERMException())


def check_ends(found: Sequence[bool], batch: int) -> None:
    """Check the exchanged flags of all ranks for an end of the epoch.

    Raises:
        PipelineError: the epoch ends with this batch on some ranks only.
    """
    *_, some_last, some_not = found
    if some_last and some_not:
        raise PipelineError(
            f"the training data of some ranks end with batch {batch}, but other ranks have more batches. Every rank of "
            "a pipeline must load the same batches"
        )


class LateAgreement:
    """Stop all ranks after the same batch, although they are not at the same batch when they exchange flags.

    Each rank starts an exchange after each batch. It reads the result some batches later, when all ranks have started
    the same exchange, so that no rank waits. After a flush, the ranks agree immediately.

    Args:
        trainer: the trainer to stop.
        stops: the flags of this rank.
        control: the collectives of all ranks.
        max_lag: the largest number of batches between two ranks.
        is_flushed: returns whether all ranks are at the same batch and have finished it.
        flush: finishes all batches in flight.
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
        self._pending: deque[tuple[int, Callable[[], list[bool]]]] = deque()  # the batch, and its exchange

    def agree_on_stop(self) -> None:
        """Stop all ranks or none of them.

        Raises:
            PipelineError: an epoch has ended on some ranks only.
        """
        flags = self._stops.stop_flags()
        self._trainer.should_stop = False  # all ranks stop together
        self._pending.append((self._trainer.fit_loop.batch_idx, self._control.start_any(*flags)))
        while self._pending and (self._is_flushed() or len(self._pending) > self._max_lag):
            batch, answer = self._pending.popleft()
            found = answer()
            if any(found[:3]):
                self._flush()  # all ranks read this answer after the same batch
                found[:3] = [any(flags) for flags in zip(found[:3], *(a()[:3] for _, a in self._pending), strict=True)]
                self._pending.clear()
            self._stops.apply_flags(found, batch)
