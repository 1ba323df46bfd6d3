"""Trainings in which layers move while batches continue, and a process that computes the expected results."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.messages import bulk_transfer
from lightning_pipes.ir import Span
from tests.trainer.lit import WIDTH, Lit, data, plain_values, quiet
from tests.trainer.relocation.rich import LAYERS, Block
from tests.trainers import make_trainer

BATCHES = 12
"""Batches per epoch, with 4 samples each."""
SYNCHRONOUS = ("1f1b", "kfkb", "interleaved")


class LitWaiting(Lit):
    """A module with every kind of state. Its third layer has no weights, and its fourth layer is frozen."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block(saves) for _ in range(LAYERS - 1)), nn.Linear(WIDTH, 3))
        self.model[2] = nn.Tanh()
        self.model[3].requires_grad_(False)


@dataclass(frozen=True)
class Waiting:
    """A training whose layers move.

    Attributes:
        cuts: the first layers of all stages but the first. Key -1 holds the initial cut, and key n the cut adopted
            after batch n.
        held: for a batch after which a cut is adopted, the batch before which parcels do not arrive.
        free: batches after which no parcel is held back any longer.
        saved: batches after which a checkpoint is saved.
        stopped: the batch after which rank 1 requests a stop.
        meddles: the batch after which weights are changed by hand.
        saves: whether checkpoints contain the whole state of the module.
        checkpoint: the form of checkpoints.
        slow: additional seconds per batch.
    """

    schedule: str = "1f1b"
    relocation: str = "buffered"
    cuts: dict[int, tuple[int, ...]] = field(default_factory=lambda: {-1: (3,), 2: (1,)})
    held: dict[int, int] = field(default_factory=lambda: {2: 7})
    epochs: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    free: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    stopped: int = -1
    meddles: int = -1
    slow: float = 0.0
    saves: bool = False
    checkpoint: str = "full"


class Acts(Callback):
    """Adopts cuts, holds parcels, and acts as the case specifies."""

    def __init__(self, case: Waiting, folder: str) -> None:
        self.case, self.folder, self.until = case, folder, -1
        self.weights: dict[int, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        bulk_transfer.GATE_SECONDS = 1000.0
        loop, self.relocation = trainer.fit_loop, trainer.strategy.current_run.relocation
        # If all ranks wait for parcels of an earlier move, which a slow machine has delayed, no parcel is held.
        hold = lambda: loop.total_batch_idx < self.until and not self.relocation.is_ending  # noqa: E731
        trainer.strategy.current_run.local_layers.bulk_transfer.set_gate(hold)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        case, strategy, number = self.case, trainer.strategy, trainer.fit_loop.total_batch_idx
        self.layers = strategy.current_run.local_layers.holdings.layers
        time.sleep(case.slow)
        if number in case.held and case.relocation != "blocking":
            self.until = case.held[number]
        if number in case.free or (trainer.is_last_batch and case.relocation == "buffered"):
            self.until = -1
        if number in case.cuts:
            plan = strategy.current_run.engine.plan
            ends = (0, *case.cuts[number], LAYERS)
            plan = replace(plan, layers=tuple(Span(a, b) for a, b in pairwise(ends)))
            strategy.adopt(strategy.schedule, plan=plan)
        if number == case.stopped and trainer.global_rank == 1:
            trainer.should_stop = True
        if number == case.meddles:
            for layer in strategy.current_run.local_layers.cut.layers.values():
                for p in layer.parameters():
                    p.data.mul_(0.5)  # torch does not count this as a change
        if number in case.saved:
            trainer.save_checkpoint(f"{self.folder}/{number}.ckpt")


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(data(4 * BATCHES), batch_size=4), DataLoader(data(13), batch_size=5)


def made(case: Waiting) -> LitWaiting:
    pl.seed_everything(3, verbose=False)
    return LitWaiting(case.saves).double()


def fit(case: Waiting, ranks: int, folder: str, resume: str | None = None) -> dict[str, Any]:
    """Train a case, and return the weights, the metrics and the moves."""
    quiet()
    module, acts = made(case), Acts(case, folder)
    trainer = make_trainer(
        devices=ranks,
        strategy=PipelineStrategy(
            case.schedule,
            1 if ranks == 2 else None,
            partition=list(case.cuts[-1]),
            relocation=case.relocation,
            check_loss=False,
            checkpoint=case.checkpoint,
        ),
        precision="64-true",
        max_epochs=case.epochs,
        num_sanity_val_steps=0,
        callbacks=[acts],
        **{"limit_val_batches": 0, **case.trainer},
    )
    trainer.fit(module, *loaders(), ckpt_path=resume, weights_only=False)
    return {
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "moved": [vars(m) for m in acts.relocation.moved],
        "cuts": tuple(span.start for span in acts.layers[1:]),
    }


def delays(schedule: str, stages: int) -> list[int]:
    """Return the number of updates by which the weights of each stage are late."""
    late = {"pipedream": [stages - 1 - s for s in range(stages)], "pipedream_2bw": [1] * stages}
    return late.get(schedule, [0] * stages)


@dataclass(frozen=True)
class Pause:
    """A pause of optimizer steps.

    The steps of batches `start` to `stop` - 1 wait, and are made before batch `stop`. From this batch on, stages begin
    at `cut`.
    """

    start: int
    stop: int
    cut: tuple[int, ...]


def pauses(case: Waiting, moved: list[dict[str, Any]]) -> list[Pause]:
    """Return the pauses of a training, or, if steps do not wait, the batches at which layers changed ranks."""
    cuts = list(case.cuts.values())[1:]
    given = zip(moved, cuts, strict=True)
    if case.relocation != "buffered":
        return [Pause(m["ended"], m["ended"], cut) for m, cut in given]
    # In a stream, no stage makes a step for the first batch of a move. With other schedules, that batch has already
    # begun its step.
    return [Pause(m["began"] + (case.schedule in SYNCHRONOUS), m["ended"], cut) for m, cut in given]


def expected(case: Waiting, batches: int, pauses: Sequence[Pause], flushes: Sequence[int] = ()) -> dict[str, Any]:
    """Train in a plain loop. Everything is finished before the batches in `flushes` and at the end of a pause."""
    module = made(case)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    layers, loss_of = list(module.model), module.model
    assert loss_of is not None
    cut, since, queue = case.cuts[-1], 0, []
    old = [_weights(layers)]
    every = case.trainer.get("accumulate_grad_batches", 1)
    given = [b for _ in range(case.epochs) for b in loaders()[0]][:batches]
    sums: dict[nn.Parameter, torch.Tensor] = {}
    for n, (x, y) in enumerate(given):
        for pause in pauses:
            if n == pause.stop:
                _take(queue, optimizer)
                old[n], since, cut = _weights(layers), n, pause.cut
        if n in flushes:
            since = n
        ends = (0, *cut, LAYERS)
        late = [
            d
            for d, (a, b) in zip(delays(case.schedule, len(ends) - 1), pairwise(ends), strict=True)
            for _ in range(a, b)
        ]
        read = []
        for number, (layer, delay) in enumerate(zip(layers, late, strict=True)):
            weights = old[max(since, n - delay)][number]
            read.append({name: w.clone().requires_grad_(w.requires_grad) for name, w in weights.items()})
            x = functional_call(layer, read[-1], (x,))
        loss = F.cross_entropy(x, y) / every
        wanted = [
            (p, read[k][name])
            for k, layer in enumerate(layers)
            for name, p in layer.named_parameters()
            if p.requires_grad
        ]
        for (p, _), gradient in zip(wanted, torch.autograd.grad(loss, [w for _, w in wanted]), strict=True):
            sums[p] = sums[p] + gradient if p in sums else gradient
        if (n + 1) % every == 0 or (n + 1) % BATCHES == 0:
            _clip(case, sums)
            told = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            queue.append((copy.deepcopy(told), sums))
            sums = {}
            if not any(pause.start <= n < pause.stop for pause in pauses):
                assert len(queue) == 1
                _take(queue, optimizer)
            scheduler.step()
        if n == case.meddles:
            with torch.no_grad():
                for p in module.model.parameters():
                    p.mul_(0.5)
        old.append(_weights(layers))
    _take(queue, optimizer)
    return {
        "weights": plain_values(dict(module.state_dict())),
        "steps": len([n for n in range(batches) if (n + 1) % every == 0 or (n + 1) % BATCHES == 0]),
        "rate": optimizer.param_groups[0]["lr"],
    }


def _weights(layers: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
    return [
        {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in layer.named_parameters()}
        for layer in layers
    ]


def _clip(case: Waiting, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
    value = case.trainer.get("gradient_clip_val")
    if value is None:
        return
    for p, gradient in gradients.items():
        p.grad = gradient
    if case.trainer.get("gradient_clip_algorithm") == "value":
        torch.nn.utils.clip_grad_value_(gradients, value)
    else:
        torch.nn.utils.clip_grad_norm_(gradients, value)
    for p in gradients:
        gradients[p], p.grad = p.grad, None  # type: ignore[assignment]


def _take(queue: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """Make all steps in the queue, each with the settings that it was queued with."""
    now = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for told, gradients in queue:
        for group, settings in zip(optimizer.param_groups, told, strict=True):
            group.update(settings)
        for p, gradient in gradients.items():
            p.grad = gradient
        optimizer.step()
        for p in gradients:
            p.grad = None
    for group, settings in zip(optimizer.param_groups, now, strict=True):
        group.update(settings)
    queue.clear()


def folder_of(folder: str, name: str) -> str:
    path = Path(folder) / name.replace(" ", "_")
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
