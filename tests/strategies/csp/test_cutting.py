"""Compare the cuts of single subnets with the best cut of all."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np

from lightning_pipes.ir import Delayed, LayerUse, Plan, Span
from lightning_pipes.planning.partition import balanced_cuts
from lightning_pipes.strategies.csp import CSP
from tests.cases import for_each


def balanced_cut(costs: list[float], stages: int, pinned: dict[int, int]) -> tuple[Span, ...] | None:
    allowed = np.array([[pinned.get(layer, stage) == stage for layer in range(len(costs))] for stage in range(stages)])
    cuts = balanced_cuts([costs], stages, allowed)[0].tolist()
    return tuple(Span(a, b) for a, b in pairwise(cuts)) if cuts[-1] else None


LAYERS = (Span(0, 2), Span(2, 4), Span(4, 6))


@for_each("seed", range(25))
def test_as_good_as_any(seed: int) -> None:
    rng = random.Random(seed)
    layers, stages = rng.randint(3, 8), rng.randint(1, 3)
    costs = [rng.randint(0, 6) for _ in range(layers)]
    home = [n * stages // layers for n in range(layers)]
    pinned = {n: home[n] for n in range(layers) if rng.random() < 0.3}
    cases = []
    for inner in combinations(range(1, layers), stages - 1):
        spans = [Span(a, b) for a, b in pairwise([0, *inner, layers])]
        if all(spans[stage].start <= n < spans[stage].stop for n, stage in pinned.items()):
            cases.append((max(sum(costs[a:b]) for a, b in spans), inner[::-1], tuple(spans)))
    cut = balanced_cut(costs, stages, pinned)
    assert cut is not None
    best = min(case for case, _, _ in cases)
    assert max(sum(costs[a:b]) for a, b in cut) == best
    if not pinned:
        assert len(cut) == stages


def test_no_cut_where_there_is_none() -> None:
    assert balanced_cut([1.0, 1.0], 3, {}) is None
    assert balanced_cut([1.0, 1.0], 2, {0: 1}) is None


def test_choices_move_and_what_all_use_stays() -> None:
    plan = Plan.even(3, 1, layers=LAYERS)
    costs = {"0": 1.0, "1.0": 1.0, "1.1": 9.0, "2.0": 1.0, "3.0": 1.0, "4.0": 1.0, "5": 1.0}

    def cut(*names: str, delays: dict[str, Delayed] | None = None) -> tuple[int, ...]:
        found = CSP(balanced=True).cut(LayerUse.from_names(names, LAYERS, delays=delays), costs.__getitem__, plan)
        assert found is not None
        return tuple(a for a, _ in found[1:])

    rest = ("2.0", "3.0", "4.0", "5")
    assert cut("0", "1.0", *rest) == (2, 4)
    assert cut("0", "1.1", *rest) == (1, 2)
    assert cut("0", "1.1", *rest, delays={"3.0": Delayed(1)}) == (2, 4)
    assert cut("0", "1.1", "2.0", "3.0", "4.0", "5") == cut("5", "4.0", "3.0", "2.0", "1.1", "0")
    assert not CSP().moves_layers_by_batch
