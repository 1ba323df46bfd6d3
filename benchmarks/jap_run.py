"""Job arrays, executed: siblings by ordinary Trainers, over emulated stages whose times are those of a real layer.

The same jobs run one after another with the best schedule and micro-batches of ours for each batch size, and step by
step with torch.distributed.pipelining's best, in the same processes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from engine import gpt_parts
from silence import hush
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.cost import CostModel, LayerProfile, ModelProfile
from lightning_pipes.cost.model import Table
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import B, Cut, F, Kind, Plan, Schedule, Span
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.sim.timeline import Timeline
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.jap import Job, Stream
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.emulated import Emulated, steady
from lightning_pipes.testing.ranks import run_ranks

ROWS = (8, 16, 24, 32)
"""Batch sizes of the siblings, in turn, as in the paper's language jobs."""
MICROBATCHES = (1, 2, 4, 8)
TOKENS = 96
SHORT = 4
"""Batches of each sibling in an array of a real model which says what blocks take while all ranks compute."""
SIMULATIONS, UNEVEN = 25, 0.005
"""So many of an array, with stages that differ by so much from what they are said to take."""
SCHEDULES: dict[str, Schedule] = {"gpipe": GPipe(), "1f1b": OneFOneB()}


@dataclass(frozen=True)
class Case:
    """Siblings in one pipeline.

    Attributes:
        profile: of the layers.
        batches: of each sibling; so all take part to the end, and the steady state is what is compared.
        real: layers compute, those of `gpt_parts`, instead of sleeping.
    """

    stages: int
    siblings: int
    batches: int
    profile: ModelProfile
    real: bool = False

    def rows(self, sibling: int) -> int:
        """Its batch size."""
        return ROWS[sibling % len(ROWS)]

    @property
    def layers(self) -> tuple[Span, ...]:
        """Of the stages."""
        if not self.real:
            return tuple(Span(s, s + 1) for s in range(self.stages))
        ends = list(accumulate(len(part) for part in gpt_parts(self.stages)))
        return tuple(Span(start, stop) for start, stop in pairwise([0, *ends]))

    @property
    def costs(self) -> CostModel:
        """Of the stages."""
        return self.profile.costs(self.layers)

    def best_single(self, rows: int) -> tuple[str, int]:
        """The schedule and number of micro-batches that take least time for one job's batch, simulated."""
        options = [(name, m) for name in SCHEDULES for m in MICROBATCHES if m <= rows]

        def step(option: tuple[str, int]) -> int:
            plan = even_plan(SCHEDULES[option[0]], self.stages, option[1], rows)
            return makespan(SCHEDULES[option[0]].program(plan), plan, self.costs)

        return min(options, key=step)

    @property
    def simulated_one_by_one(self) -> float:
        """Seconds of the same jobs one after another, each with its best schedule."""
        total = 0
        for n in range(self.siblings):
            name, m = self.best_single(self.rows(n))
            plan = even_plan(SCHEDULES[name], self.stages, m, self.rows(n))
            total += self.batches * makespan(SCHEDULES[name].program(plan), plan, self.costs)
        return total / 1e9

    def simulated(self, costs: CostModel) -> list[float]:
        """Seconds of the array in virtual time, when nothing but blocks takes any, in ascending order: many times, with
        blocks of each stage that take `UNEVEN` more or less, for who comes first is often a matter of less than that,
        and what follows differs by some percent."""
        return sorted(self._simulated(uneven(costs, seed)) for seed in range(SIMULATIONS))

    def _simulated(self, costs: CostModel) -> float:
        stream = Stream(self.stages, costs, self.siblings)
        for n in range(self.siblings):
            earlier = (self.siblings - n) ** 4  # who has most to do begins first, and here they begin as they come
            stream.admit(Job(n, Cut.even(self.rows(n), 1, self.stages), self.batches, expected=self.batches * earlier))
        return stream.advance().time / 1e9


def uneven(costs: CostModel, seed: int) -> CostModel:
    """Costs of stages that are not quite what they are said to be."""
    draw = random.Random(seed).gauss
    tables = costs.seconds.items()
    return replace(costs, seconds={key: tuple((n, s * draw(1.0, UNEVEN)) for n, s in table) for key, table in tables})


def slow_layers(stages: int, seconds: float) -> ModelProfile:
    """Equal layers with the times of a transformer block on this machine by rows, stretched so that a batch of 16
    takes `seconds`."""
    torch.set_num_threads(1)
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    inputs = {rows: torch.randn(rows, 32, 128) for rows in (1, 2, 4, *ROWS)}
    found = profile_layers([block], inputs, repeats=7).layers[0]
    scale = seconds / sum(dict(table)[16] for table in (found.forward, found.backward))

    def stretched(table: Table) -> Table:
        return tuple((rows, value * scale) for rows, value in table)

    layer = LayerProfile("block", stretched(found.forward), stretched(found.backward), output=((1, 256),))
    return ModelProfile((layer,) * stages)


def gpt_profile(stages: int) -> ModelProfile:
    """What the layers of a small byte GPT take on this machine, with the loss after them."""
    torch.set_num_threads(1)
    layers = [layer for part in gpt_parts(stages) for layer in part]
    sizes = sorted({-(-rows // m) for rows in ROWS for m in MICROBATCHES})
    inputs = {rows: torch.randint(256, (rows, TOKENS)) for rows in sizes}
    return profile_layers([*layers[:-1], _WithLoss(layers[-1])], inputs, repeats=5)


class _WithLoss(nn.Module):
    """The last layer and what follows it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return nn.functional.cross_entropy(out, torch.zeros(len(out), out.shape[-1], dtype=torch.long))


class Jobs(L.LightningModule):
    """Layers that sleep, a stage each, or a small GPT."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.real = case.real
        layers = [layer for part in gpt_parts(case.stages) for layer in part] if case.real else []
        self.layers = nn.Sequential(*(layers or map(Emulated, case.profile.layers)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.layers(batch[0])
        loss: torch.Tensor = nn.functional.cross_entropy(out, batch[0]) if self.real else out.mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(case: Case, sibling: int, schedule: str, microbatches: int) -> None:
    """An ordinary training."""
    rows = case.rows(sibling)
    x = torch.randint(256, (rows * case.batches, TOKENS)) if case.real else torch.ones(rows * case.batches, 64)
    data = torch.utils.data.TensorDataset(x)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.stages,
        strategy=PipelineStrategy(schedule, microbatches=microbatches, partition=[s.start for s in case.layers[1:]]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Jobs(case), torch.utils.data.DataLoader(data, rows))


@dataclass(frozen=True)
class Took:
    """Seconds of an array.

    Attributes:
        whole: from the call to the end of the last sibling, and of the array.
        seconds: of blocks, means.
        work: in which the busiest stage computes.
        busy: share of the steady state in which the busiest stage computes.
        computing: between the first and the last computation of any stage.
        start: of one sibling that trains one batch alone, start and end with it, the batch itself taken off.
    """

    whole: float
    seconds: dict[tuple[Kind, int], Table]
    work: float
    busy: float
    computing: float
    start: float

    @property
    def rest(self) -> float:
        """Before the first computation and after the last one: most of it connections."""
        return self.whole - self.computing


def array(case: Case, start: float) -> Took:
    """All siblings together."""
    started = time.monotonic()
    jobs: JobArray[None] = JobArray(case.siblings, progress=False)
    for outcome in jobs.run(partial(fit, case, n, "jap", 1) for n in range(case.siblings)):
        if outcome.error is not None:
            raise outcome.error
    assert jobs.timeline is not None
    whole, timeline = time.monotonic() - started, jobs.timeline
    busy, work = utilisation(timeline), max(timeline.busy) / 1e9
    return Took(whole, block_seconds(timeline), work, busy, timeline.makespan / 1e9, start)


def block_seconds(timeline: Timeline) -> dict[tuple[Kind, int], Table]:
    """What forwards and backwards of each stage took, means by rows."""
    times: dict[tuple[Kind, int], dict[int, list[int]]] = {}
    for e in timeline.computations:
        if (kind := e.instruction.kind) in (Kind.F, Kind.B):
            by_rows = times.setdefault((kind, e.instruction.stage), {})
            by_rows.setdefault(e.instruction.span.rows, []).append(e.end - e.start)
    return {
        key: tuple((rows, statistics.mean(by_rows[rows]) / 1e9) for rows in sorted(by_rows))
        for key, by_rows in times.items()
    }


def array_and_simulated(case: Case, start: float) -> tuple[Took, list[float]]:
    """All siblings together, and the seconds of their simulations: of layers that sleep with what they are told, of
    others with what blocks took in a short array just before."""
    costs = CostModel(array(replace(case, batches=SHORT), start).seconds) if case.real else case.costs
    return array(case, start), case.simulated(costs)


def start_and_end(case: Case) -> float:
    """Seconds that a sibling's start and end take while nobody computes, the mean of some, without its one batch and
    without the array's own. The first of them load what is loaded once."""
    few = replace(case, siblings=6, batches=1)
    times: list[float] = []
    jobs: JobArray[None] = JobArray(1, progress=False)
    for outcome in jobs.run(partial(fit, few, n, "jap", 1) for n in range(few.siblings)):
        if outcome.error is not None:
            raise outcome.error
        times.append(time.monotonic())
    plan = {n: Plan.even(case.stages, 1, few.rows(n)) for n in range(2, few.siblings)}
    batches = sum(
        case.costs.duration(kind(s, Span(0, few.rows(n))), plan[n])
        for n in plan
        for kind in (F, B)
        for s in range(case.stages)
    )
    return (times[-1] - times[1] - batches / 1e9) / len(plan)


def utilisation(timeline: Timeline) -> float:
    """Of the rank that is busy most, in the second half of the time until the first sibling is through: siblings of
    different batch sizes have spread over the stages by then, and all take part."""
    last: dict[int, int] = {}
    for e in timeline.computations:
        last[e.instruction.job] = max(e.end, last.get(e.instruction.job, 0))
    begin, stop = min(e.start for e in timeline.computations), min(last.values())
    middle = (begin + stop) // 2
    busy = [0] * len(timeline.busy)
    for e in timeline.computations:
        busy[e.rank] += max(0, min(e.end, stop) - max(e.start, middle))
    return max(busy) / (stop - middle)


def one_by_one(case: Case) -> float:
    """Seconds of the same jobs one after another, by the same Trainer."""
    started = time.monotonic()
    for n in range(case.siblings):
        fit(case, n, *case.best_single(case.rows(n)))
    return time.monotonic() - started


def by_torch(case: Case, rank: int) -> float:
    """Seconds of the same batches by torch's schedules alone, without a Trainer: a few steps of each batch size and
    number of micro-batches, the best of them times the batches."""
    total, device = 0.0, torch.device("cpu")
    for rows in ROWS:
        best = float("inf")
        for kind in (ScheduleGPipe, Schedule1F1B):
            for m in MICROBATCHES:
                if kind is Schedule1F1B and m < case.stages:
                    continue  # it refuses fewer micro-batches than stages
                stage = PipelineStage(Emulated(case.profile.layers[rank]), rank, case.stages, device)
                schedule = kind(stage, m, loss_fn=lambda out, target: out.mean())
                x, times = torch.ones(rows, 64), []
                for _ in range(3):
                    dist.barrier()
                    begun = time.monotonic()
                    arguments = (x,) if rank == 0 else ()
                    if stage.is_last:
                        schedule.step(*arguments, target=x)
                    else:
                        schedule.step(*arguments)
                    dist.barrier()
                    times.append(time.monotonic() - begun)
                best = min(best, statistics.median(times[1:]))
        total += best * case.batches * sum(case.rows(n) == rows for n in range(case.siblings))
    return total


class Small(L.LightningModule):
    """A real model with dropout, trained with a learning rate of its own."""

    def __init__(self, sibling: int) -> None:
        super().__init__()
        torch.manual_seed(sibling)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU()) for _ in range(8)]
        self.layers = nn.Sequential(*blocks)
        self.lr = 1e-3 * (1 + sibling)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train_small(stages: int, sibling: int) -> tuple[list[float], list[torch.Tensor]]:
    """Its losses and weights."""
    L.seed_everything(sibling, verbose=False)
    model = Small(sibling)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(96, 32)), ROWS[sibling % len(ROWS)], shuffle=True
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=PipelineStrategy("jap"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return model.losses, [p.detach() for p in model.parameters()]


def equal_rank(rank: int, stages: int) -> bool:
    """Whether siblings in an array give what each gives in an array of its own."""
    hush()

    def run(siblings: Sequence[int]) -> dict[int, Any]:
        jobs: JobArray[Any] = JobArray(4, progress=False)
        outcomes = jobs.run(partial(train_small, stages, n) for n in siblings)
        return {siblings[outcome.index]: outcome.value for outcome in outcomes}

    together = run(range(8))
    alone = {n: run([n])[n] for n in range(8)}
    return all(together[n][0] == alone[n][0] and all(map(torch.equal, together[n][1], alone[n][1])) for n in range(8))


def bit_equal(stages: int) -> bool:
    """Whether eight siblings, four at a time, are what they are alone, on all ranks."""
    return all(run_ranks(equal_rank, stages, stages, timeout=300))


def rank_main(rank: int, cases: Sequence[Case], pairs: int) -> list[dict[str, Any]]:
    """What one rank measures, by case."""
    hush()
    steady()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found = []
    for case in cases:
        start = start_and_end(case)
        sides: dict[str, Callable[[Case], Any]] = {
            "array": partial(array_and_simulated, start=start),
            "alone": one_by_one,
        }
        measured: dict[str, list[Any]] = {name: [] for name in sides}
        for pair in range(pairs):
            for name in list(sides)[:: 1 if pair % 2 else -1]:
                dist.barrier()
                measured[name].append(sides[name](case))
        found.append({**measured, "torch": float("nan") if case.real else by_torch(case, rank)})
    return found


def executed(cases: Sequence[Case], pairs: int) -> tuple[list[str], dict[str, float]]:
    """Lines, and the worst figures of all cases."""
    lines = ["executed by ordinary Trainers: stages that sleep as long as a real transformer block of so many rows"]
    lines[0] += " computes, and a real GPT, simulated with what its blocks took in a short array before"
    lines.append(
        f"{'layers':9}{'stages':>7}{'siblings':>10}{'array s':>10}{'simulated':>11}{'one by one':>12}{'speed-up':>10}"
        f"{'by torch s':>12}{'speed-up':>10}{'utilisation':>13}"
    )
    worst = {"speedup_vs_sequential": float("inf"), "utilisation": float("inf"), "simulation_error": 0.0}
    for case in cases:
        (found,) = run_ranks(rank_main, case.stages, [case], pairs, timeout=1200)[0]
        arrays: list[Took] = [took for took, _ in found["array"]]
        whole = statistics.median(took.whole for took in arrays)
        busy = statistics.median(took.busy for took in arrays)
        computing = statistics.median(took.computing for took in arrays)
        rest = statistics.median(took.rest for took in arrays)
        simulations = sorted(seconds for _, several in found["array"] for seconds in several)
        simulated = statistics.median(simulations)
        ratios = sorted(alone / ours.whole for alone, ours in zip(found["alone"], arrays, strict=True))
        speedup = statistics.median(ratios)
        lines.append(
            f"{'real' if case.real else 'emulated':9}{case.stages:7}{case.siblings:10}{whole:10.2f}"
            f"{simulated:11.2f}"
            f"{statistics.median(found['alone']):12.2f}{speedup:10.2f}{found['torch']:12.2f}"
            f"{found['torch'] / whole:10.2f}{busy:13.1%}"
        )
        errors = sorted(took.computing / statistics.median(several) - 1 for took, several in found["array"])
        error = statistics.median(errors)
        predicted = case.simulated_one_by_one / statistics.median(case.simulated(case.costs))
        work = statistics.median(took.work for took in arrays)
        lines.append(
            f"        {case.batches} batches each; speed-ups {ratios[0]:.2f} to {ratios[-1]:.2f}; from first to last "
            f"computation {computing:.2f} s, {error:+.1%} of the simulation ({errors[0]:+.1%} to {errors[-1]:+.1%}), "
            f"which takes {simulations[0]:.2f} to {simulations[-1]:.2f} s where blocks vary by {UNEVEN:.1%}, and "
            f"{rest:.2f} s besides; the busiest stage computes {work:.2f} s; "
            f"simulated speed-up {predicted:.2f}"
        )
        lines.append(
            f"        start and end of a sibling, nobody computing: {1000 * arrays[0].start:.0f} ms, of all of them "
            f"{case.siblings * arrays[0].start / whole:.1%} of the array's time; the simulation has none"
        )
        if case.real:
            continue
        worst["speedup_vs_sequential"] = min(worst["speedup_vs_sequential"], speedup)
        worst["utilisation"] = min(worst["utilisation"], busy)
        worst["simulation_error"] = max(worst["simulation_error"], abs(error))
    return lines, worst
