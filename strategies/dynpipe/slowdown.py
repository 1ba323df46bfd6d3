"""The current state of a pipeline: the seconds of any layers on any of its devices, with their present neighbors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import RECOMPUTE_KINDS, Kind, Plan
from lightning_pipes.planning.replanning import HostedStage, Interference, Observation, sends_of
from lightning_pipes.strategies.dynpipe.partitions import Cuts

Array = npt.NDArray[np.float64]


class SlowdownModel:
    """The factors by which operations took longer on each device than in the profile.

    The mean factors include the effect of neighbors. The factors of single operations also include rare slow
    operations. The time of other layers on a device is their profiled time multiplied by the same factors ("w/o RF"). A
    predictor of interference scales the factors for stages that are affected more or less than the present stage. The
    scale is the prediction for the new stage divided by the prediction for the present stage, so that a constant bias
    cancels out (DynPipe, S V-A).

    Args:
        profile: the seconds and bytes of each layer.
        plan: the plan that ran.
        seen: a window of observations of `plan`.
        deployment: the links and devices, or None if they are unknown.
        predictor: the predictor of interference, or None.
    """

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        seen: Observation,
        deployment: Deployment | None = None,
        predictor: Interference | None = None,
    ) -> None:
        self.plan, self.seen, self.profile = plan, seen, profile
        self._deployment, self._predictor = deployment, predictor
        self.now: Cuts = np.array([[0, *(span.stop for span in plan.layers)]], np.int64)
        self._rows = [span.rows for span in plan.spans(Kind.F, 0)]
        solo = self._solo(self.now)
        self._operations = _whole(seen.operations)
        self.factors = {key: _factors(self._operations[key], alone) for key, alone in solo.items()}

    def stage_durations(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the seconds of all operations for each partition, in the form that `Replay` takes."""
        scale = self._scale(cuts)
        found = {
            (kind, stage): solo * self.factors[kind, stage] * scale[:, stage, None, None]
            for (kind, stage), solo in self._solo(cuts).items()
        }
        return found | self._messages(cuts) | self._steps(cuts)

    def mean_durations(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the seconds of all operations of one batch for each partition.

        They are computed with the mean factor of each kind and stage.
        """
        scale = self._scale(cuts)
        found = {
            (kind, stage): solo * self.factors[kind, stage].mean() * scale[:, stage, None, None]
            for (kind, stage), solo in self._solo(cuts).items()
        }
        return (
            found | self._messages(cuts) | {key: s.mean(axis=1, keepdims=True) for key, s in self._steps(cuts).items()}
        )

    def stage_slowdowns(self) -> list[float]:
        """Return the current slowdown of each stage compared with the profile."""
        solo = self._solo(self.now)
        found = []
        for stage in range(self.plan.n_stages):
            kinds = self.plan.kinds_of_stage(stage)
            alone = sum(float(solo[kind, stage].mean()) for kind in kinds)
            took = sum(float((solo[kind, stage] * self.factors[kind, stage]).mean()) for kind in kinds)
            found.append(took / alone if alone else 1.0)
        return found

    def undisturbed_durations(self, cuts: Cuts) -> Array:
        """Return the seconds of forward and backward of a micro-batch by the profile.

        Axis 0 is partitions, and axis 1 is stages.
        """
        solo, stages = self._solo(cuts), range(self.plan.n_stages)
        return np.stack(
            [sum(solo[kind, s].mean(axis=(1, 2)) for kind in self.plan.kinds_of_stage(s)) for s in stages], axis=1
        )

    def _solo(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the seconds of all operations by the profile.

        Axis 0 is partitions, axis 1 has length 1, and axis 2 is micro-batches. An R takes no time for micro-batches
        that are not recomputed.
        """
        found = {}
        sizes, which = np.unique(self._rows, return_inverse=True)
        sums = {kind: [self._sums(kind, int(rows)) for rows in sizes] for kind in self.plan.compute_kinds}

        def stack(kind: Kind, stage: int) -> Array:
            return np.stack([self._stage(each, cuts, stage) for each in sums[kind]], axis=1)

        for stage in range(self.plan.n_stages):
            again = np.array([self.plan.recomputes(stage, 0, span) for span in self.plan.spans(Kind.F, stage)])
            for kind in self.plan.kinds_of_stage(stage):
                each = stack(Kind.F if kind is Kind.R else kind, stage)[:, which]
                if kind is Kind.R:
                    each = each * again
                elif not self.plan.early_recompute and kind in RECOMPUTE_KINDS:
                    each = each + stack(Kind.F, stage)[:, which] * again
                found[kind, stage] = each[:, None]
        return found

    def _sums(self, kind: Kind, rows: int) -> tuple[Array, float, float]:
        parts = self.profile.layer_arrays.seconds_at(kind, rows)
        return np.concatenate([[0.0], np.cumsum(parts[1:-1])]), float(parts[0]), float(parts[-1])

    def _stage(self, parts: tuple[Array, float, float], cuts: Cuts, stage: int) -> Array:
        sums, before, after = parts
        seconds = sums[cuts[:, stage + 1]] - sums[cuts[:, stage]]
        ends = (before if stage == 0 else 0.0) + (after if stage == self.plan.n_stages - 1 else 0.0)
        return np.asarray(seconds + ends)

    def _messages(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the measured seconds of messages, scaled by the bytes that cross each cut."""
        found = {}
        known = self.seen.costs.seconds
        for kind, stage in sends_of(self.plan):
            edge = stage + 1 if kind is Kind.SF else stage
            times = [self.seen.costs.seconds_at(kind, stage, n) if (kind, stage) in known else 0.0 for n in self._rows]
            now = self._edges[self.now[0, edge]]
            ratio = self._edges[cuts[:, edge]] / now if now else np.ones(len(cuts))
            found[kind, stage] = ratio[:, None, None] * np.array(times)
        return found

    def _steps(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the measured seconds of STEP, scaled by the bytes of weights."""
        sums = np.concatenate([[0.0], np.cumsum(self.profile.layer_arrays.layer_values("weights"))])
        found = {}
        for stage in range(self.plan.n_stages):
            steps = self._operations.get((Kind.STEP, stage))
            if steps is not None:
                now = sums[self.now[0, stage + 1]] - sums[self.now[0, stage]]
                ratio = (sums[cuts[:, stage + 1]] - sums[cuts[:, stage]]) / now if now else np.ones(len(cuts))
                found[Kind.STEP, stage] = steps * ratio[:, None, None]
        return found

    @cached_property
    def _edges(self) -> Array:
        return np.array([self.profile.edge_bytes(cut) for cut in range(len(self.profile.layers) + 1)])

    def _scale(self, cuts: Cuts) -> Array:
        """Return the predicted slowdown of each stage in each partition, divided by the slowdown of the current stage.

        The result is 1 if the predictor was not trained on similar stages.
        """
        stages = self.plan.n_stages
        if self._predictor is None or not self.seen.devices:
            return np.ones((len(cuts), stages))
        number: dict[tuple[int, int, int], int] = {}
        every = np.vstack([self.now, cuts])
        index = np.empty((len(every), stages), np.int64)
        for stage in range(stages):
            pairs, which = np.unique(every[:, stage : stage + 2], axis=0, return_inverse=True)
            numbers = [number.setdefault((stage, int(a), int(b)), len(number)) for a, b in pairs]
            index[:, stage] = np.array(numbers)[which]
        rows = [(self._device(stage), self._device_features(stage, a, b)) for stage, a, b in number]
        ratios, known = self._predictor.predict(rows)
        now = index[0]
        usable = known[index[1:]] & known[now] & (ratios[now] > 0)
        return np.where(usable, ratios[index[1:]] / np.where(ratios[now] > 0, ratios[now], 1.0), 1.0)

    def _device(self, stage: int) -> Mapping[str, float]:
        return self.seen.devices[self.plan.ranks[stage]]

    def _device_features(self, stage: int, start: int, stop: int) -> HostedStage:
        columns, rows = self.profile.layer_arrays, max(self._rows)
        cuts = np.zeros((1, self.plan.n_stages + 1), np.int64)
        cuts[0, stage], cuts[0, stage + 1] = start, stop
        forward = float(self._stage(self._sums(Kind.F, rows), cuts, stage)[0])
        kinds = self.plan.compute_kinds[1:]
        backward = sum(float(self._stage(self._sums(kind, rows), cuts, stage)[0]) for kind in kinds)
        of = {
            name: float(columns.layer_values(name)[start:stop].sum()) for name in ("weights", "gradients", "optimizer")
        }
        return HostedStage(
            stop - start,
            rows,
            forward,
            backward,
            of["weights"],
            of["gradients"] + of["optimizer"],
            float(columns.layer_values("saved")[start:stop].sum()) * rows,
            float(self._edges[stop]) * rows if stage < self.plan.n_stages - 1 else 0.0,
        )


def _factors(operations: Array, solo: Array) -> Array:
    """Return the measured seconds of operations divided by the profiled seconds, or 1 if these are 0."""
    alone = solo[0]
    return np.where(alone > 0, operations / np.where(alone > 0, alone, 1.0), 1.0)


def _whole(operations: Mapping[tuple[Kind, int], Array]) -> dict[tuple[Kind, int], Array]:
    """Return the operations, in which missing measurements are replaced by the mean of the others."""
    found = {}
    for key, table in operations.items():
        known = np.isfinite(table)
        found[key] = np.where(known, table, table[known].mean() if known.any() else 0.0)
    return found
