"""What connects a training with other ranks: connections of its own, or those that siblings of an array share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_pipes.engine.engine import Turns, Watch
from lightning_pipes.engine.failure import FailureWatch, PeerFailure
from lightning_pipes.engine.mailbox import Transport
from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.barriers import has_purpose
from lightning_pipes.trainer.control import Control
from lightning_pipes.trainer.decision import Decision, Wanted
from lightning_pipes.trainer.kinship import decide_alike, microbatches_among, same_container
from lightning_pipes.trainer.sibling import Sibling, SiblingWatch, current_sibling, wait_in_turn
from lightning_pipes.trainer.stopping import SiblingAgreement, StopAgreement

Idle = Callable[[Callable[[], bool]], None] | None
"""What to do while waiting for a condition."""
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
        """What all ranks tell each other, from now on."""

    def get_ready(self, pipeline: Control) -> None:
        """What is connected by `pipeline` on first use is connected at once, if others would have to wait then."""

    def waits_at(self, barrier: str | None) -> bool:
        """Whether ranks wait for each other at the barrier of that name."""

    @property
    def told_to_end(self) -> bool:
        """Whether this process got SIGTERM, where the Trainer does not hear of it."""

    def wanted(self, wanted: Wanted, ranks: int) -> Wanted:
        """What a training wants, with what follows from the company that it is in."""

    def container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        """The path that `find()` gives, where it is not found yet."""

    def decide(self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]) -> Decision:
        """What `decide()` gives, where it is not decided yet."""

    def check_endless(self, schedule: str) -> None:
        """Whether a schedule will do that does not flush between batches.

        Raises:
            PlanError: it will not.
        """

    def transport(self, make: Callable[[], Transport]) -> Transport:
        """What messages between stages travel by; made where there is none yet."""

    @property
    def engine_watch(self) -> Watch:
        """Where the training's engine tells of failures."""

    @property
    def turns(self) -> Turns | None:
        """What decides when the engine works; None where it has the rank for itself."""

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        """`Sibling.check_later`, or at once where nobody else needs the rank meanwhile."""

    def check(self) -> None:
        """Returns when all that was to be checked later is right."""

    def agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        """What has the ranks of `control`, which are at the same batch, agree on stopping after it."""

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


def connections(trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]) -> Connections:
    """Those of the training that is about to begin, before they are made: its own, or its array's."""
    sibling = current_sibling()
    if sibling is None:
        return OwnConnections(make_watch())
    return SiblingConnections(sibling, trainer, sibling.array.shared.watched(make_watch, rank, ranks))


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

    def wanted(self, wanted: Wanted, ranks: int) -> Wanted:
        return wanted

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
            self.watch.fail(error)
        self.watch.close()


@dataclass
class SiblingConnections:
    """Of a sibling of an array, which leaves them to the next one."""

    sibling: Sibling[Any]
    trainer: pl.Trainer
    watch: FailureWatch

    @property
    def trainings(self) -> int:
        return self.sibling.array.size

    def connect(self, make: Make) -> Control:
        array = self.sibling.array
        greetings = self.sibling.meet(array.shared.greeting(array.size))
        control = array.shared.control(greetings, partial(make, self.watch, wait_in_turn))
        self.sibling.trainer = self.trainer
        private.remove_progress_bars(self.trainer)
        return control

    def get_ready(self, pipeline: Control) -> None:
        pipeline.get_ready()

    def waits_at(self, barrier: str | None) -> bool:
        return has_purpose(barrier, self.trainer)

    @property
    def told_to_end(self) -> bool:
        return self.sibling.array.told_to_end

    def wanted(self, wanted: Wanted, ranks: int) -> Wanted:
        return microbatches_among(wanted, self.sibling, ranks)

    def container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        return same_container(self.sibling, module, find)

    def decide(self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]) -> Decision:
        return decide_alike(self.sibling, module, plain, decide)

    def check_endless(self, schedule: str) -> None:
        raise PlanError(
            f"{schedule} does not flush between batches, which siblings of an array have to; they keep each other's "
            "stages busy, so choose 'jap' or '1f1b'"
        )

    def transport(self, make: Callable[[], Transport]) -> Transport:
        return self.sibling.array.shared.connected(make)

    @property
    def engine_watch(self) -> Watch:
        return SiblingWatch(self.sibling, self.watch)

    @property
    def turns(self) -> Turns | None:
        return self.sibling

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        self.sibling.check_later(come, check, late)

    def check(self) -> None:
        self.sibling.check()

    def agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        return SiblingAgreement(trainer, stops, control, self.sibling).agree

    def go_home(self) -> None:
        self.sibling.array.take_home(self.sibling.index)

    def leave(self, control: Control | None, down: bool) -> None:
        if control is not None and not down:
            self.sibling.array.shared.take_back(control)

    def renew(self, control: Control) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.sibling.fail(error)
