"""Stops that one rank wants become stops of all: `should_stop`, SIGTERM, a SLURM requeue."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

import lightning.pytorch as pl

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.control import Control


class StopAgreement:
    """Signal handlers only take note; `agree` is called where all ranks are, and makes the note common.

    Attributes:
        terminated: Lightning is about to raise SIGTERMException, on every rank after the same batch.
    """

    def __init__(
        self, trainer: pl.Trainer, control: Control, writing_at_once: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._trainer = trainer
        self._control = control
        self.terminated = False
        self._writing_at_once = writing_at_once
        self._sigterm = False
        self._requeue: tuple[int, FrameType | None] | None = None
        self._requeue_handler = private.replace_signal_handlers(trainer, self._note_sigterm, self._note_requeue)
        private.silence_sigterm_broadcast(trainer)

    def agree(self) -> None:
        """After this call every rank stops, or none.

        Raises:
            PipelineError: the epoch ends here on some ranks only.
        """
        requeue = self._requeue
        last = self._trainer.is_last_batch
        flags = self._trainer.should_stop, self._sigterm, requeue is not None, last, not last
        stop, sigterm, requeued, some_last, some_not = self._control.any(*flags)
        if some_last and some_not:
            batch = self._trainer.fit_loop.batch_idx
            raise PipelineError(
                f"the training data of some ranks end with batch {batch}, those of others go on; "
                "every rank of a pipeline must load the same batches"
            )
        if stop:
            self._trainer.should_stop = True
        if requeued:
            self._requeue = None
            with self._writing_at_once():  # the job is gone soon
                self._requeue_handler(*(requeue or (0, None)))
        if sigterm:
            self._terminate()

    def agree_to_leave(self, pipeline: Control) -> None:
        """The part of `agree` that matters where nothing is trained: SIGTERM. Replicas may have other numbers of
        batches there, so each is asked by itself."""
        if any(pipeline.any(self._sigterm)):
            self._terminate()

    def remove(self) -> None:
        """Lightning's own handlers and broadcast are back."""
        private.restore_signal_handlers(self._trainer)
        private.restore_sigterm_broadcast(self._trainer)

    def _terminate(self) -> None:
        self.terminated = True
        private.set_received_sigterm(self._trainer)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._sigterm and launcher is not None:
            launcher.kill(signum)
        self._sigterm = True

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._requeue = (signum, frame)
