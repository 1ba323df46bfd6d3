"""An array without rounds in virtual time. It models the behavior of `lightning_pipes.arrays`, which runs by the clock.

Siblings are independent, so the next batch of a job does not have to wait for other jobs, only for the job's own
update. A free stage computes for the job whose input arrived first. Among the micro-batches of one job, it prefers
backwards, as in 1F1B. A job that ends immediately makes room for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_pipes.cost import Costs
from lightning_pipes.ir import STEP, B, Cut, F, InputError, Instruction, Kind, Plan, Program, check_count

FORWARD_ARRIVAL, BACKWARD_ARRIVAL, STAGE_FREE, BATCH_END = range(4)
"""Kinds of events: the input of a forward or of a backward arrives, a stage becomes free, the batch of a job ends."""


@dataclass(frozen=True)
class Job:
    """A sibling of an array.

    Attributes:
        cut: its micro-batches, the same on all stages.
        batches: the number of batches that it runs.

    Raises:
        InputError: there are no batches, or the cut differs between stages or directions.
    """

    cut: Cut
    batches: int

    def __post_init__(self) -> None:
        check_count("batches of a job", self.batches)
        spans = self.cut.forward[0]
        if any(other != spans for table in (self.cut.forward, self.cut.backward) for other in table):
            raise InputError("a job of an array needs the same spans on all stages, forward and backward")


class StreamedArray(NamedTuple):
    """The complete run of an array.

    Attributes:
        program: the computations of each stage, with the jobs numbered in the given order.
        plan: the plan of the program. With this plan, `ir.lower` and `sim.simulate` give the same times.
        time: nanoseconds until the last update ends.
    """

    program: Program
    plan: Plan
    time: int


# Two resident jobs, and jobs a, b and c of 2, 1 and 1 batches: c begins when b has ended.
# Drawn by `joining()`:
# rank 0 |a0b0............a0==a1b0==c0......a1==..c0==| bubble 45.5%
# rank 1 |..a0b0......a0==b0==..a1....c0a1==..c0==....| bubble 45.5%
# rank 2 |....a0b0a0==b0==........a1a1==c0c0==........| bubble 45.5%
#         - forward  = backward  . idle
def stream_jobs(jobs: Sequence[Job], costs: Costs, resident: int | None = None) -> StreamedArray:
    """Return the complete run of all jobs, with one stage per rank.

    Args:
        jobs: the jobs, in the order in which they begin.
        costs: the durations of blocks and messages. Of the links, only bandwidth and latency are used.
        resident: the number of jobs that may run at the same time. Other jobs wait until one of them ends. By default,
            all jobs are resident.

    Raises:
        InputError: there are no jobs, `resident` is less than 1, or the jobs are cut for different numbers of stages.
    """
    resident = check_count("resident jobs", len(jobs) if resident is None else resident)
    if len(found := {len(job.cut.forward) for job in jobs}) != 1:
        raise InputError(f"all jobs of an array must be cut for the same stages; got {len(jobs)} jobs, cut for {found}")
    plan = Plan(tuple(range(found.pop())), tuple(job.cut for job in jobs))
    array = _Array(jobs, plan, costs)
    for number in range(resident, len(jobs)):
        array.waiting.append(number)
    for number in range(min(resident, len(jobs))):
        array.begin_batch(number)
    array.run()
    return StreamedArray(Program(tuple(map(tuple, array.rows))), plan, array.now)


class _Running:
    """The state of a job, and the durations of its blocks as lists by stage, then by span."""

    def __init__(self, number: int, job: Job, plan: Plan, costs: Costs) -> None:
        stages, extra = range(plan.n_stages), costs.overhead_ns
        self.left = job.batches
        self.batch = -1
        self.spans = job.cut.forward[0]

        def block_time(i: Instruction) -> int:
            return costs.duration_ns(i, plan) + extra

        self.blocks = [
            [[block_time(kind(s, span, number)) for span in self.spans] for s in stages] for kind in (F, B)
        ]  # forwards, backwards
        self.update = [block_time(STEP(s, number)) for s in stages]
        self.messages = [
            [
                [costs.transfer_ns(Instruction(kind, s, number, 0, span), plan) for span in self.spans]
                if 0 <= s + way < plan.n_stages
                else []
                for s in stages
            ]
            for kind, way in ((Kind.SF, 1), (Kind.SB, -1))
        ]


class _Array:
    """The event loop of an array."""

    def __init__(self, jobs: Sequence[Job], plan: Plan, costs: Costs) -> None:
        self.now = 0
        self.waiting: deque[int] = deque()
        self._jobs = [_Running(number, job, plan, costs) for number, job in enumerate(jobs)]
        self._stages = stages = plan.n_stages
        self.rows: list[list[Instruction]] = [[] for _ in range(stages)]
        self._events: list[tuple[int, int, int, int, int, int]] = []  # time, turn, event, stage, job, span
        self._turn = 0
        self._ready: list[dict[int, tuple[deque[tuple[int, int]], ...]]] = [{} for _ in range(stages)]
        """For each stage, by job: the turns and spans of the forwards and of the backwards that have arrived."""
        self._touched: set[int] = set()
        self._idle = [True] * stages
        self._wires = [[0] * stages for _ in range(2)]  # the time when each stage's link is free, by direction

    def begin_batch(self, number: int) -> None:
        """Begin the next batch of a job: its first forward arrives at stage 0."""
        job = self._jobs[number]
        job.left -= 1
        job.batch += 1
        self._arrive(FORWARD_ARRIVAL, 0, number, 0)

    def run(self) -> None:
        """Run all jobs until the last one ends."""
        while True:
            for stage in self._touched:
                if self._idle[stage] and self._ready[stage]:
                    self._compute(stage, *self._first(self._ready[stage]))
            self._touched.clear()
            if not self._events:
                break
            self._pass_on()

    def _arrive(self, way: int, stage: int, number: int, span: int) -> None:
        self._turn += 1
        arrived = self._ready[stage].setdefault(number, (deque(), deque()))
        arrived[way].append((self._turn, span))
        self._touched.add(stage)

    @staticmethod
    def _first(ready: dict[int, tuple[deque[tuple[int, int]], ...]]) -> tuple[int, int, int]:
        """Remove the next computation of a stage from `ready`, and return its direction, job and span."""
        number = min(ready, key=lambda job: min(each[0] for each in ready[job] if each))
        forwards, backwards = ready[number]
        way, chosen = (BACKWARD_ARRIVAL, backwards) if backwards else (FORWARD_ARRIVAL, forwards)
        _, span = chosen.popleft()
        if not forwards and not backwards:
            del ready[number]
        return way, number, span

    def _pass_on(self) -> None:
        """Advance virtual time to the next events, and process all events of that time."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            _, _, what, stage, number, span = heappop(self._events)
            if what == STAGE_FREE:
                self._idle[stage] = True
                self._touched.add(stage)
            elif what != BATCH_END:
                self._arrive(what, stage, number, span)
            elif self._jobs[number].left:
                self.begin_batch(number)
            elif self.waiting:
                self.begin_batch(self.waiting.popleft())

    def _compute(self, stage: int, way: int, number: int, span: int) -> None:
        job = self._jobs[number]
        more = span + 1 < len(job.spans)
        self.rows[stage].append((F, B)[way](stage, job.spans[span], number, job.batch))
        end = self.now + job.blocks[way][stage][span]
        there = stage + (1 if way == FORWARD_ARRIVAL else -1)
        if 0 <= there < self._stages:
            wire = self._wires[way]
            occupied, late = job.messages[way][stage][span]
            wire[stage] = max(wire[stage], end) + occupied
            self._after(wire[stage] + late, way, there, number, span)
        elif way == FORWARD_ARRIVAL:
            self._after(end, BACKWARD_ARRIVAL, stage, number, span)
        if way == FORWARD_ARRIVAL and stage == 0 and more:
            self._after(end, FORWARD_ARRIVAL, 0, number, span + 1)  # behind the jobs that are already waiting
        if way == BACKWARD_ARRIVAL and not more:
            self.rows[stage].append(STEP(stage, number, job.batch))
            end += job.update[stage]
            if stage == 0:
                self._after(end, BATCH_END, 0, number, 0)
        self._idle[stage] = False
        self._after(end, STAGE_FREE, stage, number, 0)

    def _after(self, time: int, what: int, stage: int, number: int, span: int) -> None:
        self._turn += 1
        heappush(self._events, (time, self._turn, what, stage, number, span))
