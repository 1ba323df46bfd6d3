"""Compare each regime with a simulation that advances nanosecond by nanosecond."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_pipes.cost import Cluster, CostModel, Device, Link, Regime
from lightning_pipes.ir import COMPUTE_KINDS, InputError, Kind, lower
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import tiny_plan
from tests.cases import for_each
from tests.sim.ticking import Ticking

ORDERS = [
    (OneFOneB(), tiny_plan(3, 5)),
    (GPipe(), tiny_plan(4, 3)),
    (Interleaved(2), tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
    (Interleaved(2), tiny_plan(6, 3, ranks=(0, 1, 2, 0, 1, 2))),
]


def random_case(order, plan, seed):
    """Return a program, its costs for each operation, and the same durations and latencies as dicts."""
    rng = random.Random(seed)
    program, late = order.program(plan), rng.choice([0, 3, 20])
    sends = [i for row in lower(program, plan).head for i in row if i.kind in (Kind.SF, Kind.SB)]
    takes = {i: rng.randrange(1, 30) for i in program.iter_instructions()}
    takes |= {i: rng.randrange(0 if seed % 2 else 1, 30) for i in sends}
    costs = replace(
        CostModel.uniform(plan.n_stages, 1.0, 1.0, link=Link(latency=late * 1e-9)),
        each={i: t * 1e-9 for i, t in takes.items()},
    )
    return program, costs, takes, dict.fromkeys(sends, late)


@for_each("regime", list(Regime))
@for_each("order", range(len(ORDERS)))
def test_nanosecond_by_nanosecond(regime, order, kernel):
    schedule, plan = ORDERS[order]
    for seed in range(25):
        program, costs, takes, latency = random_case(schedule, plan, seed)
        costs = replace(costs, regime=regime)
        ticking = Ticking(program, plan, takes, latency, blocks=regime.is_blocking, shares=regime.shares_wire)
        timeline = simulate(program, plan, costs)
        assert {e.instruction: e.start for e in timeline.events} == ticking.run()
        assert makespan(program, plan, costs) == timeline.makespan
        assert timeline.regimes == (regime,)


def test_the_worlds_differ_and_none_is_faster_than_asynchronous_links():
    plan = tiny_plan(4, 8)
    program, costs, _, _ = random_case(OneFOneB(), plan, 3)
    took = {regime: makespan(program, plan, replace(costs, regime=regime.value)) for regime in Regime}
    assert len(set(took.values())) == 4
    assert min(took, key=took.get) is Regime.ASYNCHRONOUS


def test_a_link_that_blocks_among_others_that_do_not():
    """Check that rank 0 waits for its messages to leave, and that rank 1 does not."""
    plan = tiny_plan(3, 2)
    slow = Link(1e9)
    costs = CostModel.uniform(3, 2e-9, 2e-9, message_bytes=5, link=slow)
    costs = replace(costs, links={(0, 1): replace(slow, blocking=True)})
    timeline = simulate(GPipe().program(plan), plan, costs)
    forwards = {
        r: [e.start for e in timeline.computations if e.rank == r and e.instruction.kind is Kind.F] for r in (0, 1)
    }
    assert forwards == {0: [0, 7], 1: [7, 14]}
    assert timeline.regimes == (Regime.ASYNCHRONOUS, Regime.BLOCKING)
    assert timeline.regime == "asynchronous links and sends that block"


class TestWhereItIsSaid:
    def test_in_the_title_of_a_drawing(self):
        plan = tiny_plan(2, 2)
        costs = CostModel.uniform(2, 1e-9, 1e-9, message_bytes=1, link=Link(1e9), regime="blocking")
        drawn = simulate(GPipe().program(plan), plan, costs).gantt(20)
        assert drawn.splitlines()[0].endswith(", sends that block")

    def test_links_that_take_no_time_have_none(self):
        plan = tiny_plan(2, 2)
        timeline = simulate(GPipe().program(plan), plan, CostModel.uniform(2, 1e-9, 1e-9, regime="shared"))
        assert timeline.regimes == ()
        assert timeline.regime == "links that take no time"

    def test_what_was_measured_is_of_no_regime(self):
        plan = tiny_plan(2, 2)
        timeline = simulate(GPipe().program(plan), plan, CostModel.uniform(2, 1e-9, 1e-9))
        assert type(timeline).from_events(timeline.events, plan).regime == ""


class TestByName:
    @pytest.mark.parametrize(
        "make",
        [
            lambda name: CostModel.uniform(2, 1, 1, regime=name),
            lambda name: CostModel({}, regime=name),
            lambda name: Cluster((Device(),), regime=name),
        ],
    )
    def test_any_of_them_and_no_other(self, make):
        for regime in Regime:
            assert make(regime.value).regime is regime
        with pytest.raises(InputError, match=r"no regime called 'blockin'\. Did you mean 'blocking'") as caught:
            make("blockin")
        assert all(regime.value in str(caught.value) for regime in Regime)

    def test_regime_of_a_cluster_is_the_regime_of_its_links(self):
        plan = tiny_plan(3, 4)
        for regime in Regime:
            cluster = Cluster((Device(),) * 3, inside=Link(1e9), regime=regime)
            costs = CostModel.uniform(3, 3e-9, 5e-9, message_bytes=4)
            there = replace(costs, links={(a, b): cluster.link_between(a, b) for a, b, _ in plan.directed_links})
            same = replace(costs, link=Link(1e9), regime=regime)
            ended = [simulate(OneFOneB().program(plan), plan, each) for each in (there, same)]
            assert ended[0] == ended[1]
            assert ended[0].regimes == (regime,)

    def test_a_link_that_names_its_wire_keeps_it(self):
        link = Regime.SHARED.apply_to(Link(1e9, wire="card"), 0, 1)
        assert link.wire == "card"


def test_computations_are_computed_once():
    plan = tiny_plan(2, 3)
    program, costs, _, _ = random_case(OneFOneB(), plan, 1)
    timeline = simulate(program, plan, replace(costs, regime="shared"))
    assert sorted(e.instruction for e in timeline.events if e.instruction.kind in COMPUTE_KINDS) == sorted(
        program.iter_instructions()
    )
