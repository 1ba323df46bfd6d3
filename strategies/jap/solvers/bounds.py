"""Lower bounds of the makespan of any order of an array's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import combinations
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from lightning_pipes.strategies.jap.problem import ArrayProblem

N_WORK_PIECES = 4
"""The number of pieces into which `two_stage_bound` cuts the work of a job.

More pieces give a closer bound, and the duration is proportional to their number.
"""


def preemptive_bound(problem: ArrayProblem) -> int:
    """Return the nanoseconds that the worst stage needs if it is the only limit and may interrupt its blocks (Jackson).

    The bound considers when each block can arrive and the time that follows it. It is at least the duration of the
    longest job alone. It is also at least the work of a stage, plus the shortest times before its first block and after
    its last one.
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
    """Return the nanoseconds that the worst pair of stages, u before v, needs if these two stages are the only limit.

    Stage v should finish long jobs early, because they take the longest time on their way back to u. However, u idles
    until short jobs arrive. Let F and B of a job take a in total on v, and let B take b on u. The B on u begins L or
    more after the B on v, which occupies v for c. When the share x of the job's work on v is done, at time s, (1 - x) a
    of it is left until the end of its B. The share x of the job's work on u is therefore done at s + l(x) or later,
    with l(x) = L - c + (1 - x) a + x b.

    For any time t, integrate over all work on u the time after t at which this work is done. It is enough to count a
    part of each job's work, r a, where r is the least b / a; in total, this is R. The integral is at least r times the
    integral of max(s + l - t, 0) over the work on v. Among all ways to run v, with interruptions and with no work
    before its F can arrive, the way that always runs the work with the largest l has the smallest integral: the later s
    + l is, the faster the cost grows, so exchanging two pieces never helps. Let G be the resulting lower bound of the
    integral on u. If u has done all this work at t + w, the integral on u is at most w^2 / 2 if w <= R, and w R - R^2 /
    2 otherwise, because u runs one block at a time. It follows that w >= sqrt(2 G), or w >= G / R + R / 2. After that,
    the time that follows the B on u is left. The function returns the best value over all t at which a piece begins or
    ends.
    """
    heads, busy, tails = (
        a.reshape(problem.stages, 2, problem.jobs)
        for a in (problem.earliest_starts, problem.busy_times - problem.saved_times, problem.least_rests)
    )
    shares = np.arange(N_WORK_PIECES + 1)[:, None] / N_WORK_PIECES
    worst = 0.0
    for u, v in combinations(range(problem.stages), 2):
        work, back = busy[v].sum(0), busy[u, 1]
        lags = tails[v, 1] - tails[u, 1] - busy[v, 1] + (1 - shares) * work + shares * back
        least = np.minimum(lags[1:], lags[:-1]).reshape(-1)
        parts = np.tile(work / N_WORK_PIECES, N_WORK_PIECES)
        pieces = np.array([*_urgent_first(*(a.tolist() for a in (np.tile(heads[v, 0], N_WORK_PIECES), parts, least)))])
        begin, lasted = pieces.T
        share = (back / work).min()
        times = np.concatenate([begin, begin + lasted])
        order = np.argsort(times, kind="stable")
        times, steps = times[order], np.diff(times[order])
        rate = share * np.cumsum(np.repeat([1.0, -1.0], len(begin))[order])[:-1]
        late = _after(rate * steps)  # the work that is done after each time
        sums = _after((late[1:] + rate * steps / 2) * steps)
        rest = np.sqrt(2 * sums)
        rest = np.where(rest > late[0], sums / late[0] + late[0] / 2, rest)
        worst = max(worst, float((times + rest).max() + (tails[u, 1] - back).min()))
    return ceil(worst * (1 - 1e-12))  # a margin for rounding errors


def lower_bound(problem: ArrayProblem) -> int:
    """Return the larger of `preemptive_bound` and `two_stage_bound`, in nanoseconds."""
    return max(preemptive_bound(problem), two_stage_bound(problem))


def _urgent_first(heads: list[float], busy: list[float], tails: list[float]) -> Iterator[tuple[float, float]]:
    """Yield the pieces of work of a stage that always runs the block with the longest tail.

    Each piece is a tuple of its begin plus the tail, and its length.
    """
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
    """Return the sum of the amounts from each position on, and 0 after the last one."""
    return np.append(amounts[::-1].cumsum()[::-1], 0.0)
