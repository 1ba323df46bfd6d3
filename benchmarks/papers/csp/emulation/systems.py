"""CSP and the systems that it is compared with, on the same subnets (NASPipe, S5.1): in the order of computations;
what they train differs, for only CSP and one subnet after another keep the order of reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Array, Placed, Space, Subnets, balanced, fixed
from benchmarks.papers.csp.emulation.stream import Ran, Rules, Waits, run
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import InputError, Kind, Plan, adapt_plan, short_repr
from lightning_pipes.sim import cost_representatives, makespans
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.zero_bubble import ZeroBubble


@dataclass(frozen=True)
class System:
    """A way to run a stream.

    Attributes:
        cut: from subnets and a number of stages to who computes which blocks.
        rules: what it makes of the rules of CSP, given the number of stages.
    """

    cut: Callable[[Subnets, int], Placed]
    rules: Callable[[Rules, int], Rules] = lambda rules, stages: rules

    def run(self, subnets: Subnets, stages: int, rules: Rules) -> Ran:
        """The stream, with the micro-batches and costs of `rules`."""
        return run(self.cut(subnets, stages), self.rules(rules, stages))


def bsp(bulk: int | None = None, forwards_first: bool = True) -> System:
    """Bulks of so many subnets, one for each stage by default, all with the weights at the bulk's start, and a flush
    after each (the paper's GPipe, which runs all forwards first); blocks stay on their stages."""

    def rules(rules: Rules, stages: int) -> Rules:
        return replace(rules, checks=False, bulk=bulk or stages, forwards_first=forwards_first)

    return System(fixed, rules)


def one_f_one_b(rules: Rules, stages: int) -> Rules:
    """1F1B across subnets, on whatever weights are there (the paper's PipeDream)."""
    return replace(rules, checks=False, depth=2 * stages, held=tuple(range(stages, 0, -1)))


SYSTEMS = {
    "CSP": System(balanced),
    "BSP": bsp(),
    "ASP": System(fixed, one_f_one_b),
    "without scheduler": System(balanced, lambda rules, stages: replace(rules, depth=1)),
    "without mirroring": System(fixed),
}
"""By name; without scheduler the next subnet enters when the one before has left."""


def one_by_one(placed: Placed, rules: Rules, schedule: OneFOneB | ZeroBubble) -> float:
    """Subnets a second, one after another, by a schedule that flushes. A backward in two parts takes half its time in
    each; messages take no time."""
    subnets, stages, m = placed.subnets, placed.stages, rules.microbatches
    plan = adapt_plan(Plan.even(stages, m), schedule)
    program = schedule.program(plan)
    parts = 2 if plan.split_backward else 1
    columns = []
    for i in cost_representatives(program, plan):
        if i.kind is Kind.F:
            columns.append(placed.forward[:, i.stage] // m + rules.overhead)
        elif i.kind in (Kind.B, Kind.I, Kind.W):
            columns.append(placed.backward[:, i.stage] // m // parts + rules.overhead)
        else:
            columns.append(np.zeros(len(subnets), np.int64))
    times = np.stack(columns, axis=1).astype(np.int64)
    took = makespans(program, plan, CostModel.uniform(stages, 1e-9, 1e-9), times)
    return float(len(subnets) / took.sum() * 1e9)


def by_finished_list(placed: Placed, depth: int) -> Waits:
    """A forward waits until its stage has finished all earlier subnets that use any of its layers there, on whatever
    stage these had it: Algorithm 2 as printed."""
    n, stages = len(placed.subnets), placed.stages
    sources, targets = [], []
    for y in range(n):
        for x in range(max(0, y - depth + 1), y):
            shared = placed.subnets.choices[x] == placed.subnets.choices[y]
            for stage in np.unique(placed.stage_of[y, shared]):
                sources.append(x * stages + stage)
                targets.append(y * stages + stage)
    numbers = np.array(sources, np.int64), np.array(targets, np.int64)
    return Waits.of(*numbers, np.zeros(len(sources), np.int64), n * stages)


def stale_reads(ran: Ran) -> int:
    """How many layers a forward has read before they had the update of the last subnet before that uses them."""
    placed = ran.placed
    users, blocks = np.nonzero(placed.subnets.last_user >= 0)
    last = placed.subnets.last_user[users, blocks]
    here, there = placed.stage_of[last, blocks], placed.stage_of[users, blocks]
    moving = np.where(here == there, 0, ran.rules.moving * placed.subnets.swap[users, blocks])
    updated = ran.stepped[last, here] + moving
    return int((ran.forwards[0].min(axis=2)[users, there] < updated).sum())


# ---- Times that no order of a stream goes below, because subnets share layers.


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


# ---- How many micro-batches, and how far to look ahead, by simulation.

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
        raise InputError(f"nothing to choose from: microbatches is {short_repr(microbatches)}")
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
