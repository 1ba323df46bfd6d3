"""Bounds that no order of an array's blocks can beat."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import combinations
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from lightning_pipes.strategies.jap.problem import ArrayProblem

PARTS = 4
"""Into how many pieces `two_stage_bound` cuts the work of a job: more are closer, and take as much longer."""


def preemptive_bound(problem: ArrayProblem) -> int:
    """Return nanoseconds that the worst stage would need if it alone were limited and could interrupt its blocks
    (Jackson).

    It knows when each block can come and what follows it, and is never below the longest job alone, nor below a stage's
    work with the shortest ways to its first block and from its last one.
    """
    tables = (
        a.reshape(problem.stages, -1).tolist()
        for a in (problem.earliest_starts, problem.busy_times - problem.saved_times, problem.least_rests)
    )
    worst = 0.0
    for heads, busy, tails in zip(*tables, strict=True):
        after = [tail - block for tail, block in zip(tails, busy, strict=True)]
        worst = max(worst, *(arrival + lasted for arrival, lasted in _urgent_first(heads, busy, after)))
    return int(worst)


def two_stage_bound(problem: ArrayProblem) -> int:
    """Return nanoseconds that the worst pair of stages, u before v, would need if they alone were limited.

    Stage v has to give back long jobs early, for they take longest on their way to u, while u is idle until it gets
    short ones. A job's F and B take v for a together, its B takes u for b and begins L or more after the B on v, which
    occupies it for c. When the share x of the work on v is done, at s, (1 - x) a is left until the end of its B; so the
    share x on u is done at s + l(x) or later, l(x) = L - c + (1 - x) a + x b.

    For any time t, take the sum over all work on u of how long after t it is done. A share of the jobs' work is enough:
    as much as r a, r the least b / a, R in all. It is at least r times the sum over the work on v of s + l - t, where
    positive. Of all ways to run v, with interruptions and no work before its F can come, that with most l first has the
    least sum: cost grows faster the later s + l is, so exchanging two pieces never helps. Let this be G. If u has done
    all at t + w, the sum on u is at most w^2 / 2 where w <= R, else w R - R^2 / 2, because u runs one block at a time:
    so w >= sqrt(2 G), or G / R + R / 2. What follows the B on u is left. The best of the t where a piece begins or ends
    is returned.
    """
    heads, busy, tails = (
        a.reshape(problem.stages, 2, problem.jobs)
        for a in (problem.earliest_starts, problem.busy_times - problem.saved_times, problem.least_rests)
    )
    shares = np.arange(PARTS + 1)[:, None] / PARTS
    worst = 0.0
    for u, v in combinations(range(problem.stages), 2):
        work, back = busy[v].sum(0), busy[u, 1]
        lags = tails[v, 1] - tails[u, 1] - busy[v, 1] + (1 - shares) * work + shares * back
        least = np.minimum(lags[1:], lags[:-1]).reshape(-1)
        parts = np.tile(work / PARTS, PARTS)
        pieces = np.array([*_urgent_first(*(a.tolist() for a in (np.tile(heads[v, 0], PARTS), parts, least)))])
        begin, lasted = pieces.T
        share = (back / work).min()
        times = np.concatenate([begin, begin + lasted])
        order = np.argsort(times, kind="stable")
        times, steps = times[order], np.diff(times[order])
        rate = share * np.cumsum(np.repeat([1.0, -1.0], len(begin))[order])[:-1]
        late = _after(rate * steps)  # work that comes after each time
        sums = _after((late[1:] + rate * steps / 2) * steps)
        rest = np.sqrt(2 * sums)
        rest = np.where(rest > late[0], sums / late[0] + late[0] / 2, rest)
        worst = max(worst, float((times + rest).max() + (tails[u, 1] - back).min()))
    return ceil(worst * (1 - 1e-12))  # floats have 1e-16


def lower_bound(problem: ArrayProblem) -> int:
    """Return the best bound there is, in nanoseconds."""
    return max(preemptive_bound(problem), two_stage_bound(problem))


def _urgent_first(heads: list[float], busy: list[float], tails: list[float]) -> Iterator[tuple[float, float]]:
    """Yield the pieces of a stage that always runs the longest tail: begin, begin plus tail, and length."""
    coming = sorted(zip(heads, busy, tails, strict=True), reverse=True)
    here: list[tuple[float, float]] = []
    t = 0.0
    while coming or here:
        if not here:
            t = max(t, coming[-1][0])
        while coming and coming[-1][0] <= t:
            _, left, tail = coming.pop()
            heappush(here, (-tail, left))
        urgency, left = heappop(here)
        lasted = min(left, (coming[-1][0] if coming else inf) - t)
        yield t - urgency, lasted
        if lasted < left:
            heappush(here, (urgency, left - lasted))
        t += lasted


def _after(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the amount that there is from each of the times between `amounts` on."""
    return np.append(amounts[::-1].cumsum()[::-1], 0.0)
