"""Check the choice of the stages that recompute against an exhaustive search."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest

from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.ir import Kind, Plan, PlanError, Program, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning import stage_recompute
from lightning_pipes.planning.auto import AutoPlanner, choose_option
from lightning_pipes.planning.balance import BalancedPlanner
from lightning_pipes.planning.fit import Fit, evaluate_plan, price_stages
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import EvenPlanner, Problem, even_plan, planner_of, recompute_setting
from lightning_pipes.planning.stage_recompute import (
    RecomputePlanner,
    choose_stages,
    fit_recomputed,
    undecided_reason,
    with_stages,
)
from lightning_pipes.sim import simulate
from tests.cases import for_each

ROWS = 8


def random_profile(layers: int, seed: int) -> ModelProfile:
    """Return layers with different times and bytes. They are proportional to the number of samples."""
    draw = random.Random(seed)

    def layer(n: int) -> LayerProfile:
        forward = draw.uniform(1, 4)
        return LayerProfile(
            str(n),
            ((0, 0.0), (1, forward)),
            ((0, 0.0), (1, 2 * forward)),
            input_backward=((0, 0.0), (1, forward)),
            weight_backward=((0, 0.0), (1, forward)),
            saved=((0, 0.0), (1, float(draw.randint(50, 400)))),
            output=((0, 0.0), (1, float(draw.randint(1, 40)))),
            weight_bytes=draw.randint(1, 100),
        )

    return ModelProfile(tuple(layer(n) for n in range(layers)))


def cluster(*limits: int | None) -> Cluster:
    return Cluster(tuple(Device(limit) for limit in limits))


def subsets(stages: Any) -> Any:
    return chain.from_iterable(combinations(stages, n) for n in range(len(stages) + 1))


def added_seconds(plan: Plan, costs: CostModel, stages: Any) -> float:
    return sum(costs.seconds_at(Kind.F, s, span.rows) for s in stages for span in plan.spans(Kind.F, s))


def setting(name: str, ranks: int, seed: int, **settings: Any) -> tuple[Any, Plan, CostModel]:
    """Return an order, its plan with one or two layers per stage, and the costs of its stages."""
    schedule = make_schedule(name, **settings)
    plan = even_plan(schedule, ranks, 4, ROWS)
    profile = random_profile(2 * plan.n_stages - 1, seed)
    plan = replace(plan, layers=even_partition([1] * len(profile.layers), plan.n_stages))
    costs = price_stages(profile, plan, Deployment(cluster(*[None] * ranks)))
    bare = replace(plan, layers=())
    order = schedule.program(bare) if isinstance(schedule, Schedule) else schedule
    return order, bare, costs


@for_each("name", ["1f1b", "gpipe", "interleaved", "hanayo", "v", "zero_bubble", "kfkb"])
@for_each("seed", range(4))
def test_the_cheapest_stages_that_fit_recompute(name: str, seed: int) -> None:
    """All subsets of all stages are compared, for every limit between the memory with and without recomputation."""
    order, plan, costs = setting(name, 2 if name in ("interleaved", "hanayo", "v") else 3, seed)
    assert isinstance(order, Program)
    peaks = {
        stages: peak_bytes(order, with_stages(plan, stages, early=True), costs)
        for stages in subsets(range(plan.n_stages - 1))
    }
    for share in (1.0, 0.9, 0.7, 0.5, 0.3):
        limits = [int(share * size) for size in peaks[()]]
        fitting = [s for s, size in peaks.items() if all(a <= b for a, b in zip(size, limits, strict=True))]
        choice = choose_stages(order, plan, costs, limits)
        assert choice.fits == bool(fitting)
        assert choice.plain_peaks == peaks[()]
        chosen = with_stages(plan, choice.stages, early=True, kept=choice.kept_microbatches)
        assert choice.peaks == peak_bytes(order, chosen, costs)
        if fitting:
            least = min(added_seconds(plan, costs, stages) for stages in fitting)
            assert added_seconds(plan, costs, choice.stages) == pytest.approx(least)


@for_each("name", ["1f1b", "gpipe", "zero_bubble"])
@for_each("seed", range(3))
def test_a_stage_keeps_as_many_micro_batches_as_fit(name: str, seed: int) -> None:
    """Stage s of three holds n of them, and keeps a of n. One more would not fit."""
    order, plan, costs = setting(name, 3, seed)
    counts = set()
    for share in (0.95, 0.85, 0.75, 0.6):
        limits = [int(share * size) for size in peak_bytes(order, plan, costs)[:2]] + [None]
        choice = choose_stages(order, plan, costs, limits)
        if not choice.fits:
            continue
        for stage in choice.stages:
            kept, every = (choice.kept_microbatches or ((0, 1),) * 3)[stage]
            counts.add(kept)
            held = 4 if name == "gpipe" else 3 - stage
            assert kept == 0 or every == held
            for more in range(kept + 1, held):
                pairs = tuple((more, held) if s == stage else (0, 1) for s in range(3))
                assert row_peak_of(order, with_stages(plan, choice.stages, True, pairs), costs, stage) > limits[stage]
    assert max(counts) > 0


def row_peak_of(order: Program, plan: Plan, costs: CostModel, rank: int) -> int:
    return peak_bytes(order, plan, costs)[rank]


@for_each("seed", range(6))
def test_the_greedy_choice_fits_and_has_no_unnecessary_stage(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order, plan, costs = setting("interleaved", 2, seed, stages_per_rank=4)
    exact = [choose_stages(order, plan, costs, limits) for limits in every_limit(order, plan, costs)]
    monkeypatch.setattr(stage_recompute, "MAX_EXACT_STAGES", 0)
    for found, limits in zip(exact, every_limit(order, plan, costs), strict=True):
        choice = choose_stages(order, plan, costs, limits)
        assert choice.fits == found.fits
        if choice.fits:
            for stage in choice.stages:
                fewer = with_stages(plan, {*choice.stages} - {stage})
                assert any(a > b for a, b in zip(peak_bytes(order, fewer, costs), limits, strict=True))


def every_limit(order: Program, plan: Plan, costs: CostModel) -> list[list[int]]:
    return [[int(share * size) for size in peak_bytes(order, plan, costs)] for share in (1.0, 0.85, 0.7, 0.55)]


@for_each("seed", range(4))
def test_an_order_that_is_decided_while_it_runs_fits(seed: int) -> None:
    policy, plan, costs = setting("ready", 3, seed)
    plain = simulate(policy, plan, costs).peak_bytes
    assert choose_stages(policy, plan, costs, plain).stages == ()
    limits = [int(0.7 * size) for size in plain]
    choice = choose_stages(policy, plan, costs, limits)
    assert simulate(policy, with_stages(plan, choice.stages), costs).peak_bytes == choice.peaks
    everything = simulate(policy, with_stages(plan, range(2)), costs).peak_bytes
    if all(a <= b for a, b in zip(everything, limits, strict=True)):
        assert choice.fits


def test_ranks_without_limits_never_recompute() -> None:
    order, plan, costs = setting("1f1b", 3, 0)
    assert choose_stages(order, plan, costs, [None, 1, None]).stages == (1,)
    assert choose_stages(order, plan, costs, [None] * 3).stages == ()


# ---- decisions about a run


def equal_model(layers: int = 8) -> ModelProfile:
    """Return equal layers. A sample takes 1 s and 100 bytes, a message has 10 bytes, and weights have 50 bytes."""
    times = {"forward": ((0, 0.0), (1, 1.0)), "backward": ((0, 0.0), (1, 2.0))}
    split = {"input_backward": ((0, 0.0), (1, 1.0)), "weight_backward": ((0, 0.0), (1, 1.0))}
    layer = LayerProfile(
        "", **times, **split, saved=((0, 0.0), (1, 100.0)), output=((0, 0.0), (1, 10.0)), weight_bytes=50
    )
    return ModelProfile((layer,) * layers)


def request(*limits: int | None, name: str = "1f1b", free: bool = False, **given: Any) -> Problem:
    layers = even_partition([1] * 8, len(limits))
    cut = {"fallback": layers} if free else {"layers": layers}
    deployment = Deployment(cluster(*limits))
    fixed = {"profile": equal_model(), "deployment": deployment, "recompute": "auto", **cut, **given}
    return Problem(make_schedule(name), len(limits), ROWS, 8, **fixed)


def simulated(problem: Problem, plan: Plan) -> Fit:
    schedule = problem.schedule
    assert problem.profile is not None
    assert problem.deployment is not None
    order = schedule.program(replace(plan, layers=())) if isinstance(schedule, Schedule) else schedule
    return evaluate_plan(problem.profile, order, plan, problem.deployment)


def peaks_of(problem: Problem, plan: Plan) -> tuple[int, ...]:
    return simulated(problem, plan).peak_bytes


def step_of(problem: Problem, plan: Plan) -> float:
    return simulated(problem, plan).seconds


def test_only_the_stage_that_lacks_memory_recomputes() -> None:
    """Stage s of 4 holds 4 - s micro-batches of 200 bytes, and weights of 100 bytes.

    Stage 0 keeps two of them, and recomputes one at a time.
    """
    problem = request(750, 750, 750, 750)
    solution = RecomputePlanner(EvenPlanner()).solve(problem)
    assert solution.plan.recompute == (True, False, False, False)
    assert solution.plan.early_recompute
    assert solution.problem.recompute == (0,)
    assert solution.problem.kept_microbatches == solution.plan.kept_microbatches == ((2, 4), (0, 1), (0, 1), (0, 1))
    assert peaks_of(problem, solution.plan) == (700, 700, 500, 300)
    assert solution.why == (
        "recompute='auto': stage 0 recomputes (stage 0: 2 of every 4 micro-batches), because rank 0 would need 900 "
        "bytes of 750 bytes without it, and needs 700 bytes with it"
    )
    late = RecomputePlanner(EvenPlanner()).solve(replace(problem, late_recompute=True))
    assert late.plan.recompute == solution.plan.recompute
    assert not late.plan.early_recompute


def test_nothing_recomputes_if_everything_fits() -> None:
    solution = RecomputePlanner(EvenPlanner()).solve(request(900, 700, 500, 300))
    assert solution.plan == EvenPlanner().solve(request(900, 700, 500, 300, recompute=False)).plan
    assert solution.problem.recompute is False
    assert "because every rank has enough memory (900 bytes of 900 bytes on rank 0)" in solution.why
    free = RecomputePlanner(EvenPlanner()).solve(request(None, None, None, None))
    assert "no rank has a memory limit" in free.why


def test_every_stage_recomputes_if_all_lack_memory() -> None:
    solution = RecomputePlanner(EvenPlanner()).solve(request(400, 400, 400, 400))
    assert solution.problem.recompute is True
    assert "stages 0, 1 and 2 recompute, because rank 0 would need" in solution.why


def test_too_little_memory_is_an_error_with_bytes() -> None:
    """Rank 3 is full with a single micro-batch, and can't recompute."""
    with pytest.raises(PlanError, match="stage 0 on rank 0 needs 300 bytes and has 250 bytes, although stage 0 recomp"):
        RecomputePlanner(EvenPlanner()).solve(request(250, None, None, None))
    with pytest.raises(
        PlanError, match="stage 3 on rank 3 needs 300 bytes and has 250 bytes, and recomputation would not reduce"
    ):
        RecomputePlanner(EvenPlanner()).solve(request(None, None, None, 250))
    for planner in (BalancedPlanner(EvenPlanner()), EvenPlanner()):
        with pytest.raises(PlanError, match="bytes"):
            RecomputePlanner(planner).solve(request(120, 120, 120, 120, free=isinstance(planner, BalancedPlanner)))


def test_layers_move_or_stages_recompute_whichever_is_faster() -> None:
    planner = RecomputePlanner(BalancedPlanner(EvenPlanner()))
    problem = request(750, 900, 900, 900, free=True)
    moved = BalancedPlanner(EvenPlanner()).solve(replace(problem, recompute=False))
    assert moved.plan.layers[0] == Span(0, 1)
    assert step_of(problem, planner.solve(problem).plan) < step_of(problem, moved.plan)
    tight = request(500, 500, 500, 500, free=True)
    solution = planner.solve(tight)
    assert any(solution.plan.recompute)
    assert all(size <= 500 for size in peaks_of(tight, solution.plan))
    everything = BalancedPlanner(EvenPlanner()).solve(replace(tight, recompute=True))
    assert sum(solution.plan.recompute) < sum(everything.plan.recompute)


def test_the_choice_and_the_cut_fit_each_other() -> None:
    """The result is as fast as the best of all cuts with all subsets of stages, which are simulated one by one."""
    profile, schedule = random_profile(6, 7), make_schedule("1f1b")
    plan = even_plan(schedule, 3, 4, ROWS)
    limits = [2500, 2500, 2500]
    found = fit_recomputed(profile, schedule, plan, cluster(*limits))
    best = None
    for a, b in combinations(range(1, 6), 2):
        for stages in subsets(range(2)):
            given = replace(with_stages(plan, stages, early=True), layers=(Span(0, a), Span(a, b), Span(b, 6)))
            costs = price_stages(profile, given, Deployment(cluster(*limits)))
            bare = replace(given, layers=())
            timeline = simulate(schedule.program(bare), bare, costs)  # type: ignore[union-attr]
            if all(size <= limit for size, limit in zip(timeline.peak_bytes, limits, strict=True)):
                best = min(best or timeline.makespan, timeline.makespan)
    assert best is not None
    assert all(size <= limit for size, limit in zip(found.peak_bytes, limits, strict=True))
    assert found.seconds <= 1.02 * best / 1e9  # stages that recompute only some micro-batches may be faster
    assert any(found.plan.recompute)


def test_reasons_for_an_open_choice() -> None:
    unmeasured = request(100, 100, profile=None)
    assert undecided_reason(unmeasured) == "the layers are not measured"
    solution = RecomputePlanner(EvenPlanner()).solve(unmeasured)
    assert solution.problem.recompute == "auto"
    assert not solution.plan.recompute
    assert "orders overlapping batches" in undecided_reason(request(100, 100, name="csp"))


def test_schedules_whose_batches_overlap_count_their_versions() -> None:
    """With versions of the weights, the stages of a full pipeline are priced."""
    problem = request(900, None, name="pipedream")
    solution = RecomputePlanner(planner_of(problem.schedule)).solve(problem)
    assert recompute_setting(solution.plan) is True


def test_a_step_is_faster_if_recomputation_allows_more_even_stages() -> None:
    """A cut without recomputation fits into 1200 bytes, but its stages are very different."""
    given, limited = [make_schedule("1f1b")], cluster(1200, 1200, 1200, 1200)
    plain = choose_option(equal_model(16), 4, ROWS, limited, given, microbatches=[8], recompute=[False])
    choice = choose_option(equal_model(16), 4, ROWS, limited, given, microbatches=[8])
    assert choice.fit.seconds < 0.9 * plain.fit.seconds
    assert any(choice.fit.plan.recompute)


@for_each("name", ["v", "um1f1b"])
@for_each("limit", [700, 900])
def test_the_memory_limit_of_a_schedule_counts_like_that_of_a_device(name: str, limit: int) -> None:
    """Devices have no limits. The planners of these schedules hold fewer micro-batches if memory is short."""
    schedule = make_schedule(name, memory_limit=limit)
    layers = even_partition([1] * 8, len(schedule.place_stages(2)))
    problem = Problem(schedule, 2, ROWS, 8, "auto", layers, equal_model(), Deployment(cluster(None, None)))
    solution = RecomputePlanner(planner_of(schedule)).solve(problem)
    assert max(peaks_of(solution.problem, solution.plan)) <= limit
    plain = planner_of(schedule).solve(replace(problem, recompute=False))
    assert step_of(solution.problem, solution.plan) <= step_of(plain.problem, plain.plan)
    if name == "um1f1b" and limit == 700:
        assert any(solution.plan.recompute)


def test_the_automatic_schedule_lets_as_few_stages_recompute_as_needed() -> None:
    given = [make_schedule("1f1b")]
    limited = cluster(1000, 1000, 1000, 1000)
    choice = choose_option(equal_model(16), 4, ROWS, limited, given, microbatches=[8])
    best = choice.fit.plan.recompute
    assert 0 < sum(best) < 3
    assert "some" in str(choice)
    problem = Problem(given[0], 4, ROWS, 8, profile=equal_model(16), deployment=Deployment(limited))
    why = AutoPlanner().solve(problem).why  # chooses among all schedules
    assert re.search(
        r"The predicted step time is .*; stages? [\d, and]+ recomputes?.*, because rank \d would need", why
    )
    everything = choose_option(equal_model(16), 4, ROWS, limited, given, microbatches=[8], recompute=[True])
    assert choice.fit.seconds <= everything.fit.seconds
    assert all(size <= 1000 for size in choice.fit.peak_bytes)
