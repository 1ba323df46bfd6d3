"""The simulated parts of the benchmark of schedules, and the reason that it prints instead of invalid numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import schedules
from benchmarks.harness.timing import relative_range, relative_spread
from lightning_pipes.sim import simulate


def test_the_simulated_table_has_all_schedules() -> None:
    """Steps of 1F1B are (m + p - 1)(f + b); V-Half holds p + 2 of 2 p half-stages."""
    report = schedules.simulate_table(quick=True)
    text = "\n".join(report.lines)
    assert all(text.count(name) == 2 for name in ("interleaved ", "ZB-H1 ", "ZB-H2 ", "V-Min ", "V-Half ", "ZB-V "))
    assert report.keys["v_min_held_4"] == 4 / 8
    assert report.keys["v_half_held_4"] == 6 / 8
    assert report.keys["v_half_held_8"] == 10 / 16
    steps = [line.split() for line in report.lines if line.startswith("1F1B ")]
    assert [float(step[3]) for step in steps] == [11 * 30, 23 * 30]
    assert max(report.keys["v_half_simulated_4"], report.keys["v_half_simulated_8"]) < 1


@pytest.mark.parametrize("name", ["1F1B", "interleaved", "ZB-H1", "ZB-H2", "V-Half"])
def test_held_half_stages_are_those_of_the_simulator(name: str) -> None:
    cell = schedules.make_cells(4)[name]
    halves = 2 // cell.stages_per_rank
    costs = replace(cell.costs({}, None), activation_bytes=(halves,) * cell.plan.n_stages)
    timeline = simulate(cell.made_schedule.program(cell.plan), cell.plan, costs)
    assert schedules.count_held_by(cell) == max(timeline.peak_bytes)


def test_recomputation_takes_its_forwards_out_of_the_way_of_gradients() -> None:
    """Three stages repeat a forward of 10 ms when the first gradient has arrived, or have done so before."""
    cells = {name: replace(schedules.make_cells(4)["1F1B"], recompute=name) for name in ("late", "early")}
    late, early = (schedules.simulate_seconds(cell) for cell in cells.values())
    assert [cell.plan.recompute for cell in cells.values()] == [(True, True, True, False)] * 2
    assert late - early == pytest.approx(3 * 0.01)
    assert late / early > 1.05


@pytest.mark.parametrize(
    ("ours", "busy", "reason"),
    [([1.0, 1.01, 1.0, 1.02], 3.0, ""), ([1.0, 1.5, 0.7, 1.0], 3.0, "not valid"), ([1.0] * 4, 60.0, "use 60 %")],
)
def test_noise_is_described(ours: list[float], busy: float, reason: str) -> None:
    found = schedules.explain_noise_of({"V-Half": ours, schedules.PEER: [1.0] * 4}, busy)
    assert bool(found) == bool(reason)
    assert reason in found


@pytest.mark.parametrize(
    ("ratios", "spread", "whole"), [([2.0, 2.0, 2.0], 0.0, 0.0), ([1.0, 1.5, 2.0, 2.5, 3.0], 0.75, 2.0)]
)
def test_spread_of_ratios(ratios: list[float], spread: float, whole: float) -> None:
    assert relative_spread(ratios) == pytest.approx(spread)
    assert relative_range(ratios) == pytest.approx(whole)
