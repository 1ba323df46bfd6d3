"""How often subnets share layers, and how much of the time that leaves stages idle at most, by formulas."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Array, Placed, Space
from benchmarks.papers.csp.emulation.stream import Rules

# ---- Times that no order of a stream goes below: those that shared layers alone force.


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


def collisions(space: Space, subnets: int) -> float:
    """The probability that of so many subnets at least two share a layer (the birthday problem, in every block)."""
    alone = 1.0
    for n in range(subnets):
        alone *= max(0.0, 1 - n / space.choices)
    return 1 - alone**space.blocks


def forced_period(space: Space, stages: int, microbatches: int) -> float:
    """The most time that shared layers alone force from one subnet to the next, on the average of a long stream, if a
    subnet takes 1 on each stage.

    Two subnets share a layer on a given stage with probability q = 1 - (1 - 1 / choices) ** (blocks / stages). If stage
    k of p, counted from 0, is the first where they do, the later one begins w_k = 1 + (p - 1 - k) / m after the other
    at least, with m micro-batches: as long as it takes from k to the end and back. Chains of such pairs among n subnets
    are counted by their length: on average (1 + x) ** n, where x = sum of (1 - q) ** k q exp(t w_k), each weighed with
    exp(t length). So for every t > 0 hardly any chain is longer than n log(1 + x) / t; the least of these is returned.
    """
    q = 1 - (1 - 1 / space.choices) ** (space.blocks / stages)

    def period(t: float) -> float:
        longest = t * (1 + (stages - 1) / microbatches)
        x = sum((1 - q) ** k * q * math.exp(-t * k / microbatches) for k in range(stages))
        return (longest + math.log(math.exp(-longest) + x)) / t

    low, high = math.log(1e-3), math.log(1e5)
    for _ in range(200):  # the least of a function that falls and then rises
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if period(math.exp(left)) <= period(math.exp(right)):
            high = right
        else:
            low = left
    return period(math.exp(low))


def forced_bubble(space: Space, stages: int, microbatches: int) -> float:
    """The share of the time that stages idle at most because of shared layers alone; see `forced_period`."""
    return max(0.0, 1 - 1 / forced_period(space, stages, microbatches))
