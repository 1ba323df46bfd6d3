"""Steps over really shaped links: emulated stages on the hosts of a network laboratory, plans in turn in one engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Engine, FailureWatch, Item, make_transport
from lightning_pipes.ir import Plan, Policy, Program, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, Tunable
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.tuning import Chooser, Decision
from lightning_pipes.sim import makespan
from lightning_pipes.testing.emulated import Emulated, Emulation, sleeping, steady
from lightning_pipes.testing.netlab import NetLab

AUTO, TORCH = "auto", "torch 1f1b"
WARM_UP = 1


@dataclass(frozen=True)
class Trial:
    """What is measured over links of one speed.

    Attributes:
        schedules: by name; the first one is what the tuner sees before it chooses.
        forward: seconds; a backward takes twice as long.
        message: bytes.
        rounds: how often each has its turn.
        steps: of each turn, one more to warm up.
        torch: whether torch's own 1F1B has turns too.
    """

    schedules: dict[str, Schedule | Policy]
    stages: int
    microbatches: int
    forward: float
    message: int
    rounds: int = 3
    steps: int = 2
    torch: bool = False

    @property
    def plan(self) -> Plan:
        """One sample a micro-batch."""
        n = self.stages
        return replace(Plan.even(n, self.microbatches), layers=even_partition([1.0] * n, n))

    def emulation(self, schedule: Schedule | Policy) -> Emulation:
        """Equal stages."""
        layer = sleeping(self.forward, 2 * self.forward, message_bytes=self.message)
        return Emulation(self.plan, ordered(schedule, self.plan), (layer,) * self.stages, (1.0,) * self.stages)


@dataclass(frozen=True)
class Seen:
    """What one rank saw: start and end of each step by name, and samples of its steps; on rank 0, what was chosen."""

    spans: dict[str, list[tuple[int, int]]]
    samples: dict[str, list[StepSample]]
    decision: Decision | None


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

    def ratio(self, name: str, other: str) -> float:
        """The time of one over that of another, the median over steps of the same turns; `AUTO` has none in the first
        round."""
        pairs = zip(reversed(self.seconds(name)), reversed(self.seconds(other)), strict=False)
        return statistics.median(a / b for a, b in pairs)

    @property
    def decision(self) -> Decision:
        """What the tuner chose, on what it saw of the first schedule."""
        assert self.by_rank[0].decision is not None
        return self.by_rank[0].decision

    def errors(self) -> dict[str, float]:
        """What each schedule was foretold to take, on what was measured with the first one, over what it took, less
        1."""
        first = next(iter(self.trial.schedules))
        costs = averages(zip(*(seen.samples[first] for seen in self.by_rank), strict=True)).costs()
        plan = self.trial.plan
        return {
            name: makespan(ordered(schedule, plan), plan, costs) / 1e9 / self.median(name) - 1
            for name, schedule in self.trial.schedules.items()
        }


def ordered(schedule: Schedule | Policy, plan: Plan) -> Program | Policy:
    """What an engine runs."""
    return schedule.program(plan) if isinstance(schedule, Schedule) else schedule


def averages(steps: Any) -> Averages:
    """Of steps, each with a sample of every rank."""
    found = Averages()
    for step in steps:
        found.add(step)
    return found


def measure(lab: NetLab, x: float, trial: Trial) -> Measured:
    """Over links on which a message takes `x` forwards; 0 is without a limit."""
    lab.shape(trial.message / (x * trial.forward) if x else None)
    return Measured(trial, lab.run_ranks(rank_main, trial, timeout=600))


def rank_main(rank: int, trial: Trial) -> Seen:
    """Turns of all schedules; the tuner's choice is one more after the first round of the first."""
    steady()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
    plan = trial.plan
    first = next(iter(trial.schedules))
    emulation = trial.emulation(trial.schedules[first])
    transport = make_transport(plan, rank, range(trial.stages), torch.device("cpu"), watch)
    engine = Engine(plan, emulation.order, emulation.stages(rank), transport, rank=rank, watch=watch)
    turns: dict[str, Schedule | Policy] = dict(trial.schedules)
    spans: dict[str, list[tuple[int, int]]] = {}
    samples: dict[str, list[StepSample]] = {}
    decision: Decision | None = None
    by_torch = torch_step(trial, rank) if trial.torch else None

    def timed(name: str, step: Callable[[], None], number: int) -> None:
        dist.barrier()
        started = time.monotonic_ns()
        step()
        if number >= WARM_UP:
            spans.setdefault(name, []).append((started, time.monotonic_ns()))

    def train() -> None:
        engine.inject(Item(0, trial.microbatches))
        engine.drain()

    for round_ in range(trial.rounds):
        for name, schedule in list(turns.items()):
            engine.adopt(plan, ordered(schedule, plan))
            for number in range(WARM_UP + trial.steps):
                since = time.monotonic_ns()
                timed(name, train, number)
                sample = StepSample.of(engine.events, plan, since, chosen=not isinstance(schedule, Schedule))
                samples.setdefault(name, []).append(sample)
            if round_ == 0 and name == first:
                decision = agreed(rank, trial, samples[first])
                turns[AUTO] = decision.chosen.candidate.schedule
        if by_torch is not None:
            for number in range(WARM_UP + trial.steps):
                timed(TORCH, by_torch, number)
    engine.close()
    watch.close()
    return Seen(spans, samples, decision if rank == 0 else None)


def agreed(rank: int, trial: Trial, mine: Sequence[StepSample]) -> Decision:
    """What rank 0 chooses, on all ranks: an activation is a byte, and a rank may hold four times what 1F1B does."""
    every: list[Any] = [None] * trial.stages
    dist.all_gather_object(every, mine)
    told: list[Decision | None] = [None]
    if rank == 0:
        found, source = averages(zip(*every, strict=True)), make_schedule("kfkb", k="auto")
        assert isinstance(source, Tunable)
        base = CostModel(found.costs().seconds, activation_bytes=(1,) * trial.stages)
        candidates = source.candidates(trial.plan, found.costs(base), 4 * trial.stages)
        current = Candidate(make_schedule("kfkb", k=1), trial.plan, ())
        told = [Chooser().decide(candidates, current, found, base)]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    return told[0]


def torch_step(trial: Trial, rank: int) -> Callable[[], None]:
    """A step of torch's own 1F1B, by its public API."""
    layer = sleeping(trial.forward, 2 * trial.forward, message_bytes=trial.message)
    x = torch.zeros(trial.microbatches, trial.message // 4)
    stage = PipelineStage(nn.Sequential(Emulated(layer)), rank, trial.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, trial.microbatches, loss_fn=lambda out, target: out.mean())
    arguments = (x.requires_grad_(),) if rank == 0 else ()
    target = torch.zeros(trial.microbatches) if rank == trial.stages - 1 else None

    def step() -> None:
        schedule.step(*arguments, target=target)

    return step
