"""Measured steps on shaped links that change while they are used. All schedules take turns with the same trace."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.harness.emulated import join_ranks
from benchmarks.harness.netlab import NetLab
from benchmarks.papers.kfkb.links import AUTO, Trial, bandwidth, ordered
from benchmarks.papers.kfkb.replay import Direction, Trace
from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Engine, Item, make_transport
from lightning_pipes.ir import Policy, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample
from lightning_pipes.planning.tuning import CandidateRanker

READY_SECONDS = 8.0
"""Seconds that ranks have to start."""
FIRST, INTERVAL = 2, 10
"""The number of steps before the first decision, and between later decisions.

The second decision follows after a window of steps.
"""


@dataclass(frozen=True)
class Course:
    """The turns of all schedules and of an adaptive run, with the same changes of links in each turn.

    Before its turn, the adaptive run has already left 1F1B, as it has in all but the first seconds of a training.

    Attributes:
        trial: the trial with the schedules. Each one has a turn, followed by the adaptive run.
        steps: the number of steps in each turn.
        seconds: seconds of each turn, more than the slowest schedule needs.
        limit: the number of micro-batches that a rank may hold in the adaptive run.
    """

    trial: Trial
    steps: int
    seconds: float
    limit: int

    @property
    def names(self) -> list[str]:
        """The names of all turns, in order."""
        return [*self.trial.schedules, AUTO]

    def begins(self, turn: int) -> float:
        """Return the start of a turn, in seconds after the start of the first one."""
        return turn * self.seconds + (self.seconds / 2 if self.names[turn] == AUTO else 0.0)


@dataclass(frozen=True)
class Ran:
    """The results of all turns.

    Attributes:
        seconds: seconds of all steps of a turn together, by name.
        adopted: the schedules that the adaptive run changed to.
    """

    seconds: dict[str, float]
    adopted: list[str]


def run(lab: NetLab, course: Course, links: Mapping[Direction, Trace]) -> Ran:
    """Run all turns of a course.

    Args:
        lab: the network laboratory.
        course: the course.
        links: the trace of each direction, with the times of messages on an idle link.
    """
    begin = time.monotonic() + READY_SECONDS
    changes: list[tuple[float, float | None, list[Direction] | None]] = []
    for turn in range(len(course.names)):
        for direction, trace in links.items():
            for since, takes in zip(trace.since, trace.takes, strict=True):
                if since / 1e9 < course.seconds:
                    at = READY_SECONDS + course.begins(turn) + since / 1e9
                    changes.append((at, bandwidth(takes / 1e9, course.trial.message), [direction]))
    with lab.play_changes(sorted(changes, key=lambda change: change[0])):
        found: list[tuple[dict[str, tuple[int, int]], list[str]]] = lab.run_ranks(rank_main, course, begin, timeout=600)
    spans = {name: [by_rank[name] for by_rank, _ in found] for name in course.names}
    seconds = {n: (max(end for _, end in each) - min(since for since, _ in each)) / 1e9 for n, each in spans.items()}
    slow = {name: t for name, t in seconds.items() if t > course.seconds}
    assert not slow, f"a turn took longer than the {course.seconds} s of its trace: {slow} s"
    return Ran(seconds, found[0][1])


def rank_main(rank: int, course: Course, begin: float) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Run all turns on one rank, and return the start and end of each turn and the adopted schedules."""
    watch = join_ranks(rank)
    trial, plan = course.trial, course.trial.plan
    transport = make_transport(plan, rank, range(trial.stages), torch.device("cpu"), watch)
    order = ordered(next(iter(trial.schedules.values())), plan)
    engine = Engine(plan, order, trial.stages_on(rank), transport, rank=rank, watch=watch)

    def step(schedule: Schedule | Policy) -> StepSample:
        dist.barrier()
        since = time.monotonic_ns()
        engine.inject(Item(0, trial.microbatches))
        engine.drain()
        return StepSample.from_events(engine.events, plan, since, chosen=not isinstance(schedule, Schedule))

    step(make_schedule("1f1b"))
    found: dict[str, tuple[int, int]] = {}
    follower, began = Follower(course, rank), 0
    gc.disable()
    gc.freeze()  # so that collections skip the objects of all imported modules
    for turn, name in enumerate(course.names):
        running = trial.schedules.get(name, make_schedule("kfkb", k=1))
        engine.adopt(plan, ordered(running, plan))
        for number in range(-FIRST if name == AUTO else 0, course.steps):
            if number == 0:
                time.sleep(max(0.0, begin + course.begins(turn) - time.monotonic()))
                began = time.monotonic_ns()
            sample = step(running)
            if name == AUTO and (wanted := follower.after(sample)) is not None:
                running = wanted
                engine.adopt(plan, ordered(running, plan))
        found[name] = began, time.monotonic_ns()
        gc.collect()
    engine.close()
    watch.close()
    return found, follower.adopted


class Follower:
    """Makes the same decisions as `ScheduleTuner`. Each rank has a follower, and its calls are collective."""

    def __init__(self, course: Course, rank: int) -> None:
        self.adopted: list[str] = []
        self._course, self._rank = course, rank
        self._averages, self._chooser = Averages(), CandidateRanker()
        self._source = tuning_planner(make_schedule("kfkb", k="auto"))
        self._running = Candidate(make_schedule("kfkb", k=1), course.trial.plan, ())
        self._recent: list[StepSample] = []
        self._steps, self._next = 0, FIRST

    def after(self, sample: StepSample) -> Schedule | Policy | None:
        """Record a step, and return the schedule to change to, or None to keep the current one."""
        self._recent = [*self._recent, sample][-WINDOW_STEPS:]
        self._steps += 1
        if self._steps < self._next:
            return None
        first, self._next = self._steps == FIRST, self._steps + (WINDOW_STEPS if self._steps == FIRST else INTERVAL)
        every: list[list[StepSample]] = [[] for _ in range(self._course.trial.stages)]
        dist.all_gather_object(every, self._recent[-1:] if first else self._recent)
        told: list[Schedule | Policy | None] = [self._decided(every) if self._rank == 0 else None]
        dist.broadcast_object_list(told)
        return told[0]

    def _decided(self, every: Sequence[Sequence[StepSample]]) -> Schedule | Policy | None:
        for step in zip(*every, strict=True):
            self._averages.add(step)
        trial = self._course.trial
        base = CostModel(self._averages.costs().seconds, activation_bytes=(1,) * trial.stages)
        candidates = self._source.list_candidates(trial.plan, self._averages.costs(base), self._course.limit)
        decision = self._chooser.decide([*candidates, self._running], self._running, self._averages, base)
        self._running = decision.chosen.candidate
        if not decision.has_change:
            return None
        self.adopted.append(f"{self._running.schedule}")
        return self._running.schedule
