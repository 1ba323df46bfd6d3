"""Connections of a sibling: those that all siblings of its array share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_pipes.arrays.siblings.agreement import SiblingAgreement
from lightning_pipes.arrays.siblings.barriers import has_purpose
from lightning_pipes.arrays.siblings.compatibility import (
    decide_shared_cut,
    find_shared_container,
    with_default_microbatches,
)
from lightning_pipes.arrays.siblings.sibling import Sibling, SiblingWatch, wait_in_turn
from lightning_pipes.engine.engine import Turns, Watch
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.connections import Connections, Make
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.control import Control


def join(
    sibling: Sibling[Any], trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]
) -> Connections:
    """Return the connections for a sibling's run, created lazily; the first sibling creates the watch."""
    return SiblingConnections(sibling, trainer, sibling.array.shared.get_watch(make_watch, rank, ranks))


class SiblingConnections(Connections):
    """Connections of a sibling of an array, which leaves them to the next one."""

    def __init__(self, sibling: Sibling[Any], trainer: pl.Trainer, watch: FailureWatch) -> None:
        super().__init__(watch)
        self.sibling = sibling
        self.trainer = trainer

    @property
    @override
    def n_trainings(self) -> int:
        return self.sibling.array.size

    @override
    def connect(self, make: Make) -> Control:
        array = self.sibling.array
        descriptions = self.sibling.meet_peers(array.shared.describe_free_controls(array.size))
        control = array.shared.take_control(descriptions, partial(make, self.watch, wait_in_turn))
        self.sibling.trainer = self.trainer
        private.remove_progress_bars(self.trainer)
        return control

    @override
    def get_ready(self, pipeline: Control) -> None:
        pipeline.get_ready()

    @override
    def waits_at(self, barrier: str | None) -> bool:
        return has_purpose(barrier, self.trainer)

    @property
    @override
    def is_ended_by_peer(self) -> bool:
        return self.sibling.array.is_terminated

    @override
    def complete_request(self, request: RunRequest, ranks: int) -> RunRequest:
        return with_default_microbatches(request, self.sibling, ranks)

    @override
    def agree_on_container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        return find_shared_container(self.sibling, module, find)

    @override
    def agree_on_decision(
        self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
    ) -> Decision:
        return decide_shared_cut(self.sibling, module, plain, decide)

    @override
    def check_endless(self, schedule: str) -> None:
        raise PlanError(
            f"{schedule} does not flush between batches, which siblings of an array have to; they keep each other's "
            "stages busy, so choose 'jap' or '1f1b'"
        )

    @override
    def open_transport(self, make: Callable[[], Transport]) -> Transport:
        return self.sibling.array.shared.get_transport(make)

    @property
    @override
    def engine_watch(self) -> Watch:
        return SiblingWatch(self.sibling, self.watch)

    @property
    @override
    def turns(self) -> Turns | None:
        return self.sibling

    @override
    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        self.sibling.check_later(come, check, late)

    @override
    def check(self) -> None:
        self.sibling.check()

    @override
    def make_agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        return SiblingAgreement(trainer, stops, control, self.sibling).agree

    @override
    def go_home(self) -> None:
        self.sibling.array.release_sibling(self.sibling.index)

    @override
    def release_control(self, control: Control | None, down: bool) -> None:
        if control is not None and not down:
            self.sibling.array.shared.return_control(control)

    @override
    def renew_control(self, control: Control) -> None:
        pass

    @override
    def report_failure(self, error: BaseException) -> None:
        self.sibling.report_failure(error)
