"""How often subnets share layers, and how much of the time that leaves stages idle at most, by formulas."""

from __future__ import annotations

import math

from benchmarks.papers.csp.emulation.spaces import Space


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
