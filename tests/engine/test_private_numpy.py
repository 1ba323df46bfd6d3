"""The state of NumPy's global generator equals the state that NumPy returns, after draws, seeds and other changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_pipes.engine import private_numpy as private

set_bit_generator: Any = vars(np.random)["set_bit_generator"]  # missing in the type stubs of NumPy
get_bit_generator: Any = vars(np.random)["get_bit_generator"]


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Restore NumPy's global generator and its state after each test."""
    generator, state = get_bit_generator(), np.random.get_state()
    yield
    set_bit_generator(generator)
    np.random.set_state(state)


def same(a: Any, b: Any) -> bool:
    """Return whether two states of the generator are equal."""
    return a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:]


DRAWS: list[Callable[[], object]] = [
    lambda: None,
    np.random.rand,
    np.random.randn,  # a second call returns the number that the first one has stored
    lambda: np.random.permutation(700),
    lambda: np.random.seed(random.randrange(2**32)),
    lambda: set_bit_generator(np.random.MT19937(random.randrange(2**32))),
]


def test_it_lies_as_known() -> None:
    """The memory of a new generator has the expected layout. Otherwise, results would be correct but slow to obtain."""
    assert private._lies_as_known()


@pytest.mark.parametrize("lies", [True, False])
def test_what_is_told_and_taken_is_numpy_s(lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After random calls, `numpy_state` and `set_numpy_state` agree with NumPy, with and without the known layout."""
    monkeypatch.setattr(private, "_lies_as_known", lambda: lies)
    random.seed(0)
    told = []
    for _ in range(2000):
        random.choice(DRAWS)()
        expected = np.random.get_state()
        found = private.numpy_state()
        assert same(found, expected)
        told.append((found, expected))
        if random.random() < 0.5:
            taken, expected = random.choice(told[-12:])
            private.set_numpy_state(taken)
            assert same(np.random.get_state(), expected)
    assert len(private._raws) <= private._KEPT


def test_one_that_is_no_mersenne_twister() -> None:
    """If the global generator is not a Mersenne Twister, its state is read from NumPy, which warns about it."""
    set_bit_generator(np.random.PCG64(0))
    with pytest.warns(RuntimeWarning, match="MT19937"):
        state = private.numpy_state()
    assert state["bit_generator"] == "PCG64"


def test_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last read state is still valid, neither reading nor setting it calls NumPy."""
    np.random.seed(0)  # an earlier test may have left a stored normal number
    state = private.numpy_state()
    asked: list[str] = []
    monkeypatch.setattr(np.random, "get_state", lambda: asked.append("get"))
    monkeypatch.setattr(np.random, "set_state", lambda state: asked.append("set"))
    assert private.numpy_state() is state
    np.random.random()
    private.set_numpy_state(state)
    assert private.numpy_state() is state
    assert asked == []
