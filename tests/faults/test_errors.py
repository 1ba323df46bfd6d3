"""If a rank raises an error, a loss is NaN, or the scheduler sends SIGTERM, all ranks react in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from tests.faults.training import STEP, STEPS, Net, Run, losses, pairs, seconds_after, terminate, train
from tests.trainer import lit
from tests.trainers import make_trainer

RAISED = [(place, victim) for place in ("step", "save", "validation") for victim in (0, 1)]


@pytest.mark.parametrize(("place", "victim"), RAISED)
def test_a_rank_that_raises_is_named_by_all(place, victim, tmp_path):
    outcomes = watch_ranks(train, 2, Run(str(tmp_path), "raise", place, (victim,)), timeout=30)
    assert abs(seconds_after(outcomes, victim)) < scale_timeout(10)
    assert "ValueError: a bad day" in outcomes[victim].error
    other = outcomes[1 - victim].error
    assert f"rank {victim}" in other
    assert f"stage {1 - victim}" in other
    assert "ValueError: a bad day" in other
    if place == "validation":
        assert f"failed in instruction F{1 - victim}[0:2] (forward of stage {1 - victim}" in other


# ---- a loss that is NaN


class Poisoned(lit.Lit):
    """A module whose loss is NaN in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.fit_loop.total_batch_idx == 3:
            loss = loss * torch.nan
        self.log("train_loss", loss)
        return loss


class CountsBad(Callback):
    """A user's callback that stops the training after the second loss that is not finite."""

    def __init__(self) -> None:
        self.bad = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bad += not torch.isfinite(outputs["loss"])
        trainer.should_stop = self.bad == 2


def goes_on() -> dict[str, Any]:
    return {}


def stops_early() -> dict[str, Any]:
    return {"callbacks": [EarlyStopping("train_loss", check_finite=True, patience=9, check_on_train_epoch_end=True)]}


def callback_stops() -> dict[str, Any]:
    return {"callbacks": [CountsBad()]}


REACTIONS = {"goes on": (goes_on, 9), "early stopping": (stops_early, 6), "a callback": (callback_stops, 5)}


def poisoned(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Train with a NaN loss for each reaction in `REACTIONS`, without a pipeline if `ranks` is 1."""
    cases = {}
    for name, (options, _) in REACTIONS.items():
        case = lit.Case(Poisoned, trainer={"max_epochs": 3, **options()}, strategy={"microbatches": 2})
        cases[name] = lit.train(case if ranks > 1 else replace(case, strategy=None), ranks, Path(folder, name))
    return cases


@pytest.fixture(scope="module")
def reactions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, followed by the results of one process without a pipeline."""
    one, two = (str(tmp_path_factory.mktemp(name)) for name in ("one", "two"))
    return [*run_ranks(poisoned, 2, 2, two, timeout=60), *run_ranks(poisoned, 1, 1, one, timeout=60)]


@pytest.mark.parametrize("name", REACTIONS)
def test_a_loss_that_is_not_a_number_means_what_it_means_on_one_process(name, reactions):
    """With a NaN loss, both ranks run the same steps and have the same losses and weights as one process."""
    wanted = reactions[2][name]
    assert wanted["steps"] == REACTIONS[name][1]
    losses = [out["loss"] for out in wanted["outputs"]]
    assert np.isfinite(losses[:3]).all()
    assert np.isnan(losses[3:]).all()
    for found in reactions[:2]:
        assert found[name]["steps"] == wanted["steps"]
        np.testing.assert_allclose([out["loss"] for out in found[name]["outputs"]], losses, rtol=1e-10)
        for key, value in wanted["weights"].items():
            np.testing.assert_allclose(found[name]["weights"][key], value, rtol=1e-10)


def test_anomaly_detection_ends_all(tmp_path):
    """If anomaly detection raises an error on one rank, the other rank names its instruction."""
    outcomes = watch_ranks(train, 2, Run(str(tmp_path), "nan", trainer={"detect_anomaly": True}), timeout=30)
    assert "returned nan values" in outcomes[0].error
    assert "rank 0 failed in instruction B1[0:2] (backward of stage 1" in outcomes[1].error


# ---- SIGTERM


TERMINATED = [("batch end", (0,), STEP), ("epoch end", (1,), 2 * STEPS), ("epoch end", (0, 1), 2 * STEPS)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train, 2, Run(str(folder)), timeout=60)
    return losses(folder)


@pytest.mark.parametrize(("place", "victims", "step"), TERMINATED)
def test_sigterm_leaves_a_whole_checkpoint(place, victims, step, tmp_path, wanted):
    """After SIGTERM, every rank ends after the same batch. A resumed training has the losses of an undisturbed run."""
    saver = OnExceptionCheckpoint(tmp_path, filename="left")
    run = Run(str(tmp_path), "term", place, victims, trainer={"callbacks": [saver]})
    outcomes = watch_ranks(train, 2, run, timeout=30)
    for o in outcomes:
        assert SIGTERMException.__name__ in o.error
        assert o.exitcode == 128 + 15
    checkpoint = torch.load(tmp_path / "left.ckpt", weights_only=False)
    assert checkpoint["global_step"] == step
    assert checkpoint["state_dict"].keys() == Net(str(tmp_path)).state_dict().keys()
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(checkpoint["state_dict"])
    (tmp_path / "left.ckpt").rename(tmp_path / "last.ckpt")
    run_ranks(train, 2, Run(str(tmp_path), resume=True), timeout=30)
    assert losses(tmp_path) == wanted


class TerminatedHere(Callback):
    """A callback that sends SIGTERM to rank 1 in its second validation batch."""

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            terminate()


def validate(rank: int, folder: str) -> int:
    """Validate until SIGTERM ends it, and return the number of completed batches."""
    lit.quiet()
    trainer = make_trainer(strategy=PipelineStrategy(microbatches=2), callbacks=[TerminatedHere()])
    with pytest.raises(SIGTERMException):
        trainer.validate(Net(folder), DataLoader(pairs(0, 64), batch_size=8), verbose=False)
    return trainer.validate_loop.batch_progress.total.completed


def test_sigterm_ends_an_evaluation_on_all_ranks(tmp_path):
    assert run_ranks(validate, 2, str(tmp_path), timeout=30) == [2, 2]
