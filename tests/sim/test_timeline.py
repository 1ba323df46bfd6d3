import json
import random
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import B, F, Instruction, Kind, Span
from lightning_pipes.sim import Event, Timeline, compare, save_chrome_trace, save_png, simulate
from lightning_pipes.sim.shown import render
from lightning_pipes.sim.units import seconds_text
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.generators import random_costs, tiny_plan, uniform

PLAN, COSTS = uniform(2, 3, f=2, b=4, step=2, link=1, latency=1)
TIMELINE = simulate(OneFOneB().program(PLAN), PLAN, COSTS)
ONE = Span(0, 1)


def test_text_gantt():
    plan, costs = uniform(2, 3, f=2, b=4, step=2)
    assert simulate(OneFOneB().program(plan), plan, costs).gantt(52).splitlines() == [
        "26 ns",
        "rank 0 |0---1---........0=======2---1=======....2=======S###| bubble 23.1%",
        "rank 1 |....0---0=======1---1=======2---2=======S###........| bubble 23.1%",
        "        - forward  = backward  # step  . idle",
    ]


def test_the_first_event_starts_at_zero():
    events = [Event(0, F(0, ONE), 100, 110), Event(1, F(1, ONE), 90, 95)]
    timeline = Timeline.of(events, PLAN)
    assert [(e.rank, e.start, e.end) for e in timeline.events] == [(1, 0, 5), (0, 10, 20)]
    assert timeline.makespan == 20
    assert timeline.busy == (10, 5)
    assert timeline.bubble == (0.5, 0.75)


def test_gathered_from_ranks_with_clocks_of_their_own():
    by_rank = [[e for e in TIMELINE.events if e.rank == rank] for rank in (0, 1)]
    assert Timeline.gather(by_rank, PLAN).events == TIMELINE.events
    late = [by_rank[0], [e._replace(start=e.start - 1000, end=e.end - 1000) for e in by_rank[1]]]
    assert Timeline.gather(late, PLAN, offsets=(0, 1000)).events == TIMELINE.events
    assert Timeline.gather(late, PLAN).events != TIMELINE.events


def test_shuffled_events_give_back_the_program():
    events = list(TIMELINE.events)
    random.Random(0).shuffle(events)
    assert Timeline.of(events, PLAN).program() == OneFOneB().program(PLAN)


def test_link_busy_counts_overlapping_messages_once():
    sf = Instruction(Kind.SF, 0, span=ONE)
    events = [Event(0, sf, 0, 10), Event(0, sf, 5, 12), Event(0, sf, 20, 21), Event(1, sf._replace(stage=1), 0, 3)]
    plan = tiny_plan(3, 1)
    assert Timeline.of(events, plan).link_busy == {(0, 1): 13, (1, 2): 3}


def test_link_busy_of_a_simulation():
    plan, costs = uniform(2, 3, f=2, b=4, link=3)
    assert simulate(OneFOneB().program(plan), plan, costs).link_busy == {(0, 1): 9, (1, 0): 9}


def test_an_empty_timeline():
    empty = Timeline((), PLAN)
    assert (empty.makespan, empty.bubble, empty.efficiency) == (0, (0.0, 0.0), 0.0)
    assert "rank 1" in empty.gantt(20)


def test_efficiency_is_the_slowest_ranks_share():
    timeline = Timeline.of([Event(0, F(0, ONE), 0, 8), Event(1, F(1, ONE), 8, 10)], PLAN)
    assert timeline.efficiency == 0.8


def test_compare():
    slower = simulate(OneFOneB().program(PLAN), PLAN, uniform(2, 3, f=3, b=4, step=2, link=1, latency=1)[1])
    result = compare(TIMELINE, slower)
    assert result.makespan == (TIMELINE.makespan, slower.makespan)
    assert result.error == pytest.approx(TIMELINE.makespan / slower.makespan - 1)
    assert result.error < 0
    assert result.medians[Kind.F, 0] == (2, 3)
    assert result.medians[Kind.SF, 0] == (2, 2)
    assert result.moved == 0
    assert "F0: 2 ns predicted, 3 ns measured (-33.3%)" in str(result).splitlines()


def test_compare_counts_what_ran_in_another_order():
    a, b = F(0, ONE), B(0, ONE)
    plan = tiny_plan(1, 1)
    one = Timeline.of([Event(0, a, 0, 1), Event(0, b, 1, 2), Event(0, Instruction(Kind.STEP, 0), 2, 3)], plan)
    other = Timeline.of([Event(0, b, 0, 1), Event(0, a, 1, 2), Event(0, Instruction(Kind.STEP, 0), 2, 3)], plan)
    assert compare(one, other).moved == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (20_000_000, "20 ms"), (1.62e9, "1.62 s"), (5e12, "5000 s")],
)
def test_units(nanoseconds, text):
    assert seconds_text(nanoseconds) == text


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
    panel = render._panel

    def keeping(axis, part, span, *rest):
        drawn.append((part, span))
        panel(axis, part, span, *rest)

    monkeypatch.setattr(render, "_panel", keeping)
    save_png(timeline, tmp_path / "x.png")
    ((part, span),) = drawn
    bars = 3 * batches  # a forward, a backward and a step
    assert span == timeline.makespan * min(160, bars) // bars
    hidden = timeline.makespan - span
    ends = [e.end - hidden for e in timeline.computations if e.end > hidden and e.end > e.start]
    assert [e.end for e in part.computations if e.end > e.start] == ends


def test_png_of_nothing(tmp_path):
    save_png(Timeline((), PLAN), tmp_path / "empty.png")


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
    """Two ranks, two stages each, with a latency longer than the transfers: many messages are under way at once."""
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
    """The loop that every run goes through: record, derive costs, predict, compare."""
    plan = tiny_plan(3, 6)
    true = random_costs(plan, 3)
    recorded = simulate(OneFOneB().program(plan), plan, true)
    predicted = simulate(OneFOneB().program(plan), plan, CostModel.from_timelines(recorded, base=true))
    assert compare(predicted, recorded).error == 0
