"""When layers change ranks in a run, and what its batches do meanwhile.

    blocking    before the next batch; nothing goes on until the layers are there
    overlapped  their states leave, then their gradients of every step; the target takes those steps, too
    buffered    their states leave and no layer steps any more: gradients wait for the switch (DynPipe, S V-C1)

    batch       4     5     6     7     8     9      The plan says before batch 5 that layers move.
    overlapped  step  step  step  step  step  step   The target takes the steps of 5 to 7 before batch 8 begins.
    buffered    step  step  -     -     step  step   All take those of 6 and 7 before batch 8, which ran without them.

In the first two ways every weight is at every batch what it would be if nothing moved. In the third the gradients of
some batches are those of older weights, as many as there were batches in between; they are applied in their order, each
with the learning rate and all other settings of its batch, clipped as it would have been, one optimizer step for each.

All ranks switch before the same batch, with the pipeline drained: once all have received their layers, or after
MOST_BATCHES batches, where they wait for them. Where weights have to be up to date, no step stays late: validation,
checkpoints, the end of an epoch and of training wait for the transfer to end if steps wait for it.
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

MOST_BATCHES = 32
"""Batches during which layers travel: so many gradients of theirs are kept at most, or of all layers where steps
wait."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MoveRecord:
    """A move that is over.

    Attributes:
        layers: that changed ranks.
        began: the first batch that ran while they travelled; without any, that before which they moved.
        ended: the first one that ran with the layers where they are now.
        late: the number of batches whose steps waited, or which the target of the layers has stepped, too.
        again: layers that this rank received a second time.
        seconds: from its beginning to its end.
        waited: the part of them in which no batch could run.
        stages: the number of layers that each stage has since.
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
        which = f"layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"
        return (
            f"{which} moved before batch {self.ended}: stages have {', '.join(map(str, self.stages))} layers; no "
            f"rank trained for {seconds_text(1e9 * self.waited)}"
        )


class LayerRelocation:
    """The moves of one run on this rank. Collective: all ranks make one, and the same calls of it.

    Before each batch: `is_over`, or a new answer of the planner; then `plans_for`, which may have layers leave. A run
    ends a move by `finish_move`, between two windows, and switches to the plans that this returns.

    Args:
        control: of all ranks.
        mode: how they move: BLOCKING, OVERLAPPED or BUFFERED.
        plans: those of the run.

    Attributes:
        moved: the moves so far.
        max_lag: how many batches ranks may be apart.
        keeps_gradients: whether those that parameters have between two batches still count.
        is_asynchronous: stages step apart.
        is_moving: layers travel.
        is_ending: a move is about to end: no further batch runs before it does.

    Raises:
        PipelineError: steps can't wait with this precision.
    """

    def __init__(self, trainer: pl.Trainer, part: LocalLayers, control: Control, mode: str, plans: Plans) -> None:
        self.moved: list[MoveRecord] = []
        self.max_lag = 1
        self.keeps_gradients = True
        self.is_asynchronous = False
        self.is_ending = self.is_moving = False
        self._trainer, self._part, self._control, self._mode = trainer, part, control, mode
        self._plans = self._target_plans = plans  # of the last batch; where layers travel to
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
        """Refuse ways in which layers travel while batches go on.

        Raises:
            PipelineError: the way is one of them.
        """
        if self._mode != BLOCKING:
            raise PipelineError(
                f"relocation={self._mode!r} has layers travel while batches go on, and {why}; use 'blocking'"
            )

    @property
    def may_defer_steps(self) -> bool:
        """Whether steps wait while layers travel, so that weights are not up to date."""
        return self._mode == BUFFERED

    def plans_for(self, wanted: Plans, number: int) -> Plans:
        """Return the plans that order batch `number`: those `wanted`, unless layers travel to where these have them."""
        if self._transfer is None:
            if self._mode == BLOCKING or wanted.layers in ((), self._part.holdings.layers):
                self._plans = wanted
            else:
                self._begin(wanted, number)
        return self._plans

    def is_over(self, wanted: Plans, number: int) -> bool:
        """Return whether the move ends before batch `number`; all ranks get the same answer.

        It does if other plans are wanted, all layers have arrived, or it takes too long.
        """
        return wanted is not self._target_plans or self._can_end(number)

    def move_now(self, layers: Sequence[Span]) -> None:
        """Bring the layers to where these stages have them, while all ranks wait."""
        begun = read_seconds()
        moves = self._part.holdings.list_moves(layers)
        move_layers(self._part, layers, self.keeps_gradients)
        number, took = self._trainer.fit_loop.total_batch_idx, read_seconds() - begun
        self._record_move(MoveRecord(tuple(m.layer for m in moves), number, number, 0, 0, took, took, _sizes(layers)))

    def defers_steps(self) -> bool:
        """Return whether steps wait, where all stages step at the same time."""
        return self._mode == BUFFERED and self._transfer is not None and self._transfer.has_left

    def before_step(self, number: int) -> None:
        """Send the states of layers that travel, for a stage of a stream is about to step for that batch."""
        if self._transfer is not None and number >= self._began and not self._transfer.has_left:
            self._transfer.send_states()

    def defer_step(self, number: int, which: int, optimizer: Optimizer, layers: Collection[int]) -> bool:
        """Send the step of optimizer `which` for a batch to the ranks to which its layers travel; return whether it
        waits.

        Args:
            layers: those of this rank that it would step, by the gradients that their parameters have.
        """
        if self._transfer is None or not self._transfer.has_left:
            return False
        self._sent_batches.add(number)
        self._transfer.send_step(number, which, optimizer, layers, self._late)
        return self._mode == BUFFERED

    def stop_sending(self) -> None:
        """Prepare for `finish_move`: no further batch runs before it, and the window is drained."""
        self.is_ending = True
        for answer in self._pending:
            answer()
        for hook in self._hooks:
            hook.remove()
        self._paused_at = read_seconds()

    def finish_move(self) -> Plans:
        """Wait until all layers are where they are to be and no step is late, and return the plans of the run now."""
        transfer = self._transfer
        assert transfer is not None
        transfer.end(self._late, self.keeps_gradients)
        self._plans = self._target_plans
        return self._plans

    def record_end(self, number: int) -> None:
        """Keep the record of the move that has ended before batch `number`."""
        transfer, self._transfer, self.is_ending, self.is_moving = self._transfer, None, False, False
        assert transfer is not None
        now, layers = read_seconds(), tuple(m.layer for m in transfer.moves)
        since, late = now - self._began_at, len(self._sent_batches)
        stages, waited = _sizes(self._part.holdings.layers), now - self._paused_at
        self._record_move(MoveRecord(layers, self._began, number, late, transfer.n_resent, since, waited, stages))

    def _record_move(self, moved: MoveRecord) -> None:
        self.moved.append(moved)
        rank_zero_info(str(moved).capitalize())

    def _begin(self, wanted: Plans, number: int) -> None:
        self._transfer = LayerTransfer(self._part, wanted.layers, self._mode == BUFFERED, len(self.moved))
        self._began_at, self._began, self._target_plans, self.is_moving = read_seconds(), number, wanted, True
        _log.debug("move: layers %s leave at batch %d", [m.layer for m in self._transfer.moves], number)
        self._pending.clear()
        self._sent_batches.clear()
        if self.is_asynchronous:  # which tells of every step
            return
        optimizers = self._part.optimizers
        self._hooks = [o.register_step_post_hook(partial(self._follow_step, n)) for n, o in enumerate(optimizers)]
        if self._mode == OVERLAPPED:
            self._transfer.send_states()

    def _follow_step(self, which: int, optimizer: Optimizer, *_: Any) -> None:
        """Follow the step of an optimizer of a schedule that flushes."""
        transfer, part = self._transfer, self._part
        assert transfer is not None
        if transfer.has_left:
            if self._mode == OVERLAPPED:
                self.defer_step(self._trainer.fit_loop.total_batch_idx, which, optimizer, part.holdings.local)
        elif which == len(part.optimizers) - 1:
            transfer.send_states()  # steps wait from the next batch on

    def _can_end(self, number: int) -> bool:
        """Return whether all ranks know that everything has arrived, or it takes too long."""
        assert self._transfer is not None
        self._pending.append(self._control.start_any(not self._transfer.has_arrived))
        if number - self._began >= MOST_BATCHES:
            return True
        return len(self._pending) > self.max_lag and not self._pending.popleft()()[0]


def _sizes(layers: Sequence[Span]) -> tuple[int, ...]:
    return tuple(span.rows for span in layers)
