"""Check an endless policy in virtual time: only batches that share no layers overlap."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import LayerUse, LayerVersion, Plan, PlanError, Policy, Span, unroll_stream, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.testing.generators import random_costs
from tests.cases import for_each
from tests.sim.by_events import ByEvents

LAYERS = (Span(0, 4), Span(4, 8))
PLAN = Plan.even(2, 1, layers=LAYERS)
COSTS = CostModel.uniform(2, 1.0, 2.0)


@dataclass(frozen=True)
class First(Policy):
    """A policy that picks the first entry of `ready`."""

    depth: int = 4
    name: ClassVar[str] = "first"
    flushes: ClassVar[bool] = False

    def pick(self, ready, view, plan):
        return ready[0]


@dataclass(frozen=True)
class Noting(First):
    """The same policy, which also records the batches in flight and the versions that rank 0 observes."""

    seen: ClassVar[list] = []

    def pick(self, ready, view, plan):
        if view.rank == 0:
            self.seen.append((list(view.uses), dict(view.versions)))
        return ready[0]


def use(*names: str) -> LayerUse:
    return LayerUse.from_names(names, LAYERS)


def seconds(uses: list[LayerUse], depth: int = 4) -> float:
    return simulate(First(depth), PLAN, COSTS, batches=uses).makespan / 1e9


def test_batches_that_share_a_layer_wait_for_its_step():
    """Check the seconds of batches that share layers; a single batch takes 1 + 1 + 2 + 2 seconds."""
    assert seconds([use("0", "4")]) == 6
    assert seconds([use("0", "4")] * 3) == 18  # the batches share all layers and run one after another
    # Stage 1 runs F and B of one batch, then of the other, with F0 in between.
    assert seconds([use("0", "4"), use("1", "5")]) == 9
    # The batches share a layer only on stage 1, which is free in time.
    assert seconds([use("0", "4"), use("1", "4")]) == 9
    assert seconds([use("0", "4"), use("0", "5")]) == 12


def test_depth():
    """Check the depth: the slowest stage, stage 1, takes 3 seconds per batch if enough batches are in flight."""
    uses = [use(str(n % 4), str(4 + n % 4)) for n in range(4)]
    assert seconds(uses, depth=1) == 24
    assert seconds(uses, depth=2) < 24
    assert seconds(uses, depth=4) == 1 + 4 * 3 + 2


def test_by_number_all_layers_are_used():
    run = simulate(First(), PLAN, COSTS, batches=3)
    assert run.makespan == 18e9
    assert simulate(First(2), PLAN, COSTS).plan.batches == 2 + 3


@for_each("seed", range(8))
def test_as_by_events_and_verified(seed):
    """Compare the run with a plain simulator of the same plan, and verify its program."""
    rng = random.Random(seed)
    plan = replace(Plan.even(3, 2, layers=(Span(0, 2), Span(2, 4), Span(4, 6))), split_backward=seed % 2 == 1)
    uses = [
        LayerUse.from_names(
            [n for n in "012345" if rng.random() < 0.4], plan.layers, None if rng.random() < 0.7 else []
        )
        for _ in range(7)
    ]
    costs = random_costs(plan, seed)
    run = simulate(First(3), plan, costs, batches=uses)
    assert run.plan == unroll_stream(plan, uses, 3)
    assert sorted(run.events) == sorted(ByEvents(First(3), run.plan, costs, 7).run())
    verify(run.program(), run.plan)


def test_the_policy_sees_versions_and_uses():
    Noting.seen.clear()
    simulate(Noting(2), PLAN, COSTS, batches=[use("0", "4"), use("1", "5"), use("0", "1")])
    assert Noting.seen[0] == ([0, 1], {})
    assert Noting.seen[-1] == ([2], {"0": LayerVersion(1, 0), "1": LayerVersion(1, 1)})
    assert ([1, 2], {"0": LayerVersion(1, 0)}) in Noting.seen


def test_only_endless_policies_are_told_layers():
    for order in (GPipe().program(PLAN), Ready()):
        with pytest.raises(PlanError, match="only for an endless policy"):
            simulate(order, PLAN, COSTS, batches=[use("0")])
    with pytest.raises(PlanError, match="versions"):
        simulate(First(), replace(PLAN, versions=(2, 2)), COSTS)
