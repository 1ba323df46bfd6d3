"""The paper's formulas for the time of an iteration, beside what holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lightning_pipes.ir import Kind, Plan, adapt_plan
from lightning_pipes.planning.replanning.replay import Replay
from lightning_pipes.strategies.pipedream import PipeDream

Pipeline = tuple[Sequence[float], Sequence[float]]
"""Seconds of a batch on each stage, and of its messages between them, both directions together."""


def extend_pipeline(before: float, seconds: float, transfer: float, printed: bool = False) -> float:
    """Return seconds of an iteration of all stages up to one that takes `seconds`, where those before take `before` and
    the messages between both directions together `transfer` (DynPipe, E4).

    Right for two stages: max(p1, p2, (p1 + p2 + c) / 2), for two batches are under way. As `printed` the first stage
    can't be the slowest: where p1 > p2 + c it gives less than p1.
    """
    if seconds >= before + transfer:
        return seconds
    half = (before + seconds + transfer) / 2
    return half if printed else max(before, seconds, half)


def paper_seconds(stages: Sequence[float], transfers: Sequence[float], printed: bool = False) -> float:
    """Return seconds of an iteration by E5: all stages but the last count as one. That holds for two stages; on more,
    more batches are under way than two."""
    found = stages[0]
    for seconds, transfer in zip(stages[1:], transfers, strict=True):
        found = extend_pipeline(found, seconds, transfer, printed)
    return found


def least_seconds(stages: Sequence[float], transfers: Sequence[float]) -> float:
    """Return seconds that an iteration takes at least: of stages s to S, S - s + 1 batches are under way at most, and
    each takes the way to the last stage and back."""
    way, least, n = 0.0, max(stages), len(stages)
    for s in reversed(range(n)):
        way += stages[s] + (transfers[s] if s < n - 1 else 0.0)
        least = max(least, way / (n - s))
    return least


def true_seconds(pipelines: Sequence[Pipeline], share: float = 1 / 3, batches: int = 24) -> list[float]:
    """Return seconds of an iteration of each of several pipelines with as many stages, in the simulator: 1F1B that
    never flushes, one micro-batch a batch, links that work beside the stages in both directions.

    Args:
        share: of a stage's seconds that its forward takes.
        batches: over which the mean is taken, once the pipeline is full; they do not all take the same.
    """
    stages, transfers = (np.array([each[n] for each in pipelines], float) for n in (0, 1))
    n = stages.shape[1]
    durations = {(Kind.F, s): share * stages[:, s] for s in range(n)}
    durations |= {(Kind.B, s): (1 - share) * stages[:, s] for s in range(n)}
    durations |= {(Kind.SF, s): transfers[:, s] / 2 for s in range(n - 1)}
    durations |= {(Kind.SB, s + 1): transfers[:, s] / 2 for s in range(n - 1)}
    found = _replay(n, batches).step_seconds({key: seconds[:, None, None] for key, seconds in durations.items()})
    return [float(seconds) for seconds in found[:, 0]]


@lru_cache(maxsize=32)
def _replay(stages: int, batches: int) -> Replay:
    schedule = PipeDream()
    plan = adapt_plan(Plan.even(stages, 1), schedule)
    return Replay(schedule.program(plan), plan, batches)
