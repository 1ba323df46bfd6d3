"""How a job runs that has all stages for itself: the baselines of ArrayPipe's paper."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import B, Cut, F, Kind, Plan, Schedule, Span, even_spans
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.jap import problem_from_plan
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem
from lightning_pipes.strategies.one_f_one_b import OneFOneB

# ---- BPipe, which ArrayPipe is compared with: 1F1B whose first stages lend activations to its last ones (Kim et al.
# 2023).
# Stage s of S, counted from 1, would hold S + 1 - s micro-batches; one that would hold more than ceil((S + 2) / 2)
# sends the surplus to stage S + 1 - s, which holds few, and fetches each before its backward.

Op = tuple[str, int, int]
"""What, micro-batch, stage: F and B compute, OUT lends an activation, IN fetches it back."""
Lane = tuple[str, int]
"""What runs one operation at a time: "" and a stage, or a direction of its pair."""


def most_held(stages: int) -> int:
    """Activations that a stage holds at most, its own and those that it keeps for another."""
    return -(-(stages + 2) // 2)


@dataclass(frozen=True)
class BPipe:
    """What ran when, in nanoseconds.

    Attributes:
        starts, ends: of every operation.
    """

    starts: Mapping[Op, int]
    ends: Mapping[Op, int]

    @property
    def makespan(self) -> int:
        """Until the last backward of stage 0 has ended, with its update."""
        return max(end for (what, _, s), end in self.ends.items() if what == "B" and s == 0)


def bpipe(problem: ArrayProblem, moving: Array) -> BPipe:
    """When all runs if the problem's jobs are micro-batches of one batch, or batches of siblings.

    A stage keeps the oldest activations, for they are needed first; a new one is lent while the next backward runs, and
    the oldest lent one comes back as soon as a backward has made room. Neither stops a stage from computing, but what
    needs its place or its data waits. Each direction of a pair moves one activation at a time.

    Args:
        moving: nanoseconds that an activation takes to the partner or back, by micro-batch, then by stage.
    """
    jobs, stages = problem.jobs, problem.stages
    lanes: dict[Lane, list[Op]] = {}
    needs: dict[Op, list[Op]] = {}
    for s in range(stages):
        held = min(jobs, stages - s)
        kept = most_held(stages) - 1 if held > most_held(stages) else held  # one more place is for what moves
        row = lanes["", s] = one_forward_one_backward(jobs, stages, s)
        out = lanes["OUT", s] = list[Op]()
        back = lanes["IN", s] = list[Op]()
        here: list[int] = []
        lent: list[int] = []
        for op in row:
            what, n, _ = op
            wants = needs.setdefault(op, [])
            if what == "F":
                wants += out[-1:]  # its place is what the last one leaves
                here.append(n)
                if len(here) > kept:
                    lent.append(here.pop())
                    needs["OUT", n, s] = [op, *back[-1:]]  # into the place of what came back
                    out.append(("OUT", n, s))
                continue
            here.remove(n)
            if lent:
                first = lent.pop(0)
                here = sorted([*here, first])
                needs["IN", first, s] = [op, ("OUT", first, s)]
                needs.setdefault(("B", first, s), []).append(("IN", first, s))
                back.append(("IN", first, s))
    return _timed(problem, moving, lanes, needs)


def one_forward_one_backward(jobs: int, stages: int, stage: int) -> list[Op]:
    """The order of a stage."""
    warm = min(stages - stage, jobs)
    row: list[Op] = [("F", n, stage) for n in range(warm)]
    for n in range(jobs):
        row.append(("B", n, stage))
        if warm + n < jobs:
            row.append(("F", warm + n, stage))
    return row


def _timed(problem: ArrayProblem, moving: Array, lanes: Mapping[Lane, list[Op]], needs: Mapping[Op, list[Op]]) -> BPipe:
    """Every lane runs its operations in order, each as early as its data and its needs allow."""
    (forward, backward), (there, home) = problem.occupied_times, problem.stage_lags
    takes = {"F": forward, "B": backward, "OUT": moving, "IN": moving}
    starts: dict[Op, int] = {}
    ends: dict[Op, int] = {}

    def arrived(op: Op) -> int | None:
        """When its data is there; None if that is not known yet."""
        what, n, s = op
        lags, before = (home, ("B", n, s + 1)) if what == "B" else (there, ("F", n, s - 1))
        if what == "B" and s == problem.stages - 1:
            lags, before = there, ("F", n, s)
        if before[2] < 0 or what in ("OUT", "IN"):
            return 0
        return starts[before] + int(lags[n, before[2]]) if before in starts else None

    at, free = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0)
    waiting = deque(lanes)
    idle = 0
    while idle < len(waiting):
        lane = waiting[0]
        waiting.rotate(-1)
        idle += 1
        while at[lane] < len(lanes[lane]):
            op = lanes[lane][at[lane]]
            there_at, wants = arrived(op), needs.get(op, [])
            if there_at is None or any(each not in ends for each in wants):
                break
            starts[op] = max([free[lane], there_at, *(ends[each] for each in wants)])
            ends[op] = free[lane] = starts[op] + int(takes[op[0]][op[1:]])
            at[lane] += 1
            idle = 0
    assert all(at[lane] == len(row) for lane, row in lanes.items()), "stages wait for each other"
    return BPipe(starts, ends)


MICROBATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Spent:
    """What an epoch takes: `time` from begin to end, the others are sums over all stages.

    Attributes:
        overhead: recomputation and updates.
        switching: what stages wait for states.
        setting: what was chosen, in words.
    """

    time: float
    forward: float = 0.0
    backward: float = 0.0
    overhead: float = 0.0
    switching: float = 0.0
    setting: str = ""

    def utilisation(self, stages: int) -> float:
        """The share of the time in which a stage computes, on average."""
        return (self.forward + self.backward + self.overhead) / (self.time * stages)


def spent_in(time: float, plan: Plan, costs: CostModel, setting: str = "") -> Spent:
    """One batch of one job, with what its computations take."""
    spent = dict.fromkeys((Kind.F, Kind.B, Kind.STEP), 0.0)
    again = 0.0
    for s in range(plan.n_stages):
        for span in plan.spans(Kind.F, s):
            forward = costs.seconds_at(Kind.F, s, span.rows)
            spent[Kind.F] += forward
            spent[Kind.B] += costs.seconds_at(Kind.B, s, span.rows)
            again += forward if plan.recompute and plan.recompute[s] else 0.0
        spent[Kind.STEP] += costs.seconds_at(Kind.STEP, s)
    overhead = spent[Kind.STEP] + again
    return Spent(time, 1e9 * spent[Kind.F], 1e9 * spent[Kind.B], 1e9 * overhead, setting=setting)


class Memory(Protocol):
    @property
    def memory(self) -> float:
        """Bytes of a device."""


class Site(Protocol):
    """Where one job runs: `jap_schemes.Epoch` says what the attributes are."""

    stages: int
    most_stages: int
    line: CostModel

    @property
    def hardware(self) -> Memory:
        """The devices."""

    @property
    def costs(self) -> Callable[[tuple[int, ...]], CostModel]:
        """By the rank of each stage."""

    def to_partner(self, size: Array) -> Array:
        """Nanoseconds that bytes take to the stage that keeps them."""


class OneJob(Protocol):
    """How one job runs on all stages."""

    def steps(self, epoch: Site, rows: int) -> Iterator[Spent]:
        """Ways to run a batch that fit into memory."""


@dataclass(frozen=True)
class Ordered:
    """By schedules, of which the best counts.

    Attributes:
        recompute: whether all stages but the last recompute; those that may be chosen.
    """

    schedules: tuple[Schedule, ...]
    recompute: tuple[bool, ...] = (False, True)

    def steps(self, epoch: Site, rows: int) -> Iterator[Spent]:
        """See `OneJob`."""
        for schedule in self.schedules:
            where = schedule.place_stages(epoch.stages)
            if len(where) > epoch.most_stages:
                continue
            costs = epoch.costs(where)
            for m in MICROBATCHES:
                for recompute in self.recompute if m <= rows else ():
                    plan = even_plan(schedule, epoch.stages, m, rows, recompute)
                    program = schedule.program(plan)
                    if max(peak_bytes(program, plan, costs)) <= epoch.hardware.memory:
                        yield spent_in(makespan(program, plan, costs), plan, costs, f"m={m}")


@dataclass(frozen=True)
class ByBPipe:
    """BPipe."""

    def steps(self, epoch: Site, rows: int) -> Iterator[Spent]:
        """See `OneJob`."""
        costs, stages = epoch.line, epoch.stages
        for m in MICROBATCHES:
            for recompute in (False, True) if m <= rows else ():
                spans = even_spans(rows, m)
                again = tuple(recompute and s < stages - 1 for s in range(stages))
                plan = Plan(
                    tuple(range(stages)), tuple(Cut.even(span.rows, 1, stages) for span in spans), recompute=again
                )
                if self._peak(plan, costs) > epoch.hardware.memory:
                    continue
                problem = problem_from_plan(plan, costs)
                problem.update[:-1] = 0
                kept = np.array([[self._kept(plan, costs, n, s) for s in range(stages)] for n in range(m)])
                time = bpipe(problem, epoch.to_partner(kept)).makespan
                whole = even_plan(OneFOneB(), stages, m, rows, recompute)
                yield spent_in(time, whole, costs, f"m={m}")

    @staticmethod
    def _kept(plan: Plan, costs: CostModel, n: int, s: int) -> int:
        taken, given = costs.memory_change(F(s, Span(0, plan.jobs[n].rows), n), plan)
        return taken - given

    def _peak(self, plan: Plan, costs: CostModel) -> float:
        """At most, as each place holds one of the larger activations: its own, or of the stage that lends to it."""
        stages = plan.n_stages
        span = Span(0, plan.jobs[0].rows)  # the largest
        kept = [self._kept(plan, costs, 0, s) for s in range(stages)]
        most = []
        for s in range(stages):
            held = [max(0, min(len(plan.jobs), stages - each) - most_held(stages) + 1) for each in (s, stages - 1 - s)]
            lent = held[1] if held[1] > 1 else 0
            own = min(len(plan.jobs), stages - s, most_held(stages))
            working = max(costs.memory_change(F(s, span), plan)[1], costs.memory_change(B(s, span), plan)[0])
            state = costs.resident_bytes(s, plan) // len(plan.jobs)  # they are one job
            most.append(state + own * kept[s] + lent * kept[-1 - s] + working)
        return max(most)


SINGLE: dict[str, OneJob] = {
    "GPipe": Ordered((GPipe(),), recompute=(True,)),
    "1F1B": Ordered((OneFOneB(),)),
    "BPipe": ByBPipe(),
    "interleaved": Ordered((Interleaved(stages_per_rank=2),)),
    "Hanayo": Ordered((Hanayo(waves=2), Hanayo(waves=1))),
}
"""Jobs one after another."""
RECOMPUTING: dict[str, OneJob] = {
    "Hanayo, recomputing": Ordered((Hanayo(waves=2), Hanayo(waves=1)), recompute=(True,)),
    "1F1B, recomputing": Ordered((OneFOneB(),), recompute=(True,)),
}
"""As the paper's own scheme does."""
