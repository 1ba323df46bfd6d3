"""Tests of schedules that do not flush, compared with one process that trains with equally old weights."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from math import isnan
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.loop.asynchronous import check_trainer_settings
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.watchers import same_batch
from tests.cases import selected_values
from tests.trainer.lit import Lit, LitOutside, LitTied, data, differences, quiet
from tests.trainer.loop.streamed import LitPlateau, Streamed, fit, stale
from tests.trainers import make_trainer


class StopAt(Callback):
    """Requests a stop after one batch, on one rank only."""

    def __init__(self, batch: int, rank: int) -> None:
        self.batch, self.rank = batch, rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            trainer.should_stop = True


def saving(folder: str) -> list[Any]:
    return [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)]


def choosing(folder: str) -> list[Any]:
    options = {"every_n_train_steps": 5, "save_top_k": -1, "monitor": "train_loss_step"}
    return [ModelCheckpoint(folder, filename="{step}", **options)]


def stopping(folder: str) -> list[Any]:
    return [StopAt(2, rank=1)]


CASES = {
    "pipedream on 2": Streamed("pipedream", 2, 1, {"max_epochs": 2}),
    "pipedream on 4": Streamed("pipedream", 4, 1, {"max_epochs": 2, "val_check_interval": 5}),
    "pipedream on 3": Streamed("pipedream", 3, 1, {"max_epochs": 2}),
    "several micro-batches": Streamed("pipedream", 4, 2, {"max_steps": 14}),
    "2bw on 2": Streamed("pipedream_2bw", 2, 2, {"max_epochs": 2}),
    "2bw on 4": Streamed("pipedream_2bw", 4, 4, {"max_steps": 13, "gradient_clip_val": 0.01}),
    "2bw on 1": Streamed("pipedream_2bw", 1, 2, {"max_epochs": 1}),
    "checkpoints": Streamed("pipedream", 2, 1, {"max_epochs": 1}, saving),
    "stopped": Streamed("pipedream", 2, 1, {"max_epochs": 3}, stopping),
    "accumulated": Streamed("pipedream", 3, 1, {"max_epochs": 2, "accumulate_grad_batches": 2}),
    "2bw accumulated": Streamed("pipedream_2bw", 2, 2, {"max_epochs": 1, "accumulate_grad_batches": 3}),
    "clipped": Streamed("pipedream", 3, 1, {"max_epochs": 1, "gradient_clip_val": 0.05}),
    "replicas": Streamed("pipedream", 2, 1, {"max_epochs": 2}, replicas=2),
    "replicas, accumulated": Streamed("pipedream", 2, 2, {"max_epochs": 1, "accumulate_grad_batches": 2}, replicas=2),
}
CASES["metrics"] = Streamed("pipedream", 3, 1, {"max_epochs": 1}, choosing, kind=LitPlateau)
for optimizer in ("adamw", "sgd"):
    CASES[f"predicted, {optimizer}"] = replace(
        CASES["pipedream on 4"], schedule_args={"predict": True}, optimizer=optimizer, options={"max_epochs": 2}
    )
CASES["2bw on 4"].options["gradient_clip_algorithm"] = "value"


def of_rank(rank: int, keys: list[str], folder: str) -> list[Any]:
    return [fit(CASES[key], f"{folder}/{key}") for key in keys]


@cache
def in_a_pipeline(ranks: int) -> dict[str, list[Any]]:
    """Train the selected cases that need this number of ranks, and return the results of all ranks."""
    wanted = {"pipedream on 2", "pipedream on 4", *selected_values(test_parity, "name")}
    keys = [key for key, case in CASES.items() if case.ranks * case.replicas == ranks and key in wanted]
    found = run_ranks(of_rank, ranks, keys, mkdtemp(), timeout=90)
    return {key: [of[n] for of in found] for n, key in enumerate(keys)}


EXPECTED = {  # number of batches, and the batches after which all batches are finished
    "pipedream on 2": (18, {9, 18}),
    "pipedream on 4": (18, {5, 9, 14, 18}),
    "several micro-batches": (14, {9, 14}),
    "predicted, adamw": (18, {9, 18}),
    "predicted, sgd": (18, {9, 18}),
    "2bw on 2": (18, {9, 18}),
    "2bw on 4": (13, {9, 13}),
    "2bw on 1": (9, {9}),
    "checkpoints": (9, {4, 8, 9}),
    "pipedream on 3": (18, {9, 18}),
    "accumulated": (18, {9, 18}),
    "2bw accumulated": (9, {9}),
    "clipped": (9, {9}),
    "metrics": (9, {3, 5, 6, 9}),
    "replicas": (10, {5, 10}),
    "replicas, accumulated": (5, {5}),
    "stopped": (5, {5}),  # requested after batch 2; all ranks know it two batches later
}


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    case, (batches, flushes) = CASES[name], EXPECTED[name]
    wanted = stale(case, batches, flushes)
    ranks = in_a_pipeline(case.ranks * case.replicas)[name]
    if case.replicas == 1:  # each replica returns the losses of its own samples
        assert differences(ranks[0]["losses"], wanted["losses"]) == []  # the last stage has them at once
    for n, found in enumerate(ranks):
        for what in ("weights", "rates", "steps"):
            assert differences(found[what], wanted[what], at=what) == []
        for scores in found["scores"] if name == "metrics" else ():
            assert differences(list(scores.values()), [wanted["losses"][4]]) == []
        assert differences(found["metrics"], ranks[n // case.ranks * case.ranks]["metrics"]) == []
        assert found["validated"] == ranks[0]["validated"]


def test_other_ranks_know_losses_later() -> None:
    """Check that the first stage gets losses three batches later than the last stage, unless a validation follows."""
    first = in_a_pipeline(4)["pipedream on 4"][-1]  # the first stage is on the last rank
    last = in_a_pipeline(4)["pipedream on 4"][0]
    assert [isnan(loss) for loss in first["losses"]] == [True] * 3 + [False] * 15
    assert first["losses"][3] == last["losses"][0]
    assert first["losses"][4] == last["losses"][4]  # a validation follows, so all batches are finished


def compared(rank: int) -> int:
    """Return the number of batches of an epoch that ranks compare, for which each rank waits for the others."""
    quiet()
    fingerprint, seen = same_batch.checksum_batch, []
    same_batch.checksum_batch = lambda batch: seen.append(1) or fingerprint(batch)  # type: ignore[assignment, func-returns-value]
    trainer = make_trainer(strategy=PipelineStrategy("pipedream", microbatches=2), max_epochs=1)
    trainer.fit(Lit().double(), DataLoader(data(8 * 10), batch_size=8))
    return len(seen)


def test_ranks_compare_the_first_batches_only_for_they_would_go_in_step() -> None:
    """Check that ranks stop comparing batches after the first ones, because comparing makes them run in step."""
    assert run_ranks(compared, 2, timeout=60) == [same_batch.N_CHECKED_BATCHES] * 2


def test_validates_where_it_should() -> None:
    assert in_a_pipeline(4)["pipedream on 4"][0]["validated"] == [5, 14]
    assert in_a_pipeline(2)["pipedream on 2"][0]["validated"] == [9, 18]


def resumed(rank: int, folder: str) -> Any:
    case = CASES["checkpoints"]
    fit(case, folder)
    return fit(case, folder, resume=str(Path(folder) / "step=4.ckpt"))


def test_resumes_from_a_checkpoint() -> None:
    """Check a resumed run against a training in one process that flushes where the checkpoint was saved.

    All batches were finished when the checkpoint was saved, so the resumed run must equal the uninterrupted one.
    """
    wanted = stale(CASES["checkpoints"], 9, {4, 8, 9})
    for found in run_ranks(resumed, 2, mkdtemp(), timeout=60):
        assert differences(found["weights"], wanted["weights"]) == []


REFUSED = {
    "outlet.weight": ({}, LitOutside),
    "model.0.weight": ({}, LitTied),
    "accumulate_grad_batches": ({"accumulate_grad_batches": 2}, Lit),
}


def refusals(rank: int) -> list[str]:
    """Return the error of each training that is refused."""
    said = []
    for options, kind in REFUSED.values():
        predict = {"predict": kind is Lit}
        try:
            fit(
                Streamed("pipedream", 2, 1, {"max_epochs": 1, **options}, schedule_args=predict),
                mkdtemp(),
                module=kind(),
            )
            said.append("")
        except PipelineError as error:
            said.append(str(error))
    return said


def test_refuses_what_needs_all_stages_at_one_batch() -> None:
    for said in run_ranks(refusals, 2, timeout=60):
        for what, message in zip(REFUSED, said, strict=True):
            assert what in message
            assert "pipedream" in message
            assert "1f1b" in message or "predict=True" in message


def test_refuses_checkpoints_by_time_that_monitor_a_metric(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=1), monitor="train_loss")
    trainer = make_trainer(devices=1, callbacks=[saving])
    with pytest.raises(PipelineError, match="use every_n_train_steps, or a schedule that flushes"):
        check_trainer_settings(trainer, make_schedule("pipedream"), Grid(1, 2, 0), ())


def failing(rank: int) -> None:
    class Broken(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    fit(Streamed("pipedream", 2, 1, {"max_epochs": 1}), mkdtemp(), module=Broken())


def test_a_failure_ends_all_ranks() -> None:
    with pytest.raises(RanksFailedError, match="on purpose"):
        run_ranks(failing, 2, timeout=30)
