"""A rank is killed while layers move between ranks: the other rank ends soon and names it, and nothing is lost."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from lightning_pipes.engine.watch.fault_points import Fault
from lightning_pipes.testing.ranks import RankResult, run_ranks, scale_timeout, watch_ranks
from tests.trainer.lit import differences
from tests.trainer.relocation.waiting import BATCHES, Waiting, expected, fit, pauses

SOON = 10.0
SAVED = 1
"""The batch after which the last checkpoint is saved."""
WAYS = {
    "buffered": Waiting(saved=(SAVED,), slow=0.03, saves=True),
    "ahead": Waiting(relocation="overlapped", saved=(SAVED,), slow=0.03, saves=True),
    "drain": Waiting(relocation="blocking", saved=(SAVED,), slow=0.03, saves=True),
    "pipedream, buffered": Waiting("pipedream", saved=(SAVED,), slow=0.03, saves=True),
    "pipedream, ahead": Waiting("pipedream", "overlapped", saved=(SAVED,), slow=0.03, saves=True),
}


@dataclass(frozen=True)
class Death:
    """A fault that kills rank `victim` `delay` seconds after it has reached a point for the `nth` time."""

    way: str
    victim: int
    point: str
    delay: float = 0.0
    nth: int = 1


NAMED = [Death("buffered", 0, "move.step"), Death("pipedream, ahead", 1, "move.taken")]
EVERYWHERE = [
    Death("ahead", 1, "move.launched"),
    Death("pipedream, buffered", 1, "move.step", nth=2),
    Death("pipedream, ahead", 0, "move.launched"),
    *(Death(way, n % 2, point) for n, way in enumerate(WAYS) for point in ("move", "move.taken")),
    *(Death(way, 1 - n % 2, point) for n, way in enumerate(WAYS) for point in ("move.arrived", "move.ended")),
]
rng = random.Random(5)
TRAVEL = [way for way in WAYS if way != "drain"]
"""The cases in which layers are in flight for a quarter of a second or more."""
RANDOM = [Death(rng.choice(TRAVEL), rng.randrange(2), "move", rng.uniform(0.0, 0.25)) for _ in range(20)]


def dies(rank: int, way: str, folder: str) -> None:
    """Run the training of a case in which the fault occurs."""
    fit(WAYS[way], 2, folder)


def go_on(rank: int, ways: Sequence[tuple[str, str]]) -> list[Any]:
    """Resume each training from the checkpoint in its folder, and return the results."""
    return [fit(replace(WAYS[way], saved=(), slow=0.0), 2, at, resume=f"{at}/{SAVED}.ckpt") for way, at in ways]


@cache
def after(deaths: tuple[Death, ...]) -> list[tuple[list[RankResult], list[Any]]]:
    """Return the results of the ranks at the end of each fault, and the results of both ranks after resuming."""
    folders = [mkdtemp() for _ in deaths]
    ends = []
    for death, folder in zip(deaths, folders, strict=True):
        fault = Fault(death.victim, death.point, f"{folder}/when", nth=death.nth, delay=death.delay)
        ends.append(watch_ranks(dies, 2, death.way, folder, timeout=60, env=dict(fault.to_environment())))
    assert all(Path(folder, "when").exists() for folder in folders), "a process ended before its fault"
    again = [(death.way, folder) for death, folder in zip(deaths, folders, strict=True)]
    both = run_ranks(go_on, 2, again, timeout=180)
    return [(end, [of[n] for of in both]) for n, end in enumerate(ends)]


def check(deaths: list[Death], number: int) -> None:
    """Check that the other rank ended in time and named the victim, and that the resumed weights are correct."""
    death, (outcomes, ranks) = deaths[number], after(tuple(deaths))[number]
    victim, other = outcomes[death.victim], outcomes[1 - death.victim]
    assert victim.exitcode == -signal.SIGKILL
    assert other.exitcode is not None, "it was still there at the deadline"
    assert f"rank {death.victim} (stage {1 - death.victim}) has ended" in other.error
    assert other.seconds - victim.seconds < scale_timeout(SOON)
    case = WAYS[death.way]
    wanted = expected(case, BATCHES, pauses(case, ranks[0]["moved"]), [0, SAVED + 1])
    for found in ranks:
        assert len(found["moved"]) == 1
        assert differences(found["weights"], wanted["weights"]) == []


@pytest.mark.parametrize("number", range(len(NAMED)))
def test_a_death_on_the_way(number: int) -> None:
    """A rank is killed at two typical points of a move."""
    check(NAMED, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EVERYWHERE)))
def test_a_death_wherever_layers_are(number: int) -> None:
    """A rank is killed at each point of a move, for each kind of training."""
    check(EVERYWHERE, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_a_death_at_any_time(number: int) -> None:
    """A rank is killed at a random time after the start of a move."""
    check(RANDOM, number)
