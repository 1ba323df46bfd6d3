"""A cut by measured time is taken where it saves something."""

from __future__ import annotations

import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.balance import balanced
from lightning_pipes.planning.planner import even_plan

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
    """Equal stages take m + p - 1 = 5 times F and B, 12 seconds. Evenly cut, 4 x 5 + 3 forward and 6 + 4 x 10 back."""
    found = balanced(profile(4, 1, 1, 1, 1), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(2, 5), place())
    assert found.layers == cut(1, 5)
    assert found.seconds == pytest.approx(5 * 12)
    assert "a step takes 60 s instead of 69 s with [2]" in found.why


@pytest.mark.parametrize(("small", "at"), [(0.04, 3), (0.08, 2)])
def test_less_than_a_twentieth_is_not_worth_it(small: float, at: int) -> None:
    """Without the small layer the first stage is as fast as the second one is then: it saves half of what it takes."""
    layers = profile(1.0, 1.0, 2 * small, 2.0 - 2 * small)
    found = balanced(layers, GPIPE, even_plan(GPIPE, 2, 1000, 1000), cut(3, 4), place())
    assert found.layers == cut(at, 4)


def test_a_slow_device_gets_less() -> None:
    found = balanced(
        profile(*[1.0] * 9), GPIPE, even_plan(GPIPE, 2, 8, 8), cut(4, 9), place(Device(), Device(speed=0.5))
    )
    assert found.layers == cut(6, 9)


def test_memory_is_kept_to() -> None:
    """GPipe holds four samples, 4 MiB of each layer."""
    room = place(Device(8 * MIB), Device())
    found = balanced(profile(*[1.0] * 6), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(3, 6), room)
    assert found.layers == cut(2, 6)
    assert "fits into memory" in found.why
    nothing = place(Device(MIB), Device(MIB))
    found = balanced(profile(*[1.0] * 6), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(3, 6), nothing)
    assert found.layers == cut(3, 6)
    assert "needs" in found.why


def test_messages_count() -> None:
    """A cut where much passes is avoided, although it is the even one."""
    layers = list(profile(1, 1, 1, 1).layers)
    layers[1] = LayerProfile("1", ((1, 1.0),), ((1, 2.0),), output=((1, 1000.0),))
    links = Deployment(Cluster((Device(), Device()), inside=Link(bandwidth=50.0)))
    found = balanced(ModelProfile(tuple(layers)), GPIPE, even_plan(GPIPE, 2, 4, 4), cut(2, 4), links)
    assert found.layers in (cut(1, 4), cut(3, 4))


def test_schedules_without_steps() -> None:
    endless = make_schedule("pipedream_2bw")
    with pytest.raises(PlanError, match="does not flush"):
        balanced(profile(1, 1), endless, even_plan(endless, 2, 4, 4), cut(1, 2), place())
