"""Tests that a pipeline gives, bit by bit, the weights, statistics and losses of one subnet after another."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from lightning_pipes.strategies.csp import CSP
from lightning_pipes.supernets import FromIterable
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.supernets import nets
from tests.supernets.nets import BLOCKS, WARNED, after, alone, fit, plain, supernet

SHORT, LONG = 20, 250
"""Numbers of subnets in each of two epochs."""
SHARED = ["sequential", "delayed", "frozen", "per_choice"]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the folders of runs in a place that pytest clears."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def in_turn(rank: int, ranks: int, folder: str) -> list[dict[str, Any]]:
    """Run several trainings in the same processes, because starting processes takes most of the time.

    They share layers in different ways. The second training is resumed in the middle of its second epoch, and the third
    one uses an evolution, which learns from losses.
    """
    saved = fit(rank, ranks, "delayed", SHORT, folder, every=30)
    resumed = fit(rank, ranks, "delayed", SHORT, folder, f"{folder}/step=30.ckpt", every=30)
    frozen = fit(rank, ranks, "frozen", SHORT, folder)
    assert not WARNED
    sequential = fit(rank, ranks, "sequential", SHORT, folder)
    assert len(WARNED) == (rank == 0)
    return [sequential, frozen, saved, resumed]


def test_two_stages_train_as_one_process() -> None:
    for sequential, frozen, saved, resumed in run_ranks(in_turn, 2, 2, mkdtemp(), timeout=120):
        assert sequential == plain("sequential", SHORT)
        assert frozen == plain("frozen", SHORT)
        assert saved == plain("delayed", SHORT, (30,))
        assert resumed == after(saved, 30)
    assert plain("delayed", SHORT)["losses"] != plain("sequential", SHORT)["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("shared", SHARED)
def test_many_subnets_on_any_number_of_stages(shared: str, stages: int) -> None:
    wanted = plain(shared, LONG)
    for found in run_ranks(fit, stages, stages, shared, LONG, mkdtemp(), timeout=500):
        assert found == wanted
    assert len(wanted["losses"]) == 2 * LONG


def weights(stages: int, schedule: str | None = None, bulk: int = 0) -> dict[str, str]:
    """Return the weights after forty subnets."""
    args = ("sequential", SHORT, mkdtemp(), None, -1, False, None, schedule, bulk)
    found: list[dict[str, Any]] = run_ranks(fit, stages, stages, *args, timeout=120)
    assert all(each == found[0] for each in found)
    return found[0]["weights"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_asynchronous_and_bulk_synchronous_training_depend_on_stages() -> None:
    """Check on which numbers of stages the weights depend.

    With PipeDream, and with bulks as large as the number of stages, the weights on 2 and on 4 stages differ. With one
    subnet after another, and with bulks of one size, they are equal. These two results differ from each other.
    """
    assert weights(2, "pipedream") != weights(4, "pipedream")
    assert weights(2, bulk=2) != weights(4, bulk=4)
    assert weights(2, bulk=4) == weights(4, bulk=4) != weights(2, bulk=1)
    assert weights(2) == weights(4) == plain("sequential", SHORT)["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_a_validation_ends_all_before_it(stages: int) -> None:
    """Check that a validation waits for all earlier subnets, so that later ones read their weights."""
    args = ("delayed", SHORT, mkdtemp(), None, -1, False, None, None, 0, None, 7)
    for found in run_ranks(fit, stages, stages, *args, timeout=120):
        assert found == plain("delayed", SHORT, (7, 14, 27, 34))


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["sequential", "frozen"])
def test_a_flush_after_each_subnet_is_one_after_another_too(shared: str) -> None:
    """Check that a schedule with a flush after each subnet gives the same weights.

    An evolution gets all losses there, too.
    """
    args = (shared, SHORT, mkdtemp(), None, -1, False, None, "1f1b")
    for found in run_ranks(fit, 2, 2, *args, timeout=120):
        assert (found["weights"], found["told"]) == (plain(shared, SHORT)["weights"], 2 * SHORT)


@pytest.mark.slow
def test_failure_of_a_subnet_producer_on_one_rank() -> None:
    outcomes = watch_ranks(failing, 2, mkdtemp(), timeout=60)
    assert "the iterable of subnets has failed at subnet 11: OSError: the line is down" in outcomes[0].error
    assert "rank 0" in outcomes[1].error


def failing(rank: int, folder: str) -> None:
    """Train with subnets from a source that fails on rank 0."""
    nets.explorer = lambda shared: FromIterable(lines(rank), supernet(shared).space)
    fit(rank, 2, "sequential", SHORT, folder)


def lines(rank: int) -> Iterator[tuple[int, ...]]:
    """Yield choices, and fail at subnet 11 on rank 0."""
    for number in range(2 * SHORT):
        if number == 11 and rank == 0:
            raise OSError("the line is down")
        yield (number % 3,) * BLOCKS


@pytest.mark.parametrize(
    ("stages", "shared", "how"),
    [(1, "sequential", {}), (2, "delayed", {"split_backward": True}), (2, "sequential", {"balanced": True})],
)
def test_replicas_average_gradients_batch_by_batch(stages: int, shared: str, how: dict[str, bool]) -> None:
    """Check that two replicas give, bit by bit, the result of one process that averages their gradients.

    The result does not depend on the number of stages. Each replica has its own batches and dropout, and the first
    replica determines the statistics of norms.
    """
    wanted = alone(shared, 2 * SHORT, replicas=2)
    args = (shared, 2 * SHORT, mkdtemp(), None, -1, False, None, CSP(depth=8, **how), 0, None, None, nets.Lit, False)
    ranks = 2 * stages
    for rank, found in enumerate(run_ranks(fit, ranks, ranks, *args, {"data_parallel": 2}, timeout=120)):
        assert found["weights"] == wanted["weights"]
        assert found["losses"] == {n: losses[rank // stages] for n, losses in wanted["losses"].items()}


SPLIT = CSP(depth=8, split_backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("shared", "recompute"), [*((each, False) for each in SHARED), ("sequential", True)])
def test_a_split_backward_on_any_number_of_stages(shared: str, recompute: bool, stages: int) -> None:
    args = (shared, SHORT, mkdtemp(), None, -1, recompute, None, SPLIT)
    for found in run_ranks(fit, stages, stages, *args, timeout=200):
        assert found == plain(shared, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
def test_recomputed(shared: str) -> None:
    """Check that layers that recompute their activations give the results of one process."""
    for found in run_ranks(fit, 2, 2, shared, SHORT, mkdtemp(), None, -1, True, timeout=120):
        assert found == plain(shared, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 1)])
def test_resumes_on_another_number_of_stages(shared: str, first: int, then: int) -> None:
    folder, wanted = mkdtemp(), plain(shared, SHORT, (30,))
    run_ranks(fit, first, first, shared, SHORT, folder, None, -1, False, 30, timeout=120)
    saved = f"{folder}/step=30.ckpt"
    for found in run_ranks(fit, then, then, shared, SHORT, folder, saved, -1, False, 30, timeout=120):
        assert found == after(wanted, 30)


@pytest.mark.slow
def test_resumes_after_a_rank_was_killed() -> None:
    folder, wanted = mkdtemp(), plain("delayed", SHORT, (30,))
    outcomes = watch_ranks(fit, 2, 2, "delayed", SHORT, folder, None, 34, False, 30, timeout=120)
    assert "exit code -9" in outcomes[0].error
    saved = f"{folder}/step=30.ckpt"
    for found in run_ranks(fit, 2, 2, "delayed", SHORT, folder, saved, -1, False, 30, timeout=120):
        assert found == after(wanted, 30)
