"""Checks that hooks and steps are called in the same order and with the same arguments as in one process."""

from __future__ import annotations

import functools
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit, data, quiet
from tests.trainers import make_trainer

OF_MODULE = {
    *(name for kind in (CheckpointHooks, DataHooks, ModelHooks) for name in vars(kind) if not name.startswith("_")),
    *("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_callbacks"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
}
OF_CALLBACK = {name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")}


def shown(value: Any) -> Any:
    """Return a description of an argument that can be compared with an argument in another process."""
    if isinstance(value, torch.Tensor):  # requires_grad is left out: in a pipeline, the loss has no graph
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.ndim == 0 and round(float(value), 8)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(shown, value)]
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, (int, float, str, type(None), torch.device)):
        return value
    for kind in (pl.Trainer, pl.LightningModule, LightningOptimizer, torch.optim.Optimizer):
        if isinstance(value, kind):
            return kind.__name__
    return "function" if callable(value) and not isinstance(value, nn.Module) else type(value).__name__


class Recorder(Callback):
    """A callback that records its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(("callback.state_dict", [], {}))
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(("callback.load_state_dict", [shown(state)], {}))


class Recording(Lit):
    """A module that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []


def keep(owner: type, name: str, prefix: str) -> None:
    """Replace a method of a class by one that records its calls."""

    @functools.wraps(getattr(owner, name))
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = name in ("on_save_checkpoint", "on_load_checkpoint")
        given = {key: shown(value) for key, value in kwargs.items()}
        self.calls.append((prefix + name, ["checkpoint"] if checkpoint else list(map(shown, args)), given))
        return getattr(super(owner, self), name)(*args, **kwargs)

    setattr(owner, name, hook)


for _name in OF_MODULE:
    keep(Recording, _name, "")
for _name in OF_CALLBACK:
    keep(Recorder, _name, "callback.")


def calls(devices: int, strategy: Any, folder: str, more: dict[str, Any]) -> list[Any]:
    """Fit, validate, test, predict and resume, and return the recorded calls."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module = Recording().double()

    def trainer(epochs: int) -> pl.Trainer:
        return make_trainer(
            devices=devices,
            strategy=strategy(),
            max_epochs=epochs,
            precision="64-true",
            callbacks=[Recorder(module.calls)],
            **more,
        )

    def loader(rows: int = 22) -> DataLoader[Any]:
        return DataLoader(data(rows), batch_size=8)

    first = trainer(1)
    first.fit(module, loader(), loader(13))
    first.save_checkpoint(f"{folder}/first.ckpt")
    first.validate(module, loader(13), verbose=False)
    first.test(module, loader(13), verbose=False)
    first.predict(module, loader(13))
    trainer(2).fit(module, loader(), loader(13), ckpt_path=f"{folder}/first.ckpt", weights_only=False)
    return module.calls


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "val_check_interval": 2},
}


def pipeline() -> PipelineStrategy:
    """Return a strategy with one micro-batch and an even cut by parameters."""
    return PipelineStrategy(microbatches=1, partition="parameters", check_loss=False)


def on_a_rank(rank: int, folder: str, case: str) -> list[Any]:
    """Return the calls of a case on one of two ranks."""
    return calls(2, pipeline, folder, CASES[case])


def differing(found: list[Any], wanted: list[Any]) -> list[str]:
    """Return descriptions of the first calls that differ.

    A repeated evaluation step counts once because a rank with both the first and the last stage runs the code before
    the layers twice.
    """
    steps = ("validation_step", "test_step", "predict_step")
    found = [call for n, call in enumerate(found) if call[0] not in steps or call != found[n - 1]]
    wrong = [f"{n}: {a} instead of {b}" for n, (a, b) in enumerate(zip_longest(found, wanted)) if a != b]
    return wrong[:5]


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.slow), "clipped, accumulated"])
def test_calls_equal_one_process(case: str, tmp_path: Path) -> None:
    """A pipeline on one device, and the rank of the last stage of two, make the same calls as one process."""
    wanted = calls(1, lambda: "auto", str(tmp_path), CASES[case])
    assert differing(calls(1, pipeline, str(tmp_path), CASES[case]), wanted) == []
    last, _ = run_ranks(on_a_rank, 2, str(tmp_path), case, timeout=120)
    assert differing(last, wanted) == []
