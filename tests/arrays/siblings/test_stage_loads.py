"""Tests that the cuts of unlike siblings give all ranks the same amount of work."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from lightning_pipes.arrays.siblings.stage_loads import StageLoads
from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.ir import Span
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.trainer.plan.decision import Decision

STAGES, ROWS, MICROBATCHES = 3, 8, 2


def decide(seconds: list[float], movable: bool = True) -> Decision:
    """Return a decision for layers with these seconds per sample, forward and backward together."""
    layers = tuple(LayerProfile("", ((1, 0.25 * each),), ((1, 0.75 * each),)) for each in seconds)
    cut = (*(Span(n, n + 1) for n in range(STAGES - 1)), Span(STAGES - 1, len(seconds)))
    deployment = Deployment(Cluster((Device(),) * STAGES))
    return Decision(
        OneFOneB(),
        MICROBATCHES,
        False,
        tuple(range(STAGES)),
        cut,
        rows=ROWS,
        profile=ModelProfile(layers),
        deployment=deployment,
        movable=movable,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_busiest_rank_has_the_least_possible_work(seed: int) -> None:
    """Compare the largest work of a rank with the largest work of every possible cut."""
    rng = np.random.default_rng(seed)
    loads, work = StageLoads(), np.zeros(STAGES)
    for index, count in enumerate((7, 4, 9)):
        seconds = rng.uniform(0.5, 2.0, count).tolist()
        decision = decide(seconds)
        cut = loads.level_cut(decision)
        sums = [
            np.array([sum(seconds[a:b]) for a, b in pairwise((0, *at, count))])
            for at in combinations(range(1, count), STAGES - 1)
        ]
        if index:
            own = np.array([sum(seconds[span.start : span.stop]) for span in cut])
            assert max(work + own) == pytest.approx(min(max(work + each) for each in sums))
        else:
            assert cut == decision.layers, "there are no other siblings"
        decision = replace(decision, layers=cut)
        loads.begin_sibling(index, decision)
        work += [sum(seconds[span.start : span.stop]) for span in cut]


def test_a_sibling_that_has_ended_does_not_count() -> None:
    loads = StageLoads()
    loads.begin_sibling(0, decide([9.0, 1.0, 1.0]))
    assert loads.level_cut(decide([1.0] * 9))[0] == Span(0, 1)
    loads.end_sibling(0)
    loads.begin_sibling(1, decide([1.0, 1.0, 9.0]))
    assert loads.level_cut(decide([1.0] * 9))[2] == Span(8, 9)


def test_a_cut_of_the_user_stays() -> None:
    loads = StageLoads()
    loads.begin_sibling(0, decide([9.0, 1.0, 1.0]))
    chosen = decide([1.0] * 9, movable=False)
    assert loads.level_cut(chosen) == chosen.layers
    assert loads.level_cut(replace(chosen, movable=True, profile=None)) == chosen.layers


def test_units_count_as_layers_do() -> None:
    """Check that a sibling whose units were measured counts on the ranks of its stages, until it ends."""
    loads, unmeasured = StageLoads(), replace(decide([1.0] * 9), profile=None)
    assert loads.sum_seconds() == []
    loads.begin_sibling(0, unmeasured)
    assert loads.sum_seconds() == []
    loads.begin_sibling(1, replace(unmeasured, stage_seconds=(2.0, 20.0, 1.0)))
    loads.begin_sibling(2, replace(unmeasured, ranks=(0, 1, 2, 1, 0), stage_seconds=(1.0, 2.0, 4.0, 8.0, 16.0)))
    assert loads.sum_seconds() == [19.0, 30.0, 5.0]
    loads.end_sibling(2)
    assert loads.level_cut(decide([1.0] * 9))[1] == Span(4, 5), "the stage in the middle is busy"


def test_batches_of_unlike_siblings_are_compared_by_their_times() -> None:
    """Check siblings of different layers, siblings with the same layers, and siblings without a measurement.

    The time of a layer does not depend on the number of samples.
    """
    loads, alike = StageLoads(), decide([1.0] * 6)
    loads.begin_sibling(0, decide([1.0] * 3))
    loads.begin_sibling(1, alike)
    loads.begin_sibling(2, replace(alike, rows=1))
    assert loads.compare_batches({0: 10, 1: 1, 2: 4}) == pytest.approx([3.0, 6.0, 6.0])
    assert loads.compare_batches({2: 1, 1: 4}) == [1.0, 4.0]
    loads.begin_sibling(3, replace(alike, profile=None))
    assert loads.compare_batches({0: 10, 3: 1}) == [10.0, 1.0]
