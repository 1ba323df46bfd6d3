"""Check the order of CSP by hand and against the dependencies of batches."""

from __future__ import annotations

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import (
    STEP,
    B,
    F,
    I,
    InputError,
    LayerUse,
    Plan,
    RankView,
    Span,
    W,
    adapt_plan,
    check_stream,
    unroll_stream,
    verify,
)
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.testing.generators import uniform

LAYERS = (Span(0, 3), Span(3, 6))


def uses(*names: str) -> list[LayerUse]:
    return [LayerUse.from_names(each.split(), LAYERS) for each in names]


def lines(names: list[str], depth: int = 30, microbatches: int = 1) -> list[str]:
    plan, costs = uniform(2, microbatches, f=1, b=2)
    return simulate(CSP(depth), plan, costs, batches=uses(*names)).program().to_lines()


def test_batches_that_share_no_layer_overlap_and_others_wait() -> None:
    """Check the order if batch 2 shares layer 0 with batch 0 and layer 4 with batch 1."""
    assert lines(["0 3", "1 4", "0 4"]) == [
        "F0.0 F0.0@1 B0.0 STEP0 F0.0@2 B0.0@1 STEP0@1 B0.0@2 STEP0@2",
        "F1.0 B1.0 STEP1 F1.0@1 B1.0@1 STEP1@1 F1.0@2 B1.0@2 STEP1@2",
    ]


def test_a_later_batch_goes_first_where_an_earlier_one_waits() -> None:
    assert lines(["0 3", "0 4", "1 5"])[0] == "F0.0 F0.0@2 B0.0 STEP0 F0.0@1 B0.0@2 STEP0@2 B0.0@1 STEP0@1"


def test_looks_ahead_as_far_as_its_depth() -> None:
    assert lines(["0 3", "0 4", "1 5"], depth=2)[0] == "F0.0 B0.0 STEP0 F0.0@1 F0.0@2 B0.0@1 STEP0@1 B0.0@2 STEP0@2"


def test_a_step_comes_before_the_backward_of_an_earlier_batch() -> None:
    """Check the priority of a STEP: other batches wait for it, while no batch on this rank waits for the backward."""
    span = Span(0, 1)
    plan = Plan.even(2, 1)
    view = RankView(0, None, {0: 0})
    ready = [B(0, span, batch=1), STEP(0, batch=2), F(0, span, batch=0)]
    assert CSP().pick(ready, view, plan) == STEP(0, batch=2)
    assert CSP().pick([ready[0], ready[2]], view, plan) == B(0, span, batch=1)
    assert CSP().pick([ready[2]], view, plan) == F(0, span, batch=0)


def test_weight_gradients_wait_until_nothing_else_is_ready_or_somebody_waits_for_them() -> None:
    """Check when weight gradients run: if nothing else is ready, or if a later batch waits for them.

    Batch 2 shares layer 0 with batch 0. The weight gradients of batch 0 precede a forward once all input gradients of
    batch 0 are done.
    """
    spans = Span(0, 1), Span(1, 2)
    policy = CSP(split_backward=True)
    plan = adapt_plan(Plan.even(2, 2), policy)
    first, second = (W(0, span) for span in spans)
    f = F(0, spans[0], batch=1)
    view = RankView(0, None, {0: 2}, dict(enumerate(uses("0 3", "1 4", "0 5"))))
    alone = RankView(0, None, {0: 2}, dict(enumerate(uses("0 3", "1 4", "2 5"))))
    assert policy.pick([I(0, spans[1]), first, f], view, plan) == I(0, spans[1])
    assert policy.pick([first, f], view, plan) == f
    assert policy.pick([first, second, f], view, plan) == first
    assert policy.pick([second, f], view, plan) == second
    assert policy.pick([first, second, f], alone, plan) == f
    assert policy.pick([first, second], alone, plan) == first
    assert policy.pick([second, STEP(0, batch=1), f], view, plan) == STEP(0, batch=1)


def test_a_split_backward_does_what_the_waits_allow_sooner() -> None:
    plan, costs = Plan.even(3, 2), CostModel.uniform(3, 2e-9, 4e-9)
    layers = (Span(0, 3), Span(3, 6), Span(6, 9))
    given = [
        LayerUse.from_names(each.split(), layers) for each in ("0 3 6", "1 4 7", "0 5 8", "2 3 7", "1 5 6", "0 4 8")
    ]
    took = {}
    for split in (False, True):
        policy = CSP(split_backward=split)
        timeline = simulate(policy, adapt_plan(plan, policy), costs, batches=given)
        verify(timeline.program(), unroll_stream(adapt_plan(plan, policy), given, policy.depth))
        took[split] = timeline.makespan
    assert took[True] < took[False]


def test_layers_that_all_share_leave_one_batch_after_another() -> None:
    plan, costs = uniform(4, 3, f=1, b=2)
    one, five = (simulate(CSP(), plan, costs, batches=n).makespan for n in (1, 5))
    assert one == (3 + 4 - 1) * 3
    assert five == 5 * one


@pytest.mark.parametrize("depth", [1, 2, 30])
def test_does_what_the_waits_allow(depth: int) -> None:
    plan, costs = uniform(2, 2, f=1, b=2)
    given = uses("0 3", "1 3", "2 4", "0 1", "5", "2 5", "1 4")
    verify(simulate(CSP(depth), plan, costs, batches=given).program(), unroll_stream(plan, given, depth))


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_refuses_a_depth_that_counts_no_batches(depth: int) -> None:
    with pytest.raises(InputError, match="depth"):
        CSP(depth)


def test_orders_a_stream() -> None:
    check_stream(CSP(), Plan.even(3, 2))
    assert CSP().is_endless
    assert not CSP.list_variants(4, 8)  # a search over schedules only uses schedules that flush
