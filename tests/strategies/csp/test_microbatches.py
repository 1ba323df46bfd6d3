"""Check the micro-batches of subnets."""

from __future__ import annotations

from lightning_pipes.ir import Kind
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.strategies.csp.schedule import DEFAULT_MICROBATCHES


def test_as_many_on_any_number_of_stages() -> None:
    plans = [solve_plan(Problem(CSP(), ranks, 32)) for ranks in (1, 2, 4, 8)]
    assert {plan.spans(Kind.F, 0) for plan in plans} == {plans[0].spans(Kind.F, 0)}
    assert len(plans[0].spans(Kind.F, 0)) == DEFAULT_MICROBATCHES
    assert [len(solve_plan(Problem(CSP(), 4, rows)).spans(Kind.F, 0)) for rows in (3, 8, 100)] == [1, 1, 1]


def test_keeps_to_what_was_asked_for() -> None:
    assert len(solve_plan(Problem(CSP(), 4, 32, microbatches=3)).spans(Kind.F, 0)) == 3
    assert CSP().make_planner().profile_sizes(32, 4, None) == (16, 32)
    assert CSP().make_planner().profile_sizes(32, 4, 2) == (8, 16)
