"""Check the systems that CSP is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Space, Subnets, balanced, space_of
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.systems import SYSTEMS, bsp, by_finished_list, one_by_one, stale_reads
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, adapt_plan
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.zero_bubble import ZeroBubble

STAGES = 4


def same(n: int) -> Subnets:
    """Return subnets that take the same time on all stages."""
    rng = np.random.default_rng(0)
    times = np.full((n, 8), 1_200)
    return Subnets(rng.integers(0, 20, (n, 8)), times, 2 * times, times)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_bubbles_of_theory_on_equal_subnets(m: int) -> None:
    subnets, rules = same(120), Rules(m, overhead=0)
    bulks = {bulk: bsp(bulk).run(subnets, STAGES, rules).bubble for bulk in (4, 8, 1)}
    assert bulks == {bulk: pytest.approx(1 - bulk * m / (bulk * m + STAGES - 1), abs=0.005) for bulk in bulks}
    assert SYSTEMS["BSP"].run(subnets, STAGES, rules).bubble == bulks[4]
    assert SYSTEMS["ASP"].run(subnets, STAGES, rules).bubble == pytest.approx(0, abs=0.005)
    alone = SYSTEMS["without scheduler"].run(subnets, STAGES, rules)
    assert alone.bubble == pytest.approx(1 - m / (m + STAGES - 1), abs=0.005)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubble()])
def test_one_by_one_equals_the_simulator(schedule) -> None:  # type: ignore[no-untyped-def]
    subnets, rules = space_of("NLP.c3").draw(5, 0), Rules(6)
    placed = balanced(subnets, STAGES)
    plan = adapt_plan(Plan.even(STAGES, 6), schedule)
    took = 0
    for y in range(5):
        seconds = {}
        for s in range(STAGES):
            forward, backward = (int(each[y, s]) // 6 for each in (placed.forward, placed.backward))
            seconds[Kind.F, s] = ((1, 1e-9 * (forward + rules.overhead)),)
            seconds[Kind.B, s] = ((1, 1e-9 * (backward + rules.overhead)),)
            seconds |= {(kind, s): ((1, 1e-9 * (backward // 2 + rules.overhead)),) for kind in (Kind.I, Kind.W)}
            seconds[Kind.STEP, s] = ((1, 0.0),)
        took += simulate(schedule.program(plan), plan, CostModel(seconds)).makespan
    assert one_by_one(placed, rules, schedule) == pytest.approx(5e9 / took, rel=1e-12)


def test_1f1b_without_a_flush_is_one_by_one_at_depth_1() -> None:
    subnets, rules = space_of("NLP.c1").draw(40, 0), Rules(4)
    alone = run(balanced(subnets, STAGES), Rules(4, depth=1))
    assert 40e9 / alone.makespan == pytest.approx(one_by_one(balanced(subnets, STAGES), rules, OneFOneB()), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_versions_never_let_a_stale_layer_be_read_and_the_printed_rule_does(seed: int) -> None:
    subnets = Space("small", 16, 12, NLP).draw(150, seed)
    placed, rules = balanced(subnets, STAGES), Rules(2)
    assert stale_reads(run(placed, rules)) == 0
    assert stale_reads(run(placed, rules, by_finished_list(placed, rules.depth))) > 0
    fixed_there = SYSTEMS["without mirroring"].cut(subnets, STAGES)  # correct if layers never change their stage
    assert stale_reads(run(fixed_there, rules, by_finished_list(fixed_there, rules.depth))) == 0
    assert stale_reads(SYSTEMS["ASP"].run(subnets, STAGES, rules)) > 0
    assert stale_reads(SYSTEMS["BSP"].run(subnets, STAGES, rules)) > 0


def test_more_choices_are_faster_and_systems_have_their_order() -> None:
    found = {}
    for name in ("NLP.c0", "NLP.c1", "NLP.c2", "NLP.c3"):
        subnets = space_of(name).draw(200, 0)
        found[name] = {which: system.run(subnets, 8, Rules(4)).throughput for which, system in SYSTEMS.items()}
    speeds = [each["CSP"] for each in found.values()]
    assert speeds == sorted(speeds, reverse=True)
    for each in found.values():
        assert each["without scheduler"] < each["without mirroring"] < each["CSP"]
