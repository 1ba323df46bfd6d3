"""Replanning while training goes on: observations of the running plan, and times of other plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import COMPUTE, SENDS, InputError, Instruction, Kind, Plan, PlanError, Program, short_repr
from lightning_pipes.ir.replication import Seconds
from lightning_pipes.sim import cost_representatives, makespans

Array = npt.NDArray[np.float64]
MAX_OBSERVATIONS = 64
"""The number of windows of the running plan, and of earlier ones, that planners see."""


FreeBytes = tuple[int | None, ...]
"""Bytes that are free on the device of each rank of the pipeline; None where it is unknown."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One window of batches under one plan, the same on all ranks.

    Attributes:
        costs: averages of stages and links, for the sizes that the plan has.
        operations: seconds of every computation by kind and stage: axis 0 is batches, the oldest first, axis 1 the
            spans that the plan has for this kind and stage; of a STEP one. What was not seen is NaN. An average hides
            an operation that is slow now and then, and the whole pipeline waits for that.
        devices: of each rank of the pipeline what a monitor saw of its device, by name, means over the window; NaN
            where one source was silent. Empty without a monitor.
        free: bytes of each device at its end.
        layers: mean seconds of a sample's forward through each layer, by number; empty where they are not timed.
        replicas: by stage, mean seconds of a sample's forward and backward on each of its ranks; NaN on a rank that had
            no samples. Empty where each stage has one rank.

    Raises:
        InputError: operations that are no table, or of another kind; or devices and free of different lengths.
    """

    costs: CostModel
    operations: Mapping[tuple[Kind, int], Array] = field(default_factory=dict)
    devices: tuple[Mapping[str, float], ...] = ()
    free: FreeBytes = ()
    layers: Mapping[int, float] = field(default_factory=dict)
    replicas: Seconds = ()

    def __post_init__(self) -> None:
        for (kind, stage), table in self.operations.items():
            if kind not in COMPUTE or table.ndim != 2:
                raise InputError(
                    f"operations need computations in tables of batches by spans, got {kind}{stage} in shape "
                    f"{short_repr(table.shape)}"
                )
        if len(self.devices) != len(self.free):
            raise InputError(f"{len(self.devices)} devices were seen, and memory of {len(self.free)}")

    @property
    def batches(self) -> int:
        """The number of batches of which operations are known."""
        return max((len(table) for table in self.operations.values()), default=0)

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Mean seconds of a forward and its backward, for every stage."""
        found: dict[int, float] = {}
        for (kind, stage), table in self.operations.items():
            if kind is not Kind.STEP:
                known = table[np.isfinite(table)]
                found[stage] = found.get(stage, 0.0) + (float(known.mean()) if known.size else 0.0)
        return tuple(found[stage] for stage in sorted(found))

    def matches_plan(self, plan: Plan) -> bool:
        """Return whether the operations are all forwards and backwards of `plan`."""
        tables = [
            (self.operations.get((kind, s)), plan.spans(kind, s))
            for s in range(plan.n_stages)
            for kind in plan.compute_kinds
        ]
        return self.batches > 0 and all(
            table is not None and table.shape == (self.batches, len(spans)) for table, spans in tables
        )


class GradientSample(NamedTuple):
    """One iteration's part in an estimate; norms are over all parameters.

    Attributes:
        moved: of the difference of the weights to those of the iteration before.
        changed: of the difference of the gradients at both, on one and the same probe batch.
        squared: the squared norm of the gradient of the iteration's own mini-batch.
    """

    moved: float
    changed: float
    squared: float


class HostedStage(NamedTuple):
    """A stage that a device hosts, or would host, in a few numbers; bytes are for one micro-batch where they depend on
    samples.

    Attributes:
        layers: how many.
        rows: samples of a micro-batch.
        forward: seconds that a forward takes alone on the device.
        backward: the same of a backward.
        weights: bytes.
        states: bytes of gradients and optimizer.
        saved: bytes that are kept from forward to backward.
        sent: bytes of the message to the next stage.
    """

    layers: float
    rows: float
    forward: float
    backward: float
    weights: float
    states: float
    saved: float
    sent: float


class Predicted(NamedTuple):
    """For each row the time as a multiple of that on a device without neighbours, about 1 or more, and whether the
    predictor has seen the like; where it has not, its ratio is not to be used."""

    ratios: npt.NDArray[np.float64]
    known: npt.NDArray[np.bool_]


@runtime_checkable
class Interference(Protocol):
    """Predicts by how much stages are slowed down by neighbours (DynPipe, S V-A). Planners use it as a ratio only: of
    the stage that runs there is a measurement, so a constant bias cancels."""

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        """Predict all rows in one call; each has the metrics of a device and the stage that it would host."""


Durations = Mapping[tuple[Kind, int], Array]
"""Seconds by kind and stage: axis 0 is cases, axis 1 batches, axis 2 spans; axes of length 1 stand for any. Of a send,
those of its message; of a STEP, axis 2 has length 1. What is absent takes no time."""
MOST_AT_ONCE = 2**22
"""Durations in one go."""


class Replay:
    """An order of a plan, to be timed with other durations again and again.

    A schedule that flushes is timed batch by batch. Where it does not, all batches are timed in one window that runs
    twice in a row: the second run begins with a full pipeline.

    Raises:
        PlanError: several jobs; or the order is none of the plan.
    """

    def __init__(self, order: Program, plan: Plan, batches: int) -> None:
        if len(plan.jobs) > 1:
            raise PlanError(f"operations are timed one by one where there is one job, this plan has {len(plan.jobs)}")
        self.batches, self._endless = batches, order.is_endless
        self._costs: dict[float, CostModel] = {}
        self._plan = replace(plan, layers=(), limits=())
        rounds = (batches, 2 * batches) if self._endless else (1,)
        self._programs = [order.unroll(n) for n in rounds]
        self._columns = [
            _columns(cost_representatives(program, self._plan, apart=True), plan) for program in self._programs
        ]

    def step_seconds(self, durations: Durations, overhead: float = 0.0) -> Array:
        """Return the seconds of a step: axis 0 is cases, axis 1 batches; only their mean if the schedule does not
        flush.

        Args:
            overhead: seconds before each computation.
        """
        if overhead not in self._costs:  # prices are worked out once for an object
            self._costs = {overhead: CostModel.uniform(self._plan.n_stages, 0.0, 0.0, overhead=overhead)}
        costs = self._costs[overhead]
        cases = max(len(table) for table in durations.values())
        if not self._endless:
            each = max(1, MOST_AT_ONCE // (self.batches * self._width(0)))
            return np.concatenate([self._flushed(_part(durations, k, each), costs) for k in range(0, cases, each)])
        each = max(1, MOST_AT_ONCE // self._width(1))
        return np.concatenate([self._streamed(_part(durations, k, each), costs) for k in range(0, cases, each)])

    def _flushed(self, durations: Durations, costs: CostModel) -> Array:
        cases = max(len(table) for table in durations.values())
        times = np.zeros((cases, self.batches, self._width(0)))
        for key, (_, spans, columns) in self._columns[0].items():
            if key in durations:
                table = durations[key]
                shape = (cases, self.batches, table.shape[2])
                times[:, :, columns] = np.broadcast_to(table, shape)[:, :, spans if table.shape[2] > 1 else 0 * spans]
        return self._ends(0, times.reshape(cases * self.batches, -1), costs).reshape(cases, self.batches)

    def _streamed(self, durations: Durations, costs: CostModel) -> Array:
        cases = max(len(table) for table in durations.values())
        ends = []
        for n, of in enumerate(self._columns):
            times = np.zeros((cases, self._width(n)))
            for key, (batches, spans, columns) in of.items():
                if key in durations:
                    table = durations[key]
                    batch = batches % self.batches if table.shape[1] > 1 else 0 * batches
                    times[:, columns] = table[:, batch, spans if table.shape[2] > 1 else 0 * spans]
            ends.append(self._ends(n, times, costs))
        return np.asarray((ends[1] - ends[0]) / self.batches)[:, None]

    def _ends(self, n: int, times: Array, costs: CostModel) -> Array:
        found = makespans(self._programs[n], self._plan, costs, np.rint(times * 1e9).astype(np.int64), apart=True)
        return np.asarray(found / 1e9)

    def _width(self, n: int) -> int:
        return sum(len(columns) for _, _, columns in self._columns[n].values())


def replay_of(order: Program, plan: Plan, batches: int) -> Replay:
    """Return the replay of an order, the same for all partitions; the last ones are remembered: to make one takes
    longer than to use it."""
    return _known(order, replace(plan, layers=()), batches)


@lru_cache(maxsize=8)
def _known(order: Program, plan: Plan, batches: int) -> Replay:
    return Replay(order, plan, batches)


def _part(durations: Durations, start: int, size: int) -> Durations:
    return {key: table[start : start + size] if len(table) > 1 else table for key, table in durations.items()}


def _columns(
    operations: tuple[Instruction, ...], plan: Plan
) -> dict[tuple[Kind, int], tuple[npt.NDArray[np.int64], ...]]:
    """Return the batch, the number of the span and the column of every operation, by kind and stage."""
    number = {
        (kind, s): {span: n for n, span in enumerate(plan.spans(kind, s))}
        for kind, s in {(i.kind, i.stage) for i in operations}
    }
    found: dict[tuple[Kind, int], list[tuple[int, int, int]]] = {}
    for column, i in enumerate(operations):
        span = 0 if i.kind is Kind.STEP else number[i.kind, i.stage][i.span]
        found.setdefault((i.kind, i.stage), []).append((i.batch, span, column))
    return {key: tuple(np.array(rows, np.int64).T) for key, rows in found.items()}


def sends_of(plan: Plan) -> list[tuple[Kind, int]]:
    """Kind and stage of the messages that `plan` has."""
    crossing = [s for s in range(plan.n_stages - 1) if plan.is_remote_edge(s)]
    sends = [(Kind.SF, s) for s in crossing] + [(Kind.SB, s + 1) for s in crossing]
    assert {kind for kind, _ in sends} <= SENDS
    return sends
