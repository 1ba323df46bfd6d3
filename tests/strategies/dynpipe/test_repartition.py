"""Compare the bounds and predicted times of partitions with the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_pipes.cost import Link
from lightning_pipes.ir import Kind
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.strategies.dynpipe.partitions import all_partitions, spans_of
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay, step_bounds
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel
from tests.cases import for_each
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, constant_slowdown, layered_model


def world(name: str, ranks: int, seed: int, slow: float = 1e6) -> Neighbourhood:
    rng = np.random.default_rng(seed)
    profile = layered_model((rng.uniform(0.5, 2, 9) * 1e-3).tolist())
    layers = tuple(replace(x, input_backward=x.forward, weight_backward=x.forward) for x in profile.layers)
    slowdown = constant_slowdown(rng.uniform(1, 3, ranks).tolist())
    return Neighbourhood(
        replace(profile, layers=layers), make_schedule(name), ranks, 8, 4, slowdown, Link(bandwidth=slow)
    )


@for_each(
    ("name", "ranks"),
    [("1f1b", 3), ("gpipe", 3), ("kfkb", 4), ("zero_bubble", 3), ("interleaved", 2), ("pipedream", 3), ("dynpipe", 4)],
)
@for_each("slow", [1e9, 3e5])
def test_no_partition_is_faster_than_its_bound(name: str, ranks: int, slow: float) -> None:
    at = world(name, ranks, 7, slow)
    plan = at.plan()
    every = all_partitions(range(1, 9), plan.n_stages, 9)
    model = SlowdownModel(at.profile, plan, at.observe_window(plan, 0, 12), at.deployment)
    windows = WindowReplay([model], at.order(plan))
    endless = not at.schedule.flushes
    bounds = step_bounds(model.mean_durations(every), plan, endless)
    true = windows.mean_step(every)
    assert (bounds <= true * (1.02 if endless else 1 + 1e-6)).all()  # batches of a stream take different times
    assert (true / bounds).mean() < 1.6
    assert bounds.argmin() in np.argsort(true)[: len(true) // 3]


def test_another_partition_is_priced_as_it_turns_out() -> None:
    """Check that the times of one partition predict the step of every other partition.

    The slowdowns are constant, so the prediction must be exact.
    """
    for name in ("1f1b", "interleaved", "dynpipe"):
        at = world(name, 2, 3)
        plan = at.plan()
        model = SlowdownModel(at.profile, plan, at.observe_window(plan, 0, 4), at.deployment)
        every = all_partitions(range(1, 9), plan.n_stages, 9)[:20]
        predicted = WindowReplay([model], at.order(plan)).mean_step(every)
        for cuts, seconds in zip(every, predicted, strict=True):
            other = at.plan(spans_of(cuts))
            assert seconds == pytest.approx(float(at.steps(other, 0, 4).mean()), rel=1e-6)


def test_slowdowns_equal_the_devices() -> None:
    at = world("1f1b", 3, 5)
    plan = at.plan()
    found = SlowdownModel(at.profile, plan, at.observe_window(plan, 0, 4), at.deployment).stage_slowdowns()
    assert found == pytest.approx([float(at.slowdown(rank, 0, 1).item()) for rank in range(3)])


def test_a_stage_that_recomputes_runs_its_forward_again() -> None:
    at = world("1f1b", 2, 1)
    plan = replace(at.plan(), recompute=(True, False))
    seen = at.observe_window(at.plan(), 0, 2)
    twice = {**seen.operations, (Kind.B, 0): seen.operations[Kind.B, 0] + seen.operations[Kind.F, 0]}
    model = SlowdownModel(at.profile, plan, replace(seen, operations=twice), at.deployment)
    assert model.stage_slowdowns()[0] == pytest.approx(float(at.slowdown(0, 0, 1).item()))
