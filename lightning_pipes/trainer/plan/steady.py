"""Steps disturbed for a moment by other work on the machine, and the steps that count."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

_WAITED = 0.05
"""The share of a step that no rank may wait for a core, if nobody has disturbed it."""
_LONGER = 2
"""How many times as many turns there are at most where something disturbs them."""
_ENOUGH = 0.25
"""The share of turns that has to be undisturbed: where fewer are, neighbours are always there."""


class Turn(NamedTuple):
    """One step of all ranks.

    Attributes:
        took: nanoseconds.
        waited: of them, how long the rank waited for a core that waited longest.
    """

    took: float
    waited: float


def goes_on(turns: Sequence[Turn], wanted: int) -> bool:
    """Whether there is to be another turn after these: until there are as many as wanted, and a quarter of them was not
    disturbed, but twice as many at most."""
    return len(turns) < wanted or (not _enough(turns) and len(turns) < _LONGER * wanted)


def counting(turns: Sequence[Turn]) -> list[int]:
    """The numbers of the turns that count: those that nobody has disturbed; where neighbours are always there, the half
    that they have disturbed least."""
    if _enough(turns):
        return [number for number, turn in enumerate(turns) if _steady(turn)]
    by_waiting = sorted(range(len(turns)), key=lambda number: turns[number].waited / max(turns[number].took, 1))
    return sorted(by_waiting[: -(-len(turns) // 2)])


def _enough(turns: Sequence[Turn]) -> bool:
    return sum(map(_steady, turns)) >= _ENOUGH * len(turns)


def _steady(turn: Turn) -> bool:
    return turn.waited <= _WAITED * turn.took


def waited_so_far() -> int:
    """Nanoseconds for which this thread could have run, and did not, for want of a core: what others on the machine
    take, and nothing of what it waits for messages. 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1])
    return 0
