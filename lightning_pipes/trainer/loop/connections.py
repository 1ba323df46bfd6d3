"""Connections of a training to other ranks, which are either its own or shared with other trainings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.engine import Turns, Watch
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.control import Control

Idle = Callable[[Callable[[], bool]], None] | None
"""Does other work until the given condition is true."""
MakeControl = Callable[[FailureWatch, Idle], Control]
"""Returns the control of a training."""


class Connections:
    """Connections of a training with ranks of its own, from `setup_environment` of a strategy to its `teardown`.

    Trainings that share ranks use a subclass that overrides the methods that differ.

    Attributes:
        watch: detects failures of other ranks, and reports the failure of this rank.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.watch = watch

    @property
    def n_siblings(self) -> int:
        """Number of trainings that share the ranks, this one included."""
        return 1

    def connect(self, make: MakeControl) -> Control:
        """Return the control through which all ranks exchange objects from now on."""
        return make(self.watch, None)

    def connect_eagerly(self, pipeline: Control) -> None:
        """Open the connections that `pipeline` opens on first use, if other trainings would wait at that time."""

    def waits_at(self, barrier: str | None) -> bool:
        """Return whether ranks wait for each other at the barrier of this name."""
        return True

    @property
    def is_terminated_by_signal(self) -> bool:
        """Whether this process received SIGTERM, and the Trainer does not handle it."""
        return False

    def complete_request(self, request: RunRequest, ranks: int) -> RunRequest:
        """Return the request of a training, completed by settings of the trainings that share its ranks."""
        return request

    @property
    def computes_alone(self) -> bool:
        """Whether no other training computes on the ranks yet, so that steps of this training can be timed."""
        return True

    def agree_on_container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        """Return the path of the container. Trainings of equal modules call `find` once."""
        return find()

    def agree_on_decision(
        self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
    ) -> Decision:
        """Return the decision. Trainings of equal modules that request the same cut call `decide` once."""
        return decide()

    def share_work_of_others(self) -> Sequence[float]:
        """Return the seconds per batch of the other trainings on each rank, equal on all ranks. Collective.

        The result is empty if no other training was measured.
        """
        return ()

    def find_tensor(self, source: Hashable, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a tensor with the value that another training has read from the same files, or None.

        Args:
            source: identifies an entry of the files and its content.
            dtype: the dtype of the tensor.
            device: the device of the tensor.
        """
        return None

    def share_tensors(self, module: nn.Module, sources: Mapping[int, Hashable]) -> None:
        """Let the tensors that do not train use the memory of equal tensors of other trainings.

        Args:
            module: the module after it was cut.
            sources: the sources of the tensors that were read from files, by the id of the tensor.
        """

    def check_asynchronous(self, schedule: str) -> None:
        """Check whether a schedule that does not flush between batches can be used.

        Raises:
            PlanError: the schedule cannot be used.
        """

    def open_transport(self, make: Callable[[], Transport]) -> Transport:
        """Return the transport of the messages between stages. Only one of the trainings calls `make`."""
        return make()

    @property
    def engine_watch(self) -> Watch:
        """The watch to which the training's engine reports failures."""
        return self.watch

    @property
    def turns(self) -> Turns | None:
        """The turns that determine when the engine works, or None if the training does not share its ranks."""
        return None

    def check_later(self, is_ready: Callable[[], bool], check: Callable[[], object], max_turns: int) -> None:
        """Call `check` when `is_ready()` is true, or immediately if no other training needs the rank in the meantime.

        Args:
            is_ready: returns whether `check` can be called without waiting.
            check: raises an error if the training has to end.
            max_turns: number of turns of the training after which an error of `check` ends it on all ranks.
        """
        check()

    def check(self) -> None:
        """Call all checks that `check_later` has deferred."""

    def make_agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        """Return a function with which the ranks of `control` agree on stops. All of them must be at the same batch."""
        return stops.agree_on_stop

    def release_state(self) -> None:
        """Move the training's weights and optimizers out of the memory that trainings share."""

    def trim_memory_later(self) -> None:
        """Return free memory to the system as soon as the caller has released its own, if trainings share a heap."""

    def release_control(self, control: Control | None, peers_ended: bool) -> None:
        """Release the control that `connect` returned.

        Args:
            control: the control, or None if `connect` failed.
            peers_ended: whether other ranks may have ended.
        """
        if control is not None:
            control.close()
        self.watch.close()  # other ranks may end before this rank has finished the rest

    def renew_control(self, control: Control) -> None:
        """Close connections that were used after `release_control`, for example by Trainer.save_checkpoint."""
        control.close()

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that the training ends because of `error`."""
        if not isinstance(error, PeerFailure):
            self.watch.report_failure(error)
        self.watch.close()


JoinTrainings = Callable[[pl.Trainer, int, int, Callable[[], FailureWatch]], Connections]
"""Returns the connections of a training, given its trainer, its rank, the number of ranks, and a factory of watches."""
_shared_connections: ContextVar[JoinTrainings | None] = ContextVar("lightning_pipes_shared_connections", default=None)


def make_connections(trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]) -> Connections:
    """Return the connections of the next training: its own, or the shared connections that `share_connections`
    specifies."""
    join = _shared_connections.get()
    return Connections(make_watch()) if join is None else join(trainer, rank, ranks, make_watch)


@contextmanager
def share_connections(join: JoinTrainings) -> Iterator[None]:
    """Make trainings that begin in the block and in its thread use the connections that `join` returns."""
    token = _shared_connections.set(join)
    try:
        yield
    finally:
        _shared_connections.reset(token)
