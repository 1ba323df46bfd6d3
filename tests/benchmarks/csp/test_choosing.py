"""Check the choice of the number of micro-batches."""

from __future__ import annotations

import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Space, balanced, space_of
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.systems import AS_GOOD, MICROBATCHES, choose
from lightning_pipes.ir import InputError

FEW = (1, 2, 4, 8)
EIGHT = 8


def test_no_other_number_is_much_faster() -> None:
    subnets = Space("small", 16, 24, NLP).draw(80, 0)
    found = choose(subnets, 4, Rules(overhead=500_000), FEW, depths=(2, 8))
    every = {(m, d): run(balanced(subnets, 4), Rules(m, d, overhead=500_000)).throughput for m in FEW for d in (2, 8)}
    assert found.tried == every
    assert found.throughput == every[found[:2]] >= (1 - AS_GOOD) * max(every.values())
    assert all(speed < (1 - AS_GOOD) * max(every.values()) for case, speed in every.items() if case < found[:2])


def test_fixed_costs_make_for_fewer() -> None:
    space = Space("small", 16, 24, NLP)
    chosen = [choose(space.draw(80, 0), 4, Rules(overhead=cost), FEW).microbatches for cost in (0, 10**6, 10**8)]
    assert chosen == sorted(chosen, reverse=True)
    assert (chosen[0], chosen[-1]) == (8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NLP.c1", "NLP.c3", "CV.c1", "CV.c3"])
@pytest.mark.parametrize("stages", [4, 8, 16])
def test_eight_are_nearly_as_fast_as_any(name: str, stages: int) -> None:
    tried = choose(space_of(name), stages, depths=(30,)).tried
    assert tried[EIGHT, 30] >= {4: 0.9, 8: 0.84, 16: 0.77}[stages] * max(tried.values())
    assert set(tried) == {(m, 30) for m in MICROBATCHES}


def test_refuses_nothing_to_choose_from() -> None:
    with pytest.raises(InputError, match="nothing to choose from"):
        choose(space_of("NLP.c1"), 4, microbatches=())
