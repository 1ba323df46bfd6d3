"""A stream of subnets whose layers take turns on devices with room for a few contexts, in virtual time.

The rules of `stream` apply, with the following additions. A task runs if its layers are on the device. While the layers
of the first ready task are missing, a later task whose layers are present runs first, which does not affect any result.
Each stage loads one layer at a time from its host, and saves one layer at a time to it. A load for the first ready task
replaces a load for a predicted task. A layer can be loaded after its update has arrived at the stage's host, and
dropped after it has been saved. An update that arrives while the layer is on the device is applied to it directly.
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

    A hit is a layer that is completely on the device when its task could start.

    Attributes:
        makespan: the total time in nanoseconds.
        tasks: the number of hits and the number of required layers, over all tasks.
        contexts: the same over tasks whose subnet or direction differs from the previous task on the stage.
        late: the number of layers that were not hits but were being loaded when their task could start.
        stalled: nanoseconds for which stages waited for layers.
        stages: the number of stages.
        starts: the start of each forward and backward, by direction, subnet, stage and micro-batch.
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
        """The share of hits over all tasks."""
        return self.tasks[0] / self.tasks[1]

    @property
    def switch_hit_rate(self) -> float:
        """The share of hits over tasks whose subnet or direction differs from the previous task."""
        return self.contexts[0] / self.contexts[1]

    @property
    def stall(self) -> float:
        """The share of time for which stages wait for layers."""
        return self.stalled / (self.stages * self.makespan)


class Nothing:
    """Predicts nothing, so that layers are loaded when they are needed."""

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], told: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        return TaskPrediction()

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        return TaskPrediction()


class InTurn:
    """The engine's prediction, computed on each stage independently.

    First come the subnets for which the stage has run some but not all forwards, or some but not all backwards. Then
    the first forward that may begin and the first subnet that has to return follow alternately, because either of them
    may be next. Subnets return in the order in which they began.

    Args:
        microbatches: the number of micro-batches of a subnet.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._begun: dict[int, int] = {}  # completed tasks by subnet, in the order of their start

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
    """Return the number of contexts that a predictor should look ahead.

    These are the contexts that fit in addition to the running one, and another one that may fit partly.

    Args:
        room: the memory for layers.
        context: the mean size of a context.
    """
    return max(1, int(room / context))


def nothing() -> Make:
    """Return predictors that predict nothing."""
    return lambda stage: Nothing()


def one_step(placed: Placed) -> Make:
    """Return the paper's predictors."""
    return lambda stage: StepAheadPredictor(stage == placed.stages - 1)


def in_turn(rules: Rules) -> Make:
    """Return predictors that predict as the engine does, on each stage independently."""
    return lambda stage: InTurn(rules.microbatches)


def ahead(placed: Placed, rules: Rules, contexts: float, plain: Ran | None = None) -> Make:
    """Return predictors that use the order of the stream without swaps, simulated with the times of the profile."""
    ran = plain or run(placed, rules)
    return lambda stage: SimulatedPredictor(order_of(ran, stage), looks_ahead(contexts, 1.0))


def order_of(ran: Ran, stage: int) -> list[Task]:
    """Return the tasks of a stage in the order in which they ran."""
    found = []
    for backward, (starts, _) in enumerate((ran.forwards, ran.backwards)):
        for (subnet, k), start in np.ndenumerate(starts[:, stage]):
            found.append((int(start), Task(subnet, bool(backward), k)))
    return [task for _, task in sorted(found)]


def swapped(placed: Placed, rules: Rules, contexts: float, make: Make, jitter: float = 0.0, seed: int = 0) -> Swaps:
    """Emulate a stream on stages with limited memory.

    Args:
        placed: the subnets with the stage of each block.
        rules: the rules of the system.
        contexts: the memory of each stage, in contexts. A context is the mean size of the layers that a subnet needs on
            a stage. The memory is at least as large as the largest context.
        make: returns the predictor of a stage.
        jitter: the largest relative random deviation of a task's time from the profile.
        seed: the seed of these deviations.

    Raises:
        InputError: `contexts` is less than 1, or the backward is split.
    """
    check_count("contexts", int(contexts))
    if rules.split:
        raise InputError("layers can't leave the device between the two parts of a backward; use rules without split")
    ran = Swapping(placed, rules, contexts, make, jitter, seed)
    ran.run()
    return Swaps(ran.end, (*ran.tasks,), (*ran.contexts,), ran.late, ran.stalled, ran.stages, ran.starts)
