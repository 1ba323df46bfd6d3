"""Compare formulas with random subnets."""

from __future__ import annotations

import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Kind, Space, fixed
from benchmarks.papers.csp.emulation.stream import Rules
from benchmarks.papers.csp.emulation.theory import collisions, forced_bubble, forced_period, least_bubble
from tests.cases import for_each

EQUAL = (Kind("equal", 4.0, 8.0, 0.0),)


def test_collisions_are_those_of_the_birthday_bound() -> None:
    space = Space("small", 3, 5, NLP)
    shared = 0
    for seed in range(4000):
        choices = space.draw(3, seed).choices
        shared += any(len(set(choices[:, block])) < 3 for block in range(3))
    assert shared / 4000 == pytest.approx(collisions(space, 3), abs=0.02)
    assert collisions(space, 1) == 0
    assert collisions(space, 6) == 1


@for_each("m", [1, 2, 4])
@for_each("choices", [24, 48, 96])
def test_shared_layers_force_no_more_than_the_formula(choices: int, m: int) -> None:
    space = Space("equal", 48, choices, EQUAL)
    placed = fixed(space.draw(1000, choices), 8)
    found = least_bubble(placed, Rules(m, overhead=0, moving=0))
    formula = forced_bubble(space, 8, m)
    assert found <= formula
    assert formula <= found + (0.08 if choices == 24 else 0.3)


@for_each("m", [1, 3, 8])
@for_each("stages", [1, 2, 8])
def test_one_choice_leaves_one_subnet_after_another(stages: int, m: int) -> None:
    assert forced_bubble(Space("same", 16, 1, EQUAL), stages, m) == pytest.approx(1 - m / (m + stages - 1), abs=1e-3)


def test_falls_with_choices_and_microbatches() -> None:
    by_choices = [forced_period(Space("equal", 48, c, EQUAL), 8, 2) for c in (12, 24, 48, 96)]
    by_microbatches = [forced_period(Space("equal", 48, 48, EQUAL), 8, m) for m in (1, 2, 4, 8, 16)]
    assert by_choices == sorted(by_choices, reverse=True)
    assert by_microbatches == sorted(by_microbatches, reverse=True)
