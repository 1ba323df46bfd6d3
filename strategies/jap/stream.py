"""An array without rounds in virtual time: the model of what `lightning_pipes.arrays` does by the clock.

Siblings are independent, so nothing makes one job's next batch wait for another job's: only for its own update. A
stage that is free computes for the job that came first, and of one job's micro-batches backwards first, as 1F1B; a job
that ends makes room for the next one at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_pipes.cost import Costs
from lightning_pipes.ir import STEP, B, Cut, F, InputError, Instruction, Kind, Plan, Program, check_count

FORWARD, BACKWARD, FREE, OVER = range(4)
"""Events: a forward or a backward arrives, a stage becomes free, a job's batch is over."""


@dataclass(frozen=True)
class Job:
    """A sibling.

    Attributes:
        cut: its micro-batches, the same on all stages.
        batches: how many it runs.

    Raises:
        InputError: no batches, or a cut that differs between stages or directions.
    """

    cut: Cut
    batches: int

    def __post_init__(self) -> None:
        check_count("batches of a job", self.batches)
        spans = self.cut.forward[0]
        if any(other != spans for table in (self.cut.forward, self.cut.backward) for other in table):
            raise InputError("a job of an array needs the same spans on all stages, forward and backward")


class StreamedArray(NamedTuple):
    """An array from begin to end.

    Attributes:
        program: what each stage runs, computations only, the jobs numbered as they were given.
        plan: of the program, for `ir.lower` and `sim.simulate`, which gives the same times.
        time: nanoseconds until the last update has ended.
    """

    program: Program
    plan: Plan
    time: int


# Two places, and jobs a, b and c of 2, 1 and 1 batches: c comes when b has left.
# Drawn by `joining()`:
# rank 0 |a0b0............a0==a1b0==c0......a1==..c0==| bubble 45.5%
# rank 1 |..a0b0......a0==b0==..a1....c0a1==..c0==....| bubble 45.5%
# rank 2 |....a0b0a0==b0==........a1a1==c0c0==........| bubble 45.5%
#         - forward  = backward  . idle
def stream_jobs(jobs: Sequence[Job], costs: Costs, resident: int | None = None) -> StreamedArray:
    """Return all jobs from begin to end, one stage a rank.

    Args:
        jobs: in the order in which they begin.
        costs: what blocks and messages take. Of links only that counts: their bandwidth and latency.
        resident: jobs that may run at once; others wait until one ends. All of them by default.

    Raises:
        InputError: no jobs, no place, or cuts for different numbers of stages.
    """
    resident = check_count("resident jobs", len(jobs) if resident is None else resident)
    if len(found := {len(job.cut.forward) for job in jobs}) != 1:
        raise InputError(f"an array needs jobs that are cut for the same stages; got {len(jobs)}, cut for {found}")
    plan = Plan(tuple(range(found.pop())), tuple(job.cut for job in jobs))
    array = _Array(jobs, plan, costs)
    for number in range(resident, len(jobs)):
        array.waiting.append(number)
    for number in range(min(resident, len(jobs))):
        array.begin_batch(number)
    array.run()
    return StreamedArray(Program(tuple(map(tuple, array.rows))), plan, array.now)


class _Running:
    """A job, and what its blocks take; lists by stage, then by span."""

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
    """Event loop of an array."""

    def __init__(self, jobs: Sequence[Job], plan: Plan, costs: Costs) -> None:
        self.now = 0
        self.waiting: deque[int] = deque()
        self._jobs = [_Running(number, job, plan, costs) for number, job in enumerate(jobs)]
        self._stages = stages = plan.n_stages
        self.rows: list[list[Instruction]] = [[] for _ in range(stages)]
        self._events: list[tuple[int, int, int, int, int, int]] = []  # time, turn, what, stage, job, span
        self._turn = 0
        self._ready: list[dict[int, tuple[deque[tuple[int, int]], ...]]] = [{} for _ in range(stages)]
        """Of each stage by job: turns and spans of forwards and of backwards that have arrived."""
        self._touched: set[int] = set()
        self._idle = [True] * stages
        self._wires = [[0] * stages for _ in range(2)]  # until when each stage's link is used, each direction

    def begin_batch(self, number: int) -> None:
        """The job's next batch arrives at stage 0."""
        job = self._jobs[number]
        job.left -= 1
        job.batch += 1
        self._arrive(FORWARD, 0, number, 0)

    def run(self) -> None:
        """Run all jobs to their ends."""
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
        """Pop the direction, the job and the span of a stage's next computation."""
        number = min(ready, key=lambda job: min(each[0] for each in ready[job] if each))
        forwards, backwards = ready[number]
        way, chosen = (BACKWARD, backwards) if backwards else (FORWARD, forwards)
        _, span = chosen.popleft()
        if not forwards and not backwards:
            del ready[number]
        return way, number, span

    def _pass_on(self) -> None:
        """Virtual time goes on to the next events, and all of them happen."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            _, _, what, stage, number, span = heappop(self._events)
            if what == FREE:
                self._idle[stage] = True
                self._touched.add(stage)
            elif what != OVER:
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
        there = stage + (1 if way == FORWARD else -1)
        if 0 <= there < self._stages:
            wire = self._wires[way]
            occupied, late = job.messages[way][stage][span]
            wire[stage] = max(wire[stage], end) + occupied
            self._after(wire[stage] + late, way, there, number, span)
        elif way == FORWARD:
            self._after(end, BACKWARD, stage, number, span)
        if way == FORWARD and stage == 0 and more:
            self._after(end, FORWARD, 0, number, span + 1)  # a job that was computed just now comes last
        if way == BACKWARD and not more:
            self.rows[stage].append(STEP(stage, number, job.batch))
            end += job.update[stage]
            if stage == 0:
                self._after(end, OVER, 0, number, 0)
        self._idle[stage] = False
        self._after(end, FREE, stage, number, 0)

    def _after(self, time: int, what: int, stage: int, number: int, span: int) -> None:
        self._turn += 1
        heappush(self._events, (time, self._turn, what, stage, number, span))
