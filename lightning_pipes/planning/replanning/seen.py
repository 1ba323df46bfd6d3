"""Observations: the last batches of a run, as planners see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import COMPUTE, InputError, Kind, Plan, short_repr

Array = npt.NDArray[np.float64]
MAX_OBSERVATIONS = 64
"""The number of windows of the running plan, and of earlier ones, that planners see."""


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
        free: bytes that are free on the device of each rank; None where nobody knows.

    Raises:
        InputError: operations that are no table, or of another kind; or devices and free of different lengths.
    """

    costs: CostModel
    operations: Mapping[tuple[Kind, int], Array] = field(default_factory=dict)
    devices: tuple[Mapping[str, float], ...] = ()
    free: tuple[int | None, ...] = ()

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
        """All rows in one call: what was seen of a device, and the stage that it would host."""
