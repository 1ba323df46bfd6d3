"""A pipeline as it is now: the seconds of any layers on any of its devices, under what is seen of their neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import RECOMPUTES, Kind, Plan
from lightning_pipes.planning.replanning import HostedStage, Interference, Observation, sends_of
from lightning_pipes.strategies.dynpipe.partitions import Cuts

Array = npt.NDArray[np.float64]


class Situation:
    """Factors by which operations took longer than in the profile, by device: now, which includes neighbours, and one
    by one, which includes what is rare. Other layers on the device take their own seconds times the same factors (the
    last measured ones, "w/o RF"). A predictor of interference scales them for stages that suffer more or less than the
    one that is there now: its answer for the new stage over its answer for this one, so that a constant bias cancels
    (DynPipe, S V-A).

    Args:
        seen: a window of `plan`, which it fits.
        deployment: links and devices; None where they were not asked for.
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
        """Return seconds of all operations for each partition, as `Replay` takes them."""
        scale = self._scale(cuts)
        found = {
            (kind, stage): solo * self.factors[kind, stage] * scale[:, stage, None, None]
            for (kind, stage), solo in self._solo(cuts).items()
        }
        return found | self._messages(cuts) | self._steps(cuts)

    def mean_durations(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return the same for one batch, with the mean factor of each operation."""
        scale = self._scale(cuts)
        found = {
            (kind, stage): solo * self.factors[kind, stage].mean() * scale[:, stage, None, None]
            for (kind, stage), solo in self._solo(cuts).items()
        }
        return (
            found | self._messages(cuts) | {key: s.mean(axis=1, keepdims=True) for key, s in self._steps(cuts).items()}
        )

    def feature_rows(self) -> tuple[list[tuple[Mapping[str, float], HostedStage]], list[float]]:
        """Return the devices, each with the stage that it hosts now, and by how much it takes longer than the profile
        has it: of this a predictor learns. Nothing without a monitor."""
        if not self.seen.devices:
            return [], []
        spans = enumerate(pairwise(self.now[0].tolist()))
        return [(self._device(s), self._device_features(s, a, b)) for s, (a, b) in spans], self.stage_slowdowns()

    def stage_slowdowns(self) -> list[float]:
        """Return the current slow-down of each stage over the profile."""
        solo = self._solo(self.now)
        found = []
        for stage in range(self.plan.n_stages):
            alone = sum(float(solo[kind, stage].mean()) for kind in self.plan.compute_kinds)
            took = sum(
                float((solo[kind, stage] * self.factors[kind, stage]).mean()) for kind in self.plan.compute_kinds
            )
            found.append(took / alone if alone else 1.0)
        return found

    def undisturbed_durations(self, cuts: Cuts) -> Array:
        """Return seconds of a micro-batch's forward and backward by the profile: axis 0 is partitions, axis 1
        stages."""
        solo, stages = self._solo(cuts), range(self.plan.n_stages)
        return np.stack(
            [sum(solo[kind, s].mean(axis=(1, 2)) for kind in self.plan.compute_kinds) for s in stages], axis=1
        )

    def _solo(self, cuts: Cuts) -> dict[tuple[Kind, int], Array]:
        """Return seconds of all operations by the profile: axis 0 is partitions, axis 1 has length 1, axis 2
        micro-batches."""
        found = {}
        again = self.plan.recompute or (False,) * self.plan.n_stages
        sizes, which = np.unique(self._rows, return_inverse=True)
        for kind in self.plan.compute_kinds:
            sums = [self._sums(kind, int(rows)) for rows in sizes]
            forward = [self._sums(Kind.F, int(rows)) for rows in sizes] if any(again) and kind in RECOMPUTES else None
            for stage in range(self.plan.n_stages):
                each = np.stack([self._stage(parts, cuts, stage) for parts in sums], axis=1)
                if forward is not None and again[stage]:
                    each = each + np.stack([self._stage(parts, cuts, stage) for parts in forward], axis=1)
                found[kind, stage] = each[:, None, which]
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
        """Return seconds of messages as measured, in proportion to the bytes that cross."""
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
        """Return seconds of STEP as measured, in proportion to the bytes of weights."""
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
        """Return the predicted slow-down of each stage in each partition, over that of the current stage; 1 where it
        has not seen the like of either."""
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
    """Return measured seconds of operations over profiled seconds; 1 where it has none."""
    alone = solo[0]
    return np.where(alone > 0, operations / np.where(alone > 0, alone, 1.0), 1.0)


def _whole(operations: Mapping[tuple[Kind, int], Array]) -> dict[tuple[Kind, int], Array]:
    """Operations; for those without a measurement the mean of the others."""
    found = {}
    for key, table in operations.items():
        known = np.isfinite(table)
        found[key] = np.where(known, table, table[known].mean() if known.any() else 0.0)
    return found
