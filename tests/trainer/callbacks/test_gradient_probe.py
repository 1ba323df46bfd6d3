"""Tests of `GradientProbe` on models whose constants in the theory of stale gradients are known."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import GradientProbe
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.dynpipe import Constants
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import quiet
from tests.trainers import make_trainer


class Quadratic(pl.LightningModule):
    """A model with the loss c |w - x|^2 / 2, averaged over the rows. Its gradient changes c times as much as w."""

    def __init__(self, curvature: float = 3.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.curvature = curvature

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = 0.5 * self.curvature * (self.w - batch[0]).square().sum(1).mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(count: int = 40) -> torch.Tensor:
    return torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def probed(module: pl.LightningModule, data: torch.Tensor, **options: Any) -> GradientProbe:
    """Train the module for one epoch and return the probe that watched it."""
    probe = GradientProbe()
    trainer = make_trainer(max_epochs=1, callbacks=[probe], **{"devices": 1, **options})
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return probe


def test_a_quadratic_function_has_known_constants():
    data, module = rows(), Quadratic()
    probe = probed(module, data)
    w, squared, batches = torch.ones(5, dtype=torch.float64), [], data.split(4)
    for x in batches:  # the same computation by hand
        gradient = 3.0 * (w - x.mean(0))
        squared.append(float(gradient.square().sum()))
        w -= 0.1 * gradient
    torch.testing.assert_close(module.w.detach(), w)
    found = Constants.from_probes(probe.loss, probe.probes)
    assert len(probe.probes) == 9
    assert found.lipschitz == pytest.approx(3.0)
    assert found.noise == pytest.approx(sum(squared[1:]) / 9)
    assert found.loss == pytest.approx(float(1.5 * (1 - batches[0]).square().sum(1).mean()))


def test_gradients_of_accumulated_batches_are_one():
    probe = probed(Quadratic(), rows(), accumulate_grad_batches=2)
    assert len(probe.probes) == 4
    assert Constants.from_probes(probe.loss, probe.probes).lipschitz == pytest.approx(3.0)


class Masked(Quadratic):
    """Multiplies the distance by a random number of every generator that `seed_everything` seeds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = (1 + torch.rand(())) * (1 + random.random()) * (1 + np.random.rand())
        return 0.5 * (factor * (self.w - batch[0])).square().sum(1).mean()


def test_random_numbers_do_not_change_the_constants():
    """Check that all gradients of the first batch are computed with the same random numbers, those of the seed 0."""
    pl.seed_everything(0, verbose=False)
    factor = (1 + torch.rand(())) * (1 + random.random()) * (1 + np.random.rand())
    pl.seed_everything(5, verbose=False)
    probe = probed(Masked(), rows())
    assert Constants.from_probes(probe.loss, probe.probes).lipschitz == pytest.approx(float(factor) ** 2)


class Noisy(Quadratic):
    """A model with everything a probe could disturb: batch statistics, dropout, an unused layer, and logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1)).double()
        self.unused = nn.Linear(2, 2)
        self.logged: list[str] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.calls += 1
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.logged.append(args[0])
        super().log(*args, **kwargs)


def test_training_is_the_same_with_it():
    """Check that weights and logged values are the same with and without the probe."""
    found = []
    for callbacks in ([], [GradientProbe()]):
        pl.seed_everything(1, verbose=False)
        module = Noisy()
        trainer = make_trainer(devices=1, max_epochs=2, callbacks=callbacks)
        trainer.fit(module, DataLoader(TensorDataset(rows()), batch_size=4))
        found.append((module.logged, float(trainer.callback_metrics["loss_epoch"]), module.state_dict()))
        assert module.calls == (1 + len(callbacks)) * 20
    (*plain, weights), (*logged, same) = found
    assert logged == plain
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def several(rank: int) -> str:
    """Return the error of a fit on two processes."""
    quiet()
    try:
        probed(Quadratic(), rows(), devices=2, strategy="ddp")
    except InputError as error:
        return str(error)
    return ""


def test_mistakes():
    """Check the errors for several processes, for manual optimization, and for a step that returns None."""
    assert all(
        "GradientProbe needs the whole model in one process, but this run has 2" in s for s in run_ranks(several, 2)
    )

    class Manual(Quadratic):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(InputError, match="needs automatic_optimization"):
        probed(Manual(), rows())

    class Skips(Quadratic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(InputError, match="returned None for the first batch"):
        probed(Skips(), rows())
