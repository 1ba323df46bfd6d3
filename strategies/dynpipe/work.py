"""The work of layers, apart from what slowed devices down while layers were measured.

    seconds of a stage now  =  work of its layers  x  slow-down of its device now, which is 1 or more

A profile that was made beside a neighbour has the slow-down of that day in the work of the layers on that device. When
the neighbour has gone, the stage takes less than the profile says, which no device can do: its layers have less work.

A slow device slows all its layers, so a layer that takes longer while others of its stage do not has more work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median_low

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import ModelProfile
from lightning_pipes.ir import Kind, Plan
from lightning_pipes.planning.replanning import Observation

Array = npt.NDArray[np.float64]
BELOW = 0.9
"""The share of its work by the profile that a stage must stay below; more is chance."""
IMPOSSIBLE, SLOWED, CHANGED = 10.0, 1.0, 0.1
"""Costs of an explanation, each times a logarithm: a stage that is faster than its work, one that is slower, for each
plan; and a layer that has less work than the profile says."""
OWN = 1.5
"""How many times as much longer than others of its stage a layer must take to have more work."""
SEEN = 0.1
"""The share of a stage's forward that this must be; less is chance."""
STEPS = 64
"""Corrections at most."""
ENOUGH = 1e-6
"""By what the cost has to fall in each."""


def estimate_work(profile: ModelProfile, looks: Sequence[tuple[Plan, Observation]], lasting: int) -> ModelProfile:
    """Return the profile with less work for those layers that explain best why stages were faster than it says.

    Plans with other stages tell which layers it is. Work becomes more where a layer alone is slower (DynPipe, S III); a
    stage that is slower as a whole has a slow device.

    Args:
        looks: the last ones of this plan and earlier ones, the oldest first.
        lasting: looks in a row that a stage has to be so fast.
    """
    if not looks:
        return profile
    own = np.min([find_slow_layers(profile, *look) for look in looks[-lasting:]], axis=0)
    if len(looks) >= lasting and (own > 1).any():
        profile = profile.scaled(own.tolist())
    alone = _work(profile, looks[-1][0])
    stages, seconds = _fastest(looks, lasting)
    if not len(stages):
        return profile
    factors = _Explanation(alone, stages, seconds).find_factors()
    if (factors == 1).all():
        return profile
    return profile.scaled(factors[1:-1].tolist(), float(factors[0]), float(factors[-1]))


def find_slow_layers(profile: ModelProfile, plan: Plan, look: Observation) -> Array:
    """Return by what factor each layer takes longer than other layers of its stage do, over the profile; 1 where that
    is little, or the stage has too few layers to tell."""
    rows = plan.spans(Kind.F, 0)[0].rows
    alone = profile.layer_arrays.seconds_at(Kind.F, rows)[1:-1] / rows
    factors = np.ones(len(alone))
    for span in plan.layers:
        known = [n for n in range(span.start, span.stop) if n in look.layers and alone[n] > 0]
        took = np.array([look.layers[n] for n in known])
        if len(known) < 3 or not took.sum():
            continue
        others = median_low((took / alone[known]).tolist())
        more = took - others * alone[known]
        slow = (took > OWN * others * alone[known]) & (more > SEEN * took.sum())
        factors[np.array(known)[slow]] = (took / (others * alone[known]))[slow]
    return factors


class _Explanation:
    """The search for factors of the parts' work, step by step: each makes one stage possible, at the least cost.

    Args:
        alone: seconds of each part by the profile.
        stages: which parts a stage has: axis 0 is stages of all plans, axis 1 parts.
        seconds: that each of them took.
    """

    def __init__(self, alone: Array, stages: npt.NDArray[np.bool_], seconds: Array) -> None:
        self._alone, self._stages, self._logs = alone, stages, np.log(seconds)
        self._seconds = seconds

    @cached_property
    def _groups(self) -> npt.NDArray[np.bool_]:
        """Parts that may have more or less work together: each, those that were together under all plans, stages."""
        _, segment = np.unique(self._stages.T, axis=0, return_inverse=True)
        segments = segment.reshape(-1) == np.arange(segment.max() + 1)[:, None]
        return np.unique(np.vstack([np.eye(len(self._alone), dtype=bool), segments, self._stages]), axis=0)

    def find_factors(self) -> Array:
        """Return a factor for each part, 1 or less."""
        factors = np.ones(len(self._alone))
        cost = float(self._costs(factors[None])[0])
        for _ in range(STEPS):
            options = self._options(factors)
            if not len(options):
                break
            costs = self._costs(options)
            best = int(costs.argmin())
            if costs[best] >= cost - ENOUGH:
                break
            factors, cost = options[best], float(costs[best])
        return factors

    def _options(self, factors: Array) -> Array:
        """Return factors that explain the measured seconds of one stage: a row for each group that may have more or
        less."""
        work = factors * self._alone
        whole = self._stages @ work
        less = self._seconds < BELOW * whole
        more = (self._seconds > whole) & (self._stages @ (factors < 1))
        found = []
        for stage in np.flatnonzero(less | more).tolist():
            inside = self._groups & self._stages[stage]
            inside = np.unique(inside if less[stage] else inside & (factors < 1), axis=0)
            own = inside @ work
            inside, own = inside[own > 0], own[own > 0]
            scale = (self._seconds[stage] - (whole[stage] - own)) / own
            inside, scale = inside[scale > 0], scale[scale > 0]
            found.append(np.where(inside, np.minimum(factors * scale[:, None], 1.0), factors))
        return np.concatenate(found) if found else np.empty((0, len(factors)))

    def _costs(self, factors: Array) -> Array:
        """Return the cost of each row of factors."""
        off = self._logs - np.log((factors * self._alone) @ self._stages.T)
        impossible = -np.minimum(off - np.log(BELOW), 0.0).sum(axis=1)
        slowed = np.maximum(off, 0.0).sum(axis=1)
        return np.asarray(IMPOSSIBLE * impossible + SLOWED * slowed - CHANGED * np.log(factors).sum(axis=1))


def _fastest(looks: Sequence[tuple[Plan, Observation]], lasting: int) -> tuple[npt.NDArray[np.bool_], Array]:
    """Return the parts of each stage of all plans, and the seconds of a micro-batch in its fastest looks in a row."""
    by_layers: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for plan, look in looks:
        by_layers.setdefault((*(span.stop for span in plan.layers),), []).append(look.stage_seconds)
    stages, seconds = [], []
    for stops, taken in by_layers.items():
        if len(taken) < lasting:
            continue
        table = np.array(taken)
        windows = np.stack([table[n : len(table) - lasting + 1 + n] for n in range(lasting)])
        ends = [0, *(stop + 1 for stop in stops[:-1]), stops[-1] + 2]  # the ends have what runs around the layers
        for (start, stop), least in zip(pairwise(ends), windows.max(axis=0).min(axis=0).tolist(), strict=True):
            if least > 0 and stop > start:
                parts = np.arange(stops[-1] + 2)
                stages.append((start <= parts) & (parts < stop))
                seconds.append(least)
    return np.array(stages, bool), np.array(seconds)


def _work(profile: ModelProfile, plan: Plan) -> Array:
    """Return the seconds of a micro-batch by the profile: of what runs before the layers, of each, and after them."""
    kinds = [*plan.compute_kinds, *([Kind.F] * any(plan.recompute))]
    sizes = [span.rows for span in plan.spans(Kind.F, 0)]
    each = [np.sum([profile.layer_arrays.seconds_at(kind, rows) for kind in kinds], axis=0) for rows in sizes]
    return np.asarray(np.mean(each, axis=0))
