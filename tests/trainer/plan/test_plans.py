"""Tests of `Plans`: which planner is asked for a new plan during training, and with which problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.ir import (
    DeadlockError,
    InputError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Policy,
    Program,
    RankView,
    Span,
    add_recomputations,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.partition import with_layer
from lightning_pipes.planning.planner import EvenPlanner, Problem, planner_of
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.plan.request import RunRequest

LAYERS = (Span(0, 4), Span(4, 6))


@dataclass(frozen=True)
class Asked(EvenPlanner):
    """A planner that moves one layer from stage 0 while stage 0 has more than `keeps` layers."""

    keeps: int = 2
    every: int = 5

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        questions.append(problem)
        layers = plan.layers[0]
        return None if layers.rows <= self.keeps else with_layer(plan, layers.stop - 1, plan.ranks[1])


questions: list[Problem] = []


def plans(replanner: Asked | None = Asked()) -> Plans:  # the default is frozen
    questions.clear()
    return Plans(Problem(make_schedule("1f1b"), 2, 1, 2, layers=LAYERS, tied=((0, 1),)), replanner)


def test_planner_that_replans_instead_of_the_schedules_planner() -> None:
    """Check that the given planner replans every five batches, and that without one no plan is due."""
    assert [plans().is_due(batch) for batch in (0, 4, 5, 10, 11)] == [False, False, True, True, False]
    assert not any(plans(None).is_due(batch) for batch in range(20))
    assert plans(None).revise(8, ()) is not None


def test_a_revised_plan_remembers_the_looks_at_those_before() -> None:
    first = plans()
    look, later = (Observation(CostModel.uniform(2, t, 2 * t)) for t in (1.0, 2.0))
    once = first.revise(8, (look,), remaining=9)
    assert once.for_rows(8)[0].layers == (Span(0, 3), Span(3, 6))
    assert once.for_rows(3)[0].layers == once.for_rows(8)[0].layers
    asked = questions[0]
    assert (asked.earlier_observations, asked.observations, asked.costs, asked.remaining) == (
        (),
        (look,),
        look.costs,
        9,
    )
    assert (asked.rows, asked.layers, asked.tied) == (8, LAYERS, ((0, 1),))
    twice = once.revise(8, (look, later))
    seen_of_first = (first.for_rows(8)[0], look)
    assert questions[1].earlier_observations == (seen_of_first,)
    assert questions[1].costs is later.costs
    assert twice.for_rows(8)[0].layers == (Span(0, 2), Span(2, 6))
    assert twice.revise(8, (look,)) is twice
    second = once.for_rows(8)[0]
    assert questions[2].earlier_observations == (seen_of_first, (second, look), (second, later))


def test_another_schedule_is_replanned_by_the_same() -> None:
    other = plans().for_schedule(make_schedule("gpipe"))
    assert other.is_due(5)
    assert other.revise(8, ()).for_rows(8)[0].layers == (Span(0, 3), Span(3, 6))
    assert questions[0].schedule == make_schedule("gpipe")


def test_a_short_batch_is_cut_into_fewer_where_one_sample_is_too_few() -> None:
    found = Plans(Problem(make_schedule("1f1b"), 2, 1, 4, layers=LAYERS, least=2))
    sizes = {rows: [span.rows for span in found.for_rows(rows)[0].spans(Kind.F, 0)] for rows in (1, 3, 5, 7, 8, 9)}
    assert sizes == {1: [1], 3: [3], 5: [2, 3], 7: [2, 2, 3], 8: [2] * 4, 9: [2, 2, 2, 3]}
    wider = found.for_schedule(make_schedule("kfkb", k=2), microbatches=2)
    assert [span.rows for span in wider.for_rows(3)[0].spans(Kind.F, 0)] == [3]


@dataclass(frozen=True)
class Refusing(Policy):
    """A policy that starts nothing once two micro-batches are in flight, so that these are never finished."""

    name: ClassVar[str] = "refusing"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return ready[0] if sum(view.in_flight.values()) < 2 else None


def test_a_policy_that_gets_stuck_is_refused():
    plans = Plans(Problem(Refusing(), 2, 1, 4, layers=(Span(0, 1),) * 2))
    assert plans.for_rows(1)
    with pytest.raises(DeadlockError, match="but refusing picks nothing"):
        plans.for_rows(8)


def test_a_policy_on_stages_of_several_ranks_is_refused():
    """Check that ranks of one stage do not order batches themselves, because they could decide differently."""
    plans = Plans(Problem(make_schedule("csp"), 1, 1, layers=(Span(0, 1),)), degrees=[2])
    with pytest.raises(PlanError, match="ranks of one stage would decide differently"):
        plans.for_rows(8)


def test_the_last_stage_never_recomputes():
    """Check that the last stage never recomputes. It runs the whole step of the user, which logs and counts."""
    plans = Plans(Problem(make_schedule("1f1b"), 3, 1, None, True, (Span(0, 1),) * 3))
    assert plans.microbatches == 6
    plan, order = plans.for_rows(50)
    assert plan.recompute == (True, True, False)
    assert plans.for_rows(50) == (plan, order)
    assert plans.for_rows(3)[0].jobs[0].rows == 3


def test_recomputations_move_to_earlier_bubbles_if_the_devices_have_the_memory() -> None:
    layer = LayerProfile("layer", ((1, 1e-3),), ((1, 2e-3),), saved=((1, 1000.0),), output=((1, 8.0),))
    one_each = tuple(Span(s, s + 1) for s in range(4))

    def first_row(memory: int | None, late: bool = False) -> str:
        deployment = Deployment(Cluster((Device(memory=memory),) * 4))
        known = ModelProfile((layer,) * 4), deployment
        problem = Problem(make_schedule("1f1b"), 4, 1, 8, True, one_each, *known, late_recompute=late)
        order = Plans(problem).for_rows(8)[1]
        assert isinstance(order, Program)
        return order.to_lines()[0]

    assert first_row(10**9).startswith("F0.0 F0.1 F0.2 F0.3 R0.0 R0.1 B0.0")
    assert first_row(None).startswith("F0.0 F0.1 F0.2 F0.3 R0.0 B0.0 F0.4 R0.1")
    assert first_row(10**9, late=True).startswith("F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1")


@pytest.mark.parametrize("late", [False, True])
def test_a_decision_keeps_when_stages_recompute(late: bool) -> None:
    problem = Problem(make_schedule("1f1b"), 2, 4, 4, True, (Span(0, 1), Span(1, 2)), late_recompute=late)
    kept = Decision.from_solution(planner_of(problem.schedule).solve(problem), movable=False).problem()
    assert kept.late_recompute == late
    assert Plans(kept).for_rows(4)[0].early_recompute == (not late)


def test_recomputations_do_not_move_if_the_halves_of_a_backward_were_not_measured() -> None:
    """Check that each R stays before its gradient. Without the seconds of I and W, no wait has a known length."""
    layer = LayerProfile("layer", ((1, 1e-3),), ((1, 2e-3),), saved=((1, 8.0),), gradient_bytes=4)
    known = ModelProfile((layer,) * 2), Deployment(Cluster((Device(memory=10**9),) * 2))
    problem = Problem(make_schedule("zero_bubble"), 2, 1, 4, True, (Span(0, 1), Span(1, 2)), *known)
    plan, order = Plans(problem).for_rows(4)
    assert isinstance(order, Program)
    row = add_recomputations(order, plan).head[0]
    assert all(row[n + 1] == i._replace(kind=Kind.I) for n, i in enumerate(row) if i.kind is Kind.R)
    assert sum(i.kind is Kind.R for i in row) == 4


@pytest.mark.parametrize("wrong", ["early", "", 1, None, [-1], [True], [0, 0], [], b"a", ["0"], {0: True}])
def test_wrong_settings_of_recomputation_are_refused_with_the_right_ones(wrong: Any) -> None:
    with pytest.raises(InputError, match="recompute must be True, False, 'late', 'auto', or a list of the numbers"):
        PipelineStrategy(recompute=wrong)


def test_stages_that_recompute_are_given_by_number() -> None:
    request = RunRequest.from_arguments("1f1b", None, 4, [2, 0], "parameters", False)
    plan, _ = request.unmeasured([1] * 4, 4).plans().for_rows(8)
    assert plan.recompute == (True, False, True, False)
    assert plan.early_recompute
    for stage, ranks, why in (
        (3, 4, "only stages 0 to 2 can recompute. The last stage"),
        (0, 1, "there is only one stage"),
    ):
        request = RunRequest.from_arguments("1f1b", None, 4, [stage], "parameters", False)
        with pytest.raises(PlanError, match=rf"recompute=\[{stage}\] names stage {stage}, .*{why}"):
            request.unmeasured([1] * 4, ranks)


def test_the_chosen_stages_recompute_in_batches_of_any_size_and_after_layers_moved() -> None:
    """Stage 0 of two lacks memory. It also recomputes in small batches, for which memory would be sufficient."""
    layer = LayerProfile("", ((0, 0.0), (1, 1.0)), ((0, 0.0), (1, 2.0)), saved=((0, 0.0), (1, 100.0)))
    deployment = Deployment(Cluster((Device(memory=900),) * 2))
    request = RunRequest.from_arguments("1f1b", None, 4, "auto", "auto", False)
    plain = request.unmeasured([1] * 6, 2)
    assert plain.recompute == "auto"
    assert not plain.plans().for_rows(8)[0].recompute
    made = request.measured(plain, ModelProfile((layer,) * 6), 8, deployment)
    assert made.recompute is True
    assert made.layers == (Span(0, 3), Span(3, 6))
    plans = made.plans()
    assert {plans.for_rows(rows)[0].recompute for rows in (1, 3, 8, 16)} == {(True, False)}
    moved = replace(plans.for_rows(8)[0], layers=(Span(0, 2), Span(2, 6)), recompute=(), early_recompute=False)
    after = plans.for_schedule(make_schedule("1f1b"), given=moved)
    assert after.for_rows(8)[0].layers == moved.layers
    assert {after.for_rows(rows)[0].recompute for rows in (3, 8)} == {(True, False)}
    assert made.cut_anew(ModelProfile((layer,) * 6)).recompute is True


def test_plan_is_the_one_that_the_schedule_requests() -> None:
    plan, order = Plans(Problem(make_schedule("zero_bubble"), 2, 1, 4, True, (Span(0, 1),) * 2)).for_rows(8)
    assert plan.split_backward
    assert isinstance(order, Program)
    assert Kind.W in {i.kind for i in order.iter_instructions()}
    plan, order = Plans(Problem(make_schedule("pipedream"), 2, 1, 1, layers=(Span(0, 1),) * 2)).for_rows(8)
    assert plan.versions == (2, 1)
    assert isinstance(order, Program)
    assert order.is_endless


def test_the_planner_decides_the_micro_batches_that_the_user_leaves_to_it() -> None:
    layers = (Span(0, 1), Span(1, 2))
    assert Plans(Problem(make_schedule("csp"), 2, 1, layers=layers)).microbatches == 1
    assert Plans(Problem(make_schedule("csp"), 2, 1, 3, layers=layers)).microbatches == 3
    default = Plans(Problem(make_schedule("pipedream"), 2, 1, layers=layers))
    adopted = default.for_schedule(make_schedule("csp"))
    assert len(adopted.for_rows(8)[0].spans(Kind.F, 0)) == adopted.microbatches == 1
    assert default.for_schedule(make_schedule("csp"), 2).microbatches == 2
