"""Check that a planner passes each observation to a learning predictor exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.replanning import HostedStage, Predicted
from lightning_pipes.strategies.dynpipe import DynPipe, DynPlanner
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, constant_slowdown, layered_model

Rows = Sequence[tuple[Mapping[str, float], HostedStage]]


class Pupil:
    """Stores the observations that it receives."""

    def __init__(self) -> None:
        self.told: list[tuple[Rows, Sequence[float]]] = []

    def predict(self, rows: Rows) -> Predicted:
        return Predicted(np.ones(len(rows)), np.zeros(len(rows), np.bool_))

    def observe(self, rows: Rows, ratios: Sequence[float]) -> None:
        self.told.append((rows, ratios))


def told(devices: tuple[dict[str, float], ...]) -> list[tuple[Any, ...]]:
    profile = layered_model([1e-3] * 6, weights=100)
    world = Neighbourhood(profile, make_schedule("1f1b"), 2, 8, 4, constant_slowdown((1.0, 2.5)))
    plan = world.plan()
    looks = [
        replace(world.observe_window(plan, 20 * n, 20), devices=devices, free=(None,) * len(devices)) for n in range(3)
    ]
    pupil = Pupil()
    planner = DynPlanner(predictor=pupil)
    for n in (2, 3):  # each call has one more window
        planner.replan(plan, replace(world.make_problem(plan.layers), observations=tuple(looks[:n])))
    return pupil.told


def test_it_is_told_of_the_stages_that_run() -> None:
    devices = {"host.compute_wait_share": 0.0}, {"host.compute_wait_share": 0.6}
    first, second = told(devices)
    rows, ratios = first
    assert [device for device, _ in rows] == list(devices)
    assert [(stage.layers, stage.rows, stage.weights) for _, stage in rows] == [(3, 2, 300), (3, 2, 300)]
    assert [stage.forward for _, stage in rows] == pytest.approx([6e-3, 6e-3])
    assert [stage.backward for _, stage in rows] == pytest.approx([12e-3, 12e-3])
    assert list(ratios) == pytest.approx([1.0, 2.5])
    assert second[0] == rows


def test_without_a_monitor_there_is_nothing_to_learn() -> None:
    assert told(()) == [([], []), ([], [])]


def test_the_schedule_takes_one() -> None:
    pupil = Pupil()
    assert DynPipe(predictor=pupil).make_planner().predictor is pupil
