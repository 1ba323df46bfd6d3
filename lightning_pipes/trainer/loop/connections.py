"""Connections of a training with other ranks: its own, or those of the company that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

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


class Connections(Protocol):
    """From `setup_environment` of a strategy to its `teardown`.

    Attributes:
        watch: sees failures of other ranks, and tells them of ours.
    """

    watch: FailureWatch

    @property
    def trainings(self) -> int:
        """How many share the ranks, this one included."""

    def connect(self, make: Make) -> Control:
        """The control through which all ranks tell each other things, from now on."""

    def get_ready(self, pipeline: Control) -> None:
        """Connects at once what `pipeline` connects on first use, if others would have to wait then."""

    def waits_at(self, barrier: str | None) -> bool:
        """Whether ranks wait for each other at the barrier of that name."""

    @property
    def told_to_end(self) -> bool:
        """Whether this process got SIGTERM, where the Trainer does not hear of it."""

    def requested(self, request: RunRequest, ranks: int) -> RunRequest:
        """The run that a training asks for, with what follows from the company that it is in."""

    def container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        """The path that `find()` gives, where it is not found yet."""

    def decide(self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]) -> Decision:
        """The decision that `decide()` makes, where there is none yet."""

    def check_endless(self, schedule: str) -> None:
        """Whether a schedule will do that does not flush between batches.

        Raises:
            PlanError: it will not.
        """

    def transport(self, make: Callable[[], Transport]) -> Transport:
        """The transport of messages between stages; made where there is none yet."""

    @property
    def engine_watch(self) -> Watch:
        """Where the training's engine tells of failures."""

    @property
    def turns(self) -> Turns | None:
        """The turns that decide when the engine works; None where it has the rank for itself."""

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        """Has `check` called when `come()`, or at once where nobody else needs the rank meanwhile.

        Args:
            late: the number of turns of the training after which an error of `check` ends it on all ranks.
        """

    def check(self) -> None:
        """Returns when all that was to be checked later is right."""

    def agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        """A function that has the ranks of `control`, which are at the same batch, agree on stopping after it."""

    def go_home(self) -> None:
        """The training's weights and optimizers are to be its own again."""

    def leave(self, control: Control | None, down: bool) -> None:
        """The training has no use for what `connect` returned any more.

        Args:
            control: that; None if it failed.
            down: the other ranks can't be counted on.
        """

    def renew(self, control: Control) -> None:
        """After `leave`, others are about to be made; it may have been used again, as by Trainer.save_checkpoint."""

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that the training ends by `error`."""


Join = Callable[[pl.Trainer, int, int, Callable[[], FailureWatch]], Connections]
"""Gives a training its connections: its trainer, its rank, how many there are, and what makes a watch."""
_company: ContextVar[Join | None] = ContextVar("lightning_pipes_company", default=None)


def connections(trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]) -> Connections:
    """Those of the training that is about to begin, before they are made: its own, or those of the company it is in."""
    join = _company.get()
    return OwnConnections(make_watch()) if join is None else join(trainer, rank, ranks, make_watch)


@contextmanager
def in_company(join: Join) -> Iterator[None]:
    """Trainings that begin in the block, in its thread, get the connections that `join` gives them."""
    token = _company.set(join)
    try:
        yield
    finally:
        _company.reset(token)


@dataclass
class OwnConnections:
    """Of a training on its own."""

    watch: FailureWatch

    @property
    def trainings(self) -> int:
        return 1

    def connect(self, make: Make) -> Control:
        return make(self.watch, None)

    def get_ready(self, pipeline: Control) -> None:
        pass

    def waits_at(self, barrier: str | None) -> bool:
        return True

    @property
    def told_to_end(self) -> bool:
        return False

    def requested(self, request: RunRequest, ranks: int) -> RunRequest:
        return request

    def container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        return find()

    def decide(self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]) -> Decision:
        return decide()

    def check_endless(self, schedule: str) -> None:
        pass

    def transport(self, make: Callable[[], Transport]) -> Transport:
        return make()

    @property
    def engine_watch(self) -> Watch:
        return self.watch

    @property
    def turns(self) -> Turns | None:
        return None

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        check()

    def check(self) -> None:
        pass

    def agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        return stops.agree

    def go_home(self) -> None:
        pass

    def leave(self, control: Control | None, down: bool) -> None:
        if control is not None:
            control.close()
        self.watch.close()  # nobody waits for anybody any more: others may be gone before the rest is done

    def renew(self, control: Control) -> None:
        control.close()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PeerFailure):
            self.watch.report_failure(error)
        self.watch.close()
