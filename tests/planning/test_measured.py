"""Check moving averages of the costs of a run, on simulated timelines with virtual clocks."""

from dataclasses import replace

import pytest

from lightning_pipes.ir import B, F, Instruction, Kind, Plan, Span
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.zero_bubble import ZeroBubble
from lightning_pipes.testing.generators import uniform
from tests.planning.samples import MS, step


def test_costs_of_a_run_predict_its_steps():
    averages = Averages()
    for n in range(3):
        samples, plan, costs = step(at=n * 10**10)
        averages.add(samples)
    found = averages.costs()
    assert averages.has_measured(plan)
    assert found.seconds_at(Kind.F, 1, 1) == pytest.approx(0.020)
    assert found.seconds_at(Kind.SB, 2, 1) == pytest.approx(0.010)
    for k in (1, 2, 3):
        program = KFKB(k).program(plan)
        assert makespan(program, plan, found) == makespan(program, plan, costs)


def test_transfers_are_averaged_over_the_last_steps():
    averages = Averages(window=3)
    for link in (10, 10, 10, 40, 40):
        averages.add(step(link=link * MS)[0])
    assert averages.costs().seconds_at(Kind.SF, 0, 1) == pytest.approx((10 + 40 + 40) / 3e3)


def test_computations_are_reused_until_they_drift():
    averages = Averages(window=2)
    for f in (90, 20, 20, 20):  # the first step includes one-time work
        averages.add(step(f=f * MS)[0])
    assert averages.costs().seconds_at(Kind.F, 0, 1) == pytest.approx(0.020)
    averages.add(step(f=int(20.9 * MS))[0])
    assert averages.drifted == ()
    assert averages.costs().seconds_at(Kind.F, 0, 1) == pytest.approx(0.020)
    averages.add(step(f=30 * MS)[0])
    assert {(kind, s) for kind, s, _ in averages.drifted} == {(Kind.F, s) for s in range(3)}
    for _ in range(2):
        averages.add(step(f=30 * MS)[0])
    assert averages.costs().seconds_at(Kind.F, 0, 1) == pytest.approx(0.030)


@pytest.mark.parametrize("jump", [3600 * 1000 * MS, -3600 * 1000 * MS, 30 * MS, -10_000 * MS])
def test_a_clock_that_jumps(jump):
    """Check a clock that jumps during a run.

    Messages of rank 1 then seem to arrive before they were sent, or to have been sent before the step. These
    measurements are ignored, and the earlier averages stay.
    """
    averages = Averages()
    averages.add(step(at=10**9)[0])
    before = averages.costs().seconds
    averages.add(step(at=10**11, shift={1: jump})[0])
    assert averages.impossible == 12
    after = averages.costs().seconds
    for key in before:
        assert after[key][-1] == pytest.approx(before[key][-1])
    averages.add(step(at=10**12, link=20 * MS)[0])
    assert averages.impossible == 0


def test_jump_of_a_clock_makes_both_directions_wrong():
    """Check both directions of a link if the clock of rank 1 is set back.

    Messages to rank 1 then arrive before they were sent, and messages from rank 1 seem to have been delayed.
    """
    plan = Plan.even(3, 2)
    (span, _) = plan.spans(Kind.F, 0)
    forward, back, other = (Instruction(k, s, span=span) for k, s in ((Kind.SF, 0), (Kind.SB, 1), (Kind.SF, 1)))

    def step(*durations):
        given = zip((forward, back, other), durations, strict=True)
        return [StepSample.from_events([(0, i, 100 * MS, (100 + ms) * MS)], plan, since=99 * MS) for i, ms in given]

    averages = Averages(window=1)
    averages.add(step(10, 10, 10))
    averages.add(step(0, 500, 20))
    assert averages.impossible == 1
    found = averages.costs()
    assert [found.seconds_at(kind, s, 1) for kind, s in ((Kind.SF, 0), (Kind.SB, 1))] == pytest.approx([0.010, 0.010])
    assert found.seconds_at(Kind.SF, 1, 1) == pytest.approx(0.020)  # another link


def test_sizes_that_were_not_seen_are_extrapolated():
    averages = Averages(latency={(0, 1): 0.004})
    plan = Plan.even(2, 4, rows=8)
    events = [
        (0, F(0, Span(0, 2)), 0, 20 * MS),
        (0, Instruction(Kind.SF, 0, span=Span(0, 2)), 20 * MS, 34 * MS),
        (1, Instruction(Kind.SB, 1, span=Span(0, 2)), 20 * MS, 30 * MS),
    ]
    averages.add([StepSample.from_events(events, plan)])
    found = averages.costs()
    assert found.seconds_at(Kind.F, 0, 4) == pytest.approx(0.040)  # in proportion to the samples
    assert found.seconds_at(Kind.SF, 0, 4) == pytest.approx(0.024)  # 4 ms for any size
    assert found.seconds_at(Kind.SF, 0, 1) == pytest.approx(0.009)
    assert found.seconds_at(Kind.SB, 1, 4) == pytest.approx(0.020)
    assert not averages.has_measured(plan)
    averages.add([StepSample.from_events([(0, F(0, Span(0, 4)), 0, 30 * MS)], plan)])
    assert averages.costs().seconds_at(Kind.F, 0, 3) == pytest.approx(0.025)  # between two measured sizes


def test_what_is_known():
    averages = Averages()
    averages.add(step()[0])
    assert averages.has_measured(Plan.even(3, 6))
    assert averages.has_measured(Plan.even(3, 12))
    assert not averages.has_measured(Plan.even(3, 6, rows=12))


def test_a_rate_that_falls_to_nearly_nothing():
    averages = Averages(window=1)
    averages.add(step(link=10**15)[0])
    plan, _ = uniform(3, 6, f=1, b=1)
    assert makespan(KFKB(2).program(plan), plan, averages.costs()) > 6 * 10**15


def test_lag_is_what_nothing_explains():
    averages = Averages()
    averages.add(step(overhead=3 * MS)[0])
    assert averages.lag == pytest.approx(0.003)
    assert averages.costs().overhead == pytest.approx(0.003)
    assert averages.costs(overhead=False).overhead == 0


def test_unsteady_links():
    averages = Averages()
    assert averages.unsteadiness == 0
    samples, _, _ = step()
    averages.add(samples)
    assert averages.unsteadiness == 0
    plan = Plan.even(2, 4)
    events = [
        (0, Instruction(Kind.SF, 0, span=s), 0, t * MS)
        for s, t in zip(plan.spans(Kind.F, 0), (5, 60, 5, 60), strict=True)
    ]
    averages.add([StepSample.from_events(events, plan)])
    assert averages.unsteadiness == pytest.approx(27.5 / 32.5)


def test_nothing_recorded_is_nothing_known():
    averages = Averages()
    averages.add([StepSample.from_events([], Plan.even(2, 2))])
    assert averages.costs().n_stages == 0
    assert averages.lag == 0


def test_bytes_equal_the_base():
    averages = Averages()
    samples, _, costs = step()
    averages.add(samples)
    base = replace(costs, activation_bytes=(7,) * 3)
    assert averages.costs(base).activation_bytes == (7,) * 3


def test_policies_may_hold_back_forwards():
    """Check that the lag does not include the forwards of a policy, because their delay may be intended."""
    plan = Plan.even(1, 2)
    a, b = plan.spans(Kind.F, 0)
    events = [(0, F(0, a), 0, 10), (0, B(0, a), 12, 20), (0, F(0, b), 100, 110), (0, B(0, b), 112, 120)]
    assert StepSample.from_events(events[:3], plan, chosen=True).lag == 2
    assert StepSample.from_events(events[:3], plan).lag == 41


def both_ways(averages, **times):
    """Return the costs after three steps with whole backwards and three steps with split ones and other times."""
    whole, split = ({"schedule": KFKB(1)}, {"schedule": ZeroBubble(), **times})
    for how in (whole, split):
        for _ in range(3):
            averages.add(step(**how)[0])
    return averages.costs()


def test_missing_times_are_derived_from_measured_ones():
    """Check that separately measured layers give the shares of I and W in the whole backward."""
    parts = {0: (0.0, 1.0), 1: (0.6, 0.5), 2: (0.5, 0.5)}
    averages = Averages(window=2, parts=parts)
    for _ in range(3):
        averages.add(step(b=40 * MS)[0])
    costs = averages.costs()
    assert [costs.seconds_at(Kind.I, s, 1) for s in range(3)] == pytest.approx([0.0, 0.024, 0.020])
    assert [costs.seconds_at(Kind.W, s, 1) for s in range(3)] == pytest.approx([0.040, 0.020, 0.020])
    assert not averages.has_measured(replace(Plan.even(3, 6), split_backward=True))
    averages = Averages(window=2, parts=parts)
    for _ in range(3):
        averages.add(step(ZeroBubble(), b=44 * MS)[0])
    assert [averages.costs().seconds_at(Kind.B, s, 1) for s in range(3)] == pytest.approx([0.044, 0.040, 0.044])


def test_measured_times_count_more_and_drift_with_current_ones():
    averages = Averages(window=2, parts=dict.fromkeys(range(3), (0.9, 0.9)))
    costs = both_ways(averages, b=50 * MS)
    assert costs.seconds_at(Kind.I, 1, 1) + costs.seconds_at(Kind.W, 1, 1) == pytest.approx(0.050)
    assert costs.seconds_at(Kind.B, 1, 1) == pytest.approx(0.040)
    for _ in range(6):
        averages.add(step(ZeroBubble(), b=75 * MS)[0])
    costs = averages.costs()
    assert costs.seconds_at(Kind.I, 1, 1) + costs.seconds_at(Kind.W, 1, 1) == pytest.approx(0.075)
    assert costs.seconds_at(Kind.B, 1, 1) == pytest.approx(0.060)
