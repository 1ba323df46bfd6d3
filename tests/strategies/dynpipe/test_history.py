"""Check the times that partitions would have had in windows of other plans."""

from __future__ import annotations

from lightning_pipes.ir import Plan, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe.history import History
from lightning_pipes.strategies.dynpipe.partitions import all_partitions
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, constant_slowdown, layered_model

EVEN, MOVED = (Span(0, 4), Span(4, 8)), (Span(0, 5), Span(5, 8))


def history(*looks: tuple[tuple[Span, ...], float]) -> History:
    """Return windows of partitions of eight equal layers, in which the device of stage 1 is slower by a factor."""
    schedule = make_schedule("pipedream")
    assert isinstance(schedule, Schedule)
    every: list[tuple[Plan, Observation]] = []
    for layers, factor in looks:
        world = Neighbourhood(layered_model([1e-3] * 8), schedule, 2, 8, 4, constant_slowdown((1.0, factor)))
        plan = world.plan(layers)
        every.append((plan, world.observe_window(plan, 0, 20)))
    plan, look = every[-1]
    windows = WindowReplay([SlowdownModel(world.profile, plan, look, world.deployment)], world.order(plan))
    return History(windows, all_partitions(range(1, 8), 2, 8), every)


def test_devices_are_as_slow_as_they_were_whatever_ran_there() -> None:
    """Check that the slowdown of a device is separated from the layers that ran on it.

    If one device takes 5/3 of the time, 5 and 3 layers take equally long. After this move no other one is needed,
    although stage 1 was observed under other plans.
    """
    slow = 5 / 3
    assert history((EVEN, slow), (EVEN, slow)).select_length(2, 0.05)
    assert not history((MOVED, slow), (MOVED, slow)).select_length(2, 0.05)
    assert not history((EVEN, slow), (MOVED, slow)).select_length(2, 0.05)
    assert history((EVEN, slow), (MOVED, slow), (MOVED, 1.0), (MOVED, 1.0)).select_length(2, 0.05)
    assert not history((EVEN, slow), (MOVED, slow), (MOVED, 1.0), (MOVED, slow)).select_length(2, 0.05)


def test_the_partition_to_stay_with_is_one_that_ran() -> None:
    """Check a slowdown that is present in one of four windows.

    A planner that decides after two windows would move layers in vain each time.
    """
    looks = [(EVEN, 1.0), (EVEN, 1.0), (MOVED, 1.0), (MOVED, 2.0)] * 4
    assert history(*looks, (MOVED, 1.0)).count_windows(2, 0.05) == (17, EVEN)
    assert history(*([(EVEN, 1.0)] * 8), (EVEN, 3.0), (EVEN, 3.0)).count_windows(2, 0.05) == (2, None)
