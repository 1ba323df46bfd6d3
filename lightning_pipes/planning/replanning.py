"""Replanning during training: observations of the running plan, and times of other plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    SEND_KINDS,
    InputError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    short_repr,
)
from lightning_pipes.ir.replication import Seconds
from lightning_pipes.sim import cost_representatives, makespans

Array = npt.NDArray[np.float64]
NO_NEIGHBOR = "none"
"""The kind of neighbor of a window in which no measured process competes. Other programs may run on the machine."""
MAX_OBSERVATIONS = 64
"""The largest number of windows of the running plan, and also of earlier plans, that planners receive."""


FreeBytes = tuple[int | None, ...]
"""The free bytes on the device of each rank of the pipeline; None if unknown."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One window of batches under one plan. It is the same on all ranks.

    Attributes:
        costs: the average times of stages and links, for the sizes in the plan.
        operations: the seconds of every computation, by kind and stage. Axis 0 is batches, the oldest first; axis 1 is
            the spans of this kind and stage in the plan, or has length 1 for a STEP. Missing values are NaN. These
            single values are needed because an average hides an operation that is slow occasionally, for which the
            whole pipeline waits.
        devices: for each rank of the pipeline, the metrics of its device by name, averaged over the window; NaN if a
            source returned no value. Empty without a monitor.
        free: the free bytes of each device at the end of the window.
        layers: the mean seconds per sample of the forward of each layer, by the number of the layer; empty if layers
            are not timed.
        replicas: for each stage, the mean seconds per sample of forward and backward on each of its ranks; NaN on a
            rank without samples. Empty if each stage has one rank.

    Raises:
        InputError: an entry of `operations` is not a table or not of a computation, or `devices` and `free` differ in
            length.
    """

    costs: CostModel
    operations: Mapping[tuple[Kind, int], Array] = field(default_factory=dict)
    devices: tuple[Mapping[str, float], ...] = ()
    free: FreeBytes = ()
    layers: Mapping[int, float] = field(default_factory=dict)
    replicas: Seconds = ()

    def __post_init__(self) -> None:
        for (kind, stage), table in self.operations.items():
            if kind not in COMPUTE_KINDS or table.ndim != 2:
                raise InputError(
                    f"operations need computations in tables of batches by spans, got {kind}{stage} in shape "
                    f"{short_repr(table.shape)}"
                )
        if len(self.devices) != len(self.free):
            raise InputError(f"{len(self.devices)} devices were observed, but the free memory of {len(self.free)}")

    @property
    def batches(self) -> int:
        """The number of batches with recorded operations."""
        return max((len(table) for table in self.operations.values()), default=0)

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """The mean seconds of a forward and its backward, for every stage."""
        found: dict[int, float] = {}
        for (kind, stage), table in self.operations.items():
            if kind is not Kind.STEP:
                known = table[np.isfinite(table)]
                seconds = float(known.mean()) if known.size else 0.0
                if kind is Kind.R:  # some micro-batches may have none
                    seconds *= float(np.isfinite(table).any(axis=0).mean())
                found[stage] = found.get(stage, 0.0) + seconds
        return tuple(found[stage] for stage in sorted(found))

    def matches_plan(self, plan: Plan) -> bool:
        """Return whether the operations include all forwards and backwards of `plan`."""
        tables = [
            (self.operations.get((kind, s)), plan.spans(kind, s))
            for s in range(plan.n_stages)
            for kind in plan.compute_kinds
        ]
        return self.batches > 0 and all(
            table is not None and table.shape == (self.batches, len(spans)) for table, spans in tables
        )


class GradientSample(NamedTuple):
    """The measurements of one iteration from which the constants of a model are estimated.

    Norms are over all parameters.

    Attributes:
        moved: the norm of the difference between the weights of this iteration and of the previous one.
        changed: the norm of the difference between the gradients at these two sets of weights, for the same probe
            batch.
        squared: the squared norm of the gradient of the mini-batch of this iteration.
    """

    moved: float
    changed: float
    squared: float


class HostedStage(NamedTuple):
    """Statistics of a stage that a device hosts, or would host. Bytes that depend on samples are for one micro-batch.

    Attributes:
        layers: the number of layers.
        rows: the number of samples of a micro-batch.
        forward: the seconds of a forward, if nothing else runs on the device.
        backward: the seconds of a backward, if nothing else runs on the device.
        weights: the bytes of the weights.
        states: the bytes of the gradients and of the optimizer states.
        saved: the bytes that are kept from forward to backward.
        sent: the bytes of the message to the next stage.
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
    """The prediction of an interference model.

    Attributes:
        ratios: for each row, the time of the stage divided by its time on a device without neighbors; about 1 or more.
        known: for each row, whether the model was fitted to similar cases. Otherwise, the ratio must not be used.
    """

    ratios: npt.NDArray[np.float64]
    known: npt.NDArray[np.bool_]


@runtime_checkable
class Interference(Protocol):
    """Predicts the slowdown of stages by neighbors on their devices (DynPipe, S V-A).

    Planners use only ratios of predictions. The time of the running stage is measured, so a constant bias of the model
    cancels.
    """

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        """Return the predictions for all rows.

        Args:
            rows: the metrics of a device, and the stage that the device would host.
        """


Durations = Mapping[tuple[Kind, int], Array]
"""Seconds by kind and stage. Axis 0 is cases, axis 1 is batches, and axis 2 is spans; axes of length 1 are broadcast. A
send contains the seconds of its message, and a STEP has length 1 in axis 2. Operations that are absent take no time."""
MAX_DURATIONS_PER_CALL = 2**22
"""The largest number of durations that are simulated in one call."""


class Replay:
    """An order of a plan that is simulated repeatedly with different durations.

    If the schedule flushes, each batch is simulated separately. Otherwise, all batches are simulated in one window that
    runs twice in a row, so that the second run begins with a full pipeline.

    Args:
        order: the order.
        plan: the plan. Its layers are ignored.
        batches: the number of batches.

    Raises:
        PlanError: the plan has several jobs, or the order does not belong to the plan.
    """

    def __init__(self, order: Program, plan: Plan, batches: int) -> None:
        if len(plan.jobs) > 1:
            raise PlanError(
                f"single operations can be timed only in a plan with one job, but this plan has {len(plan.jobs)} jobs"
            )
        self.batches, self._endless = batches, order.is_endless
        self._costs: dict[float, CostModel] = {}
        self._plan = replace(plan, layers=(), limits=())
        rounds = (batches, 2 * batches) if self._endless else (1,)
        self._programs = [order.unroll(n) for n in rounds]
        self._columns = [
            _find_columns(cost_representatives(program, self._plan, apart=True), plan) for program in self._programs
        ]

    def step_seconds(self, durations: Durations, overhead: float = 0.0) -> Array:
        """Return the seconds of a step. Axis 0 is cases, and axis 1 is batches.

        If the schedule does not flush, axis 1 has length 1 and contains the mean over all batches.

        Args:
            durations: the seconds of all operations.
            overhead: the seconds before each computation.
        """
        if overhead not in self._costs:  # prices are computed once for each cost model object
            self._costs = {overhead: CostModel.uniform(self._plan.n_stages, 0.0, 0.0, overhead=overhead)}
        costs = self._costs[overhead]
        cases = max(len(table) for table in durations.values())
        if not self._endless:
            each = max(1, MAX_DURATIONS_PER_CALL // (self.batches * self._batch_width(0)))
            return np.concatenate(
                [self._flushed_seconds(_slice_durations(durations, k, each), costs) for k in range(0, cases, each)]
            )
        each = max(1, MAX_DURATIONS_PER_CALL // self._batch_width(1))
        return np.concatenate(
            [self._streamed_seconds(_slice_durations(durations, k, each), costs) for k in range(0, cases, each)]
        )

    def _flushed_seconds(self, durations: Durations, costs: CostModel) -> Array:
        cases = max(len(table) for table in durations.values())
        times = np.zeros((cases, self.batches, self._batch_width(0)))
        for key, (_, spans, columns) in self._columns[0].items():
            if key in durations:
                table = durations[key]
                shape = (cases, self.batches, table.shape[2])
                times[:, :, columns] = np.broadcast_to(table, shape)[:, :, spans if table.shape[2] > 1 else 0 * spans]
        return self._compute_ends(0, times.reshape(cases * self.batches, -1), costs).reshape(cases, self.batches)

    def _streamed_seconds(self, durations: Durations, costs: CostModel) -> Array:
        cases = max(len(table) for table in durations.values())
        ends = []
        for n, of in enumerate(self._columns):
            times = np.zeros((cases, self._batch_width(n)))
            for key, (batches, spans, columns) in of.items():
                if key in durations:
                    table = durations[key]
                    batch = batches % self.batches if table.shape[1] > 1 else 0 * batches
                    times[:, columns] = table[:, batch, spans if table.shape[2] > 1 else 0 * spans]
            ends.append(self._compute_ends(n, times, costs))
        return np.asarray((ends[1] - ends[0]) / self.batches)[:, None]

    def _compute_ends(self, n: int, times: Array, costs: CostModel) -> Array:
        found = makespans(self._programs[n], self._plan, costs, np.rint(times * 1e9).astype(np.int64), apart=True)
        return np.asarray(found / 1e9)

    def _batch_width(self, n: int) -> int:
        return sum(len(columns) for _, _, columns in self._columns[n].values())


def replay_of(order: Program, plan: Plan, batches: int) -> Replay:
    """Return the replay of an order, which is the same for all partitions.

    The last replays are cached, because creating a replay takes longer than using it.
    """
    return _cached_operations(order, replace(plan, layers=()), batches)


@lru_cache(maxsize=8)
def _cached_operations(order: Program, plan: Plan, batches: int) -> Replay:
    return Replay(order, plan, batches)


def _slice_durations(durations: Durations, start: int, size: int) -> Durations:
    return {key: table[start : start + size] if len(table) > 1 else table for key, table in durations.items()}


def _find_columns(
    operations: tuple[Instruction, ...], plan: Plan
) -> dict[tuple[Kind, int], tuple[npt.NDArray[np.int64], ...]]:
    """Return the batch, the number of the span, and the column of every operation, by kind and stage."""
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
    """Return the kind and stage of all messages of `plan`."""
    crossing = [s for s in range(plan.n_stages - 1) if plan.is_remote_edge(s)]
    sends = [(Kind.SF, s) for s in crossing] + [(Kind.SB, s + 1) for s in crossing]
    assert {kind for kind, _ in sends} <= SEND_KINDS
    return sends
