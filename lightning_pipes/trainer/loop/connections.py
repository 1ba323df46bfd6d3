"""Connections of a training with other ranks: its own, or those of the company that it is in."""

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
Make = Callable[[FailureWatch, Idle], Control]
"""Makes a control."""


class Connections:
    """Connections of a training on its own, from `setup_environment` of a strategy to its `teardown`.

    Trainings that share ranks override what is different for them.

    Attributes:
        watch: sees failures of other ranks, and tells them of ours.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.watch = watch

    @property
    def trainings(self) -> int:
        """Number of trainings that share the ranks, this one included."""
        return 1

    def connect(self, make: Make) -> Control:
        """Return the control by which all ranks exchange objects from now on."""
        return make(self.watch, None)

    def get_ready(self, pipeline: Control) -> None:
        """Connect at once what `pipeline` connects on first use, if others would have to wait then."""

    def waits_at(self, barrier: str | None) -> bool:
        """Return whether ranks wait for each other at the barrier of that name."""
        return True

    @property
    def told_to_end(self) -> bool:
        """Whether this process got SIGTERM, where the Trainer does not hear of it."""
        return False

    def requested(self, request: RunRequest, ranks: int) -> RunRequest:
        """Return the request of a training, with what follows from trainings beside it."""
        return request

    def container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        """Return the path that `find()` gives, where it is not found yet."""
        return find()

    def decide(self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]) -> Decision:
        """Return the decision that `decide()` makes, where there is none yet."""
        return decide()

    def check_endless(self, schedule: str) -> None:
        """Check whether a schedule will do that does not flush between batches.

        Raises:
            PlanError: it will not.
        """

    def transport(self, make: Callable[[], Transport]) -> Transport:
        """Return the transport of messages between stages; made where there is none yet."""
        return make()

    @property
    def engine_watch(self) -> Watch:
        """Where the training's engine tells of failures."""
        return self.watch

    @property
    def turns(self) -> Turns | None:
        """The turns that decide when the engine works; None where it has the rank for itself."""
        return None

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        """Call `check` when `come()`, or at once where no other training needs the rank meanwhile.

        Args:
            late: the number of turns of the training after which an error of `check` ends it on all ranks.
        """
        check()

    def check(self) -> None:
        """Finish all checks that were left for later."""

    def agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        """Return a function by which the ranks of `control` agree on stopping; they are at the same batch."""
        return stops.agree

    def go_home(self) -> None:
        """Take the training's weights and optimizers out of memory that trainings share."""

    def leave(self, control: Control | None, down: bool) -> None:
        """Give up what `connect` returned: the training has no use for it any more.

        Args:
            control: that; None if it failed.
            down: the other ranks can't be counted on.
        """
        if control is not None:
            control.close()
        self.watch.close()  # others may be gone before the rest is done

    def renew(self, control: Control) -> None:
        """Close what may have been used again after `leave`, as by Trainer.save_checkpoint; others are made next."""
        control.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the training ends by `error`."""
        if not isinstance(error, PeerFailure):
            self.watch.report_failure(error)
        self.watch.close()


Join = Callable[[pl.Trainer, int, int, Callable[[], FailureWatch]], Connections]
"""Gives a training its connections: its trainer, its rank, how many there are, and what makes a watch."""
_company: ContextVar[Join | None] = ContextVar("lightning_pipes_company", default=None)


def connections(trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]) -> Connections:
    """Those of the training that is about to begin, before they are made: its own, or those of the company it is in."""
    join = _company.get()
    return Connections(make_watch()) if join is None else join(trainer, rank, ranks, make_watch)


@contextmanager
def in_company(join: Join) -> Iterator[None]:
    """Trainings that begin in the block, in its thread, get the connections that `join` gives them."""
    token = _company.set(join)
    try:
        yield
    finally:
        _company.reset(token)
