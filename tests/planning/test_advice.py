"""Check that advice identifies the slow part and claims only gains that come true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.cost import Link
from lightning_pipes.cost.layer import at_rows
from lightning_pipes.ir import Cut, Kind
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.advice import advise_run
from lightning_pipes.planning.run_model import RunModel
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.strategies.umpipe.planner import spans_of
from lightning_pipes.testing.generators import make_layer, record_of

SLOW_THIRD = [2] * 6 + [4] * 3 + [2] * 3
LATE = Link(bandwidth=1.2e8, latency=5e-3)


def followed(times, ranks, arguments, batch, **more) -> RunRecord:
    """Return the run after the advice was followed; the times are for 8 rows, and proportional to the rows."""
    m = arguments["microbatches"]
    rows = batch // m
    scaled = [t * rows / 8 for t in times]
    return record_of(
        scaled,
        ranks,
        m,
        arguments["schedule"],
        rows=rows,
        cuts=arguments["partition"],
        **more,
        **arguments.get("schedule_args", {}),
    )


@pytest.mark.parametrize(
    ("times", "ranks", "m", "link"),
    [(SLOW_THIRD, 4, 8, None), ([2] * 12, 4, 8, None), ([2] * 12, 4, 16, LATE), ([2] * 11 + [9], 3, 4, None)],
)
def test_predicted_gains_come_true(times, ranks, m, link):
    links = {} if link is None else {"link": link}
    record = record_of(times, ranks, m, rows=8, **links)
    advice = advise_run(record)
    assert advice.now.seconds == pytest.approx(record.measured.makespan / 1e9, rel=0.01)
    assert advice.proposed is not None
    assert len(advice.changes) > 3
    for change in (advice.proposed, *advice.changes[:4]):
        run = followed(times, ranks, change.arguments, 8 * m, **links)
        assert run.measured.makespan / 1e9 == pytest.approx(change.seconds, rel=0.01), change
        assert sum(run.measured.bubble) / ranks == pytest.approx(change.bubble, abs=0.01)
        assert max(run.peak_bytes) == pytest.approx(change.peak_bytes, rel=0.01)


def test_a_run_whose_batches_overlap_gets_advice():
    record = record_of(SLOW_THIRD, 4, 4, "dynpipe", rows=8)
    order = make_schedule("dynpipe").program(record.plan)
    few, many = (simulate(order, record.plan, record.costs, batches=n) for n in (16, 56))
    advice = advise_run(replace(record, measured=replace(many, name="measured")))
    assert advice.now.seconds == pytest.approx((many.makespan - few.makespan) / 40 / 1e9, rel=0.01)
    assert advice.sentence.startswith("Stage 2 takes 2x the time of the others: move layer")
    assert advice.proposed.seconds < 0.8 * advice.now.seconds
    cuts = advice.proposed.arguments["partition"]
    changed = record_of(SLOW_THIRD, 4, 4, "dynpipe", rows=8, cuts=cuts)
    few, many = (simulate(order, changed.plan, changed.costs, batches=n) for n in (16, 56))
    assert advice.proposed.seconds == pytest.approx((many.makespan - few.makespan) / 40 / 1e9, rel=0.01)


def test_a_slow_stage_is_named_with_the_layers_to_move():
    advice = advise_run(record_of(SLOW_THIRD, 4, 8))
    assert advice.sentence.startswith("Stage 2 takes 2x the time of the others: move layer")
    assert f"partition={advice.proposed.arguments['partition']}; that makes a simulated step " in advice.sentence
    assert advice.proposed.seconds < advice.now.seconds


def test_siblings_only_get_advice_on_a_slow_stage():
    slow, even = (advise_run(replace(record_of(times, 4, 8), siblings=3)) for times in (SLOW_THIRD, [2] * 12))
    assert slow.sentence.startswith(
        "Stage 2 takes 2x the time of the others: give it less to do (now partition=[3, 6, 9]). This was one of up to 3"
    )
    assert even.sentence.startswith("No stage is slow: stage 0 takes 1x the time of the others. This was one of up to")
    for advice in (slow, even):
        assert (advice.proposed, advice.now, advice.changes, advice.notes) == (None, None, (), ())


def test_a_slow_device_gets_fewer_layers():
    """Check equal layers on ranks of which rank 1 is 1.5 times slower than the others.

    A layer that moves away from rank 1 becomes faster.
    """
    record = record_of([2] * 12, 3, 12)
    slower = {k: tuple((r, 1.5 * t) for r, t in v) if k[1] == 1 else v for k, v in record.costs.seconds.items()}
    record = replace(record, costs=replace(record.costs, seconds=slower))
    model = RunModel(record)
    assert [device.speed for device in model.cluster.devices] == pytest.approx([1 / 1.02, 1 / 1.53, 1 / 1.02])
    cut = model.with_best_cuts().fit.plan.layers
    assert [span.rows for span in cut] == [5, 3, 4] or [span.rows for span in cut] == [4, 3, 5]


def test_without_layer_times_advice_has_the_gain_of_equal_stages():
    record = record_of(SLOW_THIRD, 4, 8, known=False)
    advice = advise_run(record)
    even = advise_run(record_of([30 / 12] * 12, 4, 8)).now.seconds  # the same work, evenly distributed
    assert advice.sentence.startswith("Stage 2 takes 2x the time of the others: give it less to do (now partition=")
    assert advice.proposed is None
    said = int(advice.sentence.split("simulated step is ")[1].split("%")[0]) / 100
    assert said == pytest.approx(1 - even / advice.now.seconds, abs=0.01)
    assert any("lightning-pipes report RUN --profile FILE" in note for note in advice.notes)


def test_a_slow_link_is_named():
    advice = advise_run(record_of([2] * 12, 4, 16, link=LATE))
    assert advice.sentence.startswith("Messages, mostly the messages from rank ")
    assert advice.proposed.arguments["schedule"] == "deep"


def test_large_bubble_suggests_more_micro_batches():
    advice = advise_run(record_of([2] * 8, 4, 8, known=False))
    assert advice.sentence.startswith("Ranks idle 3")
    assert "16 micro-batches" in advice.sentence
    assert advice.proposed.arguments["microbatches"] == 16
    assert ", if half of the samples take half of the time." in advice.sentence


def scattered(record: RunRecord) -> RunRecord:
    """Return the run with a measured step in which two operations hang, which medians do not show."""
    slow = {e.instruction: 0.1 for e in record.measured.computations[3:20:16]}
    order = make_schedule(record.schedule).program(record.plan)
    ran = simulate(order, record.plan, replace(record.costs, each=slow))
    return replace(record, measured=replace(ran, name="measured"), replayed=replace(ran, name="replayed"))


@pytest.mark.parametrize("times", [[2] * 8, SLOW_THIRD, [2] * 4])
def test_reported_bubble_is_the_measured_one(times):
    """Check that the sentence reports the measured bubble.

    The bubble of the simulated step is only in the table of simulated steps.
    """
    record = scattered(record_of(times, 4, 8))
    advice = advise_run(record)
    assert abs(record.bubble - advice.now.bubble) > 0.02
    told = [part.split("%")[0] for part in advice.sentence.split("anks idle ")[1:]]
    assert told in ([], [f"{100 * record.bubble:.1f}"])
    (note,) = (note for note in advice.notes if note.startswith("Changes are simulated with the median time"))
    assert "The predicted gains of changes may be off by the same amount" in note


def test_advice_is_the_fastest_row_or_gives_the_reason():
    """Check several runs, of which most get a proposal of a single change.

    The advice then states the further gain of the fastest change.
    """
    others = 0
    for times, ranks, m, known in [
        ([2] * 8, 4, 8, False),
        ([2] * 8, 4, 8, True),
        (SLOW_THIRD, 4, 8, True),
        ([2] * 11 + [9], 3, 4, True),
        ([2] * 12, 4, 2, True),
    ]:
        advice = advise_run(record_of(times, ranks, m, known=known))
        fastest = advice.changes[0]
        if advice.proposed is None or advice.proposed == fastest:
            assert "The fastest row" not in advice.sentence
            continue
        others += 1
        more = 1 - fastest.seconds / advice.proposed.seconds
        assert f"The fastest row of the table, {fastest.what}, is {more:.1%} shorter still, but " in advice.sentence
    assert others


def test_a_good_run_is_left_alone():
    advice = advise_run(record_of([2] * 4, 2, 128, rows=1, known=False))
    assert "no simulated change makes a step 3% shorter" in advice.sentence
    assert advice.proposed is None


def test_fixed_costs_of_a_micro_batch_are_seen():
    """Check layers that take the same time for half the rows: more micro-batches must not be proposed."""
    record = record_of([2] * 8, 4, 8)
    layers = tuple(make_layer(each.name, 2.0, 4, fixed=2.0) for each in record.profile.layers)
    advice = advise_run(replace(record, profile=replace(record.profile, layers=layers)))
    assert advice.proposed.arguments["microbatches"] == 4
    by_count = {c.arguments["microbatches"]: c.seconds for c in advice.changes if c.arguments["schedule"] == "1f1b"}
    assert by_count[4] < advice.now.seconds < by_count[16] < by_count[32]


def test_changes_fit_into_the_devices_memory():
    record = record_of([2] * 12, 4, 8)
    limit = int(max(record.peak_bytes) * 1.05)
    limited = advise_run(replace(record, memory=(limit,) * 4))
    assert limited.changes
    assert all(change.peak_bytes <= limit for change in limited.changes)
    assert any(change.peak_bytes > limit for change in advise_run(record).changes)


def test_notes_say_what_the_simulator_missed_and_what_lies_outside():
    record = record_of([2] * 4, 2, 8)
    off = advise_run(replace(scattered(record), between=1.0))
    assert any("The predicted gains of changes may be off by the same amount" in note for note in off.notes)
    assert any(note.startswith("1 s pass between two steps of the pipeline") for note in off.notes)
    assert not any("exact" in note or "pass between" in note for note in advise_run(record).notes)


def test_a_schedule_that_is_not_installed():
    advice = advise_run(replace(record_of(SLOW_THIRD, 4, 8), schedule="mine", settings={}))
    assert advice.sentence.startswith(
        "Stage 2 takes 2x the time of the others. No change was simulated: no schedule is"
    )
    assert advice.now is None


def test_one_rank():
    advice = advise_run(record_of([2] * 4, 1, 4))
    assert advice.sentence.startswith("There is one rank only")


def test_progress_is_reported():
    told = []
    advise_run(record_of([2] * 4, 2, 4), lambda what, done: told.append(done))
    assert told == sorted(told)
    assert told[0] == 0 < told[-1] < 1


@pytest.mark.parametrize("short", [1.3, 0.99])
def test_a_short_last_micro_batch_says_little_of_larger_ones(short):
    # 4 samples took longer than 7 by chance, or almost as long. This does not make larger micro-batches free.
    record = record_of([10.0] * 4, 2, 5, rows=7, known=False)
    cut = Cut(32, (spans_of(32, 5),) * 2)
    times = {key: ((4, short * at_rows(t, 7)), (7, at_rows(t, 7))) for key, t in record.costs.seconds.items()}
    kept = {key: t for key, t in times.items() if key[0] in (Kind.F, Kind.B)}
    plan = replace(record.plan, jobs=(cut,))
    model = RunModel(
        replace(record, measured=replace(record.measured, plan=plan), costs=replace(record.costs, seconds=kept))
    )
    whole = model.with_same_cuts(None, 1)
    assert whole is not None
    one = sum(at_rows(kept[kind, s], 7) for kind in (Kind.F, Kind.B) for s in range(2))
    assert whole.step_seconds == pytest.approx(one * 32 / 7, rel=0.02)  # messages take the rest
