"""The work of all siblings on each rank, and cuts that give the least busy ranks the most work."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightning_pipes.cost import ModelProfile
from lightning_pipes.ir import Kind, Span
from lightning_pipes.planning.fit import stage_seconds
from lightning_pipes.planning.partition import StageLoad, evenest_partition
from lightning_pipes.trainer.plan.decision import Decision


class StageLoads:
    """The measured seconds per batch of each running sibling on each rank."""

    def __init__(self) -> None:
        self._seconds: dict[int, np.ndarray] = {}
        """The seconds of F and B of one batch on each rank, by the index of the sibling."""
        self._profiles: dict[int, ModelProfile] = {}
        """The measured layers of each of these siblings."""

    def level_cut(self, decision: Decision) -> tuple[Span, ...]:
        """Return the layers of each stage with which all ranks are equally busy, given the other siblings.

        The result is the cut of the decision if the layers were not measured, if the user chose the cut, if ranks have
        several stages, or if no measured sibling is running.

        Args:
            decision: the decision for a sibling that begins.
        """
        profile, deployment = decision.profile, decision.deployment
        if (
            profile is None
            or deployment is None
            or not decision.movable
            or not self._seconds
            or len(set(decision.ranks)) < len(decision.ranks)
        ):
            return decision.layers
        plan, _ = decision.plans().for_rows(decision.rows)
        others = self.sum_seconds()
        loads = [
            _with_others(load, others[rank], len(plan.spans(Kind.F, stage)))
            for stage, (load, rank) in enumerate(
                zip(stage_seconds(profile, plan, deployment.pipeline), plan.ranks, strict=True)
            )
        ]
        return evenest_partition(loads, len(profile.layers))

    def sum_seconds(self) -> list[float]:
        """Return the seconds per batch of all siblings together on each rank, or an empty list if there are none."""
        return [float(each) for each in np.sum(list(self._seconds.values()), axis=0)] if self._seconds else []

    def begin_sibling(self, index: int, decision: Decision) -> None:
        """Count the work of a sibling, if its layers or units were measured, until `end_sibling`."""
        profile, deployment = decision.profile, decision.deployment
        if profile is None or deployment is None:
            if decision.stage_seconds:
                self._seconds[index] = np.bincount(decision.ranks, decision.stage_seconds)
            return
        plan, _ = decision.plans().for_rows(decision.rows or decision.least)
        seconds = np.zeros(max(plan.ranks) + 1)
        loads = stage_seconds(profile, plan, deployment.pipeline)
        for stage, (load, rank, span) in enumerate(zip(loads, plan.ranks, plan.layers, strict=True)):
            if span.rows:
                one = load.seconds(np.array([span.start]), np.array([span.stop]))
                seconds[rank] += len(plan.spans(Kind.F, stage)) * float(one[0])
        self._seconds[index] = seconds
        self._profiles[index] = profile

    def compare_batches(self, rows: Mapping[int, int]) -> list[float]:
        """Return the work of one batch of each sibling, in the same unit for all of them.

        The unit is a second if the layers of all siblings were measured, and a sample if siblings have the same layers
        or were not measured.

        Args:
            rows: the number of samples of the batch, by the index of the sibling.
        """
        found = [self._profiles.get(index) for index in rows]
        profiles = [profile for profile in found if profile is not None]
        if len(profiles) < len(rows) or len(set(map(id, profiles))) == 1:
            return list(map(float, rows.values()))
        return [
            sum(profile.seconds(kind, layer, size) for kind in (Kind.F, Kind.B) for layer in range(len(profile.layers)))
            for profile, size in zip(profiles, rows.values(), strict=True)
        ]

    def end_sibling(self, index: int) -> None:
        """Stop counting the work of a sibling."""
        self._seconds.pop(index, None)
        self._profiles.pop(index, None)


def _with_others(load: StageLoad, others: float, microbatches: int) -> StageLoad:
    return StageLoad(lambda begin, stop: others + microbatches * load.seconds(begin, stop))
