"""Compare the compiled loop with lightning_pipes.sim where it supports the rules, and otherwise with a simple loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.kernel import STREAM
from benchmarks.papers.csp.emulation.spaces import NLP, Placed, Space, Subnets, balanced, fixed
from benchmarks.papers.csp.emulation.stream import Ran, Rules, run
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import InputError, Instruction, Kind, LayerUse, Plan, Span, adapt_plan
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.csp import CSP
from tests.benchmarks.csp.by_hand import by_hand
from tests.cases import for_each
from tests.free_costs import FreeCosts


def subnets(n: int, blocks: int, choices: int, seed: int) -> Subnets:
    """Return subnets with small random times, so that many events happen at the same instant."""
    rng = np.random.default_rng(seed)
    forward, backward, swap = (rng.integers(1, 5, (n, blocks)) for _ in range(3))
    return Subnets(rng.integers(0, choices, (n, blocks)), forward * 4, backward * 4, swap)


def tasks(ran: Ran) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    found = {}
    for kind, (starts, ends) in zip("FBW", ran.tasks, strict=False):
        for (y, s, k), start in np.ndenumerate(starts):
            found[kind, y, s, k] = int(start), int(ends[y, s, k])
    return found


def uses_of(placed: Placed) -> list[LayerUse]:
    layers = [Span(int(a), int(b)) for a, b in zip(placed.cuts[0], placed.cuts[0][1:], strict=False)]
    return [LayerUse.from_names([f"{b}.{c}" for b, c in enumerate(row)], layers) for row in placed.subnets.choices]


@dataclass(frozen=True)
class BySubnet(FreeCosts):
    """Costs that differ between batches."""

    placed: Placed
    rules: Rules
    overhead_ns: int = 0

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        if i.kind is Kind.STEP:
            return 0
        times = self.placed.forward if i.kind is Kind.F else self.placed.backward
        whole = int(times[i.batch, i.stage]) // self.rules.microbatches
        parts = {Kind.I: whole - whole // 2, Kind.W: whole // 2}
        return parts.get(i.kind, whole) + self.rules.overhead

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        return self.rules.message // self.rules.microbatches, self.rules.latency


def as_simulated(placed: Placed, rules: Rules, costs: object) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    policy = CSP(rules.depth, split_backward=rules.split)
    plan = adapt_plan(Plan.even(placed.stages, rules.microbatches), policy)
    timeline = simulate(policy, plan, costs, batches=uses_of(placed))  # type: ignore[arg-type]
    found = {}
    for event in timeline.computations:
        i = event.instruction
        if i.kind is not Kind.STEP:
            found["B" if i.kind is Kind.I else i.kind.name, i.batch, i.stage, i.span.start] = event.start, event.end
    return found


@pytest.mark.parametrize(("m", "depth"), [(1, 30), (2, 3), (3, 1), (4, 5)])
def test_equals_the_simulator_with_equal_stages(m: int, depth: int) -> None:
    drawn = subnets(14, 6, 4, seed=m)
    equal = fixed(Subnets(drawn.choices, *(np.full_like(drawn.forward, 4 * t) for t in (3, 6, 1))), 3)
    rules = Rules(m, depth, overhead=0)
    costs = CostModel.uniform(3, 24e-9 / m, 48e-9 / m)
    assert tasks(run(equal, rules)) == as_simulated(equal, rules, costs)


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_simulator_with_costs_of_each_subnet(seed: int) -> None:
    rules = Rules(1 + seed % 3, (30, 2, 4)[seed % 3], overhead=seed, message=6 * (seed % 2), latency=seed // 2)
    placed = fixed(subnets(12, 7, 3, seed), 3)
    assert tasks(run(placed, rules)) == as_simulated(placed, rules, BySubnet(placed, rules))
    rules = replace(rules, split=True)
    assert tasks(run(placed, rules)) == as_simulated(placed, rules, BySubnet(placed, rules))


CASES: Sequence[Rules] = (
    Rules(1, overhead=0),
    Rules(2, depth=4, overhead=3, moving=5),
    Rules(4, depth=9, message=8, latency=2, overhead=1, moving=3),
    Rules(2, bulk=4, checks=False, overhead=0),
    Rules(1, bulk=3, overhead=2, moving=0),
    Rules(3, bulk=4, checks=False, forwards_first=True, overhead=1),
    Rules(2, checks=False, held=(4, 3, 2, 1), overhead=1),
    Rules(2, held=(3, 3, 2, 2), overhead=1),
    Rules(3, depth=5, overhead=1, split=True),
    Rules(2, checks=False, held=(4, 4, 3, 2), message=4, overhead=2, split=True),
    Rules(2, bulk=3, checks=False, forwards_first=True, overhead=1, split=True),
)


@for_each("cut", [balanced, fixed])
@for_each("rules", CASES)
def test_equals_a_plain_loop(rules: Rules, cut) -> None:  # type: ignore[no-untyped-def]
    placed = cut(subnets(9, 8, 3, seed=rules.microbatches + rules.overhead), 4)
    assert tasks(run(placed, rules)) == by_hand(placed, rules)


@pytest.mark.skipif(STREAM.numba is None, reason="numba is not installed")
def test_the_compiled_loop_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = balanced(subnets(60, 8, 6, seed=1), 4)
    results = []
    for chosen in (STREAM.python, STREAM.numba):
        monkeypatch.setattr(STREAM, "select", lambda tasks, chosen=chosen: chosen)
        results.append(tasks(run(placed, Rules(2, 9, message=4, overhead=1, split=True))))
    assert results[0] == results[1]


def test_the_steady_state_leaves_out_filling_and_draining() -> None:
    """Check subnets without common layers, whose only bubbles are at both ends of the stream."""
    n, stages = 60, 4
    choices = np.tile(np.arange(n)[:, None], (1, 4))
    times = np.full((n, 4), 1000)
    placed = fixed(Subnets(choices, times, 2 * times, times), stages)
    ran = run(placed, Rules(overhead=0))
    assert ran.makespan == (n + stages - 1) * 3000
    assert ran.bubble == 0
    assert ran.throughput == pytest.approx(1e9 / 3000)
    assert run(placed, Rules(1, overhead=500)).lost == pytest.approx(1 - 3000 / 4000)
    flushed = run(placed, Rules(bulk=4, overhead=0))
    assert flushed.bubble == pytest.approx(1 - 4 / (4 + stages - 1))


def test_one_subnet_after_another_has_the_bubble_of_theory() -> None:
    space = Space("same", 8, 1, NLP[:1])
    ran = run(balanced(space.draw(30, 0), 4), Rules(5, overhead=0))
    assert ran.bubble == pytest.approx(1 - 5 / (5 + 4 - 1), abs=1e-6)


def test_refuses_limits_for_other_stages() -> None:
    placed = balanced(subnets(3, 4, 3, 0), 2)
    with pytest.raises(InputError, match="are for 3 stages, the subnets are on 2"):
        run(placed, Rules(held=(1, 1, 1)))
    with pytest.raises(InputError, match="overhead can't be below 0"):
        Rules(overhead=-1)
    with pytest.raises(InputError, match="forwards_first is for bulks"):
        Rules(forwards_first=True)
