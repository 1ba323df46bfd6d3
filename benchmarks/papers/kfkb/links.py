"""Steps over really shaped links: emulated stages on the hosts of a network laboratory, in turn, one step each, by one
engine in the same processes."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness.emulated import EmulatedLayer, Emulation, join_ranks, sleeping_layer
from benchmarks.harness.netlab import BURST, GOODPUT, NetLab
from benchmarks.papers.kfkb.replay import Direction
from lightning_pipes.cost import CostModel, LayerProfile
from lightning_pipes.engine import Engine, Item, Stage, make_transport
from lightning_pipes.ir import SENDS, Kind, Plan, Policy, Program, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.measured import WINDOW, Averages, StepSample
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.tuning import CandidateRanker, TuningDecision
from lightning_pipes.sim import makespan

AUTO, TORCH, SPMD = "auto", "torch 1f1b", "SPMD"
LOOKS = 3
"""Steps of the first schedule before the tuner chooses."""


@dataclass(frozen=True)
class Trial:
    """What is measured over links of one speed.

    Attributes:
        schedules: by name; the first one is what the tuner sees before it chooses.
        forward: seconds; a backward takes twice as long.
        message: bytes.
        rounds: how often each has its turn, after one that does not count.
        torch: whether torch's own 1F1B has turns too.
        tuned: whether the tuner's choice has turns too.
        rivals: whether also the best of each kind of schedule has, as predicted.
        limit: samples that a rank may hold in what the tuner chooses; by default four times the stages.
        plans: by name of a schedule, where the batch is cut otherwise; else a sample a micro-batch.
        layer: of each stage, where it is not `sleeping`, whatever the samples.
    """

    schedules: dict[str, Schedule | Policy]
    stages: int
    microbatches: int
    forward: float
    message: int
    rounds: int = 5
    torch: bool = False
    tuned: bool = True
    rivals: bool = False
    limit: int = 0
    plans: Mapping[str, Plan] = field(default_factory=dict)
    layer: LayerProfile | None = None

    @property
    def plan(self) -> Plan:
        """One sample a micro-batch."""
        n = self.stages
        return replace(Plan.even(n, self.microbatches), layers=even_partition([1.0] * n, n))

    def plan_of(self, name: str) -> Plan:
        """What a schedule orders."""
        return self.plans.get(name, self.plan)

    def stages_on(self, rank: int) -> list[Stage]:
        """Those that a rank runs, by the plan of the first schedule: emulated, and equal."""
        first, schedule = next(iter(self.schedules.items()))
        layer = self.layer or sleeping_layer(self.forward, 2 * self.forward, message_bytes=self.message)
        plan, n = self.plan_of(first), self.stages
        return Emulation(plan, ordered(schedule, plan), (layer,) * n, (1.0,) * n).stages(rank)

    def replicated_step(self, rank: int) -> Callable[[], None] | None:
        """A step of the same training by replicas of the whole model; None where it is emulated, and has no weights."""
        return None


@dataclass(frozen=True)
class Seen:
    """What one rank saw: start and end of each step by name, and samples of its steps; on rank 0, what was chosen."""

    spans: dict[str, list[tuple[int, int]]]
    samples: dict[str, list[StepSample]]
    decision: TuningDecision | None


@dataclass(frozen=True)
class Measured:
    """What all ranks saw over links of one speed."""

    trial: Trial
    by_rank: list[Seen]

    def seconds(self, name: str) -> list[float]:
        """Of every step, from the first rank's start to the last one's end."""
        each = zip(*(seen.spans[name] for seen in self.by_rank), strict=True)
        return [(max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 for spans in each]

    def median(self, name: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds(name))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Seconds of a step: the first and the third quartile over rounds."""
        first, _, third = statistics.quantiles(self.seconds(name), n=4, method="inclusive")
        return first, third

    def ratios(self, name: str, other: str) -> list[float]:
        """The time of one over that of the other in the same round, for every round."""
        return [a / b for a, b in zip(self.seconds(name), self.seconds(other), strict=True)]

    def ratio(self, name: str, other: str) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios(name, other))

    @property
    def transfer(self) -> float:
        """Seconds that a message of the first schedule kept its link busy, the median over links and steps."""
        first = next(iter(self.trial.schedules))
        samples = [sample for seen in self.by_rank for sample in seen.samples[first]]
        return statistics.median(mean for s in samples for key, mean in s.means.items() if key[0] in SENDS) / 1e9

    def links(self, name: str) -> dict[Direction, float]:
        """Seconds that a message keeps each direction of each link busy, as the tuner has it after the steps of a
        schedule: averages over the last ones."""
        costs = self.costs(name)
        edges = [(s, s + 1) for s in range(self.trial.stages - 1)]
        there = {(a, b): costs.seconds_at(Kind.SF, a, 1) for a, b in edges}
        return there | {(b, a): costs.seconds_at(Kind.SB, b, 1) for a, b in edges}

    def costs(self, name: str) -> CostModel:
        """Averages over the last steps of a schedule."""
        steps = list(zip(*(seen.samples[name] for seen in self.by_rank), strict=True))
        return averages(steps[-WINDOW:]).costs()

    @property
    def decision(self) -> TuningDecision:
        """What the tuner chose, on what it saw of the first schedule."""
        assert self.by_rank[0].decision is not None
        return self.by_rank[0].decision

    def errors(self) -> dict[str, float]:
        """What each schedule was predicted to take, on what was measured with the first one, over what it took, less 1:
        the median over windows of steps, so that something else on the machine in one of them does not count."""
        first = next(iter(self.trial.schedules))
        steps = list(zip(*(seen.samples[first] for seen in self.by_rank), strict=True))
        costs = [averages(steps[n : n + LOOKS]).costs() for n in range(len(steps) - LOOKS + 1)]
        predicted = {}
        for name, schedule in self.trial.schedules.items():
            plan = self.trial.plan_of(name)
            order = ordered(schedule, plan)
            seconds = statistics.median(makespan(order, plan, each) for each in costs) / 1e9
            predicted[name] = seconds / self.median(name) - 1
        return predicted


def ordered(schedule: Schedule | Policy, plan: Plan) -> Program | Policy:
    """What an engine runs."""
    return schedule.program(plan) if isinstance(schedule, Schedule) else schedule


def averages(steps: Any) -> Averages:
    """Of steps, each with a sample of every rank."""
    found = Averages()
    for step in steps:
        found.add(step)
    return found


def measure(lab: NetLab, x: float | None, trial: Trial) -> Measured:
    """Over links on which a message that comes alone takes `x` forwards; 0 is without a limit, None as they are."""
    if x is not None:
        lab.shape(bandwidth(x * trial.forward, trial.message) if x else None)
    return Measured(trial, lab.run_ranks(rank_main, trial, timeout=600))


def bandwidth(seconds: float, message: int) -> float:
    """Bytes per second with which a message takes so long on a link that was idle, whose bucket lets its first bytes
    pass at full speed."""
    return (message - GOODPUT * BURST) / seconds


def rank_main(rank: int, trial: Trial) -> Seen:
    """Rounds in which each schedule has one step; the tuner chooses, and has turns of its own, after some steps of the
    first."""
    watch = join_ranks(rank)
    first, initial = next(iter(trial.schedules.items()))
    transport = make_transport(trial.plan, rank, range(trial.stages), torch.device("cpu"), watch)
    order = ordered(initial, trial.plan_of(first))
    engine = Engine(trial.plan_of(first), order, trial.stages_on(rank), transport, rank=rank, watch=watch)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    samples: dict[str, list[StepSample]] = defaultdict(list)

    def trained() -> None:
        engine.inject(Item(0, trial.plan.jobs[0].rows))
        engine.drain()

    def timed(name: str, step: Callable[[], None]) -> None:
        dist.barrier()
        gc.collect()  # not in the middle of a step
        dist.barrier()
        started = time.monotonic_ns()
        step()
        spans[name].append((started, time.monotonic_ns()))

    def turn(name: str, schedule: Schedule | Policy, order: Program | Policy) -> None:
        plan = trial.plan_of(name)
        engine.adopt(plan, order)
        since = time.monotonic_ns()
        timed(name, trained)
        samples[name].append(
            StepSample.from_events(engine.events, plan, since, chosen=not isinstance(schedule, Schedule))
        )

    gc.disable()
    gc.freeze()  # else each collection goes through all modules
    for _ in range(LOOKS):
        turn(first, initial, order)
    decision, turns = None, dict(trial.schedules)
    if trial.tuned:
        decision, rivals = agreed(rank, trial, samples[first])
        turns = {**(rivals if trial.rivals else {}), **turns, AUTO: decision.chosen.candidate.schedule}
    orders = {name: ordered(schedule, trial.plan_of(name)) for name, schedule in turns.items()}
    others = {TORCH: torch_step(trial, rank) if trial.torch else None, SPMD: trial.replicated_step(rank)}
    for number in range(1 + trial.rounds):
        if number == 1:  # what was before is not counted
            spans.clear()
        for name, schedule in turns.items():
            turn(name, schedule, orders[name])
        for name, step in others.items():
            if step is not None:
                timed(name, step)
    engine.close()
    watch.close()
    return Seen(dict(spans), dict(samples), decision if rank == 0 else None)


def agreed(rank: int, trial: Trial, mine: Sequence[StepSample]) -> tuple[TuningDecision, dict[str, Schedule | Policy]]:
    """What rank 0 chooses, and by name the best of each kind of schedule as predicted; an activation is a byte."""
    every: list[Any] = [None] * trial.stages
    dist.all_gather_object(every, mine)
    told: list[Any] = [None]
    if rank == 0:
        found, source = averages(zip(*every, strict=True)), tuning_planner(make_schedule("kfkb", k="auto"))
        base = CostModel(found.costs().seconds, activation_bytes=(1,) * trial.stages)
        costs = found.costs(base)
        candidates = source.list_candidates(trial.plan, costs, trial.limit or 4 * trial.stages)
        current = Candidate(make_schedule("kfkb", k=1), trial.plan, ())
        times = [makespan(ordered(c.schedule, c.plan), c.plan, costs) for c in candidates] if trial.rivals else []
        fastest = sorted(zip(times, candidates, strict=False), key=lambda found: found[0])
        rivals = {c.schedule.name: c.schedule for _, c in reversed(fastest)}
        told = [(CandidateRanker().decide(candidates, current, found, base), rivals)]
    dist.broadcast_object_list(told)
    decision, best = told[0]
    assert isinstance(decision, TuningDecision)
    return decision, best


def torch_step(trial: Trial, rank: int) -> Callable[[], None]:
    """A step of torch's own 1F1B, by its public API."""
    layer = sleeping_layer(trial.forward, 2 * trial.forward, message_bytes=trial.message)
    x = torch.zeros(trial.microbatches, trial.message // 4)
    stage = PipelineStage(nn.Sequential(EmulatedLayer(layer)), rank, trial.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, trial.microbatches, loss_fn=lambda out, target: out.mean())
    arguments = (x.requires_grad_(),) if rank == 0 else ()
    target = torch.zeros(trial.microbatches) if rank == trial.stages - 1 else None

    def step() -> None:
        schedule.step(*arguments, target=target)

    return step
