"""Tests of studies of arrays whose trials choose the depth of a model, and then the width of each layer."""

from __future__ import annotations

import logging
import os
import re
import warnings
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from optuna.trial import BaseTrial, TrialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import JobArray, MemorySwap, OptunaPruning, PipelineStrategy, optimize_array
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

BUDGET = 400_000
"""Bytes on each device for weights and optimizers. Two states of any trial but one have room, wherever it is cut."""
TOO_LARGE = 4
"""The number of the trial for which the budget has no room."""
PARAMETERS = [
    {"depth": 2, "width 0": 16, "width 1": 8},
    {"depth": 3, "width 0": 24, "width 1": 8, "width 2": 16},
    {"depth": 12, **{f"width {n}": 16 + 8 * (n % 2) for n in range(12)}},
    {"depth": 5, **{f"width {n}": 8 for n in range(5)}},
    {"depth": 2, "width 0": 160, "width 1": 160},
]
"""The parameters of the first trials. Later trials are sampled."""


class Net(pl.LightningModule):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        sizes = [6, *widths]
        blocks = [nn.Sequential(nn.Linear(a, b), nn.Dropout(0.1), nn.Tanh()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*blocks, nn.Linear(widths[-1], 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(widths: list[int], by_units: bool) -> float:
    """Train a model with these widths, cut in layers or by units, and return the validation loss."""
    pl.seed_everything(3, verbose=False)
    x = torch.randn(40, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    strategy = PipelineStrategy("jap", microbatches=2, module="" if by_units else None)
    trainer = make_trainer(
        devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=2, callbacks=[OptunaPruning()]
    )
    trainer.fit(Net(widths), DataLoader(data, 10, shuffle=True), DataLoader(data, 20))
    return float(trainer.callback_metrics["val_loss"])


def list_widths(trial: BaseTrial) -> list[int]:
    return [trial.suggest_int(f"width {n}", 8, 160, step=8) for n in range(trial.suggest_int("depth", 2, 12))]


class Small(optuna.samplers.RandomSampler):
    """A sampler whose widths are small, except for those of enqueued trials."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        value = super().sample_independent(study, trial, name, distribution)
        return value if name == "depth" else 8 + value % 24 // 8 * 8


def run_study(rank: int) -> tuple[list[Any], list[float], list[str], int]:
    """Run a study.

    Returns:
        The trials, the losses of the finished trials alone, the errors, and the bytes that were moved to the device.
    """
    quiet()
    warnings.filterwarnings("ignore")
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study, errors = optuna.create_study(sampler=Small(seed=1), pruner=pruner), list[str]()
    for parameters in PARAMETERS:
        study.enqueue_trial(parameters)

    def objective(trial: BaseTrial) -> float:
        try:
            return fit(list_widths(trial), by_units=trial.number % 2 == 1)
        except PlanError as error:
            errors.append(str(error))
            raise

    memory = MemorySwap(BUDGET, slots=2)
    memory._poison = True
    study = optimize_array(study, objective, 8, JobArray(3, memory=memory))
    done = study.get_trials(states=(TrialState.COMPLETE,))
    alone = [fit([t.params[f"width {n}"] for n in range(t.params["depth"])], by_units=t.number % 2 == 1) for t in done]
    trials = [(t.number, t.state.name, t.params, t.values) for t in study.trials]
    return trials, alone, errors, memory.statistics.bytes_in


def test_depth_and_the_width_of_each_layer() -> None:
    """Check that trials of different depths and widths have the losses that they have alone.

    Every other trial is cut by units. Trials from the fourth on join late, some are pruned, states take turns on the
    device, and the trial for which the device has no room fails alone.
    """
    results = run_ranks(run_study, 2, timeout=120)
    errors = [error for _, _, told, _ in results for error in told]
    for trials, alone, _, moved in results:
        assert trials == results[0][0]
        states = [state for _, state, *_ in trials]
        assert states.count("FAIL") == 1
        assert states[TOO_LARGE] == "FAIL"
        assert states.count("PRUNED") > 0
        assert [values[0] for _, state, _, values in trials if state == "COMPLETE"] == alone
        assert {state for number, state, *_ in trials if number % 2} >= {"COMPLETE"}, "of units"
        for _, _, parameters, _ in trials:
            assert set(parameters) == {"depth", *(f"width {n}" for n in range(parameters["depth"]))}
        assert moved > 0
    told = rf"sibling {TOO_LARGE} has a state of \d+ bytes, but device_bytes={BUDGET} has no room for two states"
    assert any(re.match(told, error) for error in errors), errors
