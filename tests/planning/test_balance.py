"""Check that a cut by measured time is used only if it saves enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.balance import BalancedPlanner, balance_layers, balance_stream
from lightning_pipes.planning.planner import EvenPlanner, Problem, even_plan, solve_plan

MIB = 2**20


def profile(*seconds: float) -> ModelProfile:
    return ModelProfile(
        tuple(
            LayerProfile(str(n), ((1, s),), ((1, 2 * s),), saved=((1, MIB),), output=((1, 8.0),))
            for n, s in enumerate(seconds)
        )
    )


def place(*devices: Device) -> Deployment:
    return Deployment(Cluster(devices or (Device(), Device())))


def cut(at: int, layers: int) -> tuple[Span, ...]:
    return Span(0, at), Span(at, layers)


GPIPE = make_schedule("gpipe")


def test_a_slow_layer_moves_the_cut() -> None:
    """Check the predicted steps by hand.

    Equal stages take 12 seconds for F and B, m + p - 1 = 5 times. With an even cut, the forwards take 4 x 5 + 3 and the
    backwards 6 + 4 x 10.
    """
    found = balance_layers(profile(4, 1, 1, 1, 1), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(2, 5), place())
    assert found.layers == cut(1, 5)
    assert found.seconds == pytest.approx(5 * 12)
    assert "takes an estimated 60 s, compared with 69 s for the cut by parameters ([2])" in found.why


@pytest.mark.parametrize(("small", "at"), [(0.04, 3), (0.08, 2)])
def test_less_than_a_twentieth_is_not_worth_it(small: float, at: int) -> None:
    """Check that a gain below one twentieth keeps the cut.

    If the small layer moves, both stages take the same time. This saves approximately the share `small` of a step.
    """
    layers = profile(1.0, 1.0, 2 * small, 2.0 - 2 * small)
    found = balance_layers(layers, GPIPE, even_plan(GPIPE, 2, 1000, 1000), cut(3, 4), place())
    assert found.layers == cut(at, 4)
    assert ("for the cut by parameters" in found.why) == (at == 2)


def test_a_cut_is_not_compared_with_itself() -> None:
    found = balance_layers(profile(1, 1, 1, 1), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(2, 4), place())
    assert found.why == "The cut by parameters is kept (stages begin at layers [2]). A step takes an estimated 30 s"
    other = balance_layers(profile(1.0, 1.0, 0.08, 1.92), GPIPE, even_plan(GPIPE, 2, 1000, 1000), cut(3, 4), place())
    assert other.why.endswith("A step takes an estimated 6246 s, compared with 6006 s for the fastest cut ([2])")


def test_a_slow_device_gets_less() -> None:
    found = balance_layers(
        profile(*[1.0] * 9), GPIPE, even_plan(GPIPE, 2, 8, 8), cut(4, 9), place(Device(), Device(speed=0.5))
    )
    assert found.layers == cut(6, 9)


def test_memory_is_kept_to() -> None:
    """Check that the cut respects the memory of the devices.

    GPipe holds four samples, which take 4 MiB for each layer.
    """
    room = place(Device(8 * MIB), Device())
    found = balance_layers(profile(*[1.0] * 6), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(3, 6), room)
    assert found.layers == cut(2, 6)
    assert "does not fit into memory" in found.why
    nothing = place(Device(MIB), Device(MIB))
    found = balance_layers(profile(*[1.0] * 6), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(3, 6), nothing)
    assert found.layers == cut(3, 6)
    assert "needs" in found.why


@pytest.mark.parametrize(("small", "at"), [(0.02, 3), (0.2, 2)])
def test_of_equally_fast_cuts_the_one_with_the_smaller_peak_is_taken(small: float, at: int) -> None:
    """Check that the cut with the smaller peak wins if the times are equal.

    If the second stage begins at layer 2, the stages are equally fast and keep 2 and 8 MiB of a sample. If it begins at
    layer 3, they keep 6 and 4 MiB.
    """
    layers = zip(profile(1.0, 1.0, small, 2.0 - small).layers, (1, 1, 4, 4), strict=True)
    known = ModelProfile(tuple(replace(layer, saved=((1, size * MIB),)) for layer, size in layers))
    plan = even_plan(GPIPE, 2, 1000, 1000)
    found = balance_layers(known, GPIPE, plan, cut(1, 4), place())
    assert found.layers == cut(at, 4)


def test_messages_count() -> None:
    """Check that the even cut is not used if it lies at a large message."""
    layers = list(profile(1, 1, 1, 1).layers)
    layers[1] = LayerProfile("1", ((1, 1.0),), ((1, 2.0),), output=((1, 1000.0),))
    links = Deployment(Cluster((Device(), Device()), inside=Link(bandwidth=50.0)))
    found = balance_layers(ModelProfile(tuple(layers)), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(2, 4), links)
    assert found.layers in (cut(1, 4), cut(3, 4))


def test_schedules_without_steps() -> None:
    endless = make_schedule("csp")
    with pytest.raises(PlanError, match="no step to plan"):
        balance_layers(profile(1, 1), endless, even_plan(endless, 2, 4, 4), cut(1, 2), place())


PIPEDREAM = make_schedule("pipedream")


def test_a_stream_is_as_fast_as_its_heaviest_stage() -> None:
    """Check that a stream is as fast as its slowest stage.

    With the best cut, both stages have 4 seconds of forwards for each of the four micro-batches. Forward and backward
    together take three times as long.
    """
    found = balance_stream(profile(4, 1, 1, 1, 1), PIPEDREAM, even_plan(PIPEDREAM, 2, 4, 4), cut(2, 5), place())
    assert found.layers == cut(1, 5)
    assert found.seconds == pytest.approx(4 * 3 * 4)
    assert "compared with" in found.why
    close = balance_stream(profile(1.02, 1, 1, 1), PIPEDREAM, even_plan(PIPEDREAM, 2, 4, 4), cut(2, 4), place())
    assert close.layers == cut(2, 4)
    assert close.seconds == pytest.approx(4 * 3 * 2.02)


def test_a_message_may_take_longer_than_a_stage() -> None:
    """Check a link that is slower than the stages: 8 bytes per sample at 1 byte per second.

    The link takes the same time for every cut, so the even cut stays.
    """
    slow = Deployment(Cluster((Device(), Device()), inside=Link(bandwidth=1.0)))
    found = balance_stream(profile(4, 1, 1, 1, 1), PIPEDREAM, even_plan(PIPEDREAM, 2, 4, 4), cut(2, 5), slow)
    assert found.layers == cut(1, 5)
    quick = profile(0.4, 0.1, 0.1, 0.1, 0.1)
    assert balance_stream(quick, PIPEDREAM, even_plan(PIPEDREAM, 2, 4, 4), cut(2, 5), slow).layers == cut(2, 5)


def problem(**known: Any) -> Problem:
    """Return a problem with five layers, in which the first takes as long as all others together.

    The fallback is two and three layers.
    """
    asked = Problem(GPIPE, 2, 4, 4, profile=profile(4, 1, 1, 1, 1), deployment=place(), fallback=cut(2, 5))
    return replace(asked, **known)


def test_a_planner_whose_plans_are_balanced() -> None:
    """Check that the planner uses the cut of `balance_layers` and stores the layers in the problem."""
    found = BalancedPlanner(EvenPlanner()).solve(problem())
    assert found.plan.layers == found.problem.layers == cut(1, 5)
    assert "Stages begin at layers [1]. A step takes an estimated" in found.why
    assert found.plan == solve_plan(found.problem)
    assert BalancedPlanner(EvenPlanner()).plan(problem()) == found.plan


def test_a_stream_is_balanced_by_its_heaviest_stage() -> None:
    found = BalancedPlanner(EvenPlanner()).solve(problem(schedule=PIPEDREAM))
    assert "In a full pipeline, a batch takes an estimated" in found.why
    assert found.plan.versions == (2, 1)


@pytest.mark.parametrize(
    ("known", "layers"), [({"profile": None}, cut(2, 5)), ({"layers": cut(3, 5)}, cut(3, 5)), ({"fallback": ()}, ())]
)
def test_cuts_that_are_not_balanced(known: dict[str, Any], layers: tuple[Span, ...]) -> None:
    """Check the cases without a balanced cut: no profile, layers that are already decided, and no fallback."""
    found = BalancedPlanner(EvenPlanner()).solve(problem(**known))
    assert (found.plan.layers, found.why) == (layers, "")
