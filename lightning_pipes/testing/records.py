"""Synthetic runs, for tests and for looking at reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_pipes.cost import CostModel, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import simulate
from lightning_pipes.sim.shown.record import RunRecord

MIB = 2**20
FAST = Link(bandwidth=2e9)


def make_layer(name: str, milliseconds: float, rows: int, fixed: float = 0.0) -> LayerProfile:
    """Return a layer with a forward of `milliseconds` for `rows` rows, `fixed` of them for any number of rows; its
    backward takes twice as long."""

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
    link: Link = FAST,
    known: bool = True,
    **settings: object,
) -> RunRecord:
    """Return a run of layers with these milliseconds of forward for `rows` rows, the rows of a micro-batch.

    What was "measured" is the same simulated with every time 2 % longer. Layers are counted evenly to stages unless
    `cuts` gives the first layers of stages; they are `known` or not.
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
    measured = replace(simulate(order, plan, slower), name="measured", regimes=None)
    costs = CostModel.from_timelines(measured, base=costs)
    return RunRecord(
        replace(simulate(order, plan, costs), name="predicted"),
        costs,
        measured,
        schedule,
        settings,
        profile if known else None,
        memory=(None,) * ranks,
        between=2e-3,
        facts={"model": "twelve blocks", "device": "emulated"},
    )
