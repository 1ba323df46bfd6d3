"""Estimation of the work of layers, separate from the slowdown of devices while the layers were measured.

    seconds of a stage now  =  work of its layers  x  slowdown of its device now, which is 1 or more

If a profile was measured while a neighbor was active, the slowdown of that time is contained in the work of the layers
on that device. When the neighbor has gone, the stage takes less time than the profile predicts. A device cannot cause
this, so its layers must have less work.

A slow device slows down all of its layers. If a layer takes longer while other layers of its stage do not, this layer
has more work.
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
MIN_WORK_SHARE = 0.9
"""The share of its work by the profile below which a stage counts as too fast. Smaller differences are chance."""
FASTER_STAGE_COST, SLOWER_STAGE_COST, CHANGED_WORK_COST = 10.0, 1.0, 0.1
"""The costs of an explanation, each multiplied by a logarithm.

They are for a stage that is faster than its work, for a stage that is slower than its work (both for each plan), and
for a layer that has less work than the profile predicts.
"""
MIN_LAYER_SLOWDOWN = 1.5
"""The factor by which a layer must have slowed down, compared with the other layers of its stage, to have more work."""
MIN_LAYER_SHARE = 0.1
"""The minimum additional time of such a layer, as a share of its stage's forward. Smaller differences are chance."""
MAX_CORRECTIONS = 64
"""The maximum number of corrections."""
MIN_COST_DECREASE = 1e-6
"""The minimum decrease of the cost in each correction."""


def estimate_work(profile: ModelProfile, looks: Sequence[tuple[Plan, Observation]], lasting: int) -> ModelProfile:
    """Return the profile with less work for the layers that best explain why stages were faster than it predicts.

    Plans with other stages help to identify these layers. The work of a layer is increased if the layer alone is slower
    (DynPipe, S III). If a whole stage is slower, its device is slow.

    Args:
        profile: the seconds and bytes of each layer.
        looks: the last observations of the current plan and of earlier plans, the oldest first.
        lasting: the number of consecutive observations in which a difference has to be present.
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
    """Return the factor by which each layer has slowed down compared with the other layers of its stage.

    The factor is 1 if the difference is small, or if fewer than three layers of the stage were measured.

    Args:
        profile: the seconds of each layer without the slowdown.
        plan: the plan that ran.
        look: the observation of the plan.
    """
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
        slow = (took > MIN_LAYER_SLOWDOWN * others * alone[known]) & (more > MIN_LAYER_SHARE * took.sum())
        factors[np.array(known)[slow]] = (took / (others * alone[known]))[slow]
    return factors


class _Explanation:
    """Search for the factors of the work of all parts. Each step makes one stage possible at the lowest cost.

    The parts are the code before the layers, each layer, and the code after the layers.

    Args:
        alone: the seconds of each part by the profile.
        stages: whether a stage contains a part. Axis 0 is the stages of all plans, and axis 1 is parts.
        seconds: the measured seconds of each stage.
    """

    def __init__(self, alone: Array, stages: npt.NDArray[np.bool_], seconds: Array) -> None:
        self._alone, self._stages, self._logs = alone, stages, np.log(seconds)
        self._seconds = seconds

    @cached_property
    def _groups(self) -> npt.NDArray[np.bool_]:
        """The groups of parts that may change their work together.

        These are the single parts, the parts that were in one stage under all plans, and the stages.
        """
        _, segment = np.unique(self._stages.T, axis=0, return_inverse=True)
        segments = segment.reshape(-1) == np.arange(segment.max() + 1)[:, None]
        return np.unique(np.vstack([np.eye(len(self._alone), dtype=bool), segments, self._stages]), axis=0)

    def find_factors(self) -> Array:
        """Return a factor for each part, which is at most 1."""
        factors = np.ones(len(self._alone))
        cost = float(self._costs(factors[None])[0])
        for _ in range(MAX_CORRECTIONS):
            options = self._options(factors)
            if not len(options):
                break
            costs = self._costs(options)
            best = int(costs.argmin())
            if costs[best] >= cost - MIN_COST_DECREASE:
                break
            factors, cost = options[best], float(costs[best])
        return factors

    def _options(self, factors: Array) -> Array:
        """Return factors that explain the measured seconds of one stage, with a row for each group that may change."""
        work = factors * self._alone
        whole = self._stages @ work
        less = self._seconds < MIN_WORK_SHARE * whole
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
        impossible = -np.minimum(off - np.log(MIN_WORK_SHARE), 0.0).sum(axis=1)
        slowed = np.maximum(off, 0.0).sum(axis=1)
        return np.asarray(
            FASTER_STAGE_COST * impossible
            + SLOWER_STAGE_COST * slowed
            - CHANGED_WORK_COST * np.log(factors).sum(axis=1)
        )


def _fastest(looks: Sequence[tuple[Plan, Observation]], lasting: int) -> tuple[npt.NDArray[np.bool_], Array]:
    """Return the parts of each stage of all plans, and the seconds of a micro-batch in its fastest observations.

    The seconds are the lowest value that a stage did not exceed in `lasting` consecutive observations.
    """
    by_layers: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for plan, look in looks:
        by_layers.setdefault((*(span.stop for span in plan.layers),), []).append(look.stage_seconds)
    stages, seconds = [], []
    for stops, taken in by_layers.items():
        if len(taken) < lasting:
            continue
        table = np.array(taken)
        windows = np.stack([table[n : len(table) - lasting + 1 + n] for n in range(lasting)])
        ends = [0, *(stop + 1 for stop in stops[:-1]), stops[-1] + 2]  # the ends include the work around them
        for (start, stop), least in zip(pairwise(ends), windows.max(axis=0).min(axis=0).tolist(), strict=True):
            if least > 0 and stop > start:
                parts = np.arange(stops[-1] + 2)
                stages.append((start <= parts) & (parts < stop))
                seconds.append(least)
    return np.array(stages, bool), np.array(seconds)


def _work(profile: ModelProfile, plan: Plan) -> Array:
    """Return the seconds of each part of a micro-batch by the profile: before the layers, each layer, after them."""
    again = max(map(plan.recomputed_share, range(plan.n_stages)))
    shares = {kind: 1.0 + again * (kind is Kind.F) for kind in plan.compute_kinds}
    sizes = [span.rows for span in plan.spans(Kind.F, 0)]
    each = [
        np.sum([share * profile.layer_arrays.seconds_at(kind, rows) for kind, share in shares.items()], axis=0)
        for rows in sizes
    ]
    return np.asarray(np.mean(each, axis=0))
