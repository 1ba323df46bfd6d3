"""Compare the candidates on the memory-limit curve with numbers counted by hand and with the simulator."""

from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, PlanError, Schedule
from lightning_pipes.planning.candidates import cut_into, tuning_planner
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.deep import Deep
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.kfkb.planner import KFKBPlanner, memory_curve
from lightning_pipes.strategies.per_link import PerLink
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.strategies.zero_bubble import ZeroBubble
from lightning_pipes.testing.generators import uniform
from tests.cases import for_each


def problem(stages=4, rows=24, activation=10, weights=100, **more):
    costs = CostModel.uniform(stages, 2e-3, 4e-3, rows=1, activation_bytes=activation, weight_bytes=weights)
    return Plan.even(stages, rows), replace(costs, **more)


def points(found):
    return [(c.schedule.k, max(s.rows for s in c.plan.spans(Kind.F, 0))) for c in found]


def test_the_largest_micro_batches_that_fit():
    """Check the largest micro-batch for each k.

    The first stage holds 4 k micro-batches of b samples, and a sample takes 10 bytes. The weights leave 240 bytes, so
    4 k b <= 24.
    """
    plan, costs = problem()
    assert points(memory_curve(plan, costs, 100 + 240)) == [
        (1, 24),
        (2, 12),
        (3, 8),
        (4, 6),
        (5, 4),
        (6, 4),
        (7, 3),
        (8, 3),
    ]
    assert points(memory_curve(plan, costs, 100 + 120)) == [(1, 3), (2, 1), (3, 1)]


@pytest.mark.parametrize("size", [0, -2])
def test_a_micro_batch_has_a_sample(size):
    plan, costs = problem()
    with pytest.raises(PlanError, match="samples of a micro-batch"):
        memory_curve(plan, costs, sizes=(size, 4))


def test_candidates_keep_the_cut_of_the_run_unless_sizes_are_given():
    """Check that candidates sum the gradients in the order of the running plan.

    With 32 samples in 24 micro-batches, a micro-batch has one or two samples. Fewer micro-batches of two samples each
    would change the order of the sum.
    """
    _, costs = problem(stages=2)
    plan = Plan.even(2, 24, rows=32)
    for candidate in KFKBPlanner().list_candidates(plan, costs):
        assert candidate.plan.jobs == plan.jobs, candidate.schedule
        order = candidate.schedule
        events = simulate(
            order.program(candidate.plan) if isinstance(order, Schedule) else order, candidate.plan, costs
        ).events
        done = [e.instruction for e in events if e.instruction.kind in {Kind.B, Kind.W}]
        for stage in range(2):
            summed = [i.span for i in done if i.stage == stage]
            assert summed == [*plan.spans(Kind.B, stage)], candidate.schedule
    sizes = {c.n_microbatches for c in KFKBPlanner().list_candidates(plan, costs, sizes=(2, 4))}
    assert sizes == {24, 8}


def brute_force(plan, costs, limit, k):
    """Return the largest micro-batch size with which the simulated peak stays within the limit.

    All sizes are simulated, and the rows of the largest micro-batch that fits are returned, or 0 if no size fits.
    """
    fits = []
    for b in range(1, plan.jobs[0].rows + 1):
        cut = cut_into(plan, b)
        peak = simulate(KFKB(k).program(cut), cut, costs).peak_bytes
        if max(peak) <= limit and k <= len(cut.spans(Kind.F, 0)):
            fits.append(max(s.rows for s in cut.spans(Kind.F, 0)))
    return max(fits, default=0)


@pytest.mark.parametrize("limit", [150, 170, 220, 260, 300, 340, 500])
def test_against_trying_all(limit):
    plan, costs = problem(rows=12)
    for k, b in points(memory_curve(plan, costs, limit)):
        assert b <= brute_force(plan, costs, limit, k)
        if all(len({s.rows for s in cut_into(plan, a).spans(Kind.F, 0)}) == 1 for a in (b, b + 1)):
            assert b == brute_force(plan, costs, limit, k)


@for_each("limit", [130, 200, 260, 340, 900])
@for_each("more", [{}, {"working_bytes": (3.0,) * 4}, {"forward_bytes": (4.0,) * 3}])
def test_never_more_than_the_limit_and_as_predicted(limit, more):
    plan, costs = problem(**more)
    if "forward_bytes" in more:
        plan = replace(plan, recompute=(True, True, True, False))
    try:
        found = KFKBPlanner().list_candidates(plan, costs, limit, sizes=(1, 2, 3, 4, 6, 12))
    except PlanError:
        assert limit == 130
        return
    assert found[0].schedule == KFKB(1)
    for c in found:
        order = c.schedule.program(c.plan) if isinstance(c.schedule, Schedule) else c.schedule
        peak = simulate(order, c.plan, costs).peak_bytes
        assert all(there <= said <= limit for there, said in zip(peak, c.peak_bytes, strict=True)), c.label
        assert c.plan.split_backward == c.schedule.splits_backward
        if isinstance(c.schedule, KFKB) and len({s.rows for s in c.plan.spans(Kind.F, 0)}) == 1 and not plan.recompute:
            assert peak == c.peak_bytes, c.label


def test_fractional_sizes_are_rounded_down():
    """Check figure 6: 192 samples, eight stages, and micro-batches of 6 / k samples.

    Every k may hold the activations of six samples for each stage. Sizes that are not whole numbers are rounded down.
    """
    plan, costs = problem(stages=8, rows=192)
    found = memory_curve(plan, costs, 100 + 8 * 6 * 10, largest_k=6)
    assert points(found) == [(1, 6), (2, 3), (3, 2), (4, 1), (5, 1), (6, 1)]
    assert [c.n_microbatches for c in found] == [32, 64, 96, 192, 192, 192]
    assert 192 % 5  # the last group is incomplete
    for c in found:
        simulate(c.schedule.program(c.plan), c.plan, costs)


def test_sizes_that_do_not_divide_the_batch():
    plan, _ = problem(rows=22)
    cut = cut_into(plan, 4)
    assert [s.rows for s in cut.spans(Kind.F, 0)] == [3, 4, 4, 3, 4, 4]
    with pytest.raises(PlanError, match="micro-batches of 0 samples"):
        cut_into(plan, 0)


def test_pruning():
    plan, costs = problem()
    per_k = points(memory_curve(plan, costs, 100 + 240, sizes=(1, 3, 6)))
    assert per_k == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 3), (6, 3), (7, 3), (8, 3)]
    assert points(memory_curve(plan, costs, 100 + 240, sizes=(1, 3, 6), prune="pareto")) == [(1, 6), (4, 6), (8, 3)]
    with pytest.raises(PlanError, match="prune must be 'per_k' or 'pareto', got 'all'"):
        memory_curve(plan, costs, prune="all")
    planner = KFKB("auto", prune="pareto", largest_k=4).make_planner()
    listed = [c for c in planner.list_candidates(plan, costs, 100 + 240, (1, 3, 6)) if isinstance(c.schedule, KFKB)]
    assert {c.schedule.k for c in listed} == {1, 4}
    with pytest.raises(PlanError, match="prune must be 'per_k' or 'pareto', got 'all'"):
        KFKB(prune="all")


def test_error_names_missing_bytes():
    plan, costs = problem()
    costs = replace(costs, weight_bytes=(100, 100, 400, 100))
    with pytest.raises(PlanError) as caught:
        memory_curve(plan, costs, 410)
    assert str(caught.value).startswith(
        "stage 2 needs 420 bytes and may have 410 bytes: 10 bytes are missing with 1F1B and micro-batches of 1 sample "
        "(weights and states 400 bytes, activations 20 bytes); use more stages"
    )


def test_k_ends_where_there_are_no_more_micro_batches():
    plan, costs = problem()
    assert points(memory_curve(plan, costs, None, sizes=(12,))) == [(1, 12), (2, 12)]


def test_other_ways_for_the_same_memory():
    plan, costs = uniform(4, 24, f=20, b=40, link=60, activation_bytes=10)
    whole = {key: table for key, table in costs.seconds.items() if key[0] not in (Kind.I, Kind.W)}
    costs = replace(costs, seconds=whole)
    found = KFKBPlanner().list_candidates(plan, costs, 90)
    assert tuning_planner(KFKB("auto")) == KFKBPlanner()
    assert {type(c.schedule) for c in found} == {KFKB, Deep, PerLink, Ready} - {PerLink}
    assert [c.schedule for c in found if isinstance(c.schedule, KFKB)] == [KFKB(1), KFKB(2)]
    assert [c.schedule for c in found if isinstance(c.schedule, Deep)] == [Deep(1), Deep(3), Deep(4)]
    best = min(
        found,
        key=lambda c: (
            simulate(c.schedule if isinstance(c.schedule, Ready) else c.schedule.program(plan), plan, costs).makespan
        ),
    )
    assert not isinstance(best.schedule, KFKB)


def test_extra_where_one_link_is_slow():
    plan, costs = uniform(4, 24, f=20, b=40, activation_bytes=10)
    slow = {(Kind.SF, 1): ((1, 60e-9),), (Kind.SB, 2): ((1, 60e-9),)}
    found = KFKBPlanner().list_candidates(plan, replace(costs, seconds={**costs.seconds, **slow}), 60)
    assert [c.schedule.extra for c in found if isinstance(c.schedule, PerLink)] == [(0, 2, 0)]


def test_split_backwards_with_a_warm_up_for_the_links_and_the_memory():
    plan, costs = uniform(4, 24, f=20, b=40, activation_bytes=10)
    slow = {(Kind.SF, 1): ((1, 60e-9),), (Kind.SB, 2): ((1, 60e-9),)}
    found = KFKBPlanner().list_candidates(plan, replace(costs, seconds={**costs.seconds, **slow}), 60)
    split = [c for c in found if isinstance(c.schedule, ZeroBubble)]
    assert all(c.plan.split_backward and max(c.peak_bytes) <= 60 for c in split)
    assert {c.schedule for c in split if not c.schedule.limits} == {ZeroBubble((0, n, 0)) for n in (0, 1, 2)}
    assert {c.schedule for c in split if c.schedule.limits} == {
        ZeroBubble((0, n, 0), limits=(6,) * 4) for n in (0, 1, 2, 3)
    }
    assert Ready(limits=(6,) * 4, split=True) in [c.schedule for c in found]


def test_one_stage_has_nothing_to_choose():
    plan, costs = uniform(1, 8, f=1, b=2)
    assert {type(c.schedule) for c in KFKBPlanner().list_candidates(plan, costs)} == {KFKB}


@pytest.mark.parametrize("k", ["Auto", "", "2", 1.5])
def test_k_is_a_number_or_auto(k):
    with pytest.raises(PlanError, match="k must be a whole number"):
        KFKB(k)
