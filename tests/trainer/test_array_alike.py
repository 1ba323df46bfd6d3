"""Tests of job arrays whose ranks act differently: the array ends with a clear message, and no rank waits forever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.siblings.shared import SharedConnections
from lightning_pipes.arrays.siblings.sibling import RETURN_SECONDS, Sibling
from lightning_pipes.arrays.siblings.sibling_board import Failure, PeerStore, Return
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.optimizers.optimizers import check_same_settings, settings_of
from tests.arrays.jobs import Job, told_text
from tests.trainer.lit import quiet


def fails_before_fit(rank: int, victim: int, job: Job) -> Any:
    if rank == victim:
        raise FileNotFoundError("no such file")
    return job()


def returns_before_fit(rank: int, job: Job) -> Any:
    return job() if rank == 0 else None


def fits_again(rank: int, job: Job) -> Any:
    """Run the job on both ranks, and a second time on rank 0 only."""
    job()
    return job() if rank == 0 else None


CASES: dict[str, Callable[[int], list[Callable[[], Any]]]] = {
    "fails first": lambda rank: [partial(fails_before_fit, rank, 1, Job(0)), Job(1, epochs=1)],
    "all fail": lambda rank: [*(partial(fails_before_fit, rank, 0, Job(n)) for n in range(3)), Job(3, epochs=1)],
    "returns": lambda rank: [Job(0), partial(returns_before_fit, rank, Job(1)), Job(2)],
    "returns first": lambda rank: [partial(returns_before_fit, rank, Job(0)), Job(1)],
    "fits again": lambda rank: [Job(0), partial(fits_again, rank, Job(1)), Job(2)],
    "fewer jobs": lambda rank: [Job(0, epochs=1), Job(1, epochs=1), Job(2, epochs=1)][: 3 - rank],
    "other size": lambda rank: [Job(0), Job(1)],
    "other order": lambda rank: [Job(0), Job(1)][:: 1 - 2 * rank],
}


def told(rank: int, case: str) -> tuple[list[tuple[int, str]], str]:
    """Return the indices and error messages of the siblings, and the error message of the array."""
    quiet()
    found: list[tuple[int, str]] = []
    try:
        size = 2 + rank if case == "other size" else 2
        found.extend((o.index, told_text(o.error)) for o in JobArray[Any](size).run(CASES[case](rank)))
    except PipelineError as error:
        return found, told_text(error)
    return found, ""


@pytest.mark.parametrize(("case", "victim"), [("fails first", 1), ("all fail", 0)])
def test_one_that_fails_on_a_rank_before_any_rank_trains_ends_alone(case: str, victim: int) -> None:
    """A sibling that fails on one rank before training fails on both ranks, and the last sibling completes."""
    for rank, (siblings, error) in enumerate(run_ranks(told, 2, case, timeout=60)):
        assert not error
        *failed, last = [text for _, text in sorted(siblings)]
        assert not last
        expected = "" if rank == victim else f"failed on rank {victim}: "
        assert all(f"{expected}FileNotFoundError: no such file" in text for text in failed)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("returns", "sibling 1 of the array has returned on rank 1, in its turn 1, but continues here, in its turn 1"),
        ("returns first", "sibling 0 of the array has returned on rank 1, in its turn 1, but continues here"),
        ("fits again", "sibling 1 of the array has returned on rank 1, in its turn"),
        ("fewer jobs", "rank 1 has 2 jobs for the array, but rank 0 has begun another one"),
    ],
)
def test_ranks_that_go_apart_end_the_array(case: str, says: str) -> None:
    """The array ends with an error on both ranks if one rank returns from a job early or has fewer jobs."""
    (_, zero), (_, one) = run_ranks(told, 2, case, timeout=60)
    assert says in zero
    assert says in one


def test_sizes_and_orders_that_differ_fail_every_sibling() -> None:
    """Every sibling fails if the ranks have different array sizes, or their jobs in different orders."""
    for siblings, error in run_ranks(told, 2, "other size", timeout=60):
        assert "the array has size 2 on rank 0, 3 on rank 1" in error
        assert len(siblings) == 2
        assert all("the array has size 2 on rank 0, 3 on rank 1" in text for _, text in siblings)
    for siblings, error in run_ranks(told, 2, "other order", timeout=60):
        assert not error
        assert "PipelineStrategy has different arguments on rank 1: seed=1, rank 0 0" in dict(siblings)[0]
        assert "give a job array its jobs in the same order" in dict(siblings)[1]


def test_job_that_is_not_a_function() -> None:
    with pytest.raises(PlanError, match="job 1 of the array is None"):
        list(JobArray[Any](2).run([lambda: 1, None, lambda: 2]))  # type: ignore[list-item]


def other_cuts(rank: int) -> list[str]:
    """Run three siblings, the second of them with another cut, and return the texts of their errors."""
    quiet()

    return [
        told_text(o.error) for o in JobArray[Any](2).run([Job(n, epochs=1, partition=(1 + n % 2,)) for n in range(3)])
    ]


def test_siblings_may_have_cuts_of_their_own() -> None:
    assert run_ranks(other_cuts, 2, timeout=60) == [["", "", ""]] * 2


@dataclass(frozen=True)
class Connections:
    """A stand-in for a control."""

    name: str


def test_connections_that_were_left_on_some_ranks_only_are_given_up() -> None:
    """Connections that only one rank has returned are not used again.

    A sibling that fails on one rank at its very end has returned its connections on this rank only.
    """
    made: list[str] = []

    def make(name: str) -> Callable[[], Any]:
        def control() -> Any:
            made.append(name)
            return Connections(f"{name}{made.count(name)}")

        return control

    def meet() -> list[Any]:
        descriptions = [each.describe_free_controls(2) for each in ranks]
        return [each.take_control(descriptions, make(name)) for each, name in zip(ranks, "ab", strict=True)]

    ranks = SharedConnections(), SharedConnections()
    first, second = meet(), meet()
    assert [c.name for c in (*first, *second)] == ["a1", "b1", "a2", "b2"]
    ranks[0].return_control(first[0])  # the other rank does not return its control
    for shared, control in zip(ranks, second, strict=True):
        shared.return_control(control)
    assert [c.name for c in (*meet(), *meet())] == ["a2", "b2", "a3", "b3"]


class Store(dict[str, bytes]):
    """The methods of a c10d store that a board uses, on a dict."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value if isinstance(value, bytes) else str(value).encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.get(key, b"") == expected.encode():
            self.set(key, desired)
        return self.get(key, b"")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def boards() -> tuple[PeerStore, PeerStore]:
    """Return the boards of two ranks, one of which had posted a value and news before it was opened."""
    store, one, two = Store(), PeerStore(), PeerStore()
    one.post_value("early", "word")
    one.post_news(Failure(3, 1, "ValueError: x"))
    for rank, board in enumerate((one, two)):
        watch: Any = SimpleNamespace(sub_store=lambda: store)
        board.open(watch, rank, 2)
    return one, two


def test_what_was_told_before_there_is_a_board_is_told_then() -> None:
    """Values and news that were posted before a board is opened reach the other rank when it is opened."""
    one, two = boards()
    assert two.has_posted("early", 0)
    two.post_value("early", "too")
    assert two.values("early") == ["word", "too"]
    assert list(two.read_news()) == [(0, Failure(3, 1, "sibling 3 failed on rank 0: ValueError: x"))]
    assert list(two.read_news()) == []
    assert list(one.read_news()) == []
    alone = PeerStore()
    nobody: Any = None
    alone.open(nobody, 0, 1)
    alone.post_value("word")
    assert alone.have_all_posted("word")


def test_news_of_a_sibling_that_begins_later_is_kept() -> None:
    """News of a failed sibling from a rank that is ahead takes effect when this rank begins the sibling."""
    array = JobArray[Any](2)
    *_, array.shared.board = boards()
    array._handle_news(0.0)
    array._started = 4
    array._running[3] = sibling = Sibling(3, lambda: None, array, {})
    sibling.begin_turn()
    array._handle_news(1.0)
    assert sibling.is_failing


def test_going_on_after_a_return_elsewhere() -> None:
    """A sibling that has returned on rank 1 may continue here until `RETURN_SECONDS` have passed.

    It raises an error after this time, in a later turn, or at a later meeting.
    """
    sibling = Sibling[Any](0, lambda: None, JobArray[Any](2), {})
    sibling.begin_turn()
    sibling.handle_news(1, Return(0, 1, 0), 0.0)
    sibling._meetings = 1
    sibling.handle_news(1, Return(0, 1, 1), RETURN_SECONDS - 1)
    for news, seconds in ((Return(0, 1, 0), 0.0), (Return(0, 0, 1), 0.0), (Return(0, 1, 1), RETURN_SECONDS + 1)):
        with pytest.raises(PlanError, match="has returned on rank 1"):
            sibling.handle_news(1, news, seconds)


def test_settings_of_optimizers() -> None:
    """Settings of optimizers that differ between ranks are reported with both values."""

    def made(lr: float, **more: Any) -> dict[str, str]:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}]
        return settings_of([torch.optim.SGD(groups, lr=lr, **more)])

    check_same_settings([made(0.1), made(0.1)], [0, 1])
    with pytest.raises(PipelineError, match=r"SGD 0, group 0, lr is 0.1 on rank 0, 0.2 on rank 1"):
        check_same_settings([made(0.1), made(0.2)], [0, 1])
    with pytest.raises(PipelineError, match=r"group 1, momentum is 0 on rank 4, 0.9 on rank 5"):
        check_same_settings([{k: v for k, v in made(0.1).items() if "group 1" in k}, made(0.1, momentum=0.9)], [4, 5])
    with pytest.raises(PipelineError, match="nothing on rank 1"):
        check_same_settings([made(0.1), {}], [0, 1])
