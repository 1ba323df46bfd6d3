"""Measured steps on shaped links: emulated stages run on the hosts of a network laboratory.

All schedules run in the same processes and by the same engine. They take turns of one step each.
"""

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
from lightning_pipes.ir import SEND_KINDS, Kind, Plan, Policy, Program, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.tuning import CandidateRanker, TuningDecision
from lightning_pipes.sim import makespan

AUTO, TORCH, SPMD = "auto", "torch 1f1b", "SPMD"
LOOKS = 3
"""The number of steps of the first schedule before the tuner chooses."""


@dataclass(frozen=True)
class Trial:
    """A comparison of schedules on links of one speed.

    Attributes:
        schedules: the schedules by name. The tuner observes the first one before it chooses.
        stages: the number of stages, with one stage on each rank.
        microbatches: the number of micro-batches in a batch.
        forward: seconds of a forward. A backward takes twice as long.
        message: bytes of a message.
        rounds: the number of turns of each schedule, after a first one that does not count.
        torch: whether to include torch's own 1F1B.
        tuned: whether to include the tuner's choice.
        rivals: whether to include the schedule of each kind that has the best prediction.
        limit: the number of samples that a rank may hold under the schedule that the tuner chooses. By default, it is
            four times the number of stages.
        plans: the plans of schedules that cut the batch differently, by name. All other schedules have one sample in
            each micro-batch.
        layer: the profile of each stage's layer. By default, a layer sleeps for a fixed time for any number of samples.
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
        """The plan with one sample in each micro-batch."""
        n = self.stages
        return replace(Plan.even(n, self.microbatches), layers=even_partition([1.0] * n, n))

    def plan_of(self, name: str) -> Plan:
        """Return the plan of a schedule."""
        return self.plans.get(name, self.plan)

    def stages_on(self, rank: int) -> list[Stage]:
        """Return the emulated, equal stages of a rank, according to the plan of the first schedule."""
        first, schedule = next(iter(self.schedules.items()))
        layer = self.layer or sleeping_layer(self.forward, 2 * self.forward, message_bytes=self.message)
        plan, n = self.plan_of(first), self.stages
        return Emulation(plan, ordered(schedule, plan), (layer,) * n, (1.0,) * n).stages(rank)

    def replicated_step(self, rank: int) -> Callable[[], None] | None:
        """Return a function that runs a step of data parallelism with the whole model on each rank.

        The result is None for emulated stages, because they have no weights.
        """
        return None


@dataclass(frozen=True)
class Seen:
    """The observations of one rank.

    Attributes:
        spans: the start and the end of each step, by name.
        samples: the measurements that the tuner takes from each step, by name.
        decision: the tuner's decision on rank 0, otherwise None.
    """

    spans: dict[str, list[tuple[int, int]]]
    samples: dict[str, list[StepSample]]
    decision: TuningDecision | None


@dataclass(frozen=True)
class Measured:
    """The observations of all ranks on links of one speed."""

    trial: Trial
    by_rank: list[Seen]

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of each step, from the start of the first rank to the end of the last one."""
        each = zip(*(seen.spans[name] for seen in self.by_rank), strict=True)
        return [(max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 for spans in each]

    def median(self, name: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.seconds(name))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Return the first and the third quartile of the seconds of a step, over all rounds."""
        first, _, third = statistics.quantiles(self.seconds(name), n=4, method="inclusive")
        return first, third

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the step time of one schedule divided by the step time of another one, for each round."""
        return [a / b for a, b in zip(self.seconds(name), self.seconds(other), strict=True)]

    def ratio(self, name: str, other: str) -> float:
        """Return the median of `ratios`."""
        return statistics.median(self.ratios(name, other))

    @property
    def transfer(self) -> float:
        """The median seconds for which a message of the first schedule occupies its link, over links and steps."""
        first = next(iter(self.trial.schedules))
        samples = [sample for seen in self.by_rank for sample in seen.samples[first]]
        return statistics.median(mean for s in samples for key, mean in s.means.items() if key[0] in SEND_KINDS) / 1e9

    def links(self, name: str) -> dict[Direction, float]:
        """Return the seconds for which a message occupies each direction of each link.

        These are the averages over the last steps of a schedule, as the tuner computes them.
        """
        costs = self.costs(name)
        edges = [(s, s + 1) for s in range(self.trial.stages - 1)]
        there = {(a, b): costs.seconds_at(Kind.SF, a, 1) for a, b in edges}
        return there | {(b, a): costs.seconds_at(Kind.SB, b, 1) for a, b in edges}

    def costs(self, name: str) -> CostModel:
        """Return the costs that were measured in the last steps of a schedule, as averages."""
        steps = list(zip(*(seen.samples[name] for seen in self.by_rank), strict=True))
        return averages(steps[-WINDOW_STEPS:]).costs()

    @property
    def decision(self) -> TuningDecision:
        """The tuner's decision, based on its observations of the first schedule."""
        assert self.by_rank[0].decision is not None
        return self.by_rank[0].decision

    def errors(self) -> dict[str, float]:
        """Return the relative error of the predicted step time of each schedule.

        The predictions are based on measurements of the first schedule. The median over windows of steps is used, so
        that other programs that ran during one of the windows have little effect.
        """
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
    """Return the program of a schedule, or the policy itself, for the engine to run."""
    return schedule.program(plan) if isinstance(schedule, Schedule) else schedule


def averages(steps: Any) -> Averages:
    """Return the averages over steps. Each step is a tuple with the sample of every rank."""
    found = Averages()
    for step in steps:
        found.add(step)
    return found


def measure(lab: NetLab, x: float | None, trial: Trial) -> Measured:
    """Run a trial on shaped links.

    Args:
        lab: the network laboratory.
        x: the time of a message on an idle link, in forwards. With 0, the speed is not limited, and with None, the
            links stay as they are.
        trial: the trial.
    """
    if x is not None:
        lab.shape(bandwidth(x * trial.forward, trial.message) if x else None)
    return Measured(trial, lab.run_ranks(rank_main, trial, timeout=600))


def bandwidth(seconds: float, message: int) -> float:
    """Return the bytes per second with which a message on an idle link takes a certain time.

    The first bytes of such a message pass at full speed, because the token bucket of the link is full.

    Args:
        seconds: the time of the message.
        message: bytes of the message.
    """
    return (message - GOODPUT * BURST) / seconds


def rank_main(rank: int, trial: Trial) -> Seen:
    """Run the rounds of a trial on one rank, with one step of each schedule in each round.

    The tuner chooses after some steps of the first schedule. Its choice then takes part in the rounds.
    """
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
        gc.collect()  # so that no collection happens during the step
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
    gc.freeze()  # so that collections skip the objects of all imported modules
    for _ in range(LOOKS):
        turn(first, initial, order)
    decision, turns = None, dict(trial.schedules)
    if trial.tuned:
        decision, rivals = agreed(rank, trial, samples[first])
        turns = {**(rivals if trial.rivals else {}), **turns, AUTO: decision.chosen.candidate.schedule}
    orders = {name: ordered(schedule, trial.plan_of(name)) for name, schedule in turns.items()}
    others = {TORCH: torch_step(trial, rank) if trial.torch else None, SPMD: trial.replicated_step(rank)}
    for number in range(1 + trial.rounds):
        if number == 1:  # the steps before this one do not count
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
    """Return the tuner's decision and the rivals, which rank 0 determines for all ranks.

    The rivals are the schedules of each kind with the best prediction, by name. An activation counts as one byte.
    """
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
    """Return a function that runs a step of torch's own 1F1B through its public API."""
    layer = sleeping_layer(trial.forward, 2 * trial.forward, message_bytes=trial.message)
    x = torch.zeros(trial.microbatches, trial.message // 4)
    stage = PipelineStage(nn.Sequential(EmulatedLayer(layer)), rank, trial.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, trial.microbatches, loss_fn=lambda out, target: out.mean())
    arguments = (x.requires_grad_(),) if rank == 0 else ()
    target = torch.zeros(trial.microbatches) if rank == trial.stages - 1 else None

    def step() -> None:
        schedule.step(*arguments, target=target)

    return step
