"""Tests of manual optimization on two and three processes, compared with plain Lightning on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import WIDTH, MeanOfAll, data, differences, plain_values, quiet
from tests.trainers import make_trainer


class Gan(pl.LightningModule):
    """A GAN with two optimizers and schedulers, random numbers, a gradient penalty, clipping, and four critic calls."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, WIDTH))
        self.d = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.images: Any = None

    def penalize(self, x: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(x), 1, dtype=x.dtype)
        mix = (share * x + (1 - share) * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.d(mix).sum(), mix, create_graph=True)
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, bce = batch[0], F.binary_cross_entropy_with_logits
        of_g, of_d = self.optimizers()
        self.toggle_optimizer(of_g)
        self.images = self.g(torch.randn_like(x))
        score = self.d(self.images)
        loss = bce(score, torch.ones_like(score))
        self.log("g", loss, prog_bar=True)
        of_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_g, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        of_g.step()
        self.untoggle_optimizer(of_g)
        self.toggle_optimizer(of_d)
        fake = self.g(torch.randn_like(x)).detach()
        real, score = self.d(x), self.d(fake)
        loss = bce(real, torch.ones_like(real)) + bce(score, torch.zeros_like(score)) + 10 * self.penalize(x, fake)
        self.log("d", loss, on_step=True, on_epoch=True)
        of_d.zero_grad()
        self.manual_backward(loss)
        of_d.step()
        self.untoggle_optimizer(of_d)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    # This runs within the step. If it logged, Lightning would forget the values that the step logged.
    def on_after_backward(self) -> None:
        assert self.training

    def on_train_epoch_end(self) -> None:
        self.log("images", self.images.abs().sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.d(self.g(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        found = [torch.optim.Adam(part.parameters(), lr) for part, lr in ((self.g, 0.01), (self.d, 0.02))]
        return found, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in found]


class Target(pl.LightningModule):
    """Accumulates gradients over two batches, clips and reads them, averages weights, and keeps computed values.

    Its optimizer makes a step for every batch, in turn with and without a closure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        for n in range(4):
            setattr(self, f"fc{n}", nn.Linear(WIDTH, WIDTH if n < 3 else 3))
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        self.mean, self.seen = MeanOfAll(), list[torch.Tensor]()
        self.fc0.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(self.fc0(x).tanh()).relu() + x
        return self.fc3(self.fc2(x).tanh()) - self.center

    def look_twice(self, x: torch.Tensor) -> None:
        """Use transferred values in two backward passes before they change."""
        hidden = self.fc0(x).detach()
        with torch.no_grad():
            self.log("passed", self.fc3(hidden).sum())
        hidden.requires_grad_()
        for power in (2, 4):
            ((self(x).sum() + self.fc0(self.fc2(x)).sum() + self.fc3(hidden).sum()) ** power / 100).backward()
            self.log(f"of_weight{power}", (self.fc0.weight.grad + self.fc2.weight.detach()).sum())
            self.log(f"of_value{power}", hidden.grad.norm())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        x, y = batch
        for group in optimizer.param_groups:
            group["lr"] *= 0.95

        def compute() -> torch.Tensor:
            logits = self(x + self.slow(x))
            self.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
            self.mean(F.cross_entropy(logits, y, reduction="none").detach())
            loss = F.cross_entropy(logits, y) / 2
            if loss > 0.4:
                loss = loss * 1.5
            loss.backward()
            self.seen.append(loss.detach())
            return loss

        loss = compute()
        self.look_twice(x)
        self.log("loss", loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))
            self.log("last", self.fc3.weight.grad.norm() + self.fc0.weight.grad.sum())
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.step(closure=compute)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fc2.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return {"loss": loss, "logits": self(x)}

    def on_after_backward(self) -> None:
        self.log("batch", float(self.global_step))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("outputs", outputs["logits"].sum() + outputs["loss"] + self.seen[-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 0.05)


class Keeps(pl.Callback):
    """Records the logged values after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(kind: Any, devices: int, folder: str, epochs: int = 2, resumed: str | None = None, **settings: Any) -> Any:
    """Train and return the weights, logs, steps and checkpoint. With 0 devices, train in plain Lightning."""
    quiet()
    torch.manual_seed(0)
    module, keeps = kind().double(), Keeps()
    saves = ModelCheckpoint(folder, save_last=True)
    strategy = PipelineStrategy(**settings) if devices else "auto"
    trainer = make_trainer(
        devices=devices or 1, strategy=strategy, max_epochs=epochs, callbacks=[keeps, saves], precision="64-true"
    )
    loaders = DataLoader(data(), batch_size=8, shuffle=kind is Gan), DataLoader(data(5), batch_size=5)
    trainer.fit(module, loaders[0], loaders[1] if kind is Gan else None, ckpt_path=resumed)
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)
    kept = {name: saved[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops")}
    found = {"weights": module.state_dict(), "logs": keeps.seen, "steps": trainer.global_step, "saved": kept}
    return plain_values(found)


def train_both(rank: int, devices: int, folder: str) -> list[Any]:
    cut = ["d.2"] if devices == 2 else ["d.0", "d.2"]
    return [
        train(Gan, devices, f"{folder}/gan", partition=cut),
        train(Target, devices, f"{folder}/target", epochs=1),
        train(Target, devices, f"{folder}/resumed", resumed=f"{folder}/of_one/last.ckpt"),
    ]


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_stages_train_as_one_process(devices: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = [
        train(Gan, 0, f"{folder}/alone"),
        train(Target, 0, f"{folder}/of_one", epochs=1),
        train(Target, 0, f"{folder}/whole", resumed=f"{folder}/of_one/last.ckpt"),
    ]
    for rank, found in enumerate(run_ranks(train_both, devices, devices, folder, timeout=120)):
        assert differences(expected, found, 1e-10, f"rank {rank}") == []
    again = train(Target, 0, f"{folder}/again", resumed=f"{folder}/target/last.ckpt")
    assert differences(expected[2], again, 1e-10, "resumed in one process") == []


class Hidden(Target):
    """A module whose step uses a parameter that is not registered."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.manual_backward((self(batch[0]) * scale).sum())


def refuse(rank: int, folder: str) -> list[str]:
    """Return the errors for settings that do not work with manual optimization."""
    cases: list[tuple[Any, type[Exception], dict[str, Any]]] = [
        (Target, PlanError, {"microbatches": 4}),
        (Target, PlanError, {"loss": "batch"}),
        (Target, PlanError, {"schedule": "pipedream"}),
        (Hidden, PipelineError, {}),
    ]
    said = []
    for kind, error, settings in cases:
        with pytest.raises(error) as raised:
            train(kind, 2, folder, **settings)
        said.append(str(raised.value))
    return said


def test_unavailable_values_are_refused(tmp_path: Path) -> None:
    for texts in run_ranks(refuse, 2, str(tmp_path), timeout=120):
        assert "Target optimizes manually: " in texts[0]
        assert "microbatches=4 does not work with that" in texts[0]
        assert "loss='batch' does not work with that" in texts[1]
        assert "schedule 'pipedream' does not work with that" in texts[2]
        assert "a parameter of shape (3,) that does not belong to the module" in texts[3]
