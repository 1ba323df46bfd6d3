"""Tests that random small trainings on two ranks give the results of one process.

If they do not, every rank ends with an error that describes the reason, and no rank hangs.
"""

from __future__ import annotations

import random
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import WIDTH, data, quiet
from tests.trainers import make_trainer

FEW, MANY = 4, 120
EACH = 60.0
"""Seconds per case and rank. A busy machine needs ten times as long as a quiet one."""
SCHEDULES = ("1f1b", "gpipe", "kfkb", "interleaved", "zero_bubble", "hanayo", "v", "deep", "per_link", "ready")
STEPS = (
    *("loss",) * 6,
    *("dict", "dict with more", "none", "none sometimes", "no loss in dict", "vector", "integer", "nan", "raises"),
    *("raises later", "no graph", "text", "logs a vector", "logs nan", "square loss"),
)
HOOKS = (
    *("",) * 8,
    "on_fit_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_epoch_end",
    "on_train_end",
)
OPTIMIZERS = (
    "sgd",
    "adam",
    "scheduled",
    "every step",
    "plateau",
    "two",
    "two groups",
    "none",
    "empty",
    "lbfgs",
    "text",
)


@dataclass(frozen=True)
class Fit:
    """The settings of one random training."""

    seed: int
    layers: int = 4
    step: str = "loss"
    hook: str = ""
    optimizer: str = "sgd"
    rows: int = 22
    batch_size: int = 8
    batches: str = "pairs"
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[str, ...] = ()


def random_fit(seed: int) -> Fit:
    """Return a training with random settings."""
    rng = random.Random(seed)
    strategy: dict[str, Any] = {
        "schedule": rng.choice(SCHEDULES),
        "microbatches": rng.choice((None, 1, 2, 3, 4, 50, 60_000)),
    }
    strategy["recompute"] = rng.random() < 0.2
    strategy["partition"] = rng.choice((*("parameters",) * 12, "auto", [1], [9]))
    trainer: dict[str, Any] = {"max_epochs": rng.choice((1, 2)), "num_sanity_val_steps": rng.choice((0, 2))}
    odd: tuple[dict[str, Any], ...] = (
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 50},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"limit_train_batches": rng.choice((0, 1, 2, 0.5, 0.01, 1000))},
        {"limit_val_batches": rng.choice((0, 1, 0.5))},
        {"val_check_interval": rng.choice((1, 2, 0.5))},
        {"overfit_batches": 1},
        {"max_steps": rng.choice((0, 1, 4))},
        {"precision": rng.choice(("32-true", "bf16-mixed", "bf16-true"))},
        {"check_val_every_n_epoch": 2},
        {"fast_dev_run": 2},
        {"detect_anomaly": True},
    )
    for chosen in rng.sample(odd, rng.choice((0, 0, 1, 1, 2))):
        trainer |= chosen
    return Fit(
        seed,
        rng.choice((1, 4, 4, 5, 6, 6, 9, 9, 9, 9)),
        rng.choice(STEPS),
        rng.choice(HOOKS),
        rng.choice((*("sgd", "adam") * 3, *OPTIMIZERS)),
        rng.choice((22, 22, 22, 16, 9, 1, 0)),
        rng.choice((8, 8, 8, 5, 1, 100)),
        rng.choice((*("pairs",) * 8, "dict", "none", "empty", "numbers", "ragged")),
        strategy,
        trainer,
        tuple(rng.sample(("stops early", "saves", "accumulates", "raises"), rng.choice((0, 0, 0, 1)))),
    )


class OwnError(Exception):
    """An error of the user."""


class LitRandom(pl.LightningModule):
    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.case = fit
        blocks = [nn.Tanh() if n % 2 else nn.Linear(WIDTH, WIDTH) for n in range(fit.layers - 1)]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
        if fit.hook:
            setattr(self, fit.hook, self._raises)

    def _raises(self, *_: Any) -> None:
        raise OwnError(self.case.hook)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = self.case.step
        if step == "raises" or (step == "raises later" and batch_idx == 1):
            raise OwnError(step)
        if step == "none" or (step == "none sometimes" and batch_idx % 2):
            self.model(batch[0])
            return None
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        scores = self.model(x)
        loss = F.cross_entropy(scores.float() if scores.dtype == torch.bfloat16 else scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        match step:
            case "dict" | "dict with more":
                return {"loss": loss, **({"scores": scores, "name": "x"} if "more" in step else {})}
            case "no loss in dict":
                return {"los": loss}
            case "vector":
                return scores.mean(1)
            case "integer":
                return 3
            case "nan":
                return loss * float("nan")
            case "no graph":
                return loss.detach()
            case "text":
                return "loss"
            case "logs a vector":
                self.log("vector", scores[:, 0])
            case "logs nan":
                self.log("nan", float("nan"))
            case "square loss":
                return F.mse_loss(scores, torch.zeros_like(scores))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        self.log("val_loss", F.cross_entropy(self.model(x).float(), y))

    def configure_optimizers(self) -> Any:
        kind = self.case.optimizer
        if kind in ("none", "empty", "text"):
            return {"none": None, "empty": [], "text": "sgd"}[kind]
        if kind in ("adam", "lbfgs"):
            return {"adam": torch.optim.Adam, "lbfgs": torch.optim.LBFGS}[kind](self.parameters(), lr=0.01)
        parameters: list[Any] = list(self.parameters())
        if kind == "two":
            return [torch.optim.SGD(parameters[::2], 0.1), torch.optim.SGD(parameters[1::2], 0.1)]
        if kind == "two groups":
            parameters = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
        if kind == "scheduled":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        if kind == "every step":
            scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return optimizer


class Raises(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise OwnError("callback")


def collate(kind: str, samples: list[Any]) -> Any:
    x, y = torch.stack([a for a, _ in samples]), torch.stack([b for _, b in samples])
    return {
        "pairs": (x, y),
        "dict": {"x": x, "y": y, "names": [str(n) for n in range(len(x))]},
        "none": None,
        "empty": [],
        "numbers": 5,
        "ragged": (x, y[:-1]),
    }[kind]


@dataclass
class Collate:
    kind: str

    def __call__(self, samples: list[Any]) -> Any:
        return collate(self.kind, samples)


def trained(fit: Fit, ranks: int, folder: str) -> dict[str, torch.Tensor] | str:
    """Return the weights and metrics after a training, or its error."""
    quiet()
    warnings.simplefilter("ignore")
    pl.seed_everything(fit.seed, verbose=False)
    made = {
        "stops early": lambda: EarlyStopping("val_loss", patience=0),
        "saves": lambda: ModelCheckpoint(folder, monitor="val_loss"),
        "accumulates": lambda: GradientAccumulationScheduler({0: 2}),
        "raises": Raises,
    }
    try:
        strategy = PipelineStrategy(**fit.strategy) if ranks > 1 else "auto"
        trainer = make_trainer(
            **{"precision": "64-true", **fit.trainer},
            devices=ranks,
            strategy=strategy,
            default_root_dir=folder,
            enable_checkpointing="saves" in fit.callbacks,
            callbacks=[made[name]() for name in fit.callbacks],
        )
        lit = LitRandom(fit).double() if trainer.precision == "64-true" else LitRandom(fit)
        samples = data(max(fit.rows, 1))
        if trainer.precision != "64-true":
            samples.tensors = (samples.tensors[0].float(), samples.tensors[1])
        loader = DataLoader(Subset(samples, range(fit.rows)), fit.batch_size, collate_fn=Collate(fit.batches))
        trainer.fit(
            lit, loader, DataLoader(samples, 5, collate_fn=Collate("dict" if fit.batches == "dict" else "pairs"))
        )
    except BaseException as error:
        ours = "ours " if isinstance(error, PipelineError) else ""
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{ours}{type(error).__name__}: {error}"[:600] + f" <- {Path(where.filename).name}:{where.lineno}"
    found = {name: value.detach().clone() for name, value in lit.state_dict().items()}
    metrics = {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
    return found | {f"logged {name}": value for name, value in metrics.items()}


def trained_each(rank: int, seeds: list[int], folder: str) -> list[dict[str, torch.Tensor] | str]:
    """Run all trainings on one rank, one after another in one process, even after a training fails."""
    found = []
    for seed in seeds:
        Path(folder, f"rank{rank}").write_text(f"{seed}: {random_fit(seed)}")
        found.append(trained(random_fit(seed), 2, f"{folder}/{seed}"))
    return found


def wrong(fit: Fit, plain: dict[str, torch.Tensor] | str, ranks: list[dict[str, torch.Tensor] | str]) -> str:
    """Return a description of the problem with the end of a training in a pipeline, or an empty string."""
    errors = [found for found in ranks if isinstance(found, str)]
    if len(errors) not in (0, len(ranks)):
        return f"one rank ends well, another not: {errors}"
    if errors and isinstance(plain, str):
        kind = plain.partition(":")[0]
        told = any(each.startswith(("ours ", kind)) for each in errors)
        return "" if told and all(each.startswith(("ours ", kind)) for each in errors) else f"{errors}, alone: {plain}"
    if errors:
        return "" if all(each.startswith("ours ") for each in errors) else f"{errors}, and alone it trains"
    if isinstance(plain, str):
        return f"it trains, and alone it does not: {plain}"
    loose = str(fit.trainer.get("precision", "")).startswith(("bf16", "32"))
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict)
        if found.keys() != plain.keys():
            return f"rank {rank} has {sorted(found.keys() ^ plain.keys())} or lacks it"
        for name, value in found.items():
            near = {"rtol": 0.1, "atol": 0.05} if loose else {"rtol": 1e-7, "atol": 1e-9}
            if not torch.allclose(value.double(), plain[name].double(), equal_nan=True, **near):
                return f"rank {rank}: {name} is {value.flatten()[:3]}, alone {plain[name].flatten()[:3]}"
    return ""


def compared(seeds: list[int]) -> list[str]:
    """Return the descriptions of all problems, one for each training that has one."""
    with TemporaryDirectory() as folder:
        return _compared(seeds, folder)


def _compared(seeds: list[int], folder: str) -> list[str]:
    try:
        found = run_ranks(trained_each, 2, seeds, folder, timeout=60 + EACH * len(seeds))
    except AssertionError as error:
        at = [path.read_text() for path in sorted(Path(folder).glob("rank*"))]
        raise AssertionError(f"at {at}: {error}") from error
    problems = []
    for seed, *ranks in zip(seeds, *found, strict=True):
        fit = random_fit(seed)
        problem = wrong(fit, trained(fit, 1, f"{folder}/alone{seed}"), ranks)
        if problem:
            problems.append(f"{fit}: {problem}")
    return problems


def test_random_trainings_equal_one_process_or_are_refused():
    found = compared(list(range(FEW)))
    assert not found, "\n\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, 20))
def test_many_random_trainings(first):
    found = compared(list(range(first, first + 20)))
    assert not found, "\n\n".join(found)
