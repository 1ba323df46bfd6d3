import math
from dataclasses import replace

import pytest

from lightning_pipes.cost import FREE_LINK, Cluster, CostModel, Device, Link
from lightning_pipes.ir import STEP, B, Cut, F, I, Instruction, Kind, Plan, PlanError, R, Span, W
from lightning_pipes.sim import Event, Timeline, simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan, uniform
from tests.cases import for_each

PLAN = tiny_plan(2, 4)


def model(*table, **more):
    return CostModel({(Kind.F, 0): table}, **more)


@for_each(("rows", "seconds"), [(2, 1.0), (4, 3.0), (3, 2.0), (6, 3.5), (8, 4.0), (12, 5.0), (1, 0.0), (0, 0.0)])
def test_times_are_linear_between_and_beyond_the_rows_measured(rows, seconds):
    assert model((2, 1.0), (4, 3.0), (8, 4.0)).seconds_at(Kind.F, 0, rows) == pytest.approx(seconds)


def test_one_entry_holds_for_any_rows():
    assert model((3, 1.5)).seconds_at(Kind.F, 0, 100) == 1.5


def test_known_rows_are_exact():
    times = [(rows, rows**0.5 / 7) for rows in range(1, 50, 3)]
    for rows, seconds in times:
        assert model(*times).seconds_at(Kind.F, 0, rows) == seconds


def test_seconds_outside_nanoseconds_inside():
    costs = CostModel.uniform(2, forward=1.5e-3, backward=3e-9)
    assert costs.duration_ns(F(0, Span(0, 1)), PLAN) == 1_500_000
    assert costs.duration_ns(B(1, Span(0, 1)), PLAN) == 3
    assert costs.duration_ns(STEP(0), PLAN) == 0


@pytest.mark.parametrize("n", [1, 3, 1_000_003, 86_400_000_000_007])
def test_integer_nanoseconds_survive_seconds(n):
    plan, costs = uniform(1, 1, f=n, b=2)
    assert costs.duration_ns(F(0, Span(0, 1)), plan) == n


def test_an_unknown_stage_is_named():
    with pytest.raises(PlanError, match="no time of F on stage 1; it has F0"):
        model((1, 1.0)).seconds_at(Kind.F, 1, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: model((2, 1.0), (1, 1.0)),
        lambda: model((1, 1.0), (1, 2.0)),
        lambda: model((1, -1.0)),
        lambda: model(),
        lambda: model((1, 1.0), activation_bytes=(1, 2)),
        lambda: model((1, 1.0), weight_bytes=(-1,)),
        lambda: model((1, 1.0), overhead=-1e-9),
        lambda: CostModel.uniform(3, 1, 1, message_bytes=-1),
        lambda: Link(0),
        lambda: Link(-5.0),
        lambda: Link(1.0, -1.0),
        lambda: Link(math.nan),
        lambda: Link(1.0, burst=-1.0),
        lambda: Link(2.0, peak=1.0),
        lambda: Link(1.0, max_in_flight=-1),
        lambda: Device(speed=0),
    ],
)
def test_refuses_nonsense(build):
    with pytest.raises(PlanError):
        build()


def test_a_transfer_takes_bytes_over_bandwidth_and_then_latency():
    costs = CostModel.uniform(2, 1, 1, message_bytes=1000, link=Link(bandwidth=1e6, latency=5e-4))
    assert costs.transfer_ns(Instruction(Kind.SF, 0, span=Span(0, 3)), PLAN) == (3_000_000, 500_000)
    assert costs.transfer_ns(Instruction(Kind.SB, 1, span=Span(0, 2)), PLAN) == (2_000_000, 500_000)


def test_free_links_take_no_time():
    costs = CostModel.uniform(2, 1, 1, message_bytes=1e12)
    assert costs.transfer_ns(Instruction(Kind.SF, 0, span=Span(0, 3)), PLAN) == (0, 0)


def test_links_by_direction_and_edges_by_stage():
    costs = replace(
        CostModel.uniform(3, 1, 1),
        forward_bytes=(10.0, 20.0),
        backward_bytes=(30.0, 40.0),
        links={(1, 0): Link(10.0), (2, 1): Link(20.0)},
        link=Link(1.0),
    )
    plan = tiny_plan(3, 1)
    one = Span(0, 1)
    assert costs.transfer_ns(Instruction(Kind.SF, 1, span=one), plan)[0] == 20e9
    assert costs.transfer_ns(Instruction(Kind.SB, 1, span=one), plan)[0] == 30 / 10 * 1e9
    assert costs.transfer_ns(Instruction(Kind.SB, 2, span=one), plan)[0] == 40 / 20 * 1e9


def test_activations_from_forward_to_backward():
    costs = CostModel.uniform(2, 1, 1, activation_bytes=7)
    assert costs.memory_change(F(1, Span(0, 3)), PLAN) == (21, 0)
    assert costs.memory_change(B(1, Span(0, 3)), PLAN) == (0, 21)
    split = replace(PLAN, split_backward=True)
    assert [costs.memory_change(make(1, Span(0, 3)), split) for make in (I, W)] == [(0, 0), (0, 21)]
    assert costs.memory_change(STEP(1), PLAN) == (0, 0)


def test_recompute_holds_the_input_and_runs_forward_again():
    plan = replace(PLAN, recompute=(False, True))
    costs = CostModel.uniform(2, 3e-9, 5e-9, activation_bytes=7, message_bytes=2)
    assert costs.memory_change(F(1, Span(0, 3)), plan) == (6, 0)
    assert costs.memory_change(B(1, Span(0, 3)), plan) == (21, 27)
    assert costs.duration_ns(B(1, Span(0, 3)), plan) == 8
    assert costs.duration_ns(B(0, Span(0, 3)), plan) == 5


def test_a_recomputation_of_its_own_takes_the_forward_out_of_the_backward():
    plan = replace(PLAN, recompute=(False, True), early_recompute=True)
    costs = CostModel.uniform(2, 3e-9, 5e-9, activation_bytes=7, message_bytes=2)
    assert costs.memory_change(F(1, Span(0, 3)), plan) == (6, 0)
    assert costs.memory_change(R(1, Span(0, 3)), plan) == (21, 0)
    assert costs.memory_change(B(1, Span(0, 3)), plan) == (0, 27)
    assert [costs.duration_ns(make(1, Span(0, 3)), plan) for make in (F, R, B)] == [3, 3, 5]


PARTLY_AGAIN = Plan(
    (0, 1),
    (Cut(4, ((Span(0, 2), Span(2, 4)),) * 2, ((Span(0, 3), Span(3, 4)),) * 2),),
    whole_forward=(True, False),
    early_recompute=True,
)
"""A plan in which the first backward of stage 0 differentiates a whole forward, and a part of another one.

Only the forward of the part runs again.
"""


def test_a_recomputation_costs_only_the_passes_that_run_again():
    costs = CostModel({(Kind.F, 0): ((1, 3e-9), (4, 12e-9))}, activation_bytes=(7,), working_bytes=(5,))
    both, last = R(0, Span(0, 3)), R(0, Span(3, 4))
    assert [costs.duration_ns(each, PARTLY_AGAIN) for each in (both, last)] == [3, 3]
    # the working memory is that of the larger pass
    assert [costs.memory_change(each, PARTLY_AGAIN) for each in (both, last)] == [(7 + 10, 10), (7 + 5, 5)]


def test_measured_recomputations_are_those_of_the_passes_that_run_again():
    times = {F(0, Span(0, 2)): 6, F(0, Span(2, 4)): 6, R(0, Span(0, 3)): 4, R(0, Span(3, 4)): 4}
    events = [Event(0, i, 0, took) for i, took in times.items()]
    got = CostModel.from_timelines(Timeline.from_events(events, PARTLY_AGAIN))
    assert got.seconds_at(Kind.R, 0, 1) == pytest.approx(4e-9)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("recompute", "early"), [(False, False), (True, False), (True, True)])
def test_what_is_taken_is_given_back(split, recompute, early):
    plan = replace(PLAN, split_backward=split, recompute=(recompute,) * 2, early_recompute=early)
    costs = replace(CostModel.uniform(2, 1, 1, activation_bytes=7, message_bytes=2), working_bytes=(5, 5))
    kinds = (F, *(R,) * early, *((I, W) if split else (B,)))
    held = [costs.memory_change(make(1, Span(0, 3)), plan) for make in kinds]
    assert sum(taken for taken, _ in held) == sum(freed for _, freed in held)


def test_weights_for_every_stage_job_and_version():
    costs = replace(CostModel.uniform(4, 1, 1), weight_bytes=(1, 10, 100, 1000))
    plan = Plan.even(4, 1, ranks=(0, 1, 0, 1))
    assert [costs.resident_bytes(rank, plan) for rank in (0, 1)] == [101, 1010]
    several = replace(plan, jobs=plan.jobs * 2, versions=(2, 1, 1, 1))
    assert costs.resident_bytes(0, several) == 2 * (2 * 1 + 100)


def test_cluster():
    cluster = Cluster.from_counts(2, 2, memory=80, inside=FREE_LINK, between=Link(1e9))
    assert [cluster.link_between(0, n) for n in (1, 2, 3)] == [FREE_LINK, Link(1e9), Link(1e9)]
    slow = replace(cluster, links={(1, 2): Link(1.0)})
    assert (slow.link_between(1, 2), slow.link_between(2, 1)) == (Link(1.0), Link(1e9))


def test_hosts_with_one_network_card():
    cluster = replace(Cluster.from_counts(2, 2, between=Link(1e9)), shared=True, links={(1, 2): Link(5.0)})
    assert cluster.link_between(0, 1) == FREE_LINK
    assert (
        cluster.link_between(0, 2)
        == cluster.link_between(0, 3)
        == cluster.link_between(1, 3)
        == Link(1e9, wire="host 0")
    )
    assert cluster.link_between(2, 0).wire == "host 1"
    assert cluster.link_between(1, 2) == Link(5.0)


@for_each("seed", range(8))
def test_measured_from_what_the_true_costs_gave_predicts_the_same(seed):
    plan = random_plan(seed, unequal=False)
    true = random_costs(plan, seed)
    timeline = simulate(OneFOneB().program(plan), plan, true)
    measured = CostModel.from_timelines(timeline)
    again = simulate(OneFOneB().program(plan), plan, measured)
    slack = true.transfer_ns(Instruction(Kind.SF, 0, span=Span(0, 1)), plan)[1] if plan.n_stages > 1 else 0
    assert abs(again.makespan - timeline.makespan) <= slack * 4 * len(plan.spans(Kind.F, 0)) * plan.n_stages
    exact = simulate(OneFOneB().program(plan), plan, CostModel.from_timelines(timeline, base=true))
    assert exact.makespan == timeline.makespan


def events(*times, kind=Kind.F, rows=1, rank=0):
    return [Event(rank, Instruction(kind, rank, batch=n, span=Span(0, rows)), 0, t) for n, t in enumerate(times)]


def test_measured_transfers_show_what_a_bucket_did():
    """Check that measured costs do not apply the token bucket a second time.

    Both messages fit into the bucket, so the measured transfers take no time.
    """
    plan = tiny_plan(2, 1)
    true = CostModel.uniform(2, 1e-9, 1e-9, message_bytes=10, link=Link(1e9, burst=20))
    timeline = simulate(OneFOneB().program(plan), plan, true)
    measured = CostModel.from_timelines(timeline, base=replace(true, links={(0, 1): true.link}))
    assert measured.transfer_ns(Instruction(Kind.SF, 0, span=Span(0, 1)), plan) == (0, 0)
    assert measured.link_between(0, 1) == measured.link_between(1, 0) == Link(1e9)


def test_measured_takes_medians_over_several_timelines():
    plan = tiny_plan(1, 1)
    timelines = [Timeline.from_events(events(*times), plan) for times in ((10, 11), (12, 1000), (9,))]
    assert CostModel.from_timelines(timelines).seconds_at(Kind.F, 0, 1) == 11e-9


def test_measured_one_size_is_proportional_several_are_not():
    plan = tiny_plan(1, 8)
    one = CostModel.from_timelines(Timeline.from_events(events(10, rows=2), plan))
    assert one.seconds_at(Kind.F, 0, 4) == pytest.approx(20e-9)
    two = CostModel.from_timelines(Timeline.from_events([*events(10, rows=2), *events(14, rows=4)], plan))
    assert two.seconds_at(Kind.F, 0, 3) == pytest.approx(12e-9)
    assert two.seconds_at(Kind.F, 0, 8) == pytest.approx(22e-9)


def test_measured_keeps_the_rest_from_its_base():
    base = CostModel.uniform(1, 1.0, 2.0, activation_bytes=5, weight_bytes=6)
    got = CostModel.from_timelines(Timeline.from_events(events(10), tiny_plan(1, 1)), base)
    assert got.seconds_at(Kind.F, 0, 1) == pytest.approx(1e-8)
    assert got.seconds_at(Kind.B, 0, 1) == 2.0
    assert (got.activation_bytes, got.weight_bytes) == ((5,), (6,))


def test_measured_backward_without_the_forward_that_it_ran_again():
    plan = replace(tiny_plan(1, 1), recompute=(True,))
    got = CostModel.from_timelines(Timeline.from_events([*events(10), *events(30, kind=Kind.B)], plan))
    assert got.seconds_at(Kind.B, 0, 1) == pytest.approx(20e-9)
    assert got.duration_ns(B(0, Span(0, 1)), plan) == 30


def test_measured_recomputations_of_their_own():
    plan = replace(tiny_plan(1, 1), recompute=(True,), early_recompute=True)
    times = {Kind.F: 10, Kind.R: 12, Kind.B: 20}
    got = CostModel.from_timelines(
        Timeline.from_events([e for kind, took in times.items() for e in events(took, kind=kind)], plan)
    )
    assert [got.duration_ns(make(0, Span(0, 1)), plan) for make in (F, R, B)] == [10, 12, 20]
    late = replace(plan, early_recompute=False)
    assert got.duration_ns(B(0, Span(0, 1)), late) == 30


def test_nothing_measured():
    with pytest.raises(PlanError, match="without events"):
        CostModel.from_timelines(Timeline((), PLAN))


def test_overhead_is_measured() -> None:
    """Check that the overhead is the time from the moment when a computation could start until it starts."""
    plan = Plan.even(3, 6)
    link = Link(bandwidth=1e9, latency=2e-6)
    costs = CostModel.uniform(3, 1e-3, 2e-3, overhead=1e-4, message_bytes=1000, link=link)
    timeline = simulate(OneFOneB().program(plan), plan, costs)
    measured = CostModel.from_timelines(timeline)
    assert measured.overhead == pytest.approx(1e-4)
    assert simulate(OneFOneB().program(plan), plan, measured).makespan == timeline.makespan
