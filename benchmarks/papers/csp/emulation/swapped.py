"""A stream of subnets whose layers take turns on devices that hold a few contexts, in virtual time.

As in `stream`, and: a task runs when its layers are there; until those of the first one that is ready are, a later one
that has its own goes ahead, on which no result depends. Each stage loads one layer at a time from its host and saves
one at a time to it. Loads for the first task that is ready take the place of one that is only predicted. A layer can
be loaded when its update has come to the stage's host, and dropped when it is saved; an update that comes while the
layer is here goes right into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Array, Placed
from benchmarks.papers.csp.emulation.stream import Ran, Rules, run
from benchmarks.papers.csp.emulation.swapping import Make, Swapping
from lightning_pipes.ir import InputError, check_count
from lightning_pipes.sim.predictor import (
    PendingBackward,
    SimulatedPredictor,
    StepAheadPredictor,
    Task,
    TaskPrediction,
    WaitingSubnet,
)


@dataclass(frozen=True)
class Swaps:
    """The result of a stream whose layers take turns.

    Attributes:
        makespan: nanoseconds.
        tasks: hits and layers asked for, over all tasks: resident and whole when the task was to start.
        contexts: the same over tasks of another subnet or direction than the one before on the stage.
        late: layers among those without a hit that were on their way, ahead of the task.
        stalled: nanoseconds that stages waited for layers.
        starts: of each forward and backward, by direction, subnet, stage and micro-batch.
    """

    makespan: int
    tasks: tuple[int, ...]
    contexts: tuple[int, ...]
    late: int
    stalled: int
    stages: int
    starts: Array

    @property
    def hit_rate(self) -> float:
        """The share of layers that were there, over all tasks."""
        return self.tasks[0] / self.tasks[1]

    @property
    def switch_hit_rate(self) -> float:
        """The same where a stage turns to another subnet or direction."""
        return self.contexts[0] / self.contexts[1]

    @property
    def stall(self) -> float:
        """The share of the stages' time that they waited for layers."""
        return self.stalled / (self.stages * self.makespan)


class Nothing:
    """Predicts nothing: layers are loaded when they are needed."""

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], told: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        return TaskPrediction()

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        return TaskPrediction()


class InTurn:
    """The prediction of the engine, on every stage by itself: first the subnets of which a stage has run some forwards
    or backwards and not all; then the first forward that may begin, the first subnet that is to come back, and so on in
    turn. Whichever it is, its context is there.

    A subnet that has begun comes back after those that began before it: of what is here the others are needed last.

    Args:
        microbatches: of a subnet.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._begun: dict[int, int] = {}  # tasks that have run, by subnet, in the order in which they began

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], told: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        ran = self._begun[task.subnet] = self._begun.get(task.subnet, 0) + 1
        if ran == 2 * self._microbatches:
            del self._begun[task.subnet]
        return self.idle(queue)

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        doing = [subnet for subnet, ran in self._begun.items() if ran % self._microbatches]
        back = [subnet for subnet, ran in self._begun.items() if not ran % self._microbatches]
        forwards = [subnet for subnet, waits in queue if not waits]
        blocked = [subnet for subnet, waits in queue if waits]
        both = [each for pair in zip_longest(forwards, back) for each in pair if each is not None]
        return TaskPrediction((*doing, *both, *blocked))


def looks_ahead(room: float, context: float) -> int:
    """Contexts that a predictor should look ahead where a device has room for so much, and a context takes as much on
    average: those that fit besides the one that runs, and one more, part of which may."""
    return max(1, int(room / context))


def nothing() -> Make:
    """Layers are loaded when they are needed."""
    return lambda stage: Nothing()


def one_step(placed: Placed) -> Make:
    """The paper's predictor."""
    return lambda stage: StepAheadPredictor(stage == placed.stages - 1)


def in_turn(rules: Rules) -> Make:
    """The prediction of the engine, on each stage by itself."""
    return lambda stage: InTurn(rules.microbatches)


def ahead(placed: Placed, rules: Rules, contexts: float, plain: Ran | None = None) -> Make:
    """By the order that the stream has without swaps, and by the times of the profile."""
    ran = plain or run(placed, rules)
    return lambda stage: SimulatedPredictor(order_of(ran, stage), looks_ahead(contexts, 1.0))


def order_of(ran: Ran, stage: int) -> list[Task]:
    """The tasks of a stage in the order in which they ran."""
    found = []
    for backward, (starts, _) in enumerate((ran.forwards, ran.backwards)):
        for (subnet, k), start in np.ndenumerate(starts[:, stage]):
            found.append((int(start), Task(subnet, bool(backward), k)))
    return [task for _, task in sorted(found)]


def swapped(placed: Placed, rules: Rules, contexts: float, make: Make, jitter: float = 0.0, seed: int = 0) -> Swaps:
    """A stream on stages that each have room for so many contexts, or for the largest one; a context is the layers
    that a subnet needs there, on average.

    Args:
        jitter: by what share tasks take longer or shorter than the profile says, at random.

    Raises:
        InputError: no context, or a backward in two parts.
    """
    check_count("contexts", int(contexts))
    if rules.split:
        raise InputError("layers can't leave between the two parts of a backward; take rules without split")
    ran = Swapping(placed, rules, contexts, make, jitter, seed)
    ran.run()
    return Swaps(ran.end, (*ran.tasks,), (*ran.contexts,), ran.late, ran.stalled, ran.stages, ran.starts)
