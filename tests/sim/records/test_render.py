"""Check timelines as pictures and as traces."""

import json
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.sim import Timeline, compare_timelines, save_chrome_trace, save_png, simulate
from lightning_pipes.sim.records import render
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.generators import random_costs, tiny_plan, uniform
from tests.sim.timelines import PLAN, TIMELINE


@pytest.mark.parametrize("stages", [1, 4, 20])
def test_png(tmp_path, stages):
    plan, costs = uniform(stages, 5, f=2, b=4, step=2, link=1)
    timeline = simulate(OneFOneB().program(plan), plan, costs)
    save_png(timeline, tmp_path / "one.png")
    save_png(timeline, tmp_path / "two.png", replace(timeline, name="again"))
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one[:8] == two[:8] == b"\x89PNG\r\n\x1a\n"
    height = [int.from_bytes(png[20:24], "big") for png in (one, two)]
    assert height[1] > 1.5 * height[0]


@pytest.mark.parametrize("batches", [20, 200])
def test_of_what_is_too_long_to_be_seen_the_end_is_drawn(tmp_path, monkeypatch, batches):
    plan, costs = uniform(1, 1, f=2, b=4)
    timeline = simulate(PipeDream().program(plan), plan, costs, batches=batches)
    drawn = []
    panel = render._draw_panel

    def keeping(axis, part, span, *rest):
        drawn.append((part, span))
        panel(axis, part, span, *rest)

    monkeypatch.setattr(render, "_draw_panel", keeping)
    save_png(timeline, tmp_path / "x.png")
    ((part, span),) = drawn
    bars = 3 * batches  # a forward, a backward and a step
    assert span == timeline.makespan * min(160, bars) // bars
    hidden = timeline.makespan - span
    ends = [e.end - hidden for e in timeline.computations if e.end > hidden and e.end > e.start]
    assert [e.end for e in part.computations if e.end > e.start] == ends


def test_png_of_nothing(tmp_path):
    save_png(Timeline((), PLAN), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_leaves_the_users_figures_alone(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums(), plt.get_backend()
    save_png(TIMELINE, tmp_path / "x.png")
    assert (plt.get_fignums(), plt.get_backend()) == before


def trace(tmp_path, timeline):
    save_chrome_trace(timeline, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_trace_holds_every_event_in_microseconds(tmp_path):
    slices = [r for r in trace(tmp_path, TIMELINE) if r["ph"] == "X"]
    got = sorted((r["pid"], round(r["ts"] * 1e3), round(r["dur"] * 1e3)) for r in slices)
    assert got == sorted((e.rank, e.start, e.end - e.start) for e in TIMELINE.events)


def test_trace_slices_of_a_thread_do_not_overlap(tmp_path):
    """Check two ranks with two stages each, whose latency is longer than the transfers.

    Many messages are then in flight at the same time.
    """
    plan, costs = uniform(4, 6, f=2, b=4, link=1, latency=9, ranks=(0, 1, 0, 1))
    slices = [r for r in trace(tmp_path, simulate(Interleaved(2).program(plan), plan, costs)) if r["ph"] == "X"]
    threads = {}
    for r in sorted(slices, key=lambda r: r["ts"]):
        key = r["pid"], r["tid"]
        assert r["ts"] >= threads.get(key, 0) - 1e-9
        threads[key] = r["ts"] + r["dur"]
    assert len(threads) > 4


def test_trace_arrows_end_in_the_first_use(tmp_path):
    records = trace(tmp_path, TIMELINE)
    begins = {r["id"]: r for r in records if r["ph"] == "s"}
    ends = {r["id"]: r for r in records if r["ph"] == "f"}
    assert len(begins) == len(ends) == len(TIMELINE.transfers)
    starts = {(r["pid"], r["ts"]): r["name"] for r in records if r["ph"] == "X" and r["tid"] == 0}
    sends = {(r["pid"], r["ts"], r["tid"]): r["name"] for r in records if r["ph"] == "X" and r["tid"]}
    for number, begin in begins.items():
        end = ends[number]
        sent = sends[begin["pid"], begin["ts"], begin["tid"]]
        used = starts[end["pid"], end["ts"]]
        assert (sent[:2], used[0]) in {("SF", "F"), ("SB", "B")}
        assert sent.split()[1] == used.split()[1]
        assert end["ts"] >= begin["ts"] + 2e-3 - 1e-9


def test_measured_and_predicted_meet():
    """Check the loop of every run: record, derive costs, predict, compare."""
    plan = tiny_plan(3, 6)
    true = random_costs(plan, 3)
    recorded = simulate(OneFOneB().program(plan), plan, true)
    predicted = simulate(OneFOneB().program(plan), plan, CostModel.from_timelines(recorded, base=true))
    assert compare_timelines(predicted, recorded).error == 0
