"""When batches stop overlapping, for memory gets short."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import InputError
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe import DynPipe
from lightning_pipes.strategies.dynpipe.planner import MemoryGuard


def states(guard: MemoryGuard, *free: Sequence[int | None]) -> list[bool]:
    """What it says after each look."""
    looks = [Observation(CostModel({}), devices=({},) * len(each), free=tuple(each)) for each in free]
    return [guard.should_serialize(looks[:n]) for n in range(1, len(looks) + 1)]


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


def test_both_marks() -> None:
    assert states(MemoryGuard(100, 0.5), (1000,), (400,), (400,), (110,), (110,), (160,)) == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_where_nobody_knows_nothing_is_guarded() -> None:
    assert states(MemoryGuard(100, 0.1), (None, None), (), (None, 500), (50, None)) == [False, False, False, True]
    assert states(MemoryGuard(), (5,), (1,)) == [False, False]


def test_settings() -> None:
    assert DynPipe(low_memory="2GiB", memory_drop=0.25).make_planner().guard == MemoryGuard(2 * 2**30, 0.25)
    for settings, said in (({"low_memory": "much"}, "low_memory"), ({"memory_drop": 1.5}, "a share, 0 to 1")):
        with pytest.raises(InputError, match=said):
            DynPipe(**settings)  # type: ignore[arg-type]
