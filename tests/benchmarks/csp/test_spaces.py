"""Check the search spaces of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, SPACES, Space, space_of
from lightning_pipes.ir import InputError


def test_shapes_of_the_paper() -> None:
    """Check the shapes of table 1."""
    nlp, cv = [96, 72, 48, 24], [48, 24, 12]
    assert [space_of(f"NLP.c{n}").choices for n in range(4)] == nlp
    assert [space_of(f"CV.c{n}").choices for n in (1, 2, 3)] == cv
    assert {(name[:-3], space.blocks) for name, space in SPACES.items()} == {("NLP", 48), ("CV", 32)}


def test_layers_have_the_times_of_their_kinds_in_turn() -> None:
    drawn = Space("small", 2, 6, NLP).subnets(np.array([[0, 1], [3, 5]]))
    assert drawn.forward.tolist() == [[5_000_000, 4_200_000], [7_900_000, 4_200_000]]
    assert drawn.backward.tolist() == [[10_000_000, 5_700_000], [13_800_000, 5_700_000]]
    assert drawn.swap.tolist() == [[1_760_000, 560_000], [2_070_000, 560_000]]


def test_a_seed_gives_the_same_subnets_and_each_choice_is_as_likely() -> None:
    space = space_of("NLP.c3")
    one, same, other = space.draw(500, 1), space.draw(500, 1), space.draw(500, 2)
    assert (one.choices == same.choices).all()
    assert (one.choices != other.choices).any()
    counts = np.bincount(one.choices.ravel(), minlength=24)
    assert abs(counts - 1000).max() < 160  # five standard deviations


def test_last_and_next_user_of_a_layer() -> None:
    drawn = Space("small", 3, 4, NLP).draw(40, seed=3)
    for y in range(40):
        for block in range(3):
            mine = drawn.choices[y, block]
            before = [x for x in range(y) if drawn.choices[x, block] == mine]
            later = [x for x in range(y + 1, 40) if drawn.choices[x, block] == mine]
            assert drawn.last_user[y, block] == (before[-1] if before else -1)
            assert drawn.next_user[y, block] == (later[0] if later else -1)


def test_refuses_invalid_spaces() -> None:
    with pytest.raises(InputError, match=r"no space 'NLP.c9'; there are NLP.c0"):
        space_of("NLP.c9")
    with pytest.raises(InputError, match="blocks of space x"):
        Space("x", 0, 3, NLP)
    with pytest.raises(InputError, match="needs a kind of layer"):
        Space("x", 1, 3, ())
