"""Tests that a hook on one rank has ended before other ranks reach the next hook, also in an array."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.siblings import connections
from lightning_pipes.arrays.siblings.connections import has_purpose
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.request import RunRequest
from tests.arrays.jobs import LAST, Net
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

HOOKS = {
    "prepare_data": "setup",
    "setup": "configure_model",
    "on_fit_start": "val_dataloader",
    "train_dataloader": "on_train_start",
    "val_dataloader": "on_validation_start",
}
"""The next hook behind a barrier, by the hook before it. Lightning itself has a barrier after prepare_data, too."""
PATIENCE = 0.5
"""Seconds in which a rank gets from one hook to the next if no barrier holds it."""


def fit(rank: int, writes: str, folder: Path) -> bool:
    """Return whether a rank finds in one hook the file that another rank has written in the hook before."""
    written, read = folder / writes, folder / f"{writes} has been read"
    found: list[bool] = []
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(7))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)

    def write(*args: Any, **more: Any) -> Any:
        until = time.monotonic() + PATIENCE
        while rank == LAST and not read.exists() and time.monotonic() < until:
            time.sleep(0.005)
        if rank == LAST:
            written.touch()
        return data

    def look(*args: Any, **more: Any) -> Any:
        found.append(written.exists())
        if rank != LAST:
            read.touch()
        return data

    own = {writes: write, HOOKS[writes]: look}
    module = type("Hooked", (Net,), own)(0.01)
    loaders = {"train_dataloader": data, "val_dataloader": data}
    trainer = make_trainer(strategy=PipelineStrategy("jap"), max_epochs=1)
    trainer.fit(module, **{f"{name}s": loader for name, loader in loaders.items() if name not in own})
    return found[0]


def in_an_array(rank: int, folder: str) -> dict[str, Any]:
    """Return the results of `fit` in an array for all hooks, by the first hook."""
    quiet()
    outcomes = JobArray[bool](3).run([partial(fit, rank, writes, Path(folder)) for writes in HOOKS])
    return {[*HOOKS][o.index]: o.error or o.value for o in outcomes}


def test_file_of_a_hook_on_one_rank_is_visible_to_the_others(tmp_path: Path) -> None:
    """Check that the other ranks find the file that the last rank writes in a hook.

    The writer waits until another rank has looked for the file. If barriers hold the other ranks, it waits in vain.
    """
    _, reader = run_ranks(in_an_array, 2, str(tmp_path), timeout=60)
    assert reader == dict.fromkeys(HOOKS, True)


def test_barriers_are_for_what_users_hooks_do() -> None:
    """Check that barriers around hooks are needed only if user code overrides these hooks."""

    class Writes(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None: ...

    options: Any = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    plain, writing = pl.Trainer(**options), pl.Trainer(**options, callbacks=[Writes()])
    for trainer in (plain, writing):
        trainer.strategy._lightning_module = pl.LightningModule()
    assert not has_purpose("post_setup", plain)
    assert has_purpose("post_setup", writing)
    assert not has_purpose("run-stage", writing)
    assert has_purpose("of the user's own", plain)
    assert has_purpose(None, plain)


def test_default_number_of_micro_batches_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(connections, "rank_zero_info", told.append)
    request = RunRequest.from_arguments("1f1b", None, None, False, "parameters", False)
    array = JobArray[Any](4)
    siblings: list[Any] = [SimpleNamespace(index=n, array=array) for n in range(2)]
    found = [connections.with_default_microbatches(request, sibling, 4) for sibling in siblings]
    assert [each.microbatches for each in found] == [2, 2]
    (text,) = told
    assert "cuts each batch into 2 micro-batches." in text
    assert "Set microbatches=2 in both" in text
    named = replace(request, microbatches=3)
    assert connections.with_default_microbatches(named, siblings[0], 4) == named
    assert len(told) == 1
