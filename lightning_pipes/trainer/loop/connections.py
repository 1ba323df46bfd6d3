"""Connections of a training with other ranks: its own, or those of the trainings with which it shares ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import lightning.pytorch as pl

from lightning_pipes.engine.engine import Turns, Watch
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.control import Control

Idle = Callable[[Callable[[], bool]], None] | None
"""Does something while a condition is waited for."""
MakeControl = Callable[[FailureWatch, Idle], Control]
"""Returns the control of a training."""


class Connections:
    """Connections of a training on its own, from `setup_environment` of a strategy to its `teardown`.

    Trainings that share ranks override what is different for them.

    Attributes:
        watch: sees failures of other ranks, and tells them of ours.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.watch = watch

    @property
    def n_siblings(self) -> int:
        """Number of trainings that share the ranks, this one included."""
        return 1

    def connect(self, make: MakeControl) -> Control:
        """Return the control by which all ranks exchange objects from now on."""
        return make(self.watch, None)

    def connect_eagerly(self, pipeline: Control) -> None:
        """Connect at once what `pipeline` connects on first use, if others would have to wait then."""

    def waits_at(self, barrier: str | None) -> bool:
        """Return whether ranks wait for each other at the barrier of that name."""
        return True

    @property
    def is_terminated_by_signal(self) -> bool:
        """Whether this process got SIGTERM, and the Trainer has no handler for it."""
        return False

    def complete_request(self, request: RunRequest, ranks: int) -> RunRequest:
        """Complete the request of a training by settings of trainings that share its ranks."""
        return request

    def agree_on_container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        """Return the path of the container; one of the trainings calls `find`."""
        return find()

    def agree_on_decision(
        self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
    ) -> Decision:
        """Return the decision; one of the trainings calls `decide`."""
        return decide()

    def check_asynchronous(self, schedule: str) -> None:
        """Check whether a schedule will do that does not flush between batches.

        Raises:
            PlanError: it will not.
        """

    def open_transport(self, make: Callable[[], Transport]) -> Transport:
        """Return the transport of messages between stages; one of the trainings calls `make`."""
        return make()

    @property
    def engine_watch(self) -> Watch:
        """Where the training's engine tells of failures."""
        return self.watch

    @property
    def turns(self) -> Turns | None:
        """The turns that decide when the engine works; None where it has the rank for itself."""
        return None

    def check_later(self, is_ready: Callable[[], bool], check: Callable[[], object], max_turns: int) -> None:
        """Call `check` when `is_ready()`, or at once where no other training needs the rank meanwhile.

        Args:
            max_turns: the number of turns of the training after which an error of `check` ends it on all ranks.
        """
        check()

    def check(self) -> None:
        """Finish all checks that were left for later."""

    def make_agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        """Return a function by which the ranks of `control` agree on stopping; they are at the same batch."""
        return stops.agree_on_stop

    def release_state(self) -> None:
        """Take the training's weights and optimizers out of memory that trainings share."""

    def release_control(self, control: Control | None, peers_ended: bool) -> None:
        """Release what `connect` returned.

        Args:
            control: the result of `connect`; None if it failed.
            peers_ended: other ranks may have ended.
        """
        if control is not None:
            control.close()
        self.watch.close()  # others may be gone before the rest is done

    def renew_control(self, control: Control) -> None:
        """Close connections that were used after `release_control`, as by Trainer.save_checkpoint."""
        control.close()

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that the training ends by `error`."""
        if not isinstance(error, PeerFailure):
            self.watch.report_failure(error)
        self.watch.close()


JoinTrainings = Callable[[pl.Trainer, int, int, Callable[[], FailureWatch]], Connections]
"""Returns the connections of a training from its trainer, its rank, the number of ranks, and a factory of watches."""
_shared_connections: ContextVar[JoinTrainings | None] = ContextVar("lightning_pipes_shared_connections", default=None)


def make_connections(trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]) -> Connections:
    """Return the connections of the next training: its own, or those that `share_connections` has set."""
    join = _shared_connections.get()
    return Connections(make_watch()) if join is None else join(trainer, rank, ranks, make_watch)


@contextmanager
def share_connections(join: JoinTrainings) -> Iterator[None]:
    """Give trainings that begin in the block, in its thread, the connections that `join` returns."""
    token = _shared_connections.set(join)
    try:
        yield
    finally:
        _shared_connections.reset(token)
