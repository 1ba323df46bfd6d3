"""A third-party policy for a stream of batches that use different layers, installed through its entry point.

The weights are compared bit by bit with training on one batch after another.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import cache
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Kind, PipelineError
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.toys.install import install
from tests.trainer.lit import plain_values, quiet
from tests.trainers import make_trainer

BATCHES, LAYERS, ROWS, WIDTH = 18, 8, 8, 6
CUTS = {1: [], 2: [4], 4: [2, 4, 6]}


class Optional(nn.Module):
    """A layer that is applied only to the batches that have chosen it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())

    def forward(self, given: tuple[torch.Tensor, str]) -> tuple[torch.Tensor, str]:
        x, chosen = given
        return (self.net(x) if self.name in chosen.split() else x), chosen


class Lit(pl.LightningModule):
    """A module whose batches choose their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Optional(str(n)) for n in range(LAYERS)))
        self.dies_at = -1

    def layers_of_batch(self, batch: Any) -> list[str]:
        return list(batch[2].split())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y, chosen = batch
        out, _ = self.model((x, chosen))
        loss = F.mse_loss(out, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, chosen = batch
        self.log("val_loss", F.mse_loss(self.model((x, chosen))[0], y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8), "interval": "step"}]


class Batches(Dataset[Any]):
    """Batches with the names of the layers that they use. The last batch is shorter.

    Loading a batch takes `seconds`.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        time.sleep(self.seconds)
        rng, g = random.Random(number), torch.Generator().manual_seed(number)
        rows = 5 if number == BATCHES - 1 else ROWS
        chosen = [str(n) for n in range(LAYERS) if rng.random() < 0.3] or ["0"]
        return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g), " ".join(chosen)


class Seen(Callback):
    """A callback that records the instructions of this rank in order, and the losses that it receives."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.events: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.events = [list(w.events) for w in trainer.strategy.current_run.windows]


def new_module() -> Lit:
    pl.seed_everything(3, verbose=False)
    return Lit()


def fit(rank: int, ranks: int, folder: str, resume: str | None = None, dies_at: int = -1, seconds: float = 0.0) -> Any:
    """Train on one rank and return the results. Rank 0 kills itself in batch `dies_at`."""
    quiet()
    install("stream")
    module, seen = new_module(), Seen()
    module.dies_at = dies_at if rank == 0 else -1
    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=BATCHES + 7, save_top_k=-1)
    strategy = PipelineStrategy("stream", 2, partition=CUTS[ranks])
    trainer = make_trainer(
        devices=ranks, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, callbacks=[seen, keeper]
    )
    loader = DataLoader(Batches(seconds if rank == ranks - 1 else 0.0), batch_size=None)
    trainer.fit(module, loader, loader, ckpt_path=resume, weights_only=False)
    bubbles = strategy.report.bubble_replayed, strategy.report.bubble_measured
    return {
        "weights": plain_values(dict(module.state_dict())),
        "losses": seen.losses,
        "events": seen.events,
        "bubbles": bubbles,
        "validated": float(trainer.callback_metrics["val_loss"]),
        "steps": trainer.global_step,
    }


@cache
def one_after_another() -> tuple[dict[str, np.ndarray], list[float], float]:
    """Return the weights, the losses and the last validation loss of the same training in plain PyTorch."""
    module = new_module()
    [optimizer], [scheduler] = module.configure_optimizers()
    losses, given = [], [Batches()[n] for n in range(BATCHES)]
    for _ in range(2):
        for x, y, chosen in given:
            total = 0.0
            for part in (slice(0, 4), slice(4, len(x))):
                loss = F.mse_loss(module.model((x[part], chosen))[0], y[part])
                share = len(x[part]) / len(x)
                (loss * share).backward()
                total += float(loss.detach()) * share
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()  # sets gradients to None, so that Adam skips layers without a gradient
            scheduler["scheduler"].step()
    with torch.no_grad():
        found = [(len(y), float(F.mse_loss(module.model((x, c))[0], y))) for x, y, c in given]
    mean = sum(rows * loss for rows, loss in found) / sum(rows for rows, _ in found)
    return plain_values(dict(module.state_dict())), losses, mean


def overlaps(events: list[Any]) -> int:
    """Return the number of times that a batch began on a stage before the STEP of an earlier batch on that stage."""
    begun = {(i.stage, i.batch): e.start for e in reversed(events) if (i := e.instruction).kind is Kind.F}
    over = {(i.stage, i.batch): e.end for e in events if (i := e.instruction).kind is Kind.STEP}
    return sum(start < over[stage, n] for (stage, b), start in begun.items() for n in range(b))


@pytest.mark.parametrize("ranks", CUTS)
def test_weights_equal_one_after_another(ranks: int) -> None:
    """The weights equal the weights of plain PyTorch bit by bit, although batches overlap."""
    weights, losses, validated = one_after_another()
    found = run_ranks(fit, ranks, ranks, mkdtemp(), timeout=120)
    for each in found:
        assert each["steps"] == 2 * BATCHES
        assert each["weights"].keys() == weights.keys()
        for name, value in weights.items():
            assert np.array_equal(each["weights"][name], value), name
        assert abs(each["validated"] - validated) < 1e-6
        assert 0 <= min(each["bubbles"]) <= max(each["bubbles"]) < 1
    assert found[0]["losses"][-1] == pytest.approx(losses[-1], rel=1e-6)
    # a single stage does not wait for other stages
    assert sum(overlaps(events) for each in found for events in each["events"]) >= (ranks > 1) * 5


def resumed(rank: int, folder: str) -> Any:
    """Train on two stages, then resume from a checkpoint in the middle of an epoch."""
    fit(rank, 2, folder)
    return fit(rank, 2, folder, resume=f"{folder}/step={BATCHES + 7}.ckpt")


def test_resumes_in_the_middle_of_an_epoch() -> None:
    weights, _, _ = one_after_another()
    for found in run_ranks(resumed, 2, mkdtemp(), timeout=120):
        assert all(np.array_equal(found["weights"][name], value) for name, value in weights.items())


def test_the_first_stage_may_load_slowly() -> None:
    """The result is correct if the first stage loads its batches slowly.

    The last stage waits for it in the flush at the end of an epoch, after it has reported earlier batches.
    """
    weights, _, _ = one_after_another()
    for found in run_ranks(fit, 2, 2, mkdtemp(), None, -1, 0.03, timeout=40):
        assert all(np.array_equal(found["weights"][name], value) for name, value in weights.items())


def test_a_killed_rank_ends_all() -> None:
    outcomes = watch_ranks(fit, 2, 2, mkdtemp(), None, 9, timeout=60)
    assert "exit code -9" in outcomes[0].error
    assert "rank 0" in outcomes[1].error


class LitOutside(Lit):
    """A module with a parameter outside its layers, which no batch can name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def refused(rank: int) -> str:
    """Train a module with a parameter outside its layers, and return the error."""
    quiet()
    install("stream")
    try:
        trainer = make_trainer(devices="auto", strategy=PipelineStrategy("stream", 2))
        trainer.fit(LitOutside(), DataLoader(Batches(), batch_size=None))
    except PipelineError as error:
        return str(error)
    return ""


def test_refuses_parameters_of_which_no_batch_can_say_that_it_uses_them() -> None:
    assert "scale: these parameters are outside" in run_ranks(refused, 1, timeout=60)[0]
