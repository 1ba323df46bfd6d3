"""Trainings with schedules that do not flush, and a plain training loop that uses equally old weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import Keeper, Lit, data, plain_values, quiet
from tests.trainers import make_trainer

BATCHES = 9  # per epoch, with 4 samples each; the last batch has 2
ROWS = 4 * BATCHES - 2
CUTS = {1: [], 2: [4], 3: [3, 6], 4: [2, 4, 6]}


class LossRate(ReduceLROnPlateau):
    """A scheduler that sets the learning rate in proportion to the metric."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * float(metrics)


class LitPlateau(Lit):
    """A module whose scheduler reads the loss of every third batch."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {
            "scheduler": LossRate(found["optimizer"]),
            "monitor": "train_loss_step",
            "frequency": 3,
        }
        return found


@dataclass(frozen=True)
class Streamed:
    """A training with a schedule that does not flush."""

    schedule: str
    ranks: int
    microbatches: int
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[str], list[Any]] = lambda folder: []
    replicas: int = 1
    schedule_args: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    kind: type[Lit] = Lit


def loaders(rows: int = 4) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(data(ROWS), batch_size=rows), DataLoader(data(13), batch_size=5)


def delays(case: Streamed) -> list[int]:
    """Return the number of updates by which the weights of each stage are late."""
    if case.schedule == "pipedream_2bw":
        return [1] * case.ranks
    return [-(-(case.ranks - 1 - s) // case.microbatches) for s in range(case.ranks)]


def extrapolate(
    stage: nn.Module, now: dict[str, Any], before: dict[str, Any], optimizer: torch.optim.Optimizer, at: int, n: int
) -> dict[str, Any]:
    """Return the weights predicted for batch n, from the weights after `at` updates.

    Each missing update is assumed to equal the last one without its weight decay, scaled to the learning rate of batch
    n.
    """
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    found = {}
    for name, p in stage.named_parameters():
        group = groups[id(p)]
        then, rate = (group["initial_lr"] * 0.5 ** (k // 2) for k in (at - 1, n))
        last = now[name] - (1 - then * group["weight_decay"]) * before[name]
        found[name] = now[name] + (n - at) * rate / then * last
    return found


def stale(case: Streamed, batches: int, flushes: set[int], first: Sequence[Collection[int]] = ()) -> dict[str, Any]:
    """Train in one process with weights of the same age as in the pipeline, and return the results.

    Batch n passes stage s with the weights after n - delay updates, but never with weights from before the last flush.

    Args:
        case: the training to reproduce.
        batches: the number of batches.
        flushes: the numbers of batches after which everything is finished.
        first: for each batch, the layers on the first of two stages, if layers move between stages.
    """
    pl.seed_everything(3, verbose=False)
    module = case.kind(optimizer=case.optimizer).double()
    config = module.configure_optimizers()
    optimizer, scheduler = config["optimizer"], config["lr_scheduler"]["scheduler"]
    frequency = config["lr_scheduler"].get("frequency", 1)
    reads_loss = isinstance(scheduler, ReduceLROnPlateau)
    layers = list(module.model)
    bounds = [0, *CUTS[case.ranks], len(layers)]
    stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(range(len(layers) + 1) if first else bounds)]
    old = [[{n: p.detach().clone() for n, p in s.named_parameters()} for s in stages]]
    losses, rates, since, stepped = [], [], 0, 0
    given = [b for _ in range(batches) for b in loaders(4 * case.replicas)[0]][:batches]
    an_epoch, several = -(-ROWS // (4 * case.replicas)), case.options.get("accumulate_grad_batches", 1)
    for n, (x, y) in enumerate(given):
        read = []
        late = [delays(case)[layer not in first[n]] for layer in range(len(layers))] if first else delays(case)
        for s, (stage, delay) in enumerate(zip(stages, late, strict=True)):
            at = max(since, n - delay)
            weights = old[at][s]
            if case.schedule_args.get("predict") and at:
                weights = extrapolate(stage, weights, old[at - 1][s], optimizer, at, n)
            read.append({name: w.clone().requires_grad_() for name, w in weights.items()})
            x = functional_call(stage, read[s], (x,))
        loss = F.cross_entropy(x, y) / several
        losses.append(float(loss.detach()))  # as Lightning returns it
        found = iter(torch.autograd.grad(loss, [w for of in read for w in of.values()]))
        for stage in stages:
            for p in stage.parameters():
                new = next(found)
                p.grad = new if p.grad is None else p.grad + new
        in_epoch = n % an_epoch + 1
        if in_epoch % several == 0 or in_epoch == an_epoch:
            clip = case.options.get("gradient_clip_val")
            if clip and "gradient_clip_algorithm" in case.options:
                torch.nn.utils.clip_grad_value_(module.parameters(), clip)
            for stage in stages if clip and "gradient_clip_algorithm" not in case.options else ():
                torch.nn.utils.clip_grad_norm_(stage.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if not reads_loss:
                scheduler.step()
            stepped += 1
        rates.append(optimizer.param_groups[0]["lr"])
        if reads_loss and in_epoch % frequency == 0:
            scheduler.step(losses[-1])
        old.append([{name: p.detach().clone() for name, p in s.named_parameters()} for s in stages])
        if n + 1 in flushes:
            since = n + 1
    return {"losses": losses, "rates": rates, "weights": plain_values(dict(module.state_dict())), "steps": stepped}


class Seen(Callback):
    """Records the global step of each validation."""

    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validated.append(trainer.global_step)


def fit(
    case: Streamed,
    folder: str,
    resume: str | None = None,
    module: pl.LightningModule | None = None,
    partition: list[str] | None = None,
) -> Any:
    """Train a case in a pipeline and return its results."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module = (module or case.kind(optimizer=case.optimizer)).double()
    keeper, seen = Keeper(), Seen()
    strategy = PipelineStrategy(
        case.schedule,
        case.microbatches,
        partition=partition or CUTS[case.ranks],
        data_parallel=case.replicas,
        schedule_args=case.schedule_args,
    )
    trainer = make_trainer(
        devices=case.ranks * case.replicas,
        strategy=strategy,
        precision="64-true",
        logger=CSVLogger(folder, name="", version=0),
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in case.callbacks(folder)),
        num_sanity_val_steps=0,
        callbacks=[keeper, seen, *case.callbacks(folder)],
        use_distributed_sampler=False,
        **case.options,
    )
    train, val = loaders()
    if case.replicas > 1:  # the samples of all replicas together form one larger batch
        mine = range(trainer.global_rank // case.ranks, ROWS, case.replicas)
        train = DataLoader(Subset(data(ROWS), mine), batch_size=4)
    trainer.fit(module, train, val, ckpt_path=resume, weights_only=False)
    report = strategy.report
    return {
        "losses": [float(o["loss"]) if isinstance(o, dict) else float(o) for o in keeper.outputs],
        "rates": keeper.rates,
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
        "validated": seen.validated,
        "scores": [plain_values(c.best_k_models) for c in trainer.checkpoint_callbacks],
        "bubbles": (report.bubble_replayed, report.bubble_measured),
    }
