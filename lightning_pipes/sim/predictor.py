"""Prediction of the batches that a stage computes next, before each of its tasks (Zhao et al. 2022, Algorithm 3).

The context of a stage is the data that it needs for a batch: the layers of the batch on this stage, their parameters
and their optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Task(NamedTuple):
    """A computation of a stage.

    Attributes:
        subnet: the number of the subnet.
        backward: whether the computation is a backward.
        microbatch: the number of the micro-batch.
    """

    subnet: int
    backward: bool
    microbatch: int


class WaitingSubnet(NamedTuple):
    """A subnet that waits at a stage: its input has arrived, and its forward has not begun.

    Attributes:
        subnet: the number of the subnet.
        waits: the earlier subnets that have not yet updated its layers on this stage.
    """

    subnet: int
    waits: frozenset[int]


class PendingBackward(NamedTuple):
    """A backward that will follow a forward.

    Attributes:
        subnet: the subnet of the backward.
        after: the subnet of the forward.
    """

    subnet: int
    after: int


class TaskPrediction(NamedTuple):
    """The contexts to fetch, and the records to send to the previous stage.

    Attributes:
        wanted: the subnets whose contexts are needed next, in order.
        pending: the records that are sent along with the gradient of the task.
    """

    wanted: tuple[int, ...] = ()
    pending: tuple[PendingBackward, ...] = ()


class TaskPredictor(Protocol):
    """Predicts the tasks of one stage. A wrong prediction costs only time."""

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        """Return the contexts that are needed after `task`, which runs now.

        Args:
            task: the task.
            queue: the subnets that wait on the stage, the lowest first. `task.subnet` may be among them.
            received: the records that arrived with the gradient of the task.
        """

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        """Return the contexts that are needed next if no task is running and none is ready, as at the start."""


def find_admissible(queue: Iterable[WaitingSubnet], done: frozenset[int] = frozenset()) -> int | None:
    """Return the first subnet in the queue that may run (Algorithm 2), or None if no subnet may run.

    Args:
        queue: the waiting subnets.
        done: subnets that are assumed to have updated their layers on this stage.
    """
    return next((subnet for subnet, waits in queue if waits <= done), None)


class StepAheadPredictor:
    """Algorithm 3 of the paper, which looks two contexts ahead.

    Before a backward, the predictor assumes that this backward has updated the layers and determines the forward that
    follows. A backward for which the next stage has sent a record comes after that forward. The record is kept until
    the forward is about to run; then the context is fetched and the record is sent on. The last stage sends a record
    for the backward of its next forward, which follows immediately. Before a forward, the predictor determines the next
    forward.

    Unlike in the paper, a record refers to the next forward of this stage, regardless of `after`, and is always sent
    on.

    The printed algorithm never predicts subnet 0, forgets blocked backwards at each call, and changes the list of
    finished subnets when it looks ahead. This implementation does none of these.

    Args:
        last: whether this is the last stage.
    """

    def __init__(self, last: bool) -> None:
        self._last = last
        self._blocked: dict[int, list[int]] = {}  # backwards by the forward that precedes them
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
        following = find_admissible(queue)
        wanted = [subnet for blocked in self._blocked.values() for subnet in blocked]
        return TaskPrediction((*wanted, *([] if following is None else [following])))

    def _backward(
        self, subnet: int, queue: Sequence[WaitingSubnet], received: Sequence[PendingBackward]
    ) -> TaskPrediction:
        for blocked in self._blocked.values():
            if subnet in blocked:
                blocked.remove(subnet)
        forward = find_admissible(queue, frozenset([subnet]))
        if forward is None:
            return TaskPrediction(tuple(each.subnet for each in received))
        if received:
            self._blocked.setdefault(forward, []).extend(each.subnet for each in received)
        pending = [PendingBackward(each.subnet, forward) for each in received]
        if self._last:
            pending.append(PendingBackward(forward, forward))
        return TaskPrediction((forward,), tuple(pending))

    def _forward(self, subnet: int, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        following = find_admissible(queue)
        served = self._blocked.pop(subnet, [])
        return TaskPrediction((*served, *([] if following is None else [following])))


class SimulatedPredictor:
    """Predicts tasks from a simulated order of the tasks of the stage.

    The policy is deterministic, so only the times can be wrong.

    Args:
        order: all tasks, beginning with the first one.
        contexts: the number of contexts to look ahead. More contexts than fit into memory are not useful.
        ran: the tasks that have already run.
    """

    def __init__(self, order: Sequence[Task], contexts: int, ran: Iterable[Task] = ()) -> None:
        self._order = order
        self._contexts = contexts
        self._ran = set(ran)
        self._first = 0  # all tasks before this one have run

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
