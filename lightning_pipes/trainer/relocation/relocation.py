"""The moves of layers between ranks during a run, and the way in which batches continue meanwhile.

    blocking    The layers move before the next batch. All ranks wait until they have arrived.
    overlapped  Their states are sent, then their gradients of every step. The target takes these steps, too.
    buffered    Their states are sent, and no layer steps: gradients wait for the switch (DynPipe, S V-C1).

    batch       4     5     6     7     8     9      The plan decides before batch 5 that layers move.
    overlapped  step  step  step  step  step  step   The target takes the steps of 5 to 7 before batch 8 begins.
    buffered    step  step  -     -     step  step   All ranks take the steps of 6 and 7 before batch 8.

With the first two modes, every weight has the same values at every batch as if no layer moved. With "buffered", the
gradients of some batches are computed with older weights, which lack the steps of the batches since the steps began to
wait. The gradients are applied in the order of the batches, in one optimizer step for each batch, with the learning
rate and all other settings of this batch, and clipped as they would have been.

All ranks switch before the same batch, with a drained pipeline. They switch as soon as all ranks have received their
layers. After MAX_MOVING_BATCHES batches, they wait for the layers. When weights have to be up to date, no step may be
late: if steps wait for the transfer, then validation, checkpoints, the end of an epoch and the end of training wait for
    it,
too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.planning.planner import BLOCKING, BUFFERED, OVERLAPPED
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.relocation.transfer import DeferredSteps, LayerTransfer, move_layers

MAX_MOVING_BATCHES = 32
"""The largest number of batches during which layers travel.

It limits the number of gradients that are kept: of the layers that travel, or of all layers if steps wait.
"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MoveRecord:
    """A move that has ended.

    Attributes:
        layers: the layers that have changed ranks.
        began: the first batch that ran while they travelled. If no batch did, the batch before which they moved.
        ended: the first batch that ran with the layers in their new places.
        late: the number of batches whose steps waited, or were also taken by the target of the layers.
        again: the number of layers that this rank received a second time.
        seconds: the duration of the move.
        waited: the part of this duration in which no batch could run.
        stages: the new number of layers of each stage.
    """

    layers: tuple[int, ...]
    began: int
    ended: int
    late: int
    again: int
    seconds: float
    waited: float
    stages: tuple[int, ...]

    def __str__(self) -> str:
        which = f"Layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"
        return (
            f"{which} moved to other ranks before batch {self.ended}, and stages now have "
            f"{', '.join(map(str, self.stages))} layers. Training paused for {seconds_text(1e9 * self.waited)}"
        )


class LayerRelocation:
    """The moves of one run on this rank.

    Collective: all ranks create one, and call its methods in the same order. Before each batch, a run calls `is_over`,
    or gets a new answer of the planner. It then calls `plans_for`, which may begin a move. A run ends a move between
    two windows by `finish_move`, and switches to the plans that this method returns.

    Args:
        trainer: the trainer of the run.
        local_layers: the layers of this rank.
        control: the collectives of all ranks.
        mode: the way in which layers move: BLOCKING, OVERLAPPED or BUFFERED.
        plans: the plans of the run.

    Attributes:
        moved: the moves until now.
        max_lag: the largest number of batches by which ranks may be apart.
        keeps_gradients: whether the gradients that parameters have between two batches still count.
        is_asynchronous: whether each stage steps independently of the other stages.
        is_moving: whether layers travel.
        is_ending: whether a move is about to end. No further batch runs before its end.

    Raises:
        PipelineError: the mode is BUFFERED, and the precision does not allow steps to wait.
    """

    def __init__(
        self, trainer: pl.Trainer, local_layers: LocalLayers, control: Control, mode: str, plans: Plans
    ) -> None:
        self.moved: list[MoveRecord] = []
        self.max_lag = 1
        self.keeps_gradients = True
        self.is_asynchronous = False
        self.is_ending = self.is_moving = False
        self._trainer, self._local_layers, self._control, self._mode = trainer, local_layers, control, mode
        self._plans = self._target_plans = plans  # of the last batch, and of the target of a move
        self._transfer: LayerTransfer | None = None
        self._late = DeferredSteps()
        self._sent_batches: set[int] = set()
        self._began, self._began_at, self._paused_at = 0, 0.0, 0.0
        self._pending: deque[Callable[[], list[bool]]] = deque()
        self._hooks: list[Any] = []
        if mode == BUFFERED and getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise PipelineError(
                "relocation='buffered' delays optimizer steps, and the scaler of precision='16-mixed' needs the "
                "gradients of each step before the next batch. Use 'bf16-mixed', or relocation='overlapped' or "
                "'blocking'"
            )

    def check_layers_stay(self, why: str) -> None:
        """Check that layers do not travel while batches continue.

        Args:
            why: the reason why this is not possible, used in the error message.

        Raises:
            PipelineError: the mode is not BLOCKING.
        """
        if self._mode != BLOCKING:
            raise PipelineError(
                f"relocation={self._mode!r} moves layers while batches are in flight, but {why}. Use "
                "relocation='blocking'"
            )

    @property
    def may_defer_steps(self) -> bool:
        """Whether steps wait while layers travel, so that weights are not always up to date."""
        return self._mode == BUFFERED

    def plans_for(self, wanted: Plans, number: int) -> Plans:
        """Return the plans that order batch `number`.

        These are the `wanted` plans, unless layers have to travel before these plans can be used.
        """
        if self._transfer is None:
            if self._mode == BLOCKING or wanted.layers in ((), self._local_layers.holdings.layers):
                self._plans = wanted
            else:
                self._begin(wanted, number)
        return self._plans

    def is_over(self, wanted: Plans, number: int) -> bool:
        """Return whether the move ends before batch `number`. All ranks get the same answer.

        It ends if other plans are wanted, if all layers have arrived, or if it takes too long.
        """
        return wanted is not self._target_plans or self._can_end(number)

    def move_now(self, layers: Sequence[Span]) -> None:
        """Move the layers to the stages that should have them, while all ranks wait."""
        begun = read_seconds()
        moves = self._local_layers.holdings.list_moves(layers)
        move_layers(self._local_layers, layers, self.keeps_gradients)
        number, took = self._trainer.fit_loop.total_batch_idx, read_seconds() - begun
        self._record_move(MoveRecord(tuple(m.layer for m in moves), number, number, 0, 0, took, took, _sizes(layers)))

    def defers_steps(self) -> bool:
        """Return whether steps wait now. This is for schedules in which all stages step at the same time."""
        return self._mode == BUFFERED and self._transfer is not None and self._transfer.has_left

    def before_step(self, number: int) -> None:
        """Send the states of the layers that travel, before a stage of a stream steps for batch `number`."""
        if self._transfer is not None and number >= self._began and not self._transfer.has_left:
            self._transfer.send_states()

    def defer_step(self, number: int, which: int, optimizer: Optimizer, layers: Collection[int]) -> bool:
        """Send the step of optimizer `which` for a batch to the targets of the layers that travel, and return whether
        it waits.

        Args:
            number: the number of the batch.
            which: the number of the optimizer.
            optimizer: the optimizer.
            layers: the layers of this rank that it would step with their current gradients.
        """
        if self._transfer is None or not self._transfer.has_left:
            return False
        self._sent_batches.add(number)
        self._transfer.send_step(number, which, optimizer, layers, self._late)
        return self._mode == BUFFERED

    def stop_sending(self) -> None:
        """Prepare for `finish_move`: the window is drained, and no further batch runs before it."""
        self.is_ending = True
        for answer in self._pending:
            answer()
        for hook in self._hooks:
            hook.remove()
        self._paused_at = read_seconds()

    def finish_move(self) -> Plans:
        """Wait until all layers are in their new places and no step is late, and return the plans that the run uses
        now."""
        transfer = self._transfer
        assert transfer is not None
        transfer.end(self._late, self.keeps_gradients)
        self._plans = self._target_plans
        return self._plans

    def record_end(self, number: int) -> None:
        """Record the move that has ended before batch `number`."""
        transfer, self._transfer, self.is_ending, self.is_moving = self._transfer, None, False, False
        assert transfer is not None
        now, layers = read_seconds(), tuple(m.layer for m in transfer.moves)
        since, late = now - self._began_at, len(self._sent_batches)
        stages, waited = _sizes(self._local_layers.holdings.layers), now - self._paused_at
        self._record_move(MoveRecord(layers, self._began, number, late, transfer.n_resent, since, waited, stages))

    def _record_move(self, moved: MoveRecord) -> None:
        self.moved.append(moved)
        rank_zero_info(str(moved))

    def _begin(self, wanted: Plans, number: int) -> None:
        self._transfer = LayerTransfer(self._local_layers, wanted.layers, self._mode == BUFFERED, len(self.moved))
        self._began_at, self._began, self._target_plans, self.is_moving = read_seconds(), number, wanted, True
        _log.debug("move: layers %s leave at batch %d", [m.layer for m in self._transfer.moves], number)
        self._pending.clear()
        self._sent_batches.clear()
        if self.is_asynchronous:  # the stream reports every step
            return
        optimizers = self._local_layers.optimizers
        self._hooks = [o.register_step_post_hook(partial(self._follow_step, n)) for n, o in enumerate(optimizers)]
        if self._mode == OVERLAPPED:
            self._transfer.send_states()

    def _follow_step(self, which: int, optimizer: Optimizer, *_: Any) -> None:
        """Handle the step of an optimizer, with a schedule that flushes."""
        transfer, local_layers = self._transfer, self._local_layers
        assert transfer is not None
        if transfer.has_left:
            if self._mode == OVERLAPPED:
                self.defer_step(self._trainer.fit_loop.total_batch_idx, which, optimizer, local_layers.holdings.local)
        elif which == len(local_layers.optimizers) - 1:
            transfer.send_states()  # steps wait from the next batch on

    def _can_end(self, number: int) -> bool:
        """Return whether all ranks have received everything, or the move takes too long."""
        assert self._transfer is not None
        self._pending.append(self._control.start_any(not self._transfer.has_arrived))
        if number - self._began >= MAX_MOVING_BATCHES:
            return True
        return len(self._pending) > self.max_lag and not self._pending.popleft()()[0]


def _sizes(layers: Sequence[Span]) -> tuple[int, ...]:
    return tuple(span.rows for span in layers)
