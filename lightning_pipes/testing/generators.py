"""Small plans and costs for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, Kind, Plan, Span


def tiny_plan(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Plan:
    """Return one job and one batch with one sample a micro-batch, and one stage a rank unless `ranks` is given."""
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
    """Return a tiny plan with equal stages, in integer nanoseconds, so that simulated times are exact.

    Args:
        f: a forward.
        b: a backward; split, W takes `w`, by default b // 2, and I the rest.
        link: how long a message occupies its link.
        latency: how much later it arrives.
        activation_bytes: held by each sample.
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
    """Return one job and batch on up to five stages; with `unequal`, every stage, direction and link has spans of its
    own."""
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
    """Return integer nanoseconds up to `limit` for everything, including zero; affine in rows; with latencies."""
    rng = random.Random(seed)
    compute = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SF, Kind.SB)
    seconds = {}
    for stage in range(plan.n_stages):
        for kind in compute:
            fixed, slope = rng.randrange(limit), rng.randrange(limit)
            seconds[kind, stage] = tuple((rows, (fixed + slope * rows) * 1e-9) for rows in (1, 1001))
        seconds[Kind.STEP, stage] = ((0, rng.randrange(limit) * 1e-9),)
    return CostModel(seconds, link=Link(latency=rng.randrange(limit) * 1e-9))
