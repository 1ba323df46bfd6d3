"""When layers change ranks in a run, and what its batches do meanwhile.

    drain       before the next batch; nothing goes on until the layers are there
    ahead       their states leave, then their gradients of every step; the target takes those steps, too
    buffered    their states leave and no layer steps any more: gradients wait for the switch (DynPipe, S V-C1)

    batch       4     5     6     7     8     9      The plan says before batch 5 that layers move.
    ahead       step  step  step  step  step  step   The target takes the steps of 5 to 7 before batch 8 begins.
    buffered    step  step  -     -     step  step   All take those of 6 and 7 before batch 8, which ran without them.

In the first two ways every weight is at every batch what it would be if nothing moved. In the third the gradients of
some batches are those of older weights, as many as batches came in between; they are applied in their order, each with
the learning rate and all else that its batch was told, clipped as it would have been, one optimizer step for each.

All ranks switch at one batch, where the pipeline is drained: when all have what comes to them, or, if that takes more
than MOST_BATCHES, as soon as it is there. Where weights have to be up to date, no step stays late: validation,
checkpoints, the end of an epoch and of training wait for the journey to end if steps wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import PipelineError, Plan, Policy, Program, Span
from lightning_pipes.planning.planner import AHEAD, BUFFERED, DRAIN
from lightning_pipes.sim.units import seconds_text
from lightning_pipes.trainer.moves.journey import Journey, move
from lightning_pipes.trainer.moves.late_steps import LateSteps
from lightning_pipes.trainer.moves.part import Part
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.control import Control

MOST_BATCHES = 32
"""Batches during which layers travel: so many gradients of theirs are kept at most, or of all layers where steps
wait."""


class Run(Protocol):
    """The run in which layers move."""

    trainer: pl.Trainer
    part: Part
    plans: Plans
    engine: Engine

    @property
    def streams(self) -> bool:
        """Whether stages step apart."""

    def drain(self) -> None:
        """Ends the batches under way."""

    def own_gradients(self) -> AbstractContextManager[None]:
        """In the block parameters have the gradients that were accumulated for them."""

    def turn_to(self, plan: Plan, order: Program | Policy) -> None:
        """The next window is that of another plan."""


@dataclass(frozen=True)
class Moved:
    """A move that is over.

    Attributes:
        layers: that changed ranks.
        began: the first batch that ran while they travelled; without any, that before which they moved.
        ended: the first one that ran with the layers where they are now.
        late: the number of batches whose steps waited, or which the rank that the layers came to has stepped, too.
        again: layers that came to this rank a second time.
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
            f"{which} moved before batch {self.ended}: stages have {', '.join(map(str, self.stages))} layers; nobody "
            f"trained for {seconds_text(1e9 * self.waited)}"
        )


class Moving:
    """The moves of one run on this rank. Collective: all ranks make one, and the same calls of it.

    Args:
        control: of all ranks.
        way: how they move.

    Attributes:
        moved: the moves so far.
        apart: how many batches ranks may be apart.
        gradients: whether those that parameters have between two batches still count.

    Raises:
        PipelineError: steps can't wait with this precision.
    """

    def __init__(self, run: Run, control: Control, way: str) -> None:
        self.moved: list[Moved] = []
        self.apart = 1
        self.gradients = True
        self._run, self._control, self._way = run, control, way
        self._plans = self._wanted = run.plans  # of the last batch; where layers travel to
        self._journey: Journey | None = None
        self._ending = False
        self._late = LateSteps()
        self._told: set[int] = set()
        self._began, self._since = 0, 0.0
        self._asked: deque[Callable[[], list[bool]]] = deque()
        self._hooks: list[Any] = []
        if way == BUFFERED and getattr(run.trainer.precision_plugin, "scaler", None) is not None:
            raise PipelineError(
                "moves='buffered' lets optimizer steps wait, and the scaler of precision='16-mixed' looks at the "
                "gradients of each step before the next batch: use 'bf16-mixed', or moves='ahead', or 'drain'"
            )

    def check_layers_stay(self, why: str) -> None:
        """Refuses ways in which layers travel while batches go on.

        Raises:
            PipelineError: the way is one of them.
        """
        if self._way != DRAIN:
            raise PipelineError(f"moves={self._way!r} has layers travel while batches go on, and {why}; use 'drain'")

    def plans(self, revised: Callable[[], Plans], number: int) -> Plans:
        """The plans that order batch `number`: those of the run, unless layers are on their way to where these have
        them.

        Args:
            revised: gives the plans that the run is to have from now on; asked when no layers travel.
        """
        run = self._run
        if self._journey is None:
            run.plans = revised()
        elif run.plans is self._wanted and not self._is_to_end(number):
            return self._plans
        else:
            self.finish(number)
        if self._way == DRAIN or run.plans.layers in ((), run.part.holdings.layers):
            self._plans = run.plans
        else:
            self._begin(run.plans.layers, number)
        return self._plans

    def turn(self, layers: Sequence[Span]) -> None:
        """The layers go where these stages have them, while everybody waits."""
        begun = time.monotonic()
        moves = self._run.part.holdings.moves(layers)
        move(self._run.part, layers, self.gradients)
        number, took = self._run.trainer.fit_loop.total_batch_idx, time.monotonic() - begun
        self._over(Moved(tuple(m.layer for m in moves), number, number, 0, 0, took, took, _sizes(layers)))

    def pauses(self) -> bool:
        """Whether steps wait, where all stages step at the same time."""
        return self._way == BUFFERED and self._journey is not None and self._journey.launched

    def before_step(self, number: int) -> None:
        """A stage of a stream is about to step for that batch."""
        if self._journey is not None and number >= self._began and not self._journey.launched:
            self._journey.launch()

    def takes(self, number: int, which: int, optimizer: Optimizer, layers: Collection[int]) -> bool:
        """Whether the step of these layers of the rank by optimizer `which` for a batch waits, with the gradients that
        their parameters had."""
        if self._journey is None or not self._journey.launched:
            return False
        self._told.add(number)
        self._journey.stepped(number, which, optimizer, layers, self._late)
        return self._way == BUFFERED

    def settle(self) -> None:
        """No step is late any more. No window is open."""
        if self._way == BUFFERED:
            self.finish()

    def finish(self, number: int | None = None) -> None:
        """Layers that travel are where they are to be.

        Args:
            number: of the batch that comes next; by default the one after that of the Trainer.
        """
        journey, run = self._journey, self._run
        if journey is None or self._ending:
            return
        self._ending = True
        run.drain()
        for answer in self._asked:
            answer()
        for hook in self._hooks:
            hook.remove()
        begun = time.monotonic()
        with run.own_gradients():
            journey.end(self._late, self.gradients)
            self._journey, self._ending, self._plans = None, False, self._wanted
            run.turn_to(*self._plans.for_rows(run.engine.plan.jobs[0].rows))
        now, layers = time.monotonic(), tuple(m.layer for m in journey.moves)
        ended = run.trainer.fit_loop.total_batch_idx + 1 if number is None else number
        since, late = now - self._since, len(self._told)
        stages = _sizes(run.part.holdings.layers)
        self._over(Moved(layers, self._began, ended, late, journey.again, since, now - begun, stages))

    def _over(self, moved: Moved) -> None:
        self.moved.append(moved)
        rank_zero_info(str(moved).capitalize())

    def _begin(self, layers: Sequence[Span], number: int) -> None:
        run = self._run
        self._journey = Journey(run.part, layers, self._way == BUFFERED, len(self.moved))
        self._since, self._began, self._wanted = time.monotonic(), number, run.plans
        self._asked.clear()
        self._told.clear()
        if run.streams:  # which tells of every step
            return
        self._hooks = [o.register_step_post_hook(partial(self._stepped, n)) for n, o in enumerate(run.part.optimizers)]
        if self._way == AHEAD:
            self._journey.launch()

    def _stepped(self, which: int, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer of a schedule that flushes has stepped."""
        journey, run = self._journey, self._run
        assert journey is not None
        if journey.launched:
            if self._way == AHEAD:
                self.takes(run.trainer.fit_loop.total_batch_idx, which, optimizer, run.part.holdings.local)
        elif which == len(run.part.optimizers) - 1:
            journey.launch()  # steps wait from the next batch on

    def _is_to_end(self, number: int) -> bool:
        """Whether all ranks know that everything has arrived, or it takes too long."""
        assert self._journey is not None
        self._asked.append(self._control.start_any(not self._journey.arrived))
        if number - self._began >= MOST_BATCHES:
            return True
        return len(self._asked) > self.apart and not self._asked.popleft()()[0]


def _sizes(layers: Sequence[Span]) -> tuple[int, ...]:
    return tuple(span.rows for span in layers)
