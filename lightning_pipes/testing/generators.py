"""Small plans and costs for tests, and random planning problems that can be solved exhaustively."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_pipes.cost import Cluster, CostModel, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import Cut, Kind, Plan, PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import installed_variants
from lightning_pipes.planning.fit import Fit, fit_layers
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.record import RunRecord


def tiny_plan(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Plan:
    """Return a plan of one job and one batch, with one sample per micro-batch.

    Each rank has one stage unless `ranks` is given.
    """
    return Plan.even(stages, microbatches, ranks=ranks)


def uniform(
    stages: int,
    microbatches: int,
    f: int,
    b: int,
    *,
    w: int | None = None,
    step: int = 0,
    link: int = 0,
    latency: int = 0,
    overhead: int = 0,
    activation_bytes: int = 0,
    ranks: Sequence[int] | None = None,
) -> tuple[Plan, CostModel]:
    """Return a tiny plan with equal stages, and its costs in integer nanoseconds, so that simulated times are exact.

    Args:
        stages: the number of stages.
        microbatches: the number of micro-batches.
        f: the nanoseconds of a forward.
        b: the nanoseconds of a full backward.
        w: the nanoseconds of W; I takes the rest of `b`. The default is b // 2.
        step: the nanoseconds of an optimizer step.
        link: the nanoseconds that a message occupies its link.
        latency: the nanoseconds from then to its arrival.
        overhead: the nanoseconds before each computation.
        activation_bytes: the bytes of activations per sample.
        ranks: the rank of each stage. By default, stage s is on rank s.
    """
    plan = tiny_plan(stages, microbatches, ranks)
    w = b // 2 if w is None else w
    times = {Kind.F: f, Kind.B: b, Kind.I: b - w, Kind.W: w, Kind.STEP: step, Kind.SF: link, Kind.SB: link}
    costs = CostModel(
        {(kind, s): ((1, t * 1e-9),) for kind, t in times.items() for s in range(stages)},
        link=Link(latency=latency * 1e-9),
        activation_bytes=(activation_bytes,) * stages,
        overhead=overhead * 1e-9,
    )
    return plan, costs


def random_spans(rng: random.Random, rows: int) -> tuple[Span, ...]:
    """Return spans of random sizes that cover `rows` samples."""
    cuts = sorted(rng.sample(range(1, rows), rng.randrange(rows))) if rows > 1 else []
    return tuple(Span(a, b) for a, b in zip([0, *cuts], [*cuts, rows], strict=True))


def random_plan(seed: int, *, unequal: bool = True, split_backward: bool = False) -> Plan:
    """Return a random plan of one job and one batch on up to five stages.

    Args:
        seed: the seed of the random numbers.
        unequal: whether every stage, direction and link has different spans.
        split_backward: whether the backward runs as I and W.
    """
    rng = random.Random(seed)
    stages, rows = rng.randint(1, 5), rng.randint(1, 8)

    def random_table() -> tuple[tuple[Span, ...], ...]:
        return tuple(random_spans(rng, rows) for _ in range(stages))

    if unequal:
        cut = Cut(rows, random_table(), random_table(), random_table(), random_table())
    else:
        cut = Cut(rows, (random_spans(rng, rows),) * stages)
    return Plan(tuple(range(stages)), (cut,), split_backward=split_backward)


def random_costs(plan: Plan, seed: int, *, limit: int = 20) -> CostModel:
    """Return random costs in whole nanoseconds. They are affine in rows, and links have a latency.

    The fixed part of each duration, its part per row, and the latency are less than `limit` nanoseconds and may be
    zero.
    """
    rng = random.Random(seed)
    compute = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SF, Kind.SB)
    seconds = {}
    for stage in range(plan.n_stages):
        for kind in compute:
            fixed, slope = rng.randrange(limit), rng.randrange(limit)
            seconds[kind, stage] = tuple((rows, (fixed + slope * rows) * 1e-9) for rows in (1, 1001))
        seconds[Kind.STEP, stage] = ((0, rng.randrange(limit) * 1e-9),)
    return CostModel(seconds, link=Link(latency=rng.randrange(limit) * 1e-9))


class PlanningProblem(NamedTuple):
    """The problem of training on all devices of a cluster, with batches of `rows` samples, as fast as possible."""

    profile: ModelProfile
    ranks: int
    rows: int
    cluster: Cluster


def random_problem(seed: int) -> PlanningProblem:
    """Return a random planning problem.

    The times of the model are not proportional to rows. The cluster has little memory and devices of different speeds.
    """
    rng = np.random.default_rng(seed)
    ranks, rows = int(rng.choice([2, 3, 4])), int(rng.choice([8, 12, 16, 30]))
    layers = []
    for number in range(int(rng.integers(4 * ranks, 20))):
        forward, fixed = rng.uniform(0.5, 4) * 1e-3, rng.uniform(0, 1) * 1e-3
        table = tuple((r, fixed + forward * r / rows) for r in (1, rows))
        double = tuple((r, 2 * t) for r, t in table)
        size = int(rng.integers(1, 50)) * 10_000
        layers.append(
            LayerProfile(
                str(number),
                table,
                double,
                input_backward=table,
                weight_backward=table,
                weight_bytes=size,
                gradient_bytes=size,
                optimizer_bytes=2 * size,
                saved=((1, size),),
                output=((1, size // 10),),
            )
        )
    if rng.random() < 1 / 3:  # equal layers, so that many partitions are equally good
        layers = layers[:1] * len(layers)
    memory = int(
        sum(x.weight_bytes * 4 for x in layers) / ranks
        + rows * sum(x.saved[0][1] for x in layers) / ranks * rng.uniform(0.4, 1.5)
    )
    link = Link(bandwidth=float(10 ** rng.uniform(7, 10)), latency=float(rng.uniform(0, 2e-3)))
    speeds = rng.choice([0.5, 2 / 3, 1.0, 1.0, 1.0], ranks)
    cluster = Cluster(tuple(Device(memory, float(speed)) for speed in speeds), inside=link)
    return PlanningProblem(ModelProfile(tuple(layers), overhead=2e-4), ranks, rows, cluster)


def every_fit(problem: PlanningProblem) -> Iterator[Fit]:
    """Yield the fits of all variants of all installed schedules.

    Each variant is tried with 1, 2, 4, 8, ... micro-batches and with one micro-batch per sample, with and without
    recomputation.
    """
    p = problem
    for schedule in installed_variants(p.ranks, p.rows):
        for m in sorted({*(2**n for n in range(p.rows.bit_length())), p.rows}):
            for again in (False, True):
                try:
                    plan = even_plan(schedule, p.ranks, m, p.rows, again)
                    yield fit_layers(p.profile, schedule, plan, p.cluster)
                except PlanError:
                    continue


MIB = 2**20
FAST_LINK = Link(bandwidth=2e9)


def make_layer(name: str, milliseconds: float, rows: int, fixed: float = 0.0) -> LayerProfile:
    """Return the profile of a layer with a backward that takes twice as long as its forward.

    Args:
        name: the name of the layer.
        milliseconds: the duration of a forward of `rows` rows.
        rows: the number of rows of this forward.
        fixed: the part of `milliseconds` that does not depend on the number of rows.
    """

    def make_table(factor: float) -> tuple[tuple[int, float], ...]:
        return tuple((r, factor * 1e-3 * (fixed + (milliseconds - fixed) * r / rows)) for r in sorted({1, rows}))

    return LayerProfile(
        name,
        make_table(1.0),
        make_table(2.0),
        weight_bytes=4 * MIB,
        gradient_bytes=4 * MIB,
        optimizer_bytes=8 * MIB,
        saved=((1, MIB),),
        keeps_input=True,
        output=((1, MIB // 4),),
    )


def record_of(
    milliseconds: Sequence[float],
    ranks: int,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    rows: int = 4,
    cuts: Sequence[int] = (),
    link: Link = FAST_LINK,
    known: bool = True,
    **settings: object,
) -> RunRecord:
    """Return the record of a simulated run.

    The measured timeline is a simulation in which every time is 2 % longer than predicted. The replayed timeline uses
    costs that are measured from it.

    Args:
        milliseconds: the duration of each layer's forward for one micro-batch.
        ranks: the number of ranks.
        microbatches: the number of micro-batches.
        schedule: the name of the schedule.
        rows: the number of samples in a micro-batch.
        cuts: the first layer of each stage after stage 0. By default, all stages have about the same number of layers.
        link: the link between ranks.
        known: whether the record contains the profile of the layers.
        settings: the settings of the schedule.
    """
    made = make_schedule(schedule, **settings)
    where = made.place_stages(ranks)
    edges = [0, *cuts, len(milliseconds)]
    layers = (
        tuple(Span(a, b) for a, b in pairwise(edges)) if cuts else even_partition([1.0] * len(milliseconds), len(where))
    )
    plan = replace(even_plan(made, ranks, microbatches, rows * microbatches), layers=layers)
    profile = ModelProfile(
        tuple(make_layer(f"{n} Block", t, rows) for n, t in enumerate(milliseconds)), source="formula"
    )
    costs = replace(profile.stage_costs(layers), link=link)
    order = made.program(plan) if hasattr(made, "program") else made
    slower = replace(
        costs,
        seconds={key: tuple((r, 1.02 * t) for r, t in table) for key, table in costs.seconds.items()},
    )
    predicted = replace(simulate(order, plan, costs), name="predicted")
    measured = replace(simulate(order, plan, slower), name="measured", regimes=None)
    costs = CostModel.from_timelines(measured, base=costs)
    return RunRecord(
        predicted,
        costs,
        measured,
        replace(simulate(order, plan, costs), name="replayed"),
        schedule,
        settings,
        profile if known else None,
        memory=(None,) * ranks,
        between=2e-3,
        facts={"model": "twelve blocks", "device": "emulated"},
    )
