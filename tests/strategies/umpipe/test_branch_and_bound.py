"""Compare the bound of all choices that run all forwards first with a search that tries every choice."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from lightning_pipes.strategies.umpipe.branch_and_bound import bound_choices, evolve_choices
from lightning_pipes.strategies.umpipe.fitting import Choices, fit_choices, value_choice
from lightning_pipes.strategies.umpipe.overlapped import Merge
from lightning_pipes.strategies.umpipe.pricing import CutOption

FLUSHED = Merge.ALL_FORWARDS_FIRST


def drawn(seed: int, stages: int, sizes: tuple[int, ...], rows: int) -> Choices:
    """Return random choices in which the time of a forward depends on the backward of its stage, and the reverse."""
    draw = Random(seed)

    def option(f: int, b: int, whole: bool) -> CutOption:
        return CutOption(f, b, draw.randint(1, 30) + f, draw.randint(1, 30) + 2 * b, whole)

    pairs = [(f, b, w) for f, b in product(sizes, sizes) if max(f, b) % min(f, b) == 0 for w in (False, True)]
    every = tuple(tuple(option(*pair) for pair in pairs) for _ in range(stages))
    links = tuple(
        tuple(tuple(CutOption(n, n, t, t) for n in sizes for t in [draw.randint(0, 5)]) for _ in range(2))
        for _ in range(stages - 1)
    )
    return Choices(rows, every, links)  # type: ignore[arg-type]  # two sides each


def best_of_all(choices: Choices) -> int:
    places = choices.kernel_options
    return min(value_choice(choices, FLUSHED, each) for each in product(*(range(len(options)) for options in places)))


@pytest.mark.parametrize("seed", range(6))
def test_against_trying_all(seed: int) -> None:
    """Check that the bound equals the optimum if enough nodes are searched, and never exceeds it if they are few."""
    choices = drawn(seed, 2, (1, 3) if seed % 2 else (2, 4), 6 + seed % 3)
    best = best_of_all(choices)
    assert bound_choices(choices, nodes=10_000).lower_bound == best
    assert bound_choices(choices, nodes=1).lower_bound <= bound_choices(choices, nodes=3).lower_bound <= best


def test_what_bounds_come_from_is_a_good_start() -> None:
    """Check that a descent from the choices behind the bound never makes them worse and often reaches the bound."""
    met = 0
    for seed in range(8):
        choices = drawn(seed, 3, (1, 2, 4, 8), 16)
        found = bound_choices(choices, nodes=200)
        value = fit_choices(choices, FLUSHED, starts=found.starts)[0][0]
        assert value <= min(value_choice(choices, FLUSHED, start) for start in found.starts)
        assert found.lower_bound <= value
        met += found.lower_bound == value
    assert met >= 4


def test_genetic_search_compared_with_the_bound() -> None:
    """Check that the genetic search never gets below the bound, and mostly reaches it.

    In these examples, the times of a stage's forward and backward do not depend on each other.
    """
    met = 0
    for seed in range(8):
        draw = Random(seed)
        stages = []
        for _ in range(3):
            forward, backward = ({n: draw.randint(1, 30) + n for n in (1, 2, 4, 8)} for _ in range(2))
            stages.append(tuple(CutOption(f, b, x, y) for f, x in forward.items() for b, y in backward.items()))
        links = tuple((tuple(CutOption(n, n, 1, 1) for n in (1, 2, 4, 8)),) * 2 for _ in range(2))
        choices = Choices(16, tuple(stages), links)  # type: ignore[arg-type]  # two sides each
        least = bound_choices(choices, nodes=200).lower_bound
        best = min(value_choice(choices, FLUSHED, each) for each in evolve_choices(choices))
        assert best >= least
        met += best == least
    assert met >= 6
