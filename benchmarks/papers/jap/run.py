"""Executed job arrays: siblings are trained by ordinary Trainers, on emulated stages with the times of a real layer.

The same jobs also run one after another, in the same processes and alternating with the array. They use the fastest of
our schedules, each with its best number of micro-batches, and torch.distributed.pipelining. Simulations determine which
of these schedules are worth running.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.engine import gpt_parts
from benchmarks.harness.emulated import EmulatedLayer, request_realtime_priority
from benchmarks.harness.report import QUIET, describe_allocator, hush
from benchmarks.papers.jap.peers import Single, by_torch, data_parallel, side_by_side, singles
from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.arrays.arrivals import order_first_batches
from lightning_pipes.cost import CostModel, JobCosts, LayerProfile, ModelProfile
from lightning_pipes.cost.layer import Table
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import B, Cut, F, Kind, Plan, Program, Schedule, Span
from lightning_pipes.sim import simulate
from lightning_pipes.sim.timeline import Timeline
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.jap import Job, RoundOrder, round_order, stream_jobs
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.ranks import run_ranks

ROWS = (8, 16, 24, 32)
"""The batch sizes of the siblings, which are repeated in this order, as for the paper's language jobs."""
SIZES = (1, 2, 3, 4, 6, 8, 12, *ROWS[1:])
"""The numbers of samples for which layers are measured."""
FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""The numbers of samples for which layers are measured in a quick run."""
MEASURED = 3
"""The number of measurements of each layer. A layer that stands for all others is measured four times as often."""
LAYERS = 4
"""The number of layers on each rank, so that a rank can have one, two or four stages."""
TOKENS = 96
THIRD = 2
"""The number of each sibling's third batch, counted from 0."""
SIMULATIONS, UNEVEN = 9, 0.005
"""The number of simulations of an array, and the relative deviation of the times of stages in each of them."""


@dataclass(frozen=True)
class Case:
    """Siblings in one pipeline.

    Attributes:
        ranks: the number of ranks.
        siblings: the number of siblings.
        batches: the number of batches of each sibling. It is the same for all, so that all siblings take part until the
            end, and the steady state is compared.
        profile: the times of the layers.
        real: whether the layers are the layers of `gpt_parts`, which compute, instead of layers that sleep.
        contenders: the number of our schedules that run one job after another. These are the fastest ones in
            simulations.
        steps: the number of steps of torch's pipeline. Their median is used.
        starts: whether to also measure the start and the end of a sibling.
        short: for a real model, the number of batches of each sibling in a short array that measures the times of
            blocks while all ranks compute. It must be at least 3.
    """

    ranks: int
    siblings: int
    batches: int
    profile: ModelProfile
    real: bool = False
    contenders: int = 1
    steps: int = 2
    starts: bool = True
    short: int = 4

    def rows(self, sibling: int) -> int:
        """Return the batch size of a sibling."""
        return ROWS[sibling % len(ROWS)]

    def layers(self, stages: int) -> tuple[Span, ...] | None:
        """Return the layers of each stage, or None if the model can't be cut into this number of stages."""
        each, rest = divmod(len(self.profile.layers), stages)
        if self.real and each:
            ends = list(accumulate(len(part) for part in gpt_parts(stages)))
            return tuple(Span(start, stop) for start, stop in pairwise([0, *ends]))
        return None if rest else tuple(Span(each * s, each * (s + 1)) for s in range(stages))

    def costs(self, stages: int, split: bool = False) -> CostModel | None:
        """Return the costs of stages, or None if the model can't be cut into this number of stages.

        Args:
            stages: the number of stages.
            split: whether backwards are computed in two parts.
        """
        layers = self.layers(stages)
        return None if layers is None else (self.profile if split else whole(self.profile)).stage_costs(layers)

    def singles(self, rows: int) -> list[Single]:
        """Return the contenders for a job with a certain batch size.

        The last entry is the fastest schedule that torch also has.
        """
        ours = singles(self.ranks, rows, self.costs)
        return [*ours[: self.contenders], singles(self.ranks, rows, self.costs, torchs=True)[0]]

    def simulated(self, costs: CostModel) -> list[Steady]:
        """Simulate the array several times, and return the steady state of each simulation.

        Only blocks take time. In each simulation, the times of the blocks of each stage deviate from the costs by about
        `UNEVEN`. A smaller difference often decides which block is ready first, and the resulting orders differ by a
        few percent in total time.
        """
        order = order_first_batches([self.rows(n) for n in range(self.siblings)])
        jobs = [Job(Cut.even(self.rows(n), 1, self.ranks), self.batches) for n in order]
        found = []
        for seed in range(SIMULATIONS):
            blocks = uneven(costs, seed)
            array = stream_jobs(jobs, blocks)
            found.append(steady_state(simulate(array.program, array.plan, blocks)))
        return found


@dataclass(frozen=True)
class Steady:
    """The steady state of an array.

    Attributes:
        utilisation: the share of time for which the busiest rank computes, from when all siblings have started their
            third batch until the first sibling ends.
        rest: seconds from when all siblings have started their third batch to the last computation.
    """

    utilisation: float
    rest: float


def steady_state(timeline: Timeline) -> Steady:
    """Return the steady state of a timeline, which begins when all siblings have started their third batch."""
    begun: dict[int, int] = {}
    last: dict[int, int] = {}
    blocks = [e for e in timeline.computations if e.instruction.kind in (Kind.F, Kind.B)]
    for e in blocks:
        job = e.instruction.job
        last[job] = max(e.end, last.get(job, 0))
        if e.instruction.batch == THIRD:
            begun[job] = min(e.start, begun.get(job, e.start))
    begin, stop = max(begun.values()), min(last.values())
    busy = [0] * len(timeline.busy)
    for e in blocks:
        busy[e.rank] += max(0, min(e.end, stop) - max(e.start, begin))
    return Steady(max(busy) / (stop - begin), (max(last.values()) - begin) / 1e9)


def whole(profile: ModelProfile) -> ModelProfile:
    """Return a profile of the same layers with backwards that can't be split into two parts."""
    layers = (replace(layer, input_backward=(), weight_backward=()) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def uneven(costs: CostModel, seed: int) -> CostModel:
    """Return costs in which the times of each stage deviate from the given ones at random."""
    draw = random.Random(seed).gauss
    tables = costs.seconds.items()
    return replace(costs, seconds={key: tuple((n, s * draw(1.0, UNEVEN)) for n, s in table) for key, table in tables})


def slow_layers(ranks: int, seconds: float, times: int = MEASURED) -> ModelProfile:
    """Return equal layers whose times depend on the number of samples like a transformer block on this machine.

    Args:
        ranks: the number of ranks, with `LAYERS` layers each.
        seconds: the time of a rank for the forward and backward of a batch of 16 samples, to which all times are
            scaled.
        times: the number of measurements, of which the block gets four times as many.
    """
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    found = least([block], {rows: torch.randn(rows, 32, 128) for rows in SIZES}, 4 * times).layers[0]
    scale = seconds / LAYERS / sum(dict(table)[16] for table in (found.forward, found.backward))

    def stretched(table: Table) -> Table:
        return tuple((rows, scale * t) for rows, t in table)

    layer = LayerProfile(
        "block",
        stretched(found.forward),
        stretched(found.backward),
        output=((1, 256),),
        input_backward=stretched(found.input_backward),
        weight_backward=stretched(found.weight_backward),
    )
    return ModelProfile((layer,) * ranks * LAYERS)


def gpt_profile(stages: int, sizes: Sequence[int] = SIZES, times: int = MEASURED) -> ModelProfile:
    """Return the measured times of the layers of a small byte-level GPT on this machine, including the loss."""
    layers = [layer for part in gpt_parts(stages) for layer in part]
    inputs = {rows: torch.randint(256, (rows, TOKENS)) for rows in sizes}
    return least([*layers[:-1], _WithLoss(layers[-1])], inputs, times)


def least(layers: Sequence[nn.Module], inputs: dict[int, torch.Tensor], times: int) -> ModelProfile:
    """Return the least times of layers in several measurements on one core."""
    found = run_ranks(_profiles, 1, layers, inputs, times, timeout=300)[0]

    def of(tables: Iterable[Table]) -> Table:
        return tuple(map(min, zip(*tables, strict=True)))

    best = [
        replace(
            each[0],
            forward=of(layer.forward for layer in each),
            backward=of(layer.backward for layer in each),
            input_backward=of(layer.input_backward for layer in each),
            weight_backward=of(layer.weight_backward for layer in each),
        )
        for each in zip(*(profile.layers for profile in found), strict=True)
    ]
    return ModelProfile(tuple(best))


def _profiles(
    rank: int, layers: Sequence[nn.Module], inputs: dict[int, torch.Tensor], times: int
) -> list[ModelProfile]:
    request_realtime_priority()
    torch.set_num_threads(1)
    return [profile_layers(layers, inputs, repeats=1, split=True) for _ in range(times)]


class _WithLoss(nn.Module):
    """The last layer together with the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return nn.functional.cross_entropy(out, torch.zeros(len(out), out.shape[-1], dtype=torch.long))


def modules(case: Case, split: bool = False) -> list[nn.Module]:
    """Return the layers of the model, which either sleep or are the layers of a small GPT."""
    if case.real:
        return [layer for part in gpt_parts(case.ranks) for layer in part]
    profile = case.profile if split else whole(case.profile)
    return [EmulatedLayer(layer) for layer in profile.layers]


def loss_of(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function."""
    return nn.functional.cross_entropy if case.real else lambda out, _: out.mean()


def samples(case: Case, rows: int) -> torch.Tensor:
    """Return a number of random samples, or samples of ones for layers that sleep."""
    return torch.randint(256, (rows, TOKENS)) if case.real else torch.ones(rows, 64)


class Jobs(L.LightningModule):
    """A module that trains the layers, as a user would write it."""

    def __init__(self, case: Case, split: bool) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(*modules(case, split)), loss_of(case)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(case: Case, sibling: int, single: Single | None = None, measured: bool = False) -> None:
    """Run an ordinary training, alone or as a sibling of an array.

    Args:
        case: the case.
        sibling: the number of the sibling, which determines the batch size.
        single: the schedule, cut and number of micro-batches of a job that runs alone. By default, the schedule is
            `jap`.
        measured: whether the strategy measures the layers and cuts them by time.
    """
    rows = case.rows(sibling)
    layers = case.layers(case.ranks if single is None else single.stages)
    assert layers is not None
    strategy = PipelineStrategy(
        "jap" if single is None else single.schedule,
        microbatches=1 if single is None else single.microbatches,
        partition="auto" if measured else [span.start for span in layers[1:]],
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        max_epochs=1,
        **QUIET,
    )
    data = torch.utils.data.TensorDataset(samples(case, rows * case.batches))
    split = single is not None and single.schedule.splits_backward
    trainer.fit(Jobs(case, split), torch.utils.data.DataLoader(data, rows))


@dataclass(frozen=True)
class Took:
    """The times of an array, in seconds.

    Attributes:
        whole: the time from the call to the end of the last sibling and of the array.
        seconds: the mean times of blocks.
        work: the time for which the busiest rank computes.
        computing: the time between the first and the last computation of any rank.
        steady: the steady state.
    """

    whole: float
    seconds: dict[tuple[Kind, int], Table]
    work: float
    computing: float
    steady: Steady


def array(case: Case, rounds: Order | None = None, size: int | None = None, single: Single | None = None) -> Took:
    """Train all siblings in an array and return its times.

    Args:
        case: the case.
        rounds: the order of rounds, see `JobArray`.
        size: the number of siblings at a time. By default, this is the number of all siblings.
        single: the schedule and the cut of each sibling. By default, each rank has one stage.
    """
    started = time.monotonic()
    jobs: JobArray[None] = JobArray(size or case.siblings, progress=False, rounds=rounds)
    measured = rounds is not None and single is None
    for outcome in jobs.run(partial(fit, case, n, single, measured) for n in range(case.siblings)):
        if outcome.error is not None:
            raise outcome.error
    assert jobs.timeline is not None
    took, timeline = time.monotonic() - started, jobs.timeline
    seconds = block_seconds(timeline)
    return Took(took, seconds, max(timeline.busy) / 1e9, timeline.makespan / 1e9, steady_state(timeline))


def block_seconds(timeline: Timeline) -> dict[tuple[Kind, int], Table]:
    """Return the mean times of the forwards and backwards of each stage, by number of rows."""
    times: dict[tuple[Kind, int], dict[int, list[int]]] = {}
    for e in timeline.computations:
        if (kind := e.instruction.kind) in (Kind.F, Kind.B):
            by_rows = times.setdefault((kind, e.instruction.stage), {})
            by_rows.setdefault(e.instruction.span.rows, []).append(e.end - e.start)
    return {
        key: tuple((rows, statistics.mean(by_rows[rows]) / 1e9) for rows in sorted(by_rows))
        for key, by_rows in times.items()
    }


def array_and_costs(case: Case) -> tuple[Took, CostModel]:
    """Train all siblings in an array, and return its times and the costs for simulations of it.

    For layers that sleep, these are the configured costs. For a real model, they are the times of blocks in a short
    array that runs immediately before.
    """
    costs = CostModel(array(replace(case, batches=case.short)).seconds) if case.real else case.costs(case.ranks)
    assert costs is not None
    return array(case), costs


def one_by_one(case: Case, chosen: dict[int, list[Single]]) -> dict[str, float]:
    """Return the seconds of all jobs one after another with the Trainer, and of each batch size, by name.

    One job of each batch size is measured, with the fastest of the contenders, and counted once for each sibling with
    this batch size. The total has the name "".
    """
    found: dict[str, float] = {}
    total = 0.0
    for sibling, rows in enumerate(ROWS):
        times = {}
        for single in chosen[rows][:-1]:
            dist.barrier()
            started = time.monotonic()
            fit(case, sibling, single)
            dist.barrier()
            times[str(single)] = time.monotonic() - started
        best = min(times, key=times.__getitem__)
        total += times[best] * case.siblings / len(ROWS)
        found[f"{rows}: {best}"] = times[best]
    return {"": total, **found}


def one_by_one_by_torch(case: Case, chosen: dict[int, list[Single]], rank: int) -> float:
    """Return the seconds of the same batches by torch's pipelining without a Trainer."""
    total = 0.0
    for rows in ROWS:
        single = chosen[rows][-1]
        layers = case.layers(single.stages)
        assert layers is not None
        each = modules(case)
        parts = [nn.Sequential(*each[span.start : span.stop]) for span in layers]
        seconds = by_torch(single, parts, rank, samples(case, rows), loss_of(case), case.steps)
        total += seconds * case.batches * case.siblings / len(ROWS)
    return total


def start_and_end(case: Case) -> float:
    """Return the mean seconds of the start and the end of a sibling while no other sibling computes.

    The time of its only batch and of the array itself is subtracted. The first siblings do not count, because modules
    and libraries are loaded once.
    """
    few = replace(case, siblings=4, batches=1)
    times: list[float] = []
    jobs: JobArray[None] = JobArray(1, progress=False)
    for outcome in jobs.run(partial(fit, few, n) for n in range(few.siblings)):
        if outcome.error is not None:
            raise outcome.error
        times.append(time.monotonic())
    plan = {n: Plan.even(case.ranks, 1, few.rows(n)) for n in range(2, few.siblings)}
    costs = case.costs(case.ranks)
    assert costs is not None
    batches = sum(
        costs.duration_ns(kind(s, Span(0, few.rows(n))), plan[n])
        for n in plan
        for kind in (F, B)
        for s in range(case.ranks)
    )
    return (times[-1] - times[1] - batches / 1e9) / len(plan)


class Small(L.LightningModule):
    """A real model with dropout and a learning rate for each sibling."""

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
    """Train the small model and return its losses and weights."""
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
        **QUIET,
    )
    trainer.fit(model, loader)
    return model.losses, [p.detach() for p in model.parameters()]


def equal_rank(rank: int, stages: int) -> bool:
    """Return whether the results of siblings in an array equal their results in an array with one sibling."""
    hush()

    def run(siblings: Sequence[int]) -> dict[int, Any]:
        jobs: JobArray[Any] = JobArray(4, progress=False)
        outcomes = jobs.run(partial(train_small, stages, n) for n in siblings)
        return {siblings[outcome.index]: outcome.value for outcome in outcomes}

    together = run(range(8))
    alone = {n: run([n])[n] for n in range(8)}
    return all(together[n][0] == alone[n][0] and all(map(torch.equal, together[n][1], alone[n][1])) for n in range(8))


def bit_equal(stages: int) -> bool:
    """Return whether eight siblings, four at a time, have the same results on all ranks as when trained alone."""
    return all(run_ranks(equal_rank, stages, stages, timeout=300))


Order = Callable[[Plan, CostModel | JobCosts], Program]


def order_like(schedule: Schedule) -> Order:
    """Return an order of rounds that uses a schedule for one job, with whole batches of jobs as micro-batches."""

    def order(plan: Plan, costs: CostModel | JobCosts) -> Program:
        rows = schedule.program(Plan.even(plan.n_stages, len(plan.jobs), ranks=plan.ranks)).head
        kinds = {Kind.F: F, Kind.B: B}
        return Program(
            tuple(
                tuple(
                    kinds[i.kind](i.stage, plan.spans(i.kind, i.stage, i.span.start)[0], i.span.start)
                    for i in row
                    if i.kind in kinds
                )
                for row in rows
            )
        )

    return order


ARBPIPE, ARHANAYO = "ArBPipe", "ArHanayo, one wave"
SCHEMES: dict[str, tuple[Order | None, int | None]] = {
    "no rounds (ours)": (None, None),
    "rounds, searched": (round_order, None),
    "rounds, genetic": (RoundOrder("genetic"), None),
    "ArGPipe": (order_like(GPipe()), None),
    ARBPIPE: (order_like(OneFOneB()), None),
    ARHANAYO: (order_like(Hanayo()), None),
    "Vanilla, one job at a time": (None, 1),
}
"""The order of rounds and the number of siblings at a time, by name.

BPipe has the order of 1F1B. Layers that sleep have no activations that BPipe could move to other ranks.
"""


def rank_of_schemes(rank: int, case: Case, turns: int) -> dict[str, list[float]]:
    """Return the seconds from the first to the last computation for each scheme. The schemes take turns."""
    hush()
    request_realtime_priority()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for _ in range(turns):
        for name, (rounds, size) in SCHEMES.items():
            dist.barrier()
            single = Single(Hanayo(), 1, 2 * case.ranks, 0.0) if name == ARHANAYO else None
            found[name].append(array(case, rounds, size, single).computing)
    return found


def compare_schemes(case: Case, turns: int) -> tuple[list[str], dict[str, float]]:
    """Return the lines of the table, and the time of each scheme relative to our order without rounds."""
    found = run_ranks(rank_of_schemes, case.ranks, case, turns, timeout=1200)[0]
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ours = medians["no rounds (ours)"]
    lines = [
        f"emulated, {case.ranks} ranks, {case.siblings} siblings with {case.batches} batches of {ROWS} each, {turns} "
        "turns; seconds from first to last computation, and relative to ours",
        *(f"  {name:28} {seconds:6.2f} {seconds / ours:6.2f}" for name, seconds in medians.items()),
    ]
    keys = {
        "searched": "rounds, searched",
        "argpipe": "ArGPipe",
        "arbpipe": ARBPIPE,
        "arhanayo": ARHANAYO,
        "vanilla": "Vanilla, one job at a time",
    }
    return lines, {f"{key}_over_ours": medians[name] / ours for key, name in keys.items()}


def rank_main(rank: int, case: Case, chosen: dict[int, list[Single]], pairs: int) -> dict[str, Any]:
    """Return the measurements of one rank."""
    hush()
    request_realtime_priority()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    sides: dict[str, Callable[[], Any]] = {
        "alone": partial(one_by_one, case, chosen),
        "array": partial(array_and_costs, case),
        "torch": partial(one_by_one_by_torch, case, chosen, rank),
    }
    if case.real:
        jobs = [case.rows(n) for n in range(case.siblings)]
        arguments = partial(modules, case), loss_of(case), partial(samples, case), jobs, case.batches
        sides |= {"processes": partial(side_by_side, rank, *arguments), "ddp": partial(data_parallel, *arguments)}
    measured: dict[str, list[Any]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides)[:: -1 if pair % 2 else 1]:
            dist.barrier()
            measured[name].append(sides[name]())
    return {**measured, "start": start_and_end(case) if case.starts else None}


def executed(case: Case, pairs: int) -> tuple[list[str], dict[str, float]]:
    """Run a case, and return its lines and its numbers."""
    chosen = {rows: case.singles(rows) for rows in ROWS}
    found = run_ranks(rank_main, case.ranks, case, chosen, pairs, timeout=1200)[0]
    tooks: list[Took] = [took for took, _ in found["array"]]
    wholes = [took.whole for took in tooks]
    alone = [each[""] for each in found["alone"]]
    rivals = [min(pair) for pair in zip(alone, found["torch"], strict=True)]
    ratios = sorted(rival / ours for rival, ours in zip(rivals, wholes, strict=True))
    several = [case.simulated(costs) for _, costs in (found["array"] if case.real else found["array"][:1])]
    simulated = [[each.rest for each in some] for some in several] * (1 if case.real else pairs)
    expected = [statistics.median(some) for some in simulated]
    errors = sorted(took.steady.rest / seconds - 1 for took, seconds in zip(tooks, expected, strict=True))
    busy = [statistics.median(each.utilisation for each in some) for some in several]
    figures = {
        "speedup": statistics.median(ratios),
        "utilisation": statistics.median(took.steady.utilisation for took in tooks),
        "simulation_error": max(map(abs, errors)),
    }
    median = statistics.median
    took = tooks[0]
    kind, jobs = "a real GPT" if case.real else "emulated", f"{case.siblings} siblings with {case.batches} batches"
    theirs = median(found["torch"])
    lines = [
        f"{kind}, {case.ranks} ranks, {jobs} of {ROWS} each, {pairs} pairs; malloc of {describe_allocator()}",
        f"  array {median(wholes):.1f} s; one after another, ours {median(alone):.1f} s, torch's {theirs:.1f} s;"
        f" speedup over the faster one {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        "  ours: "
        + "; ".join(f"batches of {name} {seconds:.1f} s" for name, seconds in found["alone"][0].items() if name),
        "  torch's: " + "; ".join(f"batches of {rows}: {chosen[rows][-1]}" for rows in ROWS),
        f"  from each sibling's third batch on: busiest rank {figures['utilisation']:.1%} (simulated"
        f" {median(busy):.1%}); {median(t.steady.rest for t in tooks):.2f} s, {errors[0]:+.1%} to {errors[-1]:+.1%}"
        " compared with the simulation, which takes"
        f" {min(map(min, simulated)):.2f} to {max(map(max, simulated)):.2f} s if blocks vary by {UNEVEN:.1%}",
        f"  first to last computation {took.computing:.1f} s, of which the busiest rank computes {took.work:.1f} s"
        + (f"; start and end of a sibling, no rank computing, {1000 * found['start']:.0f} ms" if case.starts else ""),
    ]
    if case.real:
        for key in ("processes", "ddp"):
            ratios = sorted(there / ours for there, ours in zip(found[key], wholes, strict=True))
            figures[f"speedup_vs_{key}"] = median(ratios)
        lines.append(
            f"  plain processes side by side {median(found['processes']):.1f} s, data parallel one after another"
            f" {median(found['ddp']):.1f} s: the array is {figures['speedup_vs_processes']:.2f} and"
            f" {figures['speedup_vs_ddp']:.2f} times as fast"
        )
    return lines, figures
