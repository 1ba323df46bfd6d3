"""Simulated arrays: epochs of the 64 jobs of ArrayPipe's paper, and arrays with several stages per rank.

The devices have enough memory for all jobs, and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from benchmarks.harness.report import Output
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Plan, Schedule, even_spans
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.jap import Effort, Job, problem_from_plan, solve_array, stream_jobs
from lightning_pipes.strategies.jap.problem import BLOCK_TIMES
from tests.strategies.jap.random_arrays import KINDS, batch_sizes

JOBS, ITERATIONS = 64, 240
"""The number of jobs, and the number of batches of a job with the smallest batch size.

All jobs have the same number of samples.
"""
POWERS = (1, 2, 4, 8, 16, 32)
ORDERS = 6_000
"""The number of orders of a round that the search may try."""


class Epoch:
    """An epoch of all jobs: in rounds, without rounds, or one after another. All times are in nanoseconds.

    Args:
        costs: returns the costs of stages, given the rank of each stage.
        stages: the number of ranks, and of the stages of arrays.
        kind: "vision" or "language", which determines the batch sizes.
        jobs: the number of jobs.
        iterations: the number of batches of a job with the smallest batch size.
    """

    def __init__(
        self,
        costs: Callable[[tuple[int, ...]], CostModel],
        stages: int,
        kind: str,
        jobs: int = JOBS,
        iterations: int = ITERATIONS,
    ) -> None:
        self._costs, self._stages = costs, stages
        self._sizes: list[int] = batch_sizes(jobs, kind).tolist()
        self._kinds = KINDS[kind][2]
        self._iterations = {rows: iterations * min(self._kinds) // rows for rows in self._kinds}
        self._line = costs(tuple(range(stages)))
        cuts = tuple(Cut.even(rows, 1, stages) for rows in self._kinds)
        self._problem = problem_from_plan(Plan(tuple(range(stages)), cuts), self._line)
        self._rounds: dict[tuple[int, ...], int] = {}

    @property
    def work(self) -> int:
        """The time for which the stage with the most work computes in an epoch."""
        runs = np.array([self._iterations[rows] * self._sizes.count(rows) for rows in self._kinds])
        return int((runs[:, None] * np.add(*self._problem.occupied_times)).sum(0).max())

    def one_by_one(self, schedule: Schedule) -> int:
        """Return the time of all jobs one after another, each with its best number of micro-batches."""
        costs, total = self._costs(schedule.place_stages(self._stages)), 0
        for rows in self._kinds:
            plans = [even_plan(schedule, self._stages, m, rows) for m in POWERS if m <= rows]
            best = min(makespan(schedule.program(plan), plan, costs) for plan in plans)
            total += best * self._iterations[rows] * self._sizes.count(rows)
        return total

    def in_rounds(self, resident: int, grouped: bool = False) -> int:
        """Return the time of the paper's scheme.

        Arrays run one after another. A round of an array has one iteration of each of its jobs that have not ended.

        Args:
            resident: the number of jobs in an array.
            grouped: whether an array consists of jobs with similar batch sizes instead of random jobs.
        """
        order = sorted(self._sizes) if grouped else np.random.default_rng(0).permutation(self._sizes).tolist()
        total = 0
        for first in range(0, len(order), resident):
            left = sorted(order[first : first + resident])
            done = 0
            while left:
                steps = min(self._iterations[rows] for rows in left) - done
                total += steps * self._round(tuple(left))
                done += steps
                left = [rows for rows in left if self._iterations[rows] > done]
        return total

    def _round(self, sizes: tuple[int, ...]) -> int:
        if sizes not in self._rounds:
            jobs = [self._kinds.index(rows) for rows in sizes]
            problem = replace(self._problem, **{name: getattr(self._problem, name)[jobs] for name in BLOCK_TIMES})
            self._rounds[sizes] = solve_array(problem, "search", Effort(ORDERS)).makespan
        return self._rounds[sizes]

    def streamed(self, resident: int, microbatches: int = 1) -> int:
        """Return the time without rounds, if the jobs with the most work begin first.

        Args:
            resident: the number of jobs at a time.
            microbatches: the number of micro-batches of each batch.
        """
        work = dict(zip(self._kinds, np.add(*self._problem.occupied_times).sum(1).tolist(), strict=True))
        sizes = sorted(self._sizes, key=lambda rows: -self._iterations[rows] * work[rows])
        jobs = [Job(Cut.even(rows, min(microbatches, rows), self._stages), self._iterations[rows]) for rows in sizes]
        return stream_jobs(jobs, self._line, resident).time


# ---- Siblings whose blocks run in the order of their arrival, on ranks with one, two or four stages, and with the best
# number of micro-batches. The forward of a stage takes a fixed time plus one unit of time for each sample, and a
# backward takes twice as long. The stages of a rank share its layers and its fixed time. Messages take no time.

RANKS, BATCHES = 8, 16
ROWS = (8, 16, 24, 32)
MICROBATCHES = (1, 2, 3, 4, 6, 8)


def over_work(stages_per_rank: int, rows: list[int], microbatches: int, fixed: float) -> float:
    """Return the time of all siblings, divided by the work of a rank if batches are not divided.

    Args:
        stages_per_rank: the number of stages on each rank.
        rows: the batch size of each sibling.
        microbatches: the number of micro-batches of a batch.
        fixed: the fixed time of a block, in units of the time of a sample.
    """
    stages = RANKS * stages_per_rank
    cuts = [[span.rows for span in even_spans(each, min(microbatches, each))] for each in rows]
    ready: list[list[tuple[int, bool, int, int, int]]] = [[] for _ in range(RANKS)]
    idle, events = [True] * RANKS, list[tuple[float, int, int, tuple[bool, int, int, int]]]()
    batches, left = [BATCHES] * len(rows), [len(cut) for cut in cuts]
    turn, now = 0, 0.0

    def arrive(back: bool, stage: int, job: int, part: int) -> None:
        nonlocal turn
        turn += 1
        heappush(ready[stage % RANKS], (turn, back, stage, job, part))

    for job, cut in enumerate(cuts):
        for part in range(len(cut)):
            arrive(False, 0, job, part)
    while True:
        for rank in range(RANKS):
            if idle[rank] and ready[rank]:
                came, back, stage, job, part = heappop(ready[rank])
                idle[rank] = False
                end = now + (2 if back else 1) * (fixed + cuts[job][part]) / stages_per_rank
                heappush(events, (end, came, rank, (back, stage, job, part)))
        if not events:
            return now / (BATCHES * sum(3 * (fixed + each) for each in rows))
        now, _, rank, (back, stage, job, part) = heappop(events)
        idle[rank] = True
        if not back:
            arrive(stage + 1 == stages, min(stage + 1, stages - 1), job, part)
        elif stage:
            arrive(True, stage - 1, job, part)
        else:
            left[job] -= 1
            batches[job] -= not left[job]
            if not left[job] and batches[job]:
                left[job] = len(cuts[job])
                for again in range(left[job]):
                    arrive(False, 0, job, again)


def stages() -> Output:
    """Yield a table by the number of siblings, the fixed time of a block, and the stages of a rank."""
    yield f"{RANKS} ranks, batches of {ROWS} in turn: time over work, by the fixed cost of a block in samples\n"
    yield (
        f"{'siblings':>10}"
        + "".join(f"{f'cost {fixed:g}, {v} a rank':>20}" for fixed in (0.5, 2, 4) for v in (1, 2, 4))
    )
    for siblings in (2, 4, 6, 8, 12, 16):
        rows = [ROWS[n % len(ROWS)] for n in range(siblings)]
        cells = [min(over_work(v, rows, m, fixed) for m in MICROBATCHES) for fixed in (0.5, 2, 4) for v in (1, 2, 4)]
        yield f"{siblings:>10}" + "".join(f"{cell:20.2f}" for cell in cells)
