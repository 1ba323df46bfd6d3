"""Times that no order of a stream goes below, because subnets share layers."""

from __future__ import annotations

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Array, Placed
from benchmarks.papers.csp.emulation.stream import Rules


def released(placed: Placed, rules: Rules) -> Array:
    """The earliest that each subnet can have stepped its layers on each stage, as if every subnet had stages of its
    own: it waits only for layers that earlier ones step, on a stage of its own for its own micro-batches, and for its
    neighbours. Messages take no time.

    With f and b of one micro-batch, and m of them, stage k's last backward ends no sooner than what follows from any
    stage j that begins at S_j: m forwards there, then one to the end and back; for j >= k also m forwards and backwards
    there, or one to the end and back to j and then m backwards, and one backward from there to k.
    """
    n, stages, m = len(placed.subnets), placed.stages, rules.microbatches
    forward, backward = (each // m + rules.overhead for each in (placed.forward, placed.backward))
    last, stage_of = placed.subnets.last_user, placed.stage_of
    moving = rules.moving * placed.subnets.swap
    ends = np.zeros((n, stages), np.int64)
    blocks = np.arange(placed.subnets.blocks)
    later = np.arange(stages)[:, None] >= np.arange(stages)[None, :]  # row j, column k: j comes after k, or is k
    for y in range(n):
        f, b = forward[y], backward[y]
        there = np.zeros(stages, np.int64)
        waits = last[y] >= 0
        users = last[y, waits]
        come = ends[users, stage_of[users, blocks[waits]]]
        come = come + np.where(stage_of[users, blocks[waits]] == stage_of[y, waits], 0, moving[users, blocks[waits]])
        np.maximum.at(there, stage_of[y, waits], come)
        begin = there
        for stage in range(1, stages):
            begin[stage] = max(begin[stage], begin[stage - 1] + f[stage - 1])
        f_from = np.cumsum(f[::-1])[::-1]  # from each stage to the end
        b_from = np.cumsum(b[::-1])[::-1]
        there_and_back = (begin + (m - 1) * f + f_from)[:, None] + b_from[None, :]
        down = b_from[None, :] - b_from[:, None]  # backwards from k up to, not with, j
        at_once = (begin + m * (f + b))[:, None] + down
        returned = (begin + f_from + b_from + (m - 1) * b)[:, None] + down
        least = np.where(later, np.maximum(at_once, returned), 0)
        ends[y] = np.maximum(there_and_back, least).max(axis=0)
    return ends


def least_bubble(placed: Placed, rules: Rules) -> float:
    """The share of the whole stream's time in which stages idle at least, 0 to 1, because of shared layers alone."""
    m = rules.microbatches
    busy = m * sum(int((each // m + rules.overhead).sum()) for each in (placed.forward, placed.backward))
    return max(0.0, 1 - busy / (placed.stages * int(released(placed, rules).max())))
