"""How many micro-batches, and how far to look ahead, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.papers.csp.emulation.spaces import Space, Subnets
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.systems import SYSTEMS, System
from lightning_pipes.ir import InputError, shown

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
QUEUE = 30
"""The paper's."""
AS_GOOD = 0.01
"""By what share less throughput is as good: fewer micro-batches and a shorter queue hold less, and kernels of larger
pieces are never slower."""
SAMPLE = 300
"""Subnets that are drawn of a space."""


class Choice(NamedTuple):
    """The best settings.

    Attributes:
        throughput: subnets a second that it then has.
        tried: the same of everything that was tried, by micro-batches and depth.
    """

    microbatches: int
    depth: int
    throughput: float
    tried: dict[tuple[int, int], float]


def choose(
    subnets: Subnets | Space,
    stages: int,
    rules: Rules | None = None,
    microbatches: Sequence[int] = MICROBATCHES,
    depths: Sequence[int] = (),
    system: System = SYSTEMS["CSP"],
) -> Choice:
    """The fewest micro-batches, and of these the shortest queue, that are as fast as any, in simulation.

    More micro-batches set layers free sooner, for the next subnet that uses them waits until the last one is back; each
    has a fixed cost.

    Args:
        subnets: a sample of those to come, or the space of which they are drawn.
        rules: what else counts: fixed costs, messages, limits.
        depths: by default the number of stages, twice as many, and the paper's queue.

    Raises:
        InputError: nothing to choose from.
    """
    if not microbatches:
        raise InputError(f"nothing to choose from: microbatches is {shown(microbatches)}")
    rules = rules or Rules()
    depths = depths or sorted({stages, 2 * stages, QUEUE})
    sample = subnets.draw(SAMPLE, seed=0) if isinstance(subnets, Space) else subnets
    placed = system.cut(sample, stages)
    tried = {
        (m, depth): run(placed, system.rules(replace(rules, microbatches=m, depth=depth), stages)).throughput
        for m in microbatches
        for depth in depths
    }
    best = max(tried.values())
    m, depth = min(case for case, speed in tried.items() if speed >= (1 - AS_GOOD) * best)
    return Choice(m, depth, tried[m, depth], tried)
