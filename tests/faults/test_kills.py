"""A rank is killed at each place of a training: all other ranks end soon and name it, and training can be resumed."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_pipes.testing.ranks import RankResult, run_ranks, scale_timeout, watch_ranks
from tests.faults.training import EPOCHS, PLACES, STEPS, Run, losses, seconds_after, train, train_all

SOON = 10.0
TWO = [(place, victim) for place in PLACES for victim in (0, 1)]
FOUR = [(place, 2) for place in PLACES]


@dataclass(frozen=True)
class Death:
    """The results of a run in which a rank was killed, and the losses of all steps after it was resumed on two."""

    outcomes: list[RankResult]
    losses: dict[int, set[str]]


Case = tuple[str, int]


def undisturbed(folder: Path) -> dict[int, set[str]]:
    """Return the losses of a run without a fault."""
    folder.mkdir()
    run_ranks(train, 2, Run(str(folder)), timeout=60)
    return losses(folder)


def deaths(folder: Path, ranks: int, cases: list[Case]) -> dict[Case, Death]:
    """Run all cases, each in separate processes, then resume all of them in the same two processes."""
    found = {}
    for place, victim in cases:
        directory = folder / f"{place}{victim}"
        directory.mkdir()
        found[place, victim] = watch_ranks(train, ranks, Run(str(directory), "kill", place, (victim,)), timeout=40)
    again = [Run(str(folder / f"{place}{victim}"), resume=True) for place, victim in cases]
    run_ranks(train_all, 2, again, timeout=60)
    return {case: Death(found[case], losses(run.directory)) for case, run in zip(cases, again, strict=True)}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Death]:
    return deaths(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Death]:
    return deaths(tmp_path_factory.mktemp("four"), 4, FOUR)


def check(death: Death, place: str, victim: int, wanted: dict[int, set[str]]) -> None:
    """Check that the other ranks ended in time and named the victim, and that the resumed losses are correct."""
    last_rank = len(death.outcomes) - 1
    assert death.outcomes[victim].exitcode == -signal.SIGKILL
    assert seconds_after(death.outcomes, victim) < scale_timeout(SOON)
    for o in death.outcomes:
        assert o.exitcode is not None, "it was still there at the deadline"
        if o.rank != victim:
            assert f"rank {victim} (stage {last_rank - victim}) has ended" in o.error
            waited = ["a collective call"]  # a rank may be in one between the instructions of two batches
            if place in ("forward", "backward", "validation"):
                waited.append("instruction")
            _, *waits = o.error.split("while waiting for ")  # none if the rank noticed it outside of any wait
            assert all(wait.startswith(tuple(waited)) for wait in waits), o.error
    assert wanted.keys() == set(range(EPOCHS * STEPS))
    assert death.losses == wanted


@pytest.mark.parametrize(("place", "victim"), TWO)
def test_one_of_two(place, victim, of_two, wanted):
    check(of_two[place, victim], place, victim, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim"), FOUR)
def test_a_middle_one_of_four(place, victim, of_four, wanted):
    check(of_four[place, victim], place, victim, wanted)
