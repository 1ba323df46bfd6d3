"""Explorers choose the subnet of each batch. Their answers depend on the number, the seed, and the reported losses.

Every rank asks for numbers in order, from 0.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_pipes.ir import InputError, check_type, short_repr
from lightning_pipes.supernets.subnet import SearchSpace

Choices = tuple[int, ...]


class Explorer(ABC):
    """Chooses subnets by number.

    Attributes:
        space: the search space.
        instant: whether it answers at once, so that no timeout is needed.
    """

    space: SearchSpace
    instant: bool = False

    @abstractmethod
    def choose_subnet(self, number: int) -> Choices:
        """Return the choices of subnet `number`; all results before `results_needed(number)` are reported.

        Raises:
            InputError: there are no more, or what gives them has failed.
        """

    def results_needed(self, number: int) -> int:
        """Return the number of results, of subnets 0, 1, ..., that must be reported before subnet `number` can be
        chosen."""
        return 0

    def report_loss(self, number: int, loss: float) -> None:  # noqa: B027  # most learn nothing from results
        """Record the loss of subnet `number`; losses are reported in the order of numbers."""

    def space_index(self, number: int) -> int:
        """Return the number of the subnet's space, where there are several."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned from results, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that `state_dict` returned."""


class Uniform(Explorer):
    """Draws each choice uniformly, block by block: single path one-shot, SPOS (Guo et al. 2020, arXiv:1904.00420,
    S3.3).

    Args:
        space: to draw from.
        seed: equal seeds give equal subnets, on any machine.
    """

    instant = True

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space, self.seed = check_type("space", space, SearchSpace), check_type("seed", seed, int)

    def choose_subnet(self, number: int) -> Choices:
        return draw_subnet(self.space, f"{self.seed}/{number}")


class FromList(Explorer):
    """Yields the given subnets, in order.

    Args:
        subnets: choices for all blocks of each.
        space: that they are from.
        repeat: begin anew when all were given.

    Raises:
        InputError: there are none, or one is not in the space.
    """

    instant = True

    def __init__(self, subnets: Sequence[Sequence[int]], space: SearchSpace, repeat: bool = False) -> None:
        self.space, self.repeat = check_type("space", space, SearchSpace), check_type("repeat", repeat, bool)
        self._subnets = [self.space.check(subnet) for subnet in check_type("subnets", subnets, Sequence)]
        if not self._subnets:
            raise InputError("a list of subnets is empty; it needs at least one")

    def choose_subnet(self, number: int) -> Choices:
        if number >= len(self._subnets) and not self.repeat:
            raise InputError(
                f"training asks for subnet {number}, and the list ends after {len(self._subnets)}; give one for each "
                "batch of all epochs, or repeat=True, or train for fewer batches"
            )
        return self._subnets[number % len(self._subnets)]


class FromIterable(Explorer):
    """Yields the subnets of your generator. A resumed training asks it again for earlier subnets.

    Args:
        subnets: an iterable of choices for all blocks.
        space: that they are from.
    """

    def __init__(self, subnets: Iterable[Sequence[int]], space: SearchSpace) -> None:
        self.space = check_type("space", space, SearchSpace)
        self._given = 0
        self._producing = as_iterator("subnets", subnets)
        self._latest: Choices = ()

    def choose_subnet(self, number: int) -> Choices:
        while self._given <= number:
            self._latest = self._next()
        return self._latest

    def _next(self) -> Choices:
        number = self._given
        try:
            found = self.space.check(next(self._producing))
        except StopIteration:
            raise InputError(
                f"training asks for subnet {number}, and what produces subnets has ended; let it give one for each "
                "batch of all epochs, or train for fewer batches"
            ) from None
        except Exception as error:
            raise InputError(
                f"what produces subnets has failed at subnet {number}: {type(error).__name__}: {error}; the batches "
                "before are trained, and a checkpoint resumes there once this is mended"
            ) from error
        self._given += 1
        return found


class RoundRobin(Explorer):
    """Alternates between explorers. Subnets of different spaces share fewer layers, so more of them overlap (NASPipe,
    Zhao et al. 2022, S5.5).

    Args:
        explorers: subnet number n is the next one of explorer n modulo their number.

    Raises:
        InputError: there are none, or their spaces have other numbers of blocks.
    """

    def __init__(self, *explorers: Explorer) -> None:
        for number, each in enumerate(explorers):
            check_type(f"explorers[{number}]", each, Explorer)
        if not explorers or len({len(each.space) for each in explorers}) > 1:
            raise InputError(
                f"explorers of spaces with {[len(each.space) for each in explorers]} blocks can't take turns; all "
                "choose for the blocks of one supernet: take parts of its space, by space.restrict_to({block: "
                "candidates})"
            )
        self._explorers = explorers
        self.instant = all(each.instant for each in explorers)
        merged = zip(*(each.space for each in explorers), strict=True)
        self.space = SearchSpace(tuple(tuple(sorted(set().union(*blocks))) for blocks in merged))

    def choose_subnet(self, number: int) -> Choices:
        explorer, own = self._explorer_of(number)
        return explorer.choose_subnet(own)

    def results_needed(self, number: int) -> int:
        explorer, own = self._explorer_of(number)
        needed = explorer.results_needed(own)
        return (needed - 1) * len(self._explorers) + self.space_index(number) + 1 if needed else 0

    def report_loss(self, number: int, loss: float) -> None:
        explorer, own = self._explorer_of(number)
        explorer.report_loss(own, loss)

    def space_index(self, number: int) -> int:
        return number % len(self._explorers)

    def state_dict(self) -> dict[str, Any]:
        return {"explorers": [each.state_dict() for each in self._explorers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for explorer, own in zip(self._explorers, state["explorers"], strict=True):
            explorer.load_state_dict(own)

    def _explorer_of(self, number: int) -> tuple[Explorer, int]:
        return self._explorers[self.space_index(number)], number // len(self._explorers)


def as_iterator(what: str, value: object) -> Iterator[Any]:
    """Return an iterator over `value`.

    Raises:
        InputError: it has none; a tensor without axes fails late.
    """
    try:
        return iter(check_type(what, value, Iterable))
    except TypeError:
        raise InputError(f"{what} must be an Iterable, got {short_repr(value)}") from None


def draw_subnet(space: SearchSpace, key: str) -> Choices:
    """Draw a subnet; equal keys give equal subnets."""
    return tuple(draw_candidate(candidates, f"{key}/{block}") for block, candidates in enumerate(space))


def draw_candidate(entries: Sequence[int], key: str) -> int:
    """Draw one entry uniformly, by `key`."""
    return entries[hash64(key) % len(entries)]


def hash64(key: str) -> int:
    """Return a 64-bit number that depends on the key alone, equal on all machines."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
