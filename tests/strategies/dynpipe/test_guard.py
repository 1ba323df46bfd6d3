"""Check when batches stop overlapping because memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_pipes.ir import InputError, Span
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.planning.replanning import FreeBytes
from lightning_pipes.strategies.dynpipe import DynPipe
from lightning_pipes.strategies.dynpipe.planner import MemoryGuard
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, constant_slowdown, layered_model


def states(guard: MemoryGuard, *free: FreeBytes, kept: int = 2) -> list[bool]:
    """Return the decisions of the guard before each batch.

    Each decision uses the free memory before the last `kept` batches.
    """
    found = [False]
    for n in range(1, len(free) + 1):
        found.append(guard.should_serialize(free[max(0, n - kept) : n], found[-1]))
    return found[1:]


def test_it_lasts_until_all_devices_are_above_the_high_mark() -> None:
    guard = MemoryGuard(low=100)
    assert states(guard, (300, 120), (300, 99), (300, 149), (149, 300), (150, 150), (100, 100), (99, 99)) == [
        False,
        True,
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_sudden_fall_counts_and_a_slow_one_does_not() -> None:
    guard = MemoryGuard(drop=0.3)
    assert states(guard, (100,), (80,), (65,), (45,), (44,), (20,)) == [False, False, False, True, False, True]


def test_a_fall_within_several_batches_counts() -> None:
    guard = MemoryGuard(drop=0.3)
    assert states(guard, (100,), (85,), (72,), (61,), (61,), (61,), kept=4) == [False, False, False, True, False, False]


def test_both_marks() -> None:
    assert states(MemoryGuard(100, 0.5), (1000,), (400,), (400,), (110,), (110,), (160,)) == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_unknown_memory_is_not_guarded() -> None:
    assert states(MemoryGuard(100, 0.1), (None, None), (), (None, 500), (50, None)) == [False, False, False, True]
    assert states(MemoryGuard(), (5,), (1,)) == [False, False]


WORLD = Neighbourhood(
    layered_model([1e-3] * 12, weights=1000), DynPipe(low_memory=10_000), 3, 8, 4, constant_slowdown((1.0,) * 3)
)


def relieved(free: FreeBytes, layers: Sequence[Span] = ()) -> list[int] | None:
    """Return the number of layers of each stage after the planner reduced memory, or None if no layer moves."""
    plan = WORLD.plan(layers)
    seen = replace(WORLD.make_problem(plan.layers), observations=(WORLD.observe_window(plan, 0, 20),))
    found = planner_of(WORLD.schedule).reduce_memory(plan, seen, free)
    return None if found is None else [span.rows for span in found.layers]


def test_layers_leave_a_device_that_lacks_memory() -> None:
    """Check which layers leave a device that is short of memory.

    With its older weights, a layer takes 11000 bytes on the first stage, 9000 on the second and 6000 on the last.
    """
    assert WORLD.plan().layers == (Span(0, 4), Span(4, 8), Span(8, 12))
    assert relieved((50_000, 50_000, 50_000)) is None
    assert relieved((50_000, 9_000, 50_000)) == [4, 3, 5], "it lacks 6000 bytes"
    assert relieved((50_000, 9_000, None)) == [4, 3, 5], "a device with unknown memory is not short of it"
    assert relieved((10**6, 0, 10**6)) == [5, 2, 5], "it lacks 15000"


def test_layers_go_where_memory_is_left_and_no_further() -> None:
    assert relieved((50_000, 9_000, 15_000)) == [5, 3, 4]
    assert relieved((10**6, 0, 15_000)) == [6, 2, 4]
    assert relieved((15_000, 9_000, 15_000)) is None, "others would be short then"
    assert relieved((26_000, 0, 15_000)) == [5, 3, 4], "less than it lacks is better than nothing"


def test_layers_that_left_do_not_return_for_speed() -> None:
    """Check that a layer does not return to a device that would then have too little free memory.

    The plan with this layer would be faster.
    """
    layers = (Span(0, 5), Span(5, 7), Span(7, 12))
    plan = WORLD.plan(layers)
    for free, back in ((16_000, False), (10**6, True)):
        looks = tuple(WORLD.observe_window(plan, 20 * n, 20, (10**6, free, 10**6)) for n in range(2))
        found = planner_of(WORLD.schedule).replan(plan, replace(WORLD.make_problem(layers), observations=looks))
        assert (found is not None and found.layers[1].rows > 2) == back


def test_settings() -> None:
    assert DynPipe(low_memory="2GiB", memory_drop=0.25).make_planner().guard == MemoryGuard(2 * 2**30, 0.25)
    for settings, said in (({"low_memory": "much"}, "low_memory"), ({"memory_drop": 1.5}, "a share, 0 to 1")):
        with pytest.raises(InputError, match=said):
            DynPipe(**settings)  # type: ignore[arg-type]
