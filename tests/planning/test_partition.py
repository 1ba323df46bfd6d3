"""Compare partitions with brute force and with results by hand."""

from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from lightning_pipes.ir import Plan, PlanError, Span
from lightning_pipes.planning.partition import (
    StageLoad,
    balanced_partitions,
    even_partition,
    min_max_load,
    partition_at,
    with_layer,
)


def brute_force(weights: list[int], stages: int) -> tuple[int, int]:
    """Return the smallest heaviest load, and the smallest sum of squares of the partitions that reach it."""
    n = len(weights)
    found = []
    for inner in combinations(range(1, n), stages - 1):
        edges = [0, *inner, n]
        loads = [sum(weights[a:b]) for a, b in pairwise(edges)]
        found.append((max(loads), sum(load**2 for load in loads)))
    return min(found)


@pytest.mark.parametrize("seed", range(6))
def test_even_partition_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 50, size=9).tolist()
    for stages in (1, 2, 3, 5, 9):
        spans = even_partition(weights, stages)
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        assert spans[-1].stop == 9
        assert all(s.rows for s in spans)
        loads = [sum(weights[s.start : s.stop]) for s in spans]
        assert (max(loads), sum(load**2 for load in loads)) == brute_force(weights, stages)


def test_weightless_layers_fill_stages():
    assert [s.rows for s in even_partition([0, 0, 0, 0], 4)] == [1, 1, 1, 1]


def test_too_few_layers():
    with pytest.raises(PlanError, match="3 layers can't fill 4 stages, because"):
        even_partition([1, 1, 1], 4)


def test_cut_points():
    assert partition_at([2, 5], 7, 3) == (Span(0, 2), Span(2, 5), Span(5, 7))
    assert partition_at([0, 3, 3, 7], 7, 5) == (Span(0, 0), Span(0, 3), Span(3, 3), Span(3, 7), Span(7, 7))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [([2], "defines 2 stages, but this run has 3. Give 2 numbers"), ([5, 2], "ascending"), ([2, 8], "ascending")],
)
def test_bad_cut_points(cuts, message):
    with pytest.raises(PlanError, match=message):
        partition_at(cuts, 7, 3)


def test_a_layer_goes_to_the_stage_next_to_its_own():
    plan = Plan.even(3, 2, layers=(Span(0, 2), Span(2, 3), Span(3, 6)))
    assert with_layer(plan, 1, 1).layers == (Span(0, 1), Span(1, 3), Span(3, 6))
    assert with_layer(plan, 2, 0).layers == (Span(0, 3), Span(3, 3), Span(3, 6))
    assert with_layer(plan, 2, 2).layers == (Span(0, 2), Span(2, 2), Span(2, 6))
    assert with_layer(plan, 3, 1).layers == (Span(0, 2), Span(2, 4), Span(4, 6))
    for layer, rank in ((0, 1), (4, 1), (5, 1), (0, 2), (1, 0), (6, 2), (5, 3)):
        with pytest.raises(PlanError, match=f"layer {layer} can't move to rank {rank}"):
            with_layer(plan, layer, rank)


def test_many_stages_take_memory_by_their_layers_not_by_all():
    """Check that the load function is called for small numbers of layers only, and that the result is still exact."""
    rng = np.random.default_rng(0)
    for n, stages in ((60, 40), (60, 5), (61, 60), (30, 1)):
        sums = np.concatenate([[0.0], np.cumsum(rng.uniform(0.1, 4, n))])
        extra = rng.uniform(0, 3, (stages, n + 1))
        asked = []

        def seconds(begin, stop, more=None, sums=sums, asked=asked):
            asked.append(int((stop - begin).max()))
            return sums[stop] - sums[begin] + more[begin]

        def least(begin, stop, sums=sums):
            return sums[stop] - sums[begin]

        loads = [StageLoad(partial(seconds, more=more), least) for more in extra]
        value = np.full((stages + 1, n + 1), np.inf)
        value[0, 0] = 0
        for s in range(stages):
            for j in range(1, n + 1):
                value[s + 1, j] = min(max(value[s, i], sums[j] - sums[i] + extra[s, i]) for i in range(j))
        assert min_max_load(loads, n) == value[stages, n]
        assert max(asked) < n / 2 or stages < 6


def test_no_partition_has_no_heaviest_stage():
    def seconds(begin, stop):
        return np.where(stop - begin < 2, 1.0, np.inf)

    assert min_max_load([StageLoad(seconds)] * 3, 5) == np.inf
    assert balanced_partitions([StageLoad(seconds)] * 3, np.zeros(6)) == []
    assert balanced_partitions([StageLoad(seconds)] * 5, np.zeros(6)) == [tuple(Span(i, i + 1) for i in range(5))]
