"""Which batches a stage computes next, asked before each task of a stage (Zhao et al. 2022, Algorithm 3).

A stage's context is what it needs of a batch: its layers there, parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Task(NamedTuple):
    """A computation of a stage."""

    subnet: int
    backward: bool
    microbatch: int


class WaitingSubnet(NamedTuple):
    """A subnet that waits at a stage: its input is there, and its forward has not begun.

    Attributes:
        waits: earlier subnets whose update of its layers there has not come.
    """

    subnet: int
    waits: frozenset[int]


class PendingBackward(NamedTuple):
    """A backward that will come once a forward has run."""

    subnet: int
    after: int


class TaskPrediction(NamedTuple):
    """Contexts to fetch, and records to tell the stage before.

    Attributes:
        wanted: subnets whose context is needed next, the first one first.
        pending: goes along with the gradient that the task sends.
    """

    wanted: tuple[int, ...] = ()
    pending: tuple[PendingBackward, ...] = ()


class TaskPredictor(Protocol):
    """Predicts for one stage. A wrong prediction costs time only."""

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        """Return the contexts that come after `task`, which runs now.

        Args:
            queue: the subnets that wait on the stage, the lowest first; `task.subnet` may be among them.
            received: what came with its gradient.
        """

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        """Return the contexts that come next where nothing runs and nothing is ready, as at the start."""


def admissible(queue: Iterable[WaitingSubnet], done: frozenset[int] = frozenset()) -> int | None:
    """Return the first of the queue that may run once the subnets `done` have stepped here (Algorithm 2); None if none
    may."""
    return next((subnet for subnet, waits in queue if waits <= done), None)


class StepAheadPredictor:
    """Algorithm 3 of the paper, two contexts ahead.

    Before a backward it pretends that this has stepped and looks for the forward that follows. A backward of which the
    stage behind has sent a record comes after that forward. The record is kept until the forward is about to run;
    then the context is fetched, and the record sent on. The last stage tells of the backward of its next forward, which
    follows at once. Before a forward it looks for the next one.

    Unlike the paper's, a record counts from this stage's next forward, whatever `after` says, and always goes on.

    As printed, subnet 0 is never predicted, what is blocked is forgotten at each call, and the list of finished
    subnets is changed by pretending; none of this is so here.

    Args:
        last: whether this is the last stage.
    """

    def __init__(self, last: bool) -> None:
        self._last = last
        self._blocked: dict[int, list[int]] = {}  # by the forward that comes before these backwards
        self._now: tuple[int, bool] | None = None
        self._prediction = TaskPrediction()

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        if self._now == task[:2] and not received:
            return self._prediction
        self._now = task[:2]
        others = [each for each in queue if each.subnet != task.subnet]
        self._prediction = (
            self._backward(task.subnet, others, received) if task.backward else self._forward(task.subnet, others)
        )
        return self._prediction

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        self._now = None
        following = admissible(queue)
        wanted = [subnet for blocked in self._blocked.values() for subnet in blocked]
        return TaskPrediction((*wanted, *([] if following is None else [following])))

    def _backward(
        self, subnet: int, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward]
    ) -> TaskPrediction:
        for blocked in self._blocked.values():
            if subnet in blocked:
                blocked.remove(subnet)
        forward = admissible(queue, frozenset([subnet]))
        if forward is None:
            return TaskPrediction(tuple(each.subnet for each in received))
        if received:
            self._blocked.setdefault(forward, []).extend(each.subnet for each in received)
        pending = [PendingBackward(each.subnet, forward) for each in received]
        if self._last:
            pending.append(PendingBackward(forward, forward))
        return TaskPrediction((forward,), tuple(pending))

    def _forward(self, subnet: int, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        following = admissible(queue)
        served = self._blocked.pop(subnet, [])
        return TaskPrediction((*served, *([] if following is None else [following])))


class SimulatedPredictor:
    """Predicts by a simulated order of the stage's tasks. The policy is deterministic, so only times can be wrong.

    Args:
        order: of all tasks from the first one on.
        contexts: how many it looks ahead; further than what fits into memory is of no use.
        ran: those of them that have run.
    """

    def __init__(self, order: Sequence[Task], contexts: int, ran: Iterable[Task] = ()) -> None:
        self._order = order
        self._contexts = contexts
        self._ran = set(ran)
        self._first = 0  # all before it have run

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        self._ran.add(task)
        return self.idle(queue)

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        while self._first < len(self._order) and self._order[self._first] in self._ran:
            self._ran.remove(self._order[self._first])
            self._first += 1
        wanted: dict[int, None] = {}
        for at in range(self._first, len(self._order)):
            coming = self._order[at]
            if coming not in self._ran:
                wanted[coming.subnet] = None
                if len(wanted) == self._contexts:
                    break
        return TaskPrediction(tuple(wanted))
