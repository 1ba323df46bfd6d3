"""Random planning problems, and exhaustive answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_pipes.cost import Cluster, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import PlanError
from lightning_pipes.planning.auto import installed_variants
from lightning_pipes.planning.fit import Fit, fit_layers
from lightning_pipes.planning.planner import even_plan


class PlanningProblem(NamedTuple):
    """A planning problem: train batches of `rows` samples on all devices of a cluster, as fast as possible."""

    profile: ModelProfile
    ranks: int
    rows: int
    cluster: Cluster


def random_problem(seed: int) -> PlanningProblem:
    """Return a random problem: a model with times not proportional to rows, and a cluster with tight memory and unequal
    devices."""
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
    if rng.random() < 1 / 3:  # many partitions are equally good then
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
    """Yield the fits of all installed schedules in all variants, with 1, 2, 4, 8, ... micro-batches and one per sample,
    with and without recomputation."""
    p = problem
    for schedule in installed_variants(p.ranks, p.rows):
        for m in sorted({*(2**n for n in range(p.rows.bit_length())), p.rows}):
            for again in (False, True):
                try:
                    plan = even_plan(schedule, p.ranks, m, p.rows, again)
                    yield fit_layers(p.profile, schedule, plan, p.cluster)
                except PlanError:
                    continue
