"""Tests for messages between the ranks of an array after a rank or a sibling has failed."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.arrays.siblings.sibling_board import (
    Failure,
    PeerStore,
    SiblingFailure,
    error_from_peer,
    packed_error,
)
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure
from lightning_pipes.testing.ranks import run_ranks
from tests.trainers import make_trainer


class Gone:
    """A store whose host was killed."""

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return ask


def test_a_store_that_has_gone_is_a_peer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the requests of a rank raise PeerFailure after the host of the store was lost."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = FailureWatch(store, 1, 2)
    monkeypatch.setattr(watch, "sub_store", Gone)
    board = PeerStore()
    board.open(watch, 1, 2)
    try:
        board.post_news(Failure(0, 1, "of no use to anybody"))
        board.post_value("ended/0")
        with pytest.raises(PeerFailure, match=r"does not answer \(Connection reset"):
            board.has_posted("ended/0", 0)
        watch.report_lost_peer(0, OSError("closed"))
        for ask in (
            lambda: board.has_posted("ended/0", 0),
            lambda: board.have_all_posted("ended/0"),
            lambda: board.values("room/0"),
            lambda: [*board.read_news()],
        ):
            with pytest.raises(PeerFailure, match="rank 0 has ended"):
                ask()
    finally:
        watch.close()


class DivergedError(Exception):
    """An error that cannot be created from its `args`."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} in step {step}")
        self.step = step


def fail_last(error: Exception) -> None:
    """Raise the error on rank 0. Other ranks wait here until they receive this failure."""
    if int(os.environ["RANK"]) != 0:
        sibling = current_sibling()
        assert sibling is not None
        sibling.wait_until(lambda: False)
    raise error


class Net(pl.LightningModule):
    """A module that raises an error at the place `fails_in`."""

    def __init__(self, fails_in: str) -> None:
        super().__init__()
        self.fails_in = fails_in
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails_in == "training_step" and batch_idx == 1:
            raise DivergedError(1, 0.5)
        loss: torch.Tensor = self.layers(batch[0]).mean()
        if self.fails_in == "loss" and batch_idx == 1:
            raise DivergedError(1, 0.5)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fails_in == "hook" and batch_idx == 1:
            fail_last(DivergedError(1, 0.5))
        if self.fails_in == "one rank" and batch_idx == 1 and self.trainer.global_rank == 0:
            raise DivergedError(1, 0.5)

    def configure_optimizers(self) -> Any:
        if self.fails_in == "configure_optimizers":
            fail_last(DivergedError(1, 0.5))
        return torch.optim.SGD(self.parameters(), lr=0.1)


def job(fails_in: str, survives: bool = False) -> str:
    """Train one sibling, and return its outcome as text."""
    trainer = make_trainer(
        devices=int(os.environ["WORLD_SIZE"]), strategy=PipelineStrategy("jap", microbatches=1), max_epochs=1
    )
    try:
        trainer.fit(Net(fails_in), DataLoader(TensorDataset(torch.ones(12, 2)), 4))
    except DivergedError as error:
        if not survives:
            raise
        return f"diverged in step {error.step}"
    if fails_in == "function":
        fail_last(DivergedError(1, 0.5))
    return "trained"


def tries_again() -> str:
    """Train a sibling that fails on one rank, and then train again in the same sibling."""
    with suppress(DivergedError):
        job("one rank")
    return job("")


PLACES = ["function", "hook", "configure_optimizers", "training_step", "loss", "one rank"]


def all_jobs(rank: int) -> list[str]:
    """Return the results or errors of siblings that fail at all places."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    jobs: list[Callable[[], str]] = [partial(job, place) for place in ["", *PLACES]]
    jobs += [partial(job, place, survives=True) for place in PLACES[1:]]
    jobs += [partial(job, ""), partial(job, ""), partial(job, "one rank", survives=True), tries_again]
    jobs.append(partial(job, ""))
    outcomes = sorted(JobArray[str](3).run(jobs), key=lambda o: o.index)
    return [o.value or f"{type(o.error).__name__}: {o.error}" for o in outcomes]


def test_one_error_on_all_ranks() -> None:
    """Check that all ranks get the same error, even if a rank receives the failure of another one before its own.

    This holds for `except` clauses and for outcomes.
    """
    for found in run_ranks(all_jobs, 2, timeout=60):
        assert found[0] == "trained"
        assert found[1:7] == ["DivergedError: loss 0.5 in step 1"] * 6
        assert found[7:12] == ["diverged in step 1"] * 5
        assert found[12:] == ["trained", "trained", "diverged in step 1", found[-2], "trained"]
        assert found[-2].startswith(
            "InputError: sibling 15 of the array has failed, but its function continues to train"
        )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text", 3),
        KeyError("key"),
        FileNotFoundError(2, "missing", "path"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        json.JSONDecodeError("bad", "{", 1),
        DivergedError(1, 0.5),
    ],
)
def test_an_error_is_the_same_elsewhere(error: Exception) -> None:
    """Check that an error from another rank has the same type, text, arguments and attributes as the original."""
    copy = error_from_peer("rank 1", packed_error(error))
    assert (type(copy), str(copy), copy.args, vars(copy)) == (type(error), str(error), error.args, vars(error))
    assert isinstance(copy.__cause__, SiblingFailure)
    assert str(copy.__cause__) == "rank 1"


def test_errors_that_do_not_travel() -> None:
    class LocalError(Exception):
        pass

    class HoldingError(ValueError):
        def __init__(self) -> None:
            self.what = lambda: None

    for error in (LocalError("text"), HoldingError(), SystemExit(1), KeyboardInterrupt()):
        assert packed_error(error) == b""
    for packed in (b"", b"no pickle"):
        failure = error_from_peer("rank 1", packed)
        assert type(failure) is SiblingFailure
        assert str(failure) == "rank 1"
