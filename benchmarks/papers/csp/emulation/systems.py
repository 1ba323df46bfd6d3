"""CSP and the systems that it is compared with, on the same subnets (NASPipe, S5.1).

The systems differ in the order of computations. They also differ in what they train, because only CSP and one subnet
after another keep the order of reads and writes.
"""

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
        cut: returns the stage of each block, given the subnets and the number of stages.
        rules: returns the rules of this system, given the rules of CSP and the number of stages.
    """

    cut: Callable[[Subnets, int], Placed]
    rules: Callable[[Rules, int], Rules] = lambda rules, stages: rules

    def run(self, subnets: Subnets, stages: int, rules: Rules) -> Ran:
        """Run the stream with the micro-batches and the costs of `rules`."""
        return run(self.cut(subnets, stages), self.rules(rules, stages))


def bsp(bulk: int | None = None, forwards_first: bool = True) -> System:
    """Return a bulk-synchronous system with a flush after each bulk.

    All subnets of a bulk use the weights at its start, and blocks stay on their stages. With `forwards_first`, this is
    the paper's GPipe.

    Args:
        bulk: the number of subnets in a bulk. By default, it is the number of stages.
        forwards_first: whether all forwards of a bulk run before its backwards.
    """

    def rules(rules: Rules, stages: int) -> Rules:
        return replace(rules, checks=False, bulk=bulk or stages, forwards_first=forwards_first)

    return System(fixed, rules)


def one_f_one_b(rules: Rules, stages: int) -> Rules:
    """Return the rules of 1F1B across subnets, which uses the current weights (the paper's PipeDream)."""
    return replace(rules, checks=False, depth=2 * stages, held=tuple(range(stages, 0, -1)))


SYSTEMS = {
    "CSP": System(balanced),
    "BSP": bsp(),
    "ASP": System(fixed, one_f_one_b),
    "without scheduler": System(balanced, lambda rules, stages: replace(rules, depth=1)),
    "without mirroring": System(fixed),
}
"""The systems by name. Without scheduler, a subnet enters when the one before it has left."""


def one_by_one(placed: Placed, rules: Rules, schedule: OneFOneB | ZeroBubble) -> float:
    """Return the subnets per second if they run one after another, with a schedule that flushes.

    Each part of a split backward takes half of its time. Messages take no time.
    """
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
    """Return the dependencies of Algorithm 2 as printed.

    A forward waits until its stage has finished all earlier subnets that use any of its layers on this stage, no matter
    which stage these subnets had the layer on.
    """
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
    """Return the number of layers that a forward read without the update of the last earlier subnet that uses them."""
    placed = ran.placed
    users, blocks = np.nonzero(placed.subnets.last_user >= 0)
    last = placed.subnets.last_user[users, blocks]
    here, there = placed.stage_of[last, blocks], placed.stage_of[users, blocks]
    moving = np.where(here == there, 0, ran.rules.moving * placed.subnets.swap[users, blocks])
    updated = ran.stepped[last, here] + moving
    return int((ran.forwards[0].min(axis=2)[users, there] < updated).sum())


# ---- Lower bounds for the times of any order of a stream, which follow from shared layers.


def released(placed: Placed, rules: Rules) -> Array:
    """Return the earliest time at which each subnet can have stepped its layers on each stage.

    In this bound, every subnet has separate stages. A subnet only waits for layers that earlier subnets step, for its
    own micro-batches on a stage, and for its neighboring stages. Messages take no time.

    Let f and b be the times of one micro-batch, and m the number of micro-batches. The last backward of stage k can't
    end before any of the following, for any stage j that begins at S_j. First, j runs m forwards, and the last
    micro-batch passes to the end and back to k. Second, for j >= k, j runs m forwards and m backwards, and the last
    backward passes from j to k. Third, for j >= k, one micro-batch passes to the end and back to j, which runs m
    backwards, and the last backward passes from j to k.
    """
    n, stages, m = len(placed.subnets), placed.stages, rules.microbatches
    forward, backward = (each // m + rules.overhead for each in (placed.forward, placed.backward))
    last, stage_of = placed.subnets.last_user, placed.stage_of
    moving = rules.moving * placed.subnets.swap
    ends = np.zeros((n, stages), np.int64)
    blocks = np.arange(placed.subnets.blocks)
    later = np.arange(stages)[:, None] >= np.arange(stages)[None, :]  # row j, column k: whether j >= k
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
        f_from = np.cumsum(f[::-1])[::-1]  # from each stage to the last one
        b_from = np.cumsum(b[::-1])[::-1]
        there_and_back = (begin + (m - 1) * f + f_from)[:, None] + b_from[None, :]
        down = b_from[None, :] - b_from[:, None]  # backwards of stages k to j - 1
        at_once = (begin + m * (f + b))[:, None] + down
        returned = (begin + f_from + b_from + (m - 1) * b)[:, None] + down
        least = np.where(later, np.maximum(at_once, returned), 0)
        ends[y] = np.maximum(there_and_back, least).max(axis=0)
    return ends


def least_bubble(placed: Placed, rules: Rules) -> float:
    """Return the smallest possible share of idle time in the whole stream, from 0 to 1, because of shared layers."""
    m = rules.microbatches
    busy = m * sum(int((each // m + rules.overhead).sum()) for each in (placed.forward, placed.backward))
    return max(0.0, 1 - busy / (placed.stages * int(released(placed, rules).max())))


# ---- The number of micro-batches and the length of the queue, chosen by simulation.

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
QUEUE = 30
"""The length of the paper's queue."""
AS_GOOD = 0.01
"""The relative loss of throughput that still counts as equal.

Fewer micro-batches and a shorter queue need less memory, and kernels of larger micro-batches are never slower.
"""
SAMPLE = 300
"""The number of subnets that are drawn from a space."""


class Choice(NamedTuple):
    """The best settings.

    Attributes:
        microbatches: the number of micro-batches.
        depth: the length of the queue.
        throughput: subnets per second with these settings.
        tried: subnets per second of all settings, by number of micro-batches and depth.
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
    """Return the settings with the fewest micro-batches that are as fast as the fastest ones in simulations.

    Of these settings, the one with the shortest queue is chosen. With more micro-batches, layers become free earlier,
    because the next subnet that uses them waits until the last micro-batch has returned. But each micro-batch has a
    fixed cost.

    Args:
        subnets: a sample of the subnets, or the space from which they are drawn.
        stages: the number of stages.
        rules: the other rules, such as fixed costs, messages and limits.
        microbatches: the numbers of micro-batches to choose from.
        depths: the depths to choose from. By default, these are the number of stages, twice this number, and the length
            of the paper's queue.
        system: the system that runs the stream.

    Raises:
        InputError: `microbatches` is empty.
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
