"""Predicts the next tasks on the stages of a rank, with the predictors of `sim.predictor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_pipes.cost import Link
from lightning_pipes.cost.links import FREE_LINK
from lightning_pipes.engine.residency.mirrors import PendingTree, TreeTransport
from lightning_pipes.ir import Instruction, Kind, LayerUse, Plan, Policy
from lightning_pipes.sim.predictor import (
    PendingBackward,
    SimulatedPredictor,
    StepAheadPredictor,
    Task,
    TaskPredictor,
    WaitingSubnet,
)
from lightning_pipes.sim.simulator import simulate

PREDICTORS = ("in_turn", "algorithm_3", "simulated")
"""The names of the predictors.

"in_turn" uses only the batches that the rank has begun and the instructions that are ready. "algorithm_3" is Algorithm
3 of NASPipe. "simulated" simulates the order of the policy with estimated times.
"""
MAX_CONTEXTS = 8
"""The number of batches that a simulated order is followed ahead. Layers without room are not loaded."""
Queue = Callable[[int], Sequence[WaitingSubnet]]
"""Returns the batches that wait for their forward on a stage, in order."""


@dataclass(frozen=True)
class PredictorChoice:
    """The predictor that all stages of a training run use.

    Attributes:
        name: one of `PREDICTORS`, except the first one.
        cost: returns the time of a layer, in any unit.
        transport: sends the records of Algorithm 3 to other ranks, if there are any.
    """

    name: str
    cost: Callable[[str], float]
    transport: TreeTransport | None = None


class UpcomingTasks:
    """Predicts the next tasks of one rank in one window.

    Args:
        choice: the predictor to use.
        policy: the policy of the window.
        plan: the plan of the window.
        rank: the rank of this process in the pipeline.
        window: the number of the window.
        notify: called when a record has arrived from another rank.
    """

    def __init__(
        self,
        choice: PredictorChoice,
        policy: Policy,
        plan: Plan,
        rank: int,
        window: int,
        notify: Callable[[], None],
    ) -> None:
        self._policy, self._plan, self._stages, self._cost = policy, plan, plan.stages[rank], choice.cost
        self._predictors: dict[int, TaskPredictor] = {
            stage: StepAheadPredictor(stage == plan.n_stages - 1) for stage in self._stages
        }
        self._notes = _Notes(choice.transport, plan, rank, window, notify) if choice.name == "algorithm_3" else None
        self._uses: dict[int, LayerUse] = {}  # of the last batches, if their order is simulated
        self._ran: list[Task] = []
        self._is_old = False
        self._running: tuple[int, tuple[int, ...]] | None = None  # the stage, and the batches that it needs next

    def enter(self, batch: int, use: LayerUse) -> None:
        """Register the next batch and the layers that it uses."""
        if self._notes is not None:
            self._notes.enter(batch)
            return
        self._uses[batch] = use
        self._uses.pop(batch - 2 * self._policy.depth, None)
        self._ran = [task for task in self._ran if task.subnet in self._uses]
        self._is_old = True

    def begin_task(self, i: Instruction, queue: Queue) -> None:
        """Predict the tasks after a forward or backward that begins now."""
        self._simulate()
        task = Task(i.batch, i.kind is not Kind.F, self._plan.spans(i.kind, i.stage).index(i.span))
        records = self._notes.take_records(i) if self._notes is not None and task.backward else ()
        prediction = self._predictors[i.stage].before(task, queue(i.stage), records)
        self._running = i.stage, prediction.wanted
        if self._notes is None:
            self._ran.append(task)
        elif task.backward and not task.microbatch:
            self._notes.send_records(i, prediction.pending)

    def end_task(self) -> None:
        """Discard the prediction for the task that has ended."""
        self._running = None

    def contexts(self, queue: Queue) -> Iterator[tuple[int, int]]:
        """Yield the stages and batches of the next tasks, in the order in which they will probably run."""
        self._simulate()
        for stage in sorted(self._stages, key=lambda stage: self._running is None or stage != self._running[0]):
            if self._running is not None and stage == self._running[0]:
                wanted = self._running[1]
            else:
                wanted = self._predictors[stage].idle(queue(stage)).wanted
            yield from ((stage, batch) for batch in wanted)

    def _simulate(self) -> None:
        """Simulate the last batches again if a batch was added since the previous simulation.

        It begins with the first batch of the window, or with a batch so far back that all earlier batches have ended.
        """
        if not self._is_old:
            return
        self._is_old, first, uses = False, min(self._uses), list(self._uses.values())
        timeline = simulate(self._policy, self._plan, _LayerCosts(uses, self._cost), batches=uses)
        events = sorted((e.start, e.instruction) for e in timeline.events if e.instruction.kind in (Kind.F, Kind.B))
        for stage in self._stages:
            order = [
                Task(first + i.batch, i.kind is not Kind.F, self._plan.spans(i.kind, stage).index(i.span))
                for _, i in events
                if i.stage == stage
            ]
            self._predictors[stage] = SimulatedPredictor(order, MAX_CONTEXTS, self._ran)


class _LayerCosts:
    """The costs of batches. A batch takes the time of its layers, in thousandths of the unit of `cost`."""

    overhead_ns = 0
    per_instruction = True

    def __init__(self, uses: Sequence[LayerUse], cost: Callable[[str], float]) -> None:
        self._seconds = [[sum(map(cost, names)) for names in use.layers] for use in uses]

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the time of a task.

        A backward takes twice as long as a forward. If the stage recomputes, the time of a forward is added.
        """
        again = plan.recomputes(i.stage, i.job, i.span)
        times = {Kind.F: 1, Kind.B: 2 + again}.get(i.kind, 0)
        return times * (1 + round(1000 * self._seconds[i.batch][i.stage]))

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return zero, because transfers take no time."""
        return 0, 0

    def link_between(self, source: int, target: int) -> Link:
        """Return a link that takes no time."""
        return FREE_LINK

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return zero bytes."""
        return 0, 0

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return zero bytes."""
        return 0


class _Notes:
    """Records of pending backwards, which a stage sends to the previous stage when a backward begins (Algorithm 3).

    A record is sent separately from the gradient. If it arrives after the gradient, it is ignored, and the only
    consequence may be a wrong prediction.
    """

    def __init__(
        self, transport: TreeTransport | None, plan: Plan, rank: int, window: int, notify: Callable[[], None]
    ) -> None:
        self._transport, self._plan, self._rank, self._window, self._notify = transport, plan, rank, window, notify
        self._expected: dict[tuple[int, int], PendingTree] = {}
        self._local: dict[tuple[int, int], Sequence[Sequence[int]]] = {}

    def enter(self, batch: int) -> None:
        """Expect the records of the next batch."""
        ranks = self._plan.ranks
        for stage in self._plan.stages[self._rank]:
            last = stage + 1 == self._plan.n_stages
            if self._transport is not None and not last and ranks[stage + 1] != self._rank:
                key = self._key(stage, batch)
                self._expected[stage, batch] = self._transport.receive(ranks[stage + 1], key, self._notify)

    def take_records(self, i: Instruction) -> tuple[PendingBackward, ...]:
        """Return the records that the next stage has sent for the backward of a batch, and delete them."""
        expected = self._expected.pop((i.stage, i.batch), None)
        content = expected.content if expected is not None and expected.is_done() else ()
        return tuple(PendingBackward(*each) for each in (*self._local.pop((i.stage, i.batch), ()), *content))

    def send_records(self, i: Instruction, records: Sequence[PendingBackward]) -> None:
        """Send records to the previous stage."""
        stage, content = i.stage - 1, [tuple(each) for each in records]
        if stage < 0:
            return
        if self._plan.ranks[stage] == self._rank:
            self._local[stage, i.batch] = content
        elif self._transport is not None:
            self._transport.send(self._plan.ranks[stage], self._key(stage, i.batch), content)

    def _key(self, stage: int, batch: int) -> tuple[int, int, str]:
        return self._window, batch, f"pending backwards of stage {stage + 1}"
