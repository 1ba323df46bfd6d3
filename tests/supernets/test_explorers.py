"""Tests for the order in which explorers choose subnets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.supernets import (
    Evolution,
    Explorer,
    FromIterable,
    FromList,
    RoundRobin,
    SearchSpace,
    Subnet,
    SubnetStream,
    Uniform,
)

SPACE = SearchSpace.from_sizes([4, 3, 5])


def taken(explorer: Explorer, count: int) -> list[tuple[int, ...]]:
    return [subnet.choices for _, subnet in zip(range(count), SubnetStream(explorer), strict=False)]


def test_uniform_is_the_same_everywhere_and_fair() -> None:
    """Check that uniform choices depend only on the seed, and that all candidates are equally frequent."""
    found = taken(Uniform(SPACE, seed=1), 6000)
    assert found[:3] == [(1, 2, 3), (1, 0, 2), (3, 2, 2)]  # these values must never change
    assert found[:50] == taken(Uniform(SPACE, seed=1), 50) != taken(Uniform(SPACE, seed=2), 50)
    for block, offered in enumerate(SPACE):
        counts = Counter(choices[block] for choices in found)
        assert counts.keys() == {*offered}
        for count in counts.values():  # five standard deviations
            p = 1 / len(offered)
            assert abs(count - 6000 * p) < 5 * (6000 * p * (1 - p)) ** 0.5


def test_list_ends_or_begins_again() -> None:
    """Check that a list of subnets repeats if requested, and raises an error at its end otherwise."""
    given = [(0, 0, 0), (1, 2, 4)]
    assert taken(FromList(given, SPACE, repeat=True), 3) == [*given, given[0]]
    with pytest.raises(InputError, match="training asks for subnet 2, and the list ends after 2"):
        taken(FromList(given, SPACE), 3)


@pytest.mark.parametrize(
    ("given", "said"), [([], "a list of subnets is empty"), ([(0, 0, 5)], "candidate 5 of block 2, which has")]
)
def test_refuses_lists(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        FromList(given, SPACE)


def ending() -> Iterator[tuple[int, ...]]:
    yield (0, 0, 0)
    yield (1, 1, 1)


def failing() -> Iterator[tuple[int, ...]]:
    yield from ending()
    raise OSError("the line is down")


def wrong() -> Iterator[tuple[int, ...]]:
    yield from ending()
    yield (0, 3, 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ending, "training requested subnet 2, but the iterable of subnets has ended"),
        (failing, "has failed at subnet 2: OSError: the line is down"),
        (wrong, "candidate 3 of block 1"),
    ],
)
def test_producer_that_ends_or_fails_reports_the_position(source: Any, said: str) -> None:
    """Check the errors of a source of subnets that ends, fails, or yields a wrong choice."""
    stream = SubnetStream(FromIterable(source(), SPACE))
    assert [next(stream).choices for _ in range(2)] == [*ending()]
    with pytest.raises(InputError, match=said):
        next(stream)


def test_several_take_turns() -> None:
    """Check that several explorers choose subnets in turns."""
    low, high = SPACE.restrict_to({0: (0, 1), 2: (0, 1)}), SPACE.restrict_to({0: (2, 3), 2: (2, 3, 4)})
    both = RoundRobin(Uniform(low, 1), Evolution(high, population=2, parents=1))
    assert both.space.blocks == SPACE.blocks
    stream = SubnetStream(both)
    found: list[Subnet] = []
    for number in range(12):
        subnet = next(stream)
        assert (subnet.id, subnet.space) == (number, number % 2)
        (low, high)[number % 2].check(subnet.choices)
        stream.report_loss(subnet, float(number))
        found.append(subnet)
    assert [both.results_needed(n) for n in range(10)] == [0, 0, 0, 0, 0, 4, 0, 4, 0, 8]
    assert [s.choices for s in found[::2]] == taken(Uniform(low, 1), 6)
    with pytest.raises(InputError, match=r"\[3, 1\] blocks can't take turns"):
        RoundRobin(Uniform(SPACE), Uniform(SearchSpace.from_sizes([2])))
