"""Job arrays, executed: siblings by ordinary Trainers, over emulated stages whose times are those of a real layer.

In the same processes and in turn with them, the same jobs one after another: by the fastest of all schedules that
ship, with their best numbers of micro-batches, and by torch.distributed.pipelining's. Simulation says which are worth
running.
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
from lightning_pipes.cost import CostModel, LayerProfile, ModelProfile
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
"""Batch sizes of the siblings, in turn, as in the paper's language jobs."""
SIZES = (1, 2, 3, 4, 6, 8, 12, *ROWS[1:])
"""Samples for which layers are measured."""
FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""The same where it has to be quick."""
MEASURED = 3
"""So often are layers measured; four times as often a layer that all others are to be like."""
LAYERS = 4
"""Of each rank, so that it can have one, two or four stages."""
TOKENS = 96
THIRD = 2
"""The number of each sibling's third batch."""
SIMULATIONS, UNEVEN = 9, 0.005
"""So many of an array, with stages that differ by so much from what they are said to take."""


@dataclass(frozen=True)
class Case:
    """Siblings in one pipeline.

    Attributes:
        profile: of the layers.
        batches: of each sibling; so all take part to the end, and the steady state is what is compared.
        real: layers compute, those of `gpt_parts`, instead of sleeping.
        contenders: schedules of ours that run for one job, the fastest by simulation.
        steps: of torch's pipeline, of which the median counts.
        starts: measure what a sibling's start and end take, too.
        short: batches, three or more, of each sibling in an array of a real model which says what blocks take while all
            ranks compute.
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
        """Its batch size."""
        return ROWS[sibling % len(ROWS)]

    def layers(self, stages: int) -> tuple[Span, ...] | None:
        """Of the stages, if there are so many; None where the model can't be cut so."""
        each, rest = divmod(len(self.profile.layers), stages)
        if self.real and each:
            ends = list(accumulate(len(part) for part in gpt_parts(stages)))
            return tuple(Span(start, stop) for start, stop in pairwise([0, *ends]))
        return None if rest else tuple(Span(each * s, each * (s + 1)) for s in range(stages))

    def costs(self, stages: int, split: bool = False) -> CostModel | None:
        """Of so many stages."""
        layers = self.layers(stages)
        return None if layers is None else (self.profile if split else whole(self.profile)).stage_costs(layers)

    def singles(self, rows: int) -> list[Single]:
        """The contenders for one job's batch, and the fastest that torch has, too, as the last one."""
        ours = singles(self.ranks, rows, self.costs)
        return [*ours[: self.contenders], singles(self.ranks, rows, self.costs, torchs=True)[0]]

    def simulated(self, costs: CostModel) -> list[Steady]:
        """The array in virtual time, when nothing but blocks takes any: many times, with blocks of each stage that take
        `UNEVEN` more or less, for who comes first is often a matter of less than that, and what follows differs by some
        percent."""
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
    """Of an array.

    Attributes:
        utilisation: the share of the time in which the busiest rank computes, from when all siblings have begun their
            third batch until the first one is through.
        rest: seconds from when all have begun their third batch to the last computation.
    """

    utilisation: float
    rest: float


def steady_state(timeline: Timeline) -> Steady:
    """What a timeline has from each sibling's third batch on."""
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
    """Layers whose backward is not computed in two parts."""
    layers = (replace(layer, input_backward=(), weight_backward=()) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def uneven(costs: CostModel, seed: int) -> CostModel:
    """Costs of stages that are not quite what they are said to be."""
    draw = random.Random(seed).gauss
    tables = costs.seconds.items()
    return replace(costs, seconds={key: tuple((n, s * draw(1.0, UNEVEN)) for n, s in table) for key, table in tables})


def slow_layers(ranks: int, seconds: float, times: int = MEASURED) -> ModelProfile:
    """Equal layers with the times of a transformer block on this machine by rows, stretched so that a batch of 16 takes
    a rank `seconds`."""
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
    """What the layers of a small byte GPT take on this machine, with the loss after them."""
    layers = [layer for part in gpt_parts(stages) for layer in part]
    inputs = {rows: torch.randint(256, (rows, TOKENS)) for rows in sizes}
    return least([*layers[:-1], _WithLoss(layers[-1])], inputs, times)


def least(layers: Sequence[nn.Module], inputs: dict[int, torch.Tensor], times: int) -> ModelProfile:
    """The least times that layers took in so many measurements, on one core."""
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
    """The last layer and what follows it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return nn.functional.cross_entropy(out, torch.zeros(len(out), out.shape[-1], dtype=torch.long))


def modules(case: Case, split: bool = False) -> list[nn.Module]:
    """The layers: that sleep, or of a small GPT."""
    if case.real:
        return [layer for part in gpt_parts(case.ranks) for layer in part]
    profile = case.profile if split else whole(case.profile)
    return [EmulatedLayer(layer) for layer in profile.layers]


def loss_of(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What is trained for."""
    return nn.functional.cross_entropy if case.real else lambda out, _: out.mean()


def samples(case: Case, rows: int) -> torch.Tensor:
    """So many."""
    return torch.randint(256, (rows, TOKENS)) if case.real else torch.ones(rows, 64)


class Jobs(L.LightningModule):
    """The layers as a user has them."""

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
    """An ordinary training, in an array or by itself; `measured` lets it measure its layers, and cut them by time."""
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
    """Seconds of an array.

    Attributes:
        whole: from the call to the end of the last sibling, and of the array.
        seconds: of blocks, means.
        work: in which the busiest rank computes.
        computing: between the first and the last computation of any rank.
    """

    whole: float
    seconds: dict[tuple[Kind, int], Table]
    work: float
    computing: float
    steady: Steady


def array(case: Case, rounds: Order | None = None, size: int | None = None, single: Single | None = None) -> Took:
    """All siblings together.

    Args:
        rounds: see `JobArray`.
        size: of the array; by default all siblings at a time.
        single: how each sibling is cut and ordered; by default a stage a rank.
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


def array_and_costs(case: Case) -> tuple[Took, CostModel]:
    """All siblings together, and the costs to simulate them with: of layers that sleep what they are told, of others
    what blocks took in a short array just before."""
    costs = CostModel(array(replace(case, batches=case.short)).seconds) if case.real else case.costs(case.ranks)
    assert costs is not None
    return array(case), costs


def one_by_one(case: Case, chosen: dict[int, list[Single]]) -> dict[str, float]:
    """Seconds of one job of each batch size, as often as there are siblings of it, by the same Trainer: with the
    fastest of the contenders that run."""
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
    """Seconds of the same batches by torch alone."""
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
    """Seconds that a sibling's start and end take while nobody computes, the mean of some, without its one batch and
    without the array's own. The first of them load what is loaded once."""
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
        **QUIET,
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


Order = Callable[[Plan, CostModel], Program]


def order_like(schedule: Schedule) -> Order:
    """Return the order of rounds in which a schedule for one job takes whole batches of jobs for micro-batches."""

    def order(plan: Plan, costs: CostModel) -> Program:
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
"""By name the order of rounds, and the siblings at a time. BPipe orders as 1F1B does; layers that sleep have no
activations that it could lend."""


def rank_of_schemes(rank: int, case: Case, turns: int) -> dict[str, list[float]]:
    """Return the seconds from first to last computation by scheme, in turns."""
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
    """Return the lines, and how many times as long as ours the others take."""
    found = run_ranks(rank_of_schemes, case.ranks, case, turns, timeout=1200)[0]
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ours = medians["no rounds (ours)"]
    lines = [
        f"emulated, {case.ranks} ranks, {case.siblings} siblings with {case.batches} batches of {ROWS} each, {turns} "
        "turns; seconds from first to last computation, and over ours",
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
    """What one rank measures."""
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
    """Lines, and figures."""
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
        f" times as fast as the faster one {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        "  ours: "
        + "; ".join(f"batches of {name} {seconds:.1f} s" for name, seconds in found["alone"][0].items() if name),
        "  torch's: " + "; ".join(f"batches of {rows}: {chosen[rows][-1]}" for rows in ROWS),
        f"  from each sibling's third batch on: busiest rank {figures['utilisation']:.1%} (simulated"
        f" {median(busy):.1%}); {median(t.steady.rest for t in tooks):.2f} s, {errors[0]:+.1%} to {errors[-1]:+.1%} of"
        " the simulation, which takes"
        f" {min(map(min, simulated)):.2f} to {max(map(max, simulated)):.2f} s where blocks vary by {UNEVEN:.1%}",
        f"  first to last computation {took.computing:.1f} s, of which the busiest rank computes {took.work:.1f} s"
        + (f"; start and end of a sibling, nobody computing, {1000 * found['start']:.0f} ms" if case.starts else ""),
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
