"""A callback that measures how gradients change with the weights, in a few training steps of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pipes.engine.compute.rng import forked_rng, seed_all
from lightning_pipes.ir import InputError
from lightning_pipes.planning.replanning import GradientSample


class GradientProbe(pl.Callback):
    """Measures the convergence constants of training with stale gradients, which are S batches old on S stages.

    The constants are defined in section IV-B2 of DynPipe. They are measured in a short run of the model in one process:
    `Trainer(devices=1, max_steps=20, callbacks=[probe])`. Before each step, the callback computes the gradient of the
    first batch at the current weights, with the same dropout masks each time. The training is not affected, because
    gradients, buffers, random number generators and logs are restored.

        constants = Constants.from_probes(probe.loss, probe.probes)

    Attributes:
        loss: the loss of the first batch before training.
        probes: the measurements of all steps except the first.
    """

    def __init__(self) -> None:
        self.loss = float("nan")
        self.probes: list[GradientSample] = []
        self._batch: Any = None
        self._before: tuple[list[Tensor], list[Tensor]] | None = None
        self._pending: tuple[float, float] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            raise InputError(
                f"GradientProbe needs the whole model in one process, but this run has {trainer.world_size} processes. "
                "Run some steps with Trainer(devices=1), even if they are slow, and use the constants from that run"
            )
        if not module.automatic_optimization:
            raise InputError("GradientProbe needs automatic_optimization: it takes the loss from training_step")
        self.loss, self.probes = float("nan"), []
        self._batch = self._before = self._pending = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batch is None:
            self._batch = copy.deepcopy(batch)
        if batch_idx % trainer.accumulate_grad_batches:
            return
        weights = [p for p in module.parameters() if p.requires_grad]
        loss, gradients = _gradients(trainer, module, self._batch, weights)
        now = [p.detach().clone() for p in weights]
        if self._before is None:
            self.loss = loss
        else:
            then, other = self._before
            self._pending = _distance(now, then), _distance(gradients, other)
        self._before = now, gradients

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self._pending is None:
            return
        squared = sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None)
        self.probes.append(GradientSample(*self._pending, squared))
        self._pending = None


def _gradients(
    trainer: pl.Trainer, module: pl.LightningModule, batch: Any, weights: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    with torch.enable_grad(), _untouched(module), trainer.precision_plugin.train_step_context():
        found = module.training_step(batch, 0)
        loss = found["loss"] if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise InputError(f"GradientProbe: training_step returned {loss!r} for the first batch; it needs a loss")
        each = torch.autograd.grad(loss, weights, allow_unused=True)
    return float(loss.detach()), [torch.zeros_like(w) if g is None else g for g, w in zip(each, weights, strict=True)]


@contextmanager
def _untouched(module: pl.LightningModule) -> Iterator[None]:
    """Run the block with a fixed seed and without logging.

    Buffers and random number generators are restored after the block.
    """
    buffers = [(b, b.clone()) for b in module.buffers()]
    names = ("log", "log_dict")
    with forked_rng(module.device):
        seed_all(0, module.device, everything=True)
        for name in names:
            object.__setattr__(module, name, lambda *args, **kwargs: None)
        try:
            yield
        finally:
            for name in names:
                object.__delattr__(module, name)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return float(sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5)
