"""Predictors that only the emulation has; see `lightning_pipes.sim.predictor`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from lightning_pipes.sim.predictor import PendingBackward, Task, TaskPrediction, WaitingSubnet


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
