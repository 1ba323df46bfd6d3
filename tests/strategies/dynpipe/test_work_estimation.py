"""Check that the work of layers is separated from slowdowns during their measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.ir import Plan, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe.work_estimation import estimate_work
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, Slowdown, constant_slowdown, layered_model

TRUE = layered_model([0.01] * 12)
QUIET = constant_slowdown((1.0,) * 4)
NEIGHBOUR = constant_slowdown((1.0, 3.0, 1.0, 1.0))


def spans(*sizes: int) -> tuple[Span, ...]:
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return tuple(Span(a, b) for a, b in pairwise(ends))


def looks(
    slowdown: Slowdown, layers: tuple[Span, ...], count: int = 2, true: ModelProfile = TRUE, name: str = "1f1b"
) -> list[tuple[Plan, Observation]]:
    world = Neighbourhood(true, make_schedule(name), 4, 8, 4, slowdown)
    plan = world.plan(layers)
    return [(plan, world.observe_window(plan, 10 * n, 10)) for n in range(count)]


def work(profile: ModelProfile) -> Sequence[float]:
    return [layer.forward[-1][1] for layer in profile.layers]


def inflated(first: int, stop: int, factor: float = 3.0) -> ModelProfile:
    return TRUE.scaled([factor if first <= n < stop else 1.0 for n in range(12)])


EVEN, OTHER = spans(3, 3, 3, 3), spans(4, 1, 4, 3)


@pytest.mark.parametrize("name", ["1f1b", "dynpipe"])
def test_a_neighbour_that_was_there_is_measured_out_when_it_has_gone(name: str) -> None:
    found = estimate_work(inflated(3, 6), looks(NEIGHBOUR, EVEN, name=name) + looks(QUIET, EVEN, name=name), 2)
    assert work(found) == pytest.approx(work(TRUE))


def test_plans_tell_which_layers_it_is() -> None:
    """Check the work after layer 3 moved to stage 0 and layer 5 to stage 2, while the slowdown ended."""
    found = estimate_work(inflated(3, 6), looks(NEIGHBOUR, EVEN) + looks(QUIET, OTHER), 2)
    assert work(found) == pytest.approx(work(TRUE))


def test_a_correction_that_went_too_far_is_taken_back() -> None:
    """Check that a correction which explains one of twelve random partitions is undone if others contradict it."""
    true, chance = layered_model([0.01] * 24), np.random.default_rng(0)
    seen: list[tuple[Plan, Observation]] = []
    for _ in range(12):
        ends = [0, *sorted(chance.choice(np.arange(1, 24), 3, replace=False).tolist()), 24]
        seen += looks(QUIET, tuple(Span(a, b) for a, b in pairwise(ends)), true=true)
    profile = true.scaled([3.0 if 6 <= n < 12 else 1.0 for n in range(24)])
    assert work(estimate_work(profile, seen, 2)) == pytest.approx(work(true))


def test_while_it_is_there_the_device_is_slow() -> None:
    profile = inflated(3, 6)
    assert estimate_work(profile, looks(NEIGHBOUR, EVEN), 2) is profile
    assert estimate_work(TRUE, looks(NEIGHBOUR, EVEN) + looks(NEIGHBOUR, OTHER), 2) is TRUE
    assert estimate_work(TRUE, [], 2) is TRUE


def timed(true: ModelProfile, slowdown: Slowdown, **more: Any) -> list[tuple[Plan, Observation]]:
    """Return windows that also have the seconds of each layer."""
    found = looks(slowdown, EVEN, true=true, **more)
    stages = [s for s, span in enumerate(EVEN) for _ in range(span.rows)]
    layers = {n: t * float(slowdown(stages[n], 0, 1)[0, 0]) for n, t in enumerate(work(true))}
    return [(plan, replace(look, layers=layers)) for plan, look in found]


@pytest.mark.parametrize("device", [1.0, 3.0])
def test_layer_that_became_slow_is_distinguished_from_a_slow_device(device: float) -> None:
    true = TRUE.scaled([6.0 if n == 4 else 1.0 for n in range(12)])
    slowdown = constant_slowdown((1.0, device, 1.0, 1.0))
    assert work(estimate_work(TRUE, timed(true, slowdown), 2)) == pytest.approx(work(true))
    assert estimate_work(TRUE, timed(true, slowdown, count=1), 2) is TRUE, "one look is no evidence"
    assert estimate_work(TRUE, looks(slowdown, EVEN, true=true), 2) is TRUE, "nothing is known of layers"
    assert estimate_work(TRUE, timed(TRUE, slowdown), 2) is TRUE


def test_others_leave_the_stage_of_a_slow_layer() -> None:
    """Check that the other layers leave the stage of a slow layer.

    Without the times of single layers, the planner sends the slow layer to the previous stage, which then becomes the
    slowest.
    """
    true = TRUE.scaled([6.0 if n == 3 else 1.0 for n in range(12)])
    world, real = (Neighbourhood(each, make_schedule("dynpipe"), 4, 8, 4, QUIET) for each in (TRUE, true))
    steps = []
    for seen in (timed(true, QUIET, name="dynpipe"), looks(QUIET, EVEN, true=true, name="dynpipe")):
        plan = seen[0][0]
        problem = replace(world.make_problem(EVEN), observations=tuple(look for _, look in seen))
        found = planner_of(world.schedule).replan(plan, problem)
        assert found is not None
        steps.append(real.steps(found, 0, 20).mean() / real.steps(plan, 0, 20).mean())
    assert steps[0] == pytest.approx(0.75), "no less is possible: the slow layer has a stage for itself"
    assert steps[1] > 1


def test_one_observation_is_not_evidence() -> None:
    profile, seen = inflated(3, 6), looks(NEIGHBOUR, EVEN) + looks(QUIET, EVEN, 1) + looks(NEIGHBOUR, EVEN)
    assert estimate_work(profile, seen, 2) is profile
    assert work(estimate_work(profile, seen, 1)) == pytest.approx(work(TRUE))


def test_code_around_the_layers_belongs_to_the_outer_stages() -> None:
    around = LayerProfile("after", ((1, 0.01),), ((1, 0.02),))
    true = replace(TRUE, after=around)
    profile = replace(inflated(9, 12), after=around.scaled(3.0))
    found = estimate_work(profile, looks(QUIET, EVEN, true=true), 2)
    assert work(found) == pytest.approx(work(TRUE))
    assert found.after.forward[-1][1] == pytest.approx(0.01)


def test_with_recomputation_a_backward_has_the_forward_in_it() -> None:
    world = Neighbourhood(TRUE, make_schedule("1f1b"), 4, 8, 4, QUIET)
    plan = replace(world.plan(EVEN), recompute=(True,) * 4)
    seen = world.observe_window(world.plan(EVEN), 0, 10)
    again = {key: table * (4 / 3 if str(key[0]) == "B" else 1.0) for key, table in seen.operations.items()}
    assert estimate_work(TRUE, [(plan, replace(seen, operations=again))] * 2, 2) is TRUE
