"""A cut of its own for each subnet, so that its stages take equally long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from lightning_pipes.ir import Span


def balanced_cut(costs: Sequence[float], stages: int, pinned: Mapping[int, int]) -> tuple[Span, ...] | None:
    """Consecutive layers for each stage (Zhao et al. 2022, S3.2): the slowest stage is as fast as can be, and none is
    empty. Of equal ones every cut, from the last to the first, is as far left as can be. None if there is none.

    Args:
        costs: of each layer.
        pinned: the stage of those layers that have to be in one.
    """
    layers, ends = len(costs), [0.0, *accumulate(costs)]
    wrong = [[0] * (layers + 1) for _ in range(stages)]  # pinned elsewhere, among the first layers
    for stage, counts in enumerate(wrong):
        for layer in range(layers):
            counts[layer + 1] = counts[layer] + (pinned.get(layer, stage) != stage)
    slowest: list[float | None] = [0.0, *[None] * layers]  # of the best cut of the first layers into so many stages
    chosen: list[list[int]] = []
    for stage in range(stages):
        now: list[float | None] = [None] * (layers + 1)
        begins = [0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                before = slowest[begin]
                if before is None or wrong[stage][end] != wrong[stage][begin]:
                    continue
                case, best = max(before, ends[end] - ends[begin]), now[end]
                if best is None or case < best:
                    now[end], begins[end] = case, begin
        slowest = now
        chosen.append(begins)
    if slowest[layers] is None:
        return None
    cuts = [layers]
    for begins in reversed(chosen):
        cuts.insert(0, begins[cuts[0]])
    return tuple(Span(a, b) for a, b in pairwise(cuts))
