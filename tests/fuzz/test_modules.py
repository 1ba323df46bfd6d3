"""Tests that random modules give the results of one plain process, or give a reason why they do not.

No module may train other weights without a warning.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.fuzz.module_runs import ALIKE, EQUAL, WARNED, WRONG, Verdict, alone, verdict, verdicts
from tests.fuzz.modules import Made, moving_module, padded_module, random_module, replanned_module, source
from tests.fuzz.pieces import MAKERS, OFF, Base, Piece, is_off
from tests.fuzz.supernets import moving_stream, streamed_module, supernet_module

FEW, MANY, TOGETHER = 20, 400, 50


def look(seeds: Iterable[int], make: Callable[[int], Made] = random_module, least: float = 0.7) -> int:
    """Assert that the verdict on none of these modules is wrong, and that at least the share `least` is equal.

    Returns:
        The number of times that planners moved layers.
    """
    cases = [make(seed) for seed in seeds]
    found = verdicts(cases)
    wrong = [told(made, came) for made, came in zip(cases, found, strict=True) if came.kind == WRONG]
    assert not wrong, "\n\n".join(wrong)
    counts = Counter(came.kind for came in found)
    assert counts[ALIKE] <= len(cases) // 20, counts
    assert counts[EQUAL] >= len(cases) * least, counts
    return sum(came.moved for came in found)


def told(made: Made, came: Verdict) -> str:
    """Return the information that is needed to repeat a wrong module."""
    return f"python -m tests.fuzz.modules --shrink {made.seed}: {made.causes} {came.text}\n{made.base}\n{source(made)}"


@pytest.mark.parametrize(("first", "last"), [(0, FEW), pytest.param(FEW, 100, marks=pytest.mark.slow)])
def test_modules(first, last):
    look(range(first, last))


@pytest.mark.parametrize(
    "first", [20, pytest.param(0, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)]
)
def test_modules_whose_layers_move(first):
    look(range(first, first + (6 if first == 20 else 20)), moving_module)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 26))])
def test_modules_with_padded_labels(first):
    look(range(first, first + (20 if first else 6)), padded_module)


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_modules_whose_planner_has_layers_move(first):
    moved = look(range(first, 30 if first else 4), replanned_module)
    assert moved or not first  # a busy machine hides the slow rank of some seeds


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_streams_whose_planner_has_layers_move(first):
    moved = look(range(first, 30 if first else 4), moving_stream)
    assert moved or not first  # a busy machine hides the slow rank of some seeds


RATES_SET_BEFORE_STEPS, TWO_STEPS = (144, 198), (151,)
"""Seeds of past bugs, in which streams or supernets differed without a warning."""


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 106, 25))])
def test_supernets(first):
    look(range(first, first + 25) if first else (*range(6), *RATES_SET_BEFORE_STEPS, *TWO_STEPS), supernet_module, 0.3)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 106, 25))])
def test_streams_with_old_weights(first):
    look(range(first, first + 25) if first else (*range(6), *RATES_SET_BEFORE_STEPS), streamed_module, 0.6)


@pytest.mark.slow
def test_modules_on_four_ranks():
    look(range(2000, 2010), lambda seed: random_module(seed, ranks=4))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, TOGETHER))
def test_many_modules(first):
    look(range(first, first + TOGETHER))


def test_a_seed_gives_the_same_script():
    assert source(random_module(5)) == source(random_module(5)) != source(random_module(6))


def test_every_kind_of_piece_is_drawn_unless_it_is_switched_off():
    rng, drawn = random.Random(0), {piece.cause for seed in range(600) for piece in random_module(seed).pieces}
    for name, (maker, _) in MAKERS.items():
        causes = {maker(rng, Base(), 0).cause for _ in range(200)}
        assert causes & drawn or all(map(is_off, causes)), name


def test_disabled_modules_have_a_reason():
    """Check that each cause that is switched off has a reason, and is not drawn."""
    assert all(reason for reason in OFF.values())
    drawn = {cause for seed in range(300) for cause in random_module(seed).causes}
    assert not [cause for cause in drawn for pattern in OFF if re.search(pattern, cause)]


def test_a_difference_is_wrong_unless_its_own_cause_warns(tmp_path):
    made = random_module(0)
    (plain,) = alone(made, str(tmp_path))
    plain["warned"] = []
    assert verdict(made, [plain], plain).kind == EQUAL
    weights = {name: value + 1e-7 for name, value in plain["weights"].items()}
    other = plain | {"weights": weights, "warned": ["layer 0 keeps a tensor"]}
    assert verdict(made, [plain, other], plain).kind == WRONG
    allowed = Made(0, made.base, (*made.pieces, Piece("auxiliary", warned="keeps a tensor")))
    assert verdict(allowed, [plain, other], plain).kind == WARNED
    assert verdict(allowed, [plain, other | {"warned": []}], plain).kind == WRONG
    ended = {"error": "PlanError: so", "ours": True, "warned": []}
    assert verdict(made, [plain, ended], plain).kind == WRONG
    assert verdict(made, [ended, ended], plain).kind == WRONG
