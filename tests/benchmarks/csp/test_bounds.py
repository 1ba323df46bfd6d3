"""Check that no order is faster than the bounds, and that some cases reach them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Placed, Space, Subnets, balanced, fixed
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.systems import least_bubble, released
from tests.cases import for_each


def drawn(seed: int) -> Subnets:
    rng = np.random.default_rng(seed)
    forward, backward, swap = (rng.integers(1, 30, (25, 8)) for _ in range(3))
    return Subnets(rng.integers(0, 3 + seed % 5, (25, 8)), forward, backward, swap)


@for_each("cut", [balanced, fixed])
@for_each("seed", range(8))
def test_no_subnet_steps_sooner(seed: int, cut) -> None:  # type: ignore[no-untyped-def]
    placed = cut(drawn(seed), 4)
    for depth in (2, 30):
        rules = Rules(1 + seed % 4, depth, overhead=seed % 3, message=4 * (seed % 2), moving=seed % 4)
        assert (run(placed, rules).backwards[1].max(axis=2) >= released(placed, rules)).all()


def longest(placed: Placed, rules: Rules) -> list[list[int]]:
    """Return the same bound for one micro-batch, as the longest chain of dependent computations."""
    forward, backward = placed.forward + rules.overhead, placed.backward + rules.overhead
    last = placed.stages - 1

    @cache
    def end(kind: str, y: int, s: int) -> int:
        if kind == "B":
            before = end("B", y, s + 1) if s < last else end("F", y, s)
            return before + int(backward[y, s])
        begin = end("F", y, s - 1) if s else 0
        for b in range(placed.cuts[y, s], placed.cuts[y, s + 1]):
            users = [x for x in range(y) if placed.subnets.choices[x, b] == placed.subnets.choices[y, b]]
            if users:
                x, at = users[-1], int(placed.stage_of[users[-1], b])
                moving = 0 if at == s else rules.moving * int(placed.subnets.swap[x, b])
                begin = max(begin, end("B", x, at) + moving)
        return begin + int(forward[y, s])

    return [[end("B", y, s) for s in range(last + 1)] for y in range(len(placed.subnets))]


@pytest.mark.parametrize("seed", range(5))
def test_is_the_longest_chain_for_one_microbatch(seed: int) -> None:
    placed = balanced(drawn(seed), 4)
    rules = Rules(1, overhead=seed, moving=seed)
    assert released(placed, rules).tolist() == longest(placed, rules)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_subnets_that_share_every_layer_reach_it(m: int) -> None:
    placed = balanced(Space("same", 8, 1, NLP[:1]).draw(12, 0), 4)
    rules = Rules(m, overhead=0)
    ran = run(placed, rules)
    assert ran.makespan == released(placed, rules).max()
    assert least_bubble(placed, rules) == pytest.approx(1 - m / (m + 3))


def test_subnets_that_share_nothing_need_not_idle() -> None:
    n = 200
    times = np.full((n, 4), 1000)
    placed = fixed(Subnets(np.tile(np.arange(n)[:, None], (1, 4)), times, 2 * times, times), 4)
    assert least_bubble(placed, Rules(overhead=0)) == 0
