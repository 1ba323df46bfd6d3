"""Rows about hooks in training with overlapping batches, where stages step at different times."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.compat.registry import row
from tests.trainer.lit import Lit


class KeepsWeights(Lit):
    """A module that stores a list of its weights before fit. A hook averages each of these weights."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.model.parameters())
        self.average: list[torch.Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.average = self.average or [torch.zeros_like(p) for p in self.kept]
        for average, p in zip(self.average, self.kept, strict=True):
            average.mul_(0.9).add_(p.detach(), alpha=0.1)


class AveragesWeights(Lit):
    """A module with a hook that averages the weights from `named_parameters`."""

    average: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.average = self.average or {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            self.average[name].mul_(0.9).add_(p.detach(), alpha=0.1)


class CountsGradients(Lit):
    """A module that counts the weights that have a gradient after their step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.model.parameters())
        self.counted = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted += sum(p.grad is not None for p in self.kept)


class DecaysRates(Lit):
    """A module that reduces the current learning rate by a factor in each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class SetsRates(DecaysRates):
    """A module that sets the learning rate of each step from the number of steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)


class ClampsWeights(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-0.125, 0.125)


class ClampsData(Lit):
    def on_train_batch_start(self, *_: Any) -> None:
        for p in self.model.parameters():
            p.data.clamp_(-0.125, 0.125)


class ClampsKept(KeepsWeights):
    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.kept:
            p.data.clamp_(-0.125, 0.125)


streams = partial(row, "Asynchronous streams")
LOOKS = "reads layers while batches are in flight"
AT_EPOCHS = (
    "stages are at different batches, and gradients are cleared; read them in on_train_epoch_end, or before the step"
)
SETS, EARLIER = (
    "sets AdamW 0, group 0, lr from",
    "later batches have begun with the previous value; set it in optimizer_step",
)
CHANGED = "other batches that use it are under way"
BETWEEN = "use optimizer.register_step_post_hook or on_train_epoch_start"
for schedule in ("pipedream", "dynpipe", "pipedream_2bw"):
    by: dict[str, Any] = {"strategy": {"schedule": schedule, "schedule_args": {}}, "slow": schedule == "pipedream_2bw"}
    name = f"{schedule}: " if schedule != "pipedream" else ""
    streams(
        f"{name}weights kept in a list, averaged in a hook", module=KeepsWeights, warned=LOOKS, reason=AT_EPOCHS, **by
    )
    streams(f"{name}weights averaged in a hook", module=AveragesWeights, warned=LOOKS, reason=AT_EPOCHS, **by)
    streams(
        f"{name}gradients in on_train_batch_end", module=CountsGradients, warned="gradients", reason=AT_EPOCHS, **by
    )
    streams(
        f"{name}learning rates changed in on_before_optimizer_step",
        module=DecaysRates,
        warned=SETS,
        reason=EARLIER,
        **by,
    )
    streams(
        f"{name}learning rates set in on_before_optimizer_step", module=SetsRates, warned=SETS, reason=EARLIER, **by
    )
    for what, kind in (("weights", ClampsWeights), ("p.data", ClampsData), ("weights kept in a list", ClampsKept)):
        streams(f"{name}{what} clamped between batches", module=kind, refused=CHANGED, reason=BETWEEN, **by)
streams(
    "EMAWeightAveraging while batches overlap",
    lambda folder: {"callbacks": [EMAWeightAveraging()]},
    refused="whose stages are at other batches",
    strategy={"schedule": "pipedream", "schedule_args": {}},
)
