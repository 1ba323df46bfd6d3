"""Check that no partition and no order is faster than its bound, and that the bounds are close to the best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import ClassVar

import numpy as np
import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import Plan, Program, Rule, RulePolicy, Schedule, Span
from lightning_pipes.planning.bounds import least_step, min_fullest_bin, step_bound
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.deep import Deep
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.testing.generators import random_costs, random_plan, uniform
from tests.ir.programs import split


@dataclass(frozen=True)
class LateWeights(Schedule):
    """GPipe that runs all W after all I."""

    name: ClassVar[str] = "late"

    @property
    def splits_backward(self) -> bool:
        return True

    def program(self, plan: Plan) -> Program:
        return split(GPipe().program(replace(plan, split_backward=False)))


@dataclass(frozen=True)
class Anything(RulePolicy):
    """A policy that picks any ready instruction."""

    name: ClassVar[str] = "anything"
    alternate: bool = True

    def rule(self, plan: Plan) -> Rule:
        return Rule(alternate=self.alternate)


SCHEDULES = [GPipe(), KFKB(1), KFKB(2), LateWeights(), Interleaved(2), Interleaved(3)]


def problem(seed: int) -> tuple[ModelProfile, Deployment, int, int]:
    rng = np.random.default_rng(seed)
    layers = []
    for number in range(7):
        fixed, by_row = rng.uniform(0, 2e-3), rng.uniform(1e-4, 2e-3)

        def table(factor: float, fixed=fixed, by_row=by_row) -> tuple[tuple[int, float], ...]:
            return tuple((rows, factor * (fixed + rows * by_row)) for rows in (1, 8))

        layers.append(
            LayerProfile(
                str(number),
                table(1.0),
                table(2.2),
                input_backward=table(1.1),
                weight_backward=table(1.1),
                step=float(rng.uniform(0, 1e-3)),
                gradient_bytes=int(rng.integers(1, 10**8)),
                output=((1, float(rng.integers(1, 10**6))),),
            )
        )
    ranks = int(rng.integers(2, 4))
    devices = tuple(Device(speed=float(rng.choice([0.5, 1.0, 1.5])), host=str(n)) for n in range(2 * ranks))
    links = [Link(1e9, 1e-4), Link(5e7, 5e-3), Link(5e7, 1e-4, burst=3e6, peak=1e9)]
    cluster = Cluster(devices, between=links[rng.integers(3)])
    profile = ModelProfile(tuple(layers), overhead=float(rng.choice([0.0, 1e-3])))
    return profile, Deployment.from_cluster(cluster, ranks, int(rng.integers(1, 3))), ranks, int(rng.integers(2, 12))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{getattr(s, 'stages_per_rank', '')}")
@pytest.mark.parametrize("again", ["", "late", "early", "late some", "early some"])
def test_nothing_beats_the_bound(schedule, again):
    closest = np.inf
    for seed in range(8):
        profile, place, ranks, rows = problem(seed)
        where = schedule.place_stages(ranks)
        if len(where) > len(profile.layers):
            continue
        recompute = (True,) * (len(where) - 1) + (False,) if again else ()
        for m in (1, 3, rows):
            plan = replace(
                Plan.even(len(where), m, rows, ranks=where, recompute=recompute),
                split_backward=isinstance(schedule, LateWeights),
                early_recompute="early" in again,
                kept_microbatches=tuple((s % 3, 3) for s in range(len(where))) if "some" in again else (),
            )
            order = schedule.program(plan)
            n = len(profile.layers)
            every = (
                tuple(Span(a, b) for a, b in pairwise([0, *cuts, n]))
                for cuts in combinations(range(1, n), len(where) - 1)
            )
            best = min(evaluate_plan(profile, order, replace(plan, layers=layers), place).seconds for layers in every)
            bound = step_bound(profile, plan, place)
            assert 0 < bound <= best * (1 + 1e-9)
            closest = min(closest, best / bound)
    assert closest < (1.3 if isinstance(schedule, Interleaved) else 1.1)


def test_uniform_stages_reach_the_bound():
    layer = LayerProfile("layer", ((1, 1e-3),), ((1, 2e-3),), step=5e-4)
    plan = Plan.even(4, 16)
    bound = step_bound(ModelProfile((layer,) * 8), plan, Deployment(Cluster((Device(),) * 4)))
    # The STEP of one layer counts, although the first stage has two layers.
    assert bound == pytest.approx((16 + 3) * 6e-3 + 5e-4)


def test_more_stages_than_layers():
    layer = LayerProfile("layer", ((1, 1e-3),), ((1, 2e-3),))
    assert step_bound(ModelProfile((layer,) * 3), Plan.even(4, 4), Deployment(Cluster((Device(),) * 4))) == np.inf


def test_the_fullest_bin():
    rng = np.random.default_rng(0)
    for _ in range(50):
        items = rng.uniform(0, 1, 7)
        fullest = min(
            max(sum(items[k] for k in range(7) if code // 3**k % 3 == b) for b in range(3)) for code in range(3**7)
        )
        assert min_fullest_bin(items, 3) <= fullest + 1e-12
    assert min_fullest_bin(np.ones(194), 64) == 4
    assert min_fullest_bin(np.array([5.0, 1, 1, 1]), 2) == 5


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
def test_no_order_takes_less_than_the_least_step(unequal, split_backward):
    closest = np.inf
    for seed in range(60):
        plan = random_plan(seed, unequal=unequal, split_backward=split_backward)
        if seed % 3 == 0:
            again = (True,) * (plan.n_stages - 1) + (False,)
            plan = replace(plan, recompute=again, early_recompute=seed % 2 == 0)
        buckets = [Link(1e9), Link(1e9, burst=20, peak=1e10), Link(1e9, latency=7e-9, wire="one")]
        costs = replace(random_costs(plan, seed), link=buckets[seed % 3], overhead=seed % 4 * 1e-9)
        late = replace(plan, early_recompute=False)
        orders = [simulate(policy, late, costs).program() for policy in (Anything(), Anything(alternate=False))]
        if not unequal and not split_backward:
            orders += [schedule.program(plan) for schedule in (GPipe(), KFKB(1), KFKB(2), Deep(3))]
        best = min(makespan(order, plan, costs) for order in orders)
        bound = least_step(plan, costs)
        assert 0 < bound <= best
        closest = min(closest, best / bound)
    assert closest < 1.01


def test_a_warm_up_that_is_long_enough_takes_the_least_step():
    plan, costs = uniform(4, 24, f=20, b=40, link=20, latency=3)
    assert makespan(Deep(3).program(plan), plan, costs) == least_step(plan, costs) == (24 + 3) * 60 + 6 * 23
    assert least_step(plan, replace(costs, overhead=1e-9)) == (24 + 3) * 62 + 6 * 23
    busy, costs = uniform(4, 24, f=2, b=4, link=20, latency=3)
    assert least_step(busy, costs) == 4 * 6 + 6 * 23 + 23 * 20


def test_what_has_no_least_step():
    plan, costs = uniform(4, 8, f=20, b=40, ranks=(0, 1, 0, 1))
    assert least_step(plan, costs) == 0
    plan, costs = uniform(4, 8, f=20, b=40)
    assert least_step(replace(plan, batches=2), costs) == 0
