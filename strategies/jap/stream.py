"""The order of an array's blocks without rounds: jobs join and leave, and every rank knows the same order.

Siblings are independent, so nothing makes one job's next batch wait for another job's: only for its own update. A
stage that is free takes the first block that has arrived, and a job that leaves makes room for the next one at once.
What arrives first is decided in virtual time, by the costs that all ranks agreed on, never by a clock: so every rank
computes all rows by itself, and all get the same.

Job arrays (`lightning_pipes.arrays`) take what arrives first, too, but by the clock: each rank knows when a batch of
theirs has come, and no costs need be agreed on. A `Stream` says what that comes to before anything runs, and is the
order of the schedule "jap". Where all ranks shall run an order that is known in advance, each does this alike:

    stream = Stream(stages, costs, resident)              # costs: equal numbers on all ranks
    stream.admit(Job(0, cut, batches=100, more=True))     # in one order on all ranks; waits if all places are taken
    while (piece := stream.advance()).asked is not None:
        run(piece.rows[stage])                            # F, B and STEP in exactly this order; then
        ...                                               # the asked job's own code goes on until it parks or ends, and
        stream.extend(piece.asked, batches)               # promises so many batches more, or
        stream.leave(piece.asked)                         # has ended; siblings may be admitted before the next advance

A piece ends where the order depends on what somebody does: when a job has run all the batches that it promised. At that
point of virtual time its last update on stage 0 ends, so a rank that has run its row so far holds all that the job's
code needs there, and does not wait for other ranks. A job which promises many batches (to the end of its epoch, say) is
asked seldom; one which promises a single batch is asked after each of them, and the order is the same either way. So
who ends first, and who takes a free place, is the same in
every run; what a job logs or reports happens in the order in which jobs are asked.

A job that ends before what it promised, because it failed or was stopped within a batch, is told by `cut_short` at any
question: from there on its batches are not ordered any more. Blocks of it that are in rows already are to be left out
by all ranks, as those of a batch that is shorter than its plan. `retime` takes other costs from a question on.

`plan` has the jobs by their numbers, for `ir.lower`, `ir.verify` and `sim.simulate`, which all take the program that
the rows make; with `costs` the simulation gives the stream's own times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_pipes.cost import Costs
from lightning_pipes.ir import STEP, B, Cut, F, InputError, Instruction, Kind, Plan, check_count
from lightning_pipes.ir.program import Rows

FORWARD, BACKWARD, FREE, OVER = range(4)
"""Events: a forward or a backward arrives, a stage becomes free, a job's batch is over."""


@dataclass(frozen=True)
class Job:
    """A sibling that wants to run.

    Attributes:
        number: of its instructions; numbers of an array count from 0 and are not used again.
        cut: its micro-batches, the same on all stages.
        batches: how many it will run at least.
        more: whether it is asked after them; else it leaves.
        expected: how many it will run in all, as far as one can tell: of those that wait, the longest goes first. 0
            means `batches`.

    Raises:
        InputError: no batches, or a cut that differs between stages or directions.
    """

    number: int
    cut: Cut
    batches: int
    more: bool = False
    expected: int = 0

    def __post_init__(self) -> None:
        check_count(f"job {self.number}: batches", self.batches)
        spans = self.cut.forward[0]
        if any(other != spans for table in (self.cut.forward, self.cut.backward) for other in table):
            raise InputError(f"job {self.number} needs the same spans on all stages, forward and backward")


class Piece(NamedTuple):
    """A part of the order.

    Attributes:
        rows: what each stage runs, computations only.
        asked: the job that has run all it promised, None where nobody is left to run.
        time: nanoseconds of virtual time at which it is asked.
    """

    rows: Rows
    asked: int | None
    time: int


class _Running:
    """A job that holds a place, and what its blocks take; lists by stage, then by span."""

    def __init__(self, job: Job, plan: Plan, costs: Costs) -> None:
        self.job = job
        self.left = job.batches  # promised and not begun
        self.expected = max(job.expected, job.batches)  # batches that may come
        self.batch = -1
        self.spans = job.cut.forward[0]
        self.price(plan, costs)

    def price(self, plan: Plan, costs: Costs) -> None:
        stages, number, extra = range(plan.n_stages), self.job.number, costs.overhead_ns

        def time(i: Instruction) -> int:
            return costs.duration(i, plan) + extra

        self.blocks = [
            [[time(kind(s, span, number)) for span in self.spans] for s in stages] for kind in (F, B)
        ]  # forwards, backwards
        self.update = [time(STEP(s, number)) for s in stages]
        self.messages = [
            [
                [costs.transfer(Instruction(kind, s, number, 0, span), plan) for span in self.spans]
                if 0 <= s + way < plan.n_stages
                else []
                for s in stages
            ]
            for kind, way in ((Kind.SF, 1), (Kind.SB, -1))
        ]
        self.work = sum(map(sum, (*self.blocks[0], *self.blocks[1]))) + sum(self.update)


class Stream:
    """Who runs what next; see the module for how an engine uses it.

    Args:
        stages: stages of the pipeline, one a rank.
        costs: what blocks and messages take. Of links only that counts: their bandwidth and latency.
        resident: jobs that may run at once; others wait until one leaves.
        backward_first: whether a stage that has both takes a backward before a forward, the rule of 1F1B, for
            comparison; if not, what arrived first, as job arrays do. The page has a table of both.

    Raises:
        InputError: no stages or no place.
    """

    def __init__(self, stages: int, costs: Costs, resident: int, *, backward_first: bool = False) -> None:
        self.stages = check_count("stages", stages)
        self.resident = check_count("resident jobs", resident)
        self.now = 0
        """Nanoseconds of virtual time up to which the order is known."""
        self._backward_first = backward_first
        self._costs = costs
        self._jobs: dict[int, Job] = {}
        self._waiting: list[tuple[int, int]] = []  # minus the work, and the number, of jobs without a place
        self._running: dict[int, _Running] = {}
        self._events: list[tuple[int, int, int, int, int, int]] = []  # time, turn, what, stage, job, span
        self._turn = 0
        self._ready: list[list[tuple[bool, int, int, int, int]]] = [[] for _ in range(stages)]
        self._touched: set[int] = set()
        self._idle = [True] * stages
        self._wires = [[0] * stages for _ in range(2)]  # until when each stage's link is used, each direction
        self._asked: int | None = None
        self._rows: list[list[Instruction]] = [[] for _ in range(stages)]

    @property
    def plan(self) -> Plan:
        """The jobs admitted so far, by number."""
        return Plan(tuple(range(self.stages)), tuple(self._jobs[n].cut for n in range(len(self._jobs))))

    @property
    def running(self) -> Mapping[int, int]:
        """The jobs that hold a place, with the batch that each is at."""
        return {number: running.batch for number, running in self._running.items()}

    @property
    def waiting(self) -> tuple[int, ...]:
        """The jobs that wait for a place, the next one first."""
        return tuple(number for _, number in sorted(self._waiting))

    def admit(self, job: Job) -> None:
        """`job` runs as soon as there is a place for it: the one with most work to do first, then by number.

        Raises:
            InputError: its number does not follow those before it, or its cut is for other stages.
        """
        if job.number != len(self._jobs) or len(job.cut.forward) != self.stages:
            raise InputError(
                f"the next job has number {len(self._jobs)} and is cut for {self.stages} stages; got number "
                f"{job.number}, cut for {len(job.cut.forward)}"
            )
        self._jobs[job.number] = job
        work = _Running(job, self.plan, self._costs)
        heappush(self._waiting, (-work.work * work.expected, job.number))

    def extend(self, number: int, batches: int, more: bool = True) -> None:
        """The job that was asked runs so many batches more.

        Raises:
            InputError: it was not asked, or runs no batch.
        """
        self._answered(number)
        running = self._running[number]
        running.left = check_count(f"job {number}: batches", batches)
        running.job = Job(number, running.job.cut, batches, more)
        self._begin(running)

    def leave(self, number: int) -> None:
        """The job that was asked has ended, and its place is free.

        Raises:
            InputError: it was not asked.
        """
        self._answered(number)
        del self._running[number]

    def cut_short(self, number: int) -> None:
        """The job ends with the batch that it is at; waiting, it never begins.

        Raises:
            InputError: there is no such job.
        """
        running = self._running.get(number)
        if running is None:
            if number not in self.waiting:
                raise InputError(f"job {number} neither runs nor waits; there are {[*self._running, *self.waiting]}")
            self._waiting = sorted(entry for entry in self._waiting if entry[1] != number)
        elif number == self._asked:
            self.leave(number)
        else:
            running.left = 0
            running.job = Job(number, running.job.cut, 1)

    def retime(self, costs: Costs) -> None:
        """From here on blocks take what `costs` say; the same on all ranks, and only while somebody is asked."""
        self._costs = costs
        for running in self._running.values():
            running.price(self.plan, costs)

    # Two places, and jobs a, b and c of 2, 1 and 1 batches: c comes when b has left.
    # Drawn by `joining()`:
    # rank 0 |a0b0............a0==a1b0==c0......a1==..c0==| bubble 45.5%
    # rank 1 |..a0b0......a0==b0==..a1....c0a1==..c0==....| bubble 45.5%
    # rank 2 |....a0b0a0==b0==........a1a1==c0c0==........| bubble 45.5%
    #         - forward  = backward  . idle
    def advance(self) -> Piece:
        """The order up to the next question.

        Raises:
            InputError: the question before has not been answered.
        """
        if self._asked is not None:
            raise InputError(f"job {self._asked} was asked what it does next; extend it, or let it leave")
        while self._asked is None:
            self._fill_places()
            for stage in self._touched:
                if self._idle[stage] and self._ready[stage]:
                    self._run(stage, *heappop(self._ready[stage])[2:])
            self._touched.clear()
            if not self._events:
                break
            self._pass_on()
        rows = tuple(map(tuple, self._rows))
        for row in self._rows:
            row.clear()
        return Piece(rows, self._asked, self.now)

    def _answered(self, number: int) -> None:
        if number != self._asked:
            raise InputError(f"job {number} was not asked; asked was {self._asked}")
        self._asked = None

    def _fill_places(self) -> None:
        while self._waiting and len(self._running) < self.resident:
            _, number = heappop(self._waiting)
            self._running[number] = _Running(self._jobs[number], self.plan, self._costs)
            self._begin(self._running[number])

    def _begin(self, running: _Running) -> None:
        """The next batch arrives at stage 0."""
        running.left -= 1
        running.batch += 1
        for span in range(len(running.spans)):
            self._arrive(FORWARD, 0, running.job.number, span)

    def _arrive(self, way: int, stage: int, number: int, span: int) -> None:
        self._turn += 1
        late = way == FORWARD and self._backward_first
        heappush(self._ready[stage], (late, self._turn, way, number, span))
        self._touched.add(stage)

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
            elif self._running[number].left:
                self._begin(self._running[number])
            elif self._running[number].job.more:
                self._asked = number  # the only one: stage 0 ends one block at a time
            else:
                del self._running[number]

    def _run(self, stage: int, way: int, number: int, span: int) -> None:
        running = self._running[number]
        instruction = (F, B)[way](stage, running.spans[span], number, running.batch)
        self._rows[stage].append(instruction)
        end = self.now + running.blocks[way][stage][span]
        there = stage + (1 if way == FORWARD else -1)
        if 0 <= there < self.stages:
            wire = self._wires[way]
            occupied, late = running.messages[way][stage][span]
            wire[stage] = max(wire[stage], end) + occupied
            self._after(wire[stage] + late, way, there, number, span)
        elif way == FORWARD:
            self._after(end, BACKWARD, stage, number, span)
        if way == BACKWARD and span + 1 == len(running.spans):
            self._rows[stage].append(STEP(stage, number, running.batch))
            end += running.update[stage]
            if stage == 0:
                self._after(end, OVER, 0, number, 0)
        self._idle[stage] = False
        self._after(end, FREE, stage, number, 0)

    def _after(self, time: int, what: int, stage: int, number: int, span: int) -> None:
        self._turn += 1
        heappush(self._events, (time, self._turn, what, stage, number, span))
