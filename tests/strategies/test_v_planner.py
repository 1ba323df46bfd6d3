"""Check that the planner of v takes durations from the profile, and the largest k that fits into memory."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import PlanError, Span, adapt_plan
from lightning_pipes.planning.auto import choose_option
from lightning_pipes.planning.balance import BalancedPlanner
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.planning.planner import EvenPlanner, Problem, planner_of
from lightning_pipes.strategies.v import V
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.setup.prepare import warn_about_memory_limit

MIB = 2**20


def model(layers: int = 8, f: float = 10e-3, i: float = 12e-3, w: float = 8e-3, split: bool = True) -> ModelProfile:
    """Return equal layers, of which each keeps 1 MiB per sample and sends 1 MB, with 3 MiB of weights and states."""
    tables = {"forward": ((1, f),), "backward": ((1, i + w),), "output": ((1, 1e6),), "saved": ((1, MIB),)}
    parts = {"input_backward": ((1, i),), "weight_backward": ((1, w),)} if split else {}
    sizes = {"weight_bytes": MIB, "gradient_bytes": MIB, "optimizer_bytes": MIB}
    return ModelProfile((LayerProfile("", **tables, **parts, **sizes),) * layers)


def place(ranks: int = 4, memory: int | None = None, bandwidth: float = 1e9) -> Deployment:
    return Deployment(Cluster((Device(memory),) * ranks, inside=Link(bandwidth)))


def solve(schedule: V, profile: ModelProfile, deployment: Deployment, rows: int = 8, ranks: int = 4, **more: object):
    """Return the solution of the planner of a schedule for micro-batches of one sample."""
    problem = Problem(schedule, ranks, rows, rows, profile=profile, deployment=deployment, **more)
    return planner_of(schedule).solve(problem)


def test_durations_are_those_of_the_profile() -> None:
    chosen = solve(V(), model(), place()).problem.schedule
    assert chosen == V(times=(8, 10, 6, 1))  # 10, 12, 8 and 1 ms, in units of 30 / 24 ms
    assert type(planner_of(chosen)) is EvenPlanner  # nothing is open anymore
    assert solve(V(k=5), model(f=7e-3, i=7e-3, w=7e-3), place(bandwidth=1e15)).problem.schedule == V(5, (1, 1, 1, 0))
    slow = Deployment(Cluster((Device(speed=0.5),) * 4, inside=Link(1e9)))
    assert solve(V(), model(), slow).problem.schedule.times == (4, 5, 3, 0)  # 20, 24, 16 and 1 ms
    recomputed = solve(V(), model(), place(bandwidth=1e15), recompute=True).problem.schedule
    assert recomputed.times[1] > 2 * recomputed.times[0]


def test_durations_of_the_user_are_kept() -> None:
    mine = V(times=(10, 12, 8, 1), memory_limit="1GiB")
    assert solve(mine, model(), place()).problem.schedule.times == (10, 12, 8, 1)


def test_whole_backwards_need_no_times_of_their_parts() -> None:
    assert solve(V(split=False), model(split=False), place()).problem.schedule.times == (8, 8, 8, 1)
    assert solve(V(), model(split=False), place()).problem.schedule.times == (8, 8, 8, 1)


def test_without_a_profile_nothing_is_chosen() -> None:
    for schedule in (V(), V(memory_limit=1)):
        solution = planner_of(schedule).solve(Problem(schedule, 4, 8))
        assert solution.problem.schedule == schedule
    assert V().durations == (1, 1, 1, 0)
    assert V(memory_limit=1).held(8) == V.least_held(8) == 6


@pytest.mark.parametrize(("p", "k"), [(4, 4), (8, 8), (8, 10)])
def test_measured_durations_make_a_faster_order(p: int, k: int) -> None:
    profile, deployment = model(2 * p, 10e-3, 15e-3, 5e-3), place(p, bandwidth=1e9 / 2)
    solution = solve(V(k), profile, deployment, 2 * p, p)
    plan = replace(solution.plan, layers=tuple(Span(n, n + 1) for n in range(2 * p)))
    measured, equal = (
        evaluate_plan(profile, schedule.program(plan), plan, deployment).seconds
        for schedule in (solution.problem.schedule, V(k))
    )
    assert measured < equal


def test_memory_limit_chooses_the_largest_k_that_fits() -> None:
    profile, p = model(8), 4
    layers = tuple(Span(n, n + 1) for n in range(8))  # the only partition
    peaks = {}
    for k in range(V.least_held(p), 2 * p + 1):
        one = V(k, (8, 10, 6, 1))
        plan = adapt_plan(EvenPlanner().plan(Problem(one, p, 8, 8, layers=layers)), one)
        peaks[k] = max(evaluate_plan(profile, one.program(plan), plan, place()).peak_bytes)
    chosen = []
    for mib in range(10, 18):
        solution = solve(V(memory_limit=f"{mib}MiB"), profile, place())
        schedule = solution.problem.schedule
        assert schedule.memory_limit is None
        assert schedule.times == (8, 10, 6, 1)
        assert schedule.k == max(k for k, peak in peaks.items() if peak <= mib * MIB)
        assert f"The largest k that fits into {mib} MiB is {schedule.k}" in solution.why
        chosen.append(schedule.k)
    assert chosen == sorted(chosen)
    assert {chosen[0], chosen[-1]} == {4, 8}
    assert solve(V(memory_limit="1GiB"), profile, place(memory=10 * MIB)).problem.schedule.k == chosen[0]
    assert solve(V(memory_limit="12MiB"), profile, place(), layers=layers).problem.schedule.k == chosen[2]


def test_refuses_a_memory_limit_below_that_of_v_min() -> None:
    said = (
        r"^v: memory_limit allows 9 MiB on rank \d, and the order with the least memory \(V-Min, k=4\) needs 10 MiB, "
        r"of which 6 MiB are weights and states\. Raise memory_limit"
    )
    for layers in ((), tuple(Span(n, n + 1) for n in range(8))):
        with pytest.raises(PlanError, match=said):
            solve(V(memory_limit="9MiB"), model(), place(), layers=layers)
    with pytest.raises(PlanError, match="7 layers can't fill 8 stages"):
        solve(V(memory_limit="9MiB"), model(7), place())
    with pytest.raises(PlanError, match=r"v: k=4 and memory_limit='9MiB' both limit the memory"):
        V(4, memory_limit="9MiB")
    with pytest.raises(PlanError, match="v: memory_limit: "):
        V(memory_limit="much")


def test_a_run_has_the_settings_that_the_planner_chose() -> None:
    """Check that the decision has the chosen schedule, so that all batches and all ranks use it."""
    request = RunRequest(V(memory_limit="12MiB"), 8, False, "auto")
    plain = request.unmeasured([1] * 8, 4)
    made = request.measured(plain, model(), 8, place())
    assert made.schedule == solve(V(memory_limit="12MiB"), model(), place()).problem.schedule
    assert (
        "Schedule 'v' is ordered for F, I, W and messages with relative times of 8, 10, 6 and 1. The largest k"
        in made.why
    )
    assert made.deployment is not None
    assert {device.memory for device in made.deployment.pipeline.devices} == {12 * MIB}
    plan, order = made.plans().for_rows(8)
    assert order == made.schedule.program(replace(plan, layers=()))
    assert BalancedPlanner(planner_of(V(memory_limit=1))).has_memory_limit


def test_a_memory_limit_that_is_not_checked_is_named() -> None:
    """A run warns if layers are not measured, so that the bytes of the stages are unknown."""
    request = RunRequest(V(memory_limit="12MiB"), 8, False, "auto")
    plain = request.unmeasured([1] * 8, 4)
    said = r"memory_limit of schedule 'v' is not checked, because the layers are not measured: no data\. The run may"
    with pytest.warns(UserWarning, match=said):
        warn_about_memory_limit(replace(plain, why="no data"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_memory_limit(request.measured(plain, model(), 8, place()))
        warn_about_memory_limit(RunRequest(V(4), 8, False, "auto").unmeasured([1] * 8, 4))


@pytest.mark.parametrize(("memory", "k"), [(None, 8), (25 * MIB, 6), (20 * MIB, 4)])
def test_auto_chooses_k_within_memory(memory: int | None, k: int) -> None:
    """Check the choice where no other schedule fits into the two smaller limits."""
    choice = choose_option(model(16), 4, 16, place(memory=memory), microbatches=[16], recompute=[False])
    assert choice.best.schedule.k == k
    assert V(k, (4, 5, 3, 0)) in {option.schedule for option in choice.options}
    whole = [option.label for option in choice.options if option.schedule.name == "v" and not option.schedule.split]
    assert whole == ["v times=(1, 1, 1, 0) split=False"]


def test_variants_of_large_plans() -> None:
    assert {each.k for each in V.list_variants(8, 16)} == {6, 8, 10, 12, 16, None}
    assert {each.k for each in V.list_variants(8, 4)} == {6, 8, None}  # there are only 8 half-stages on a rank
    assert V.list_variants(1, 8) == []
    assert {each.times for each in V.list_variants(32, 64)} == {None, (1, 1, 1, 0)}
    assert {each.times for each in V.list_variants(32, 256)} == {None}
    choice = choose_option(model(160), 80, 40, place(80), microbatches=[40], recompute=[False])
    assert all(option.why_not for option in choice.options if option.schedule.name == "v")
    assert any(
        "plan is too large with this number of micro-batches: " in s and "v times=" in s for s in choice.not_searched
    )
