"""Compare the cuts of subnets with all possible cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import Subnets, balanced, fixed, space_of
from lightning_pipes.ir import PlanError
from lightning_pipes.planning.partition import balanced_cuts


def subnets(n: int, blocks: int, seed: int, most: int) -> Subnets:
    rng = np.random.default_rng(seed)
    return Subnets(*(rng.integers(0, most, (n, blocks)) for _ in range(4)))


@pytest.mark.parametrize(("blocks", "stages"), [(6, 1), (6, 2), (7, 3), (6, 6), (8, 4)])
def test_the_slowest_stage_is_as_fast_as_of_any_cut(blocks: int, stages: int) -> None:
    drawn = subnets(40, blocks, seed=blocks + stages, most=6)  # with small times, many cuts are equally good
    placed = balanced(drawn, stages)
    for times, cuts in zip(drawn.forward + drawn.backward, placed.cuts, strict=True):
        every = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
        slowest = {c: max(times[a:b].sum() for a, b in pairwise(c)) for c in every}
        got = tuple(map(int, cuts))
        assert slowest[got] == min(slowest.values())
        # Starting from the last cut, every cut is the leftmost of the best cuts for the blocks before it.
        end = blocks
        for stage in range(stages, 1, -1):
            heads = {(*c[:stage], end) for c in every if all(x < end for x in c[:stage])}
            worst = {c: max(times[a:b].sum() for a, b in pairwise(c)) for c in heads}
            end = min(c[stage - 1] for c in heads if worst[c] == min(worst.values()))
            assert got[stage - 1] == end


def test_times_of_stages_are_sums_over_their_blocks() -> None:
    drawn = space_of("NLP.c1").draw(30, seed=1)
    for placed in (balanced(drawn, 8), fixed(drawn, 8)):
        for y in range(30):
            for stage in range(8):
                mine = placed.stage_of[y] == stage
                assert placed.forward[y, stage] == drawn.forward[y, mine].sum()
                assert placed.backward[y, stage] == drawn.backward[y, mine].sum()
                assert mine[placed.cuts[y, stage] : placed.cuts[y, stage + 1]].all()


def test_a_fixed_map_is_the_same_for_all() -> None:
    placed = fixed(space_of("CV.c1").draw(5, seed=0), 8)
    assert (placed.cuts == np.arange(0, 33, 4)).all()


@pytest.mark.parametrize("cut", [balanced, fixed])
def test_refuses_more_stages_than_blocks(cut) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match="6 blocks can't fill 7 stages"):
        cut(subnets(2, 6, 0, 5), 7)


def test_cuts_equal_the_engine() -> None:
    """Compare with the cut of one subnet at a time, in seconds."""
    drawn = space_of("NLP.c3").draw(6, seed=2)
    everywhere = np.ones((8, drawn.blocks), bool)
    for row, times in zip(balanced(drawn, 8).cuts, drawn.forward + drawn.backward, strict=True):
        assert np.array_equal(balanced_cuts([times / 1e9], 8, everywhere)[0], row)
