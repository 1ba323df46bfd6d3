"""Small LightningModules, and helpers that train them with and without a pipeline and record the results."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.utilities import dim_zero_cat

from lightning_pipes import PipelineStrategy
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.plan.trial import Trial
from lightning_pipes.trainer.user.remote_tensors import give_values
from tests.trainers import make_trainer

ROWS = 22  # batches of 8, 8 and 6 samples
WIDTH = 6


def data(rows: int = ROWS, tokens: bool = False) -> TensorDataset:
    """Return samples with labels of three classes: token sequences of length 5, or vectors in double precision."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (rows, 5), generator=g) if tokens else torch.randn(rows, WIDTH, generator=g).double()
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=g))


def restore(cut: ContainerCut, state: dict[str, torch.Tensor]) -> None:
    """Restore a cut module from the values of the whole module, as at the end of a run."""
    for key, slots in cut.find_gaps().items():
        for slot in slots:
            give_values(slot.tensor, state[key].clone(), slot.table[slot.name])
    cut.restore(ended=True)


class MeanOfAll(torchmetrics.Metric):
    """A metric in double precision that adds a mean from a running sum and a mean over a growing list of all values."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.double().sum()
        self.values.append(values.double())

    def compute(self) -> torch.Tensor:
        values = dim_zero_cat(self.values)
        return self.total / len(values) + values.mean()


class Lit(pl.LightningModule):
    """An ordinary LightningModule without any code for pipelines."""

    def __init__(self, layers: int = 9, dropout: float = 0.0, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks = [
            nn.Tanh() if n % 2 else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))
            for n in range(layers - 1)
        ]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
        self.mean = MeanOfAll()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict(
            {"right": (logits.argmax(1) == y).double().sum(), "rows": float(len(x))},
            reduce_fx="sum",
            on_step=True,
            on_epoch=True,
        )
        self.log("largest", logits.detach().max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.mean(F.cross_entropy(logits, y, reduction="none").detach())
        self.log("train_metric", self.mean, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits, "scale": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.seen.append(logits)

    def on_validation_epoch_end(self) -> None:
        self.log("val_norm", torch.cat(self.seen).norm())
        self.seen.clear()

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.log("test_loss", F.cross_entropy(logits, y))
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "adamw":
            matrices = [p for n, p in self.named_parameters() if n.endswith("weight")]
            vectors = [p for n, p in self.named_parameters() if not n.endswith("weight")]
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.05)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LitOutside(Lit):
    """A module with parameters around the pipelined layers, an unused parameter, and a skip around all layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(3 + WIDTH, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inlet(x)
        return self.outlet(torch.cat([self.model(inner), inner], dim=1))


class LitFrozen(LitOutside):
    """Trains only its layers, because schedules that do not flush refuse parameters that all ranks train."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for part in (self.inlet, self.outlet, self.unused):
            part.requires_grad_(False)


class LitUnfrozen(LitOutside):
    """A module in which one layer and the layers around the pipeline are frozen until the third step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._train(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._train(self.global_step >= 2)

    def _train(self, trained: bool) -> None:
        for part in (self.inlet, self.outlet, self.model[2]):
            part.requires_grad_(trained)


class LitHooked(Lit):
    """A module whose hooks need the whole state, run on every rank, or run on the rank that ran the step."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norms"] = {k: float(v.norm()) for k, v in checkpoint["state_dict"].items()}

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("sum_of_last", self.seen[-1].sum())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * 2, y


class Head(nn.Module):
    """A layer that averages over positions and computes logits over tokens with the weights of the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) @ self.weight.T


class LitTied(Lit):
    """A module whose first and last layers share their weights."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        embedding = nn.Embedding(11, WIDTH)
        middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.model = nn.Sequential(embedding, *middle, Head(embedding))

    tokens = True


@dataclass(frozen=True)
class Case:
    """The arguments of one Trainer run."""

    module: type[Lit] = Lit
    settings: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    evaluate: bool = False
    resume: str | None = None
    save: str | None = None

    def plain(self) -> Case:
        """Return the same case without a pipeline."""
        return replace(self, strategy=None)


class Keeper(Callback):
    """A callback that records the local gradients, the outputs and the learning rate of every step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, np.ndarray]] = []
        self.outputs: list[Any] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        here = [(n, p.grad) for n, p in module.named_parameters() if not p.is_meta]
        found = {n: _copied(gradient) for n, gradient in here if gradient is not None}
        self.gradients.append(found)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(plain_values(outputs))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def plain_values(tree: Any) -> Any:
    """Return a copy of a tree with NumPy arrays instead of tensors, so that it outlives the process."""
    return pytree.tree_map(lambda t: _copied(t) if isinstance(t, torch.Tensor) else t, tree)


def _copied(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().clone()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


class LineHandler(logging.Handler):
    """Keeps the log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def rank_zero_lines() -> Iterator[list[str]]:
    """Collect the lines that rank 0 logs, including those of level INFO."""
    kept, logger = LineHandler(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        yield kept.lines
    finally:
        logger.removeHandler(kept)


def quiet() -> None:
    """Ignore warnings and hide the messages of Lightning below errors."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def loaders(case: Case) -> dict[str, DataLoader[Any]]:
    """Return the training and validation loaders of a case."""
    tokens = getattr(case.module, "tokens", False)
    return {
        "train_dataloaders": DataLoader(data(tokens=tokens), batch_size=8),
        "val_dataloaders": DataLoader(data(13, tokens=tokens), batch_size=5),
    }


def train(case: Case, ranks: int, folder: Path | str) -> dict[str, Any]:
    """Run a case and return its outputs, gradients, weights, metrics and logged rows on this rank."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module = case.module(**case.settings)
    if case.trainer.get("precision", "64-true") == "64-true":
        module.double()  # Lightning restores weights before its precision plugin converts them to double
    keeper = Keeper()
    options = {"max_epochs": 1, "num_sanity_val_steps": 1, "precision": "64-true", **case.trainer}
    trainer = make_trainer(
        devices=options.pop("devices", ranks),
        strategy="auto" if case.strategy is None else PipelineStrategy(**case.strategy),
        logger=CSVLogger(str(folder), name="", version=0),
        log_every_n_steps=1,
        callbacks=[keeper, *options.pop("callbacks", [])],
        **options,
    )
    trainer.fit(module, **loaders(case), ckpt_path=case.resume, weights_only=False)
    found: dict[str, Any] = {
        "outputs": keeper.outputs,
        "rates": keeper.rates,
        "gradients": keeper.gradients,
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
    }
    if case.save:
        trainer.save_checkpoint(case.save)
    if case.evaluate:
        loader = DataLoader(data(13, tokens=getattr(case.module, "tokens", False)), batch_size=5)
        found["validated"] = trainer.validate(module, loader, verbose=False)
        found["tested"] = trainer.test(module, loader, verbose=False)
        found["predicted"] = plain_values(trainer.predict(module, loader))
    path = Path(folder) / "version_0" / "metrics.csv"
    if trainer.is_global_zero:
        with open(path) as file:
            found["rows"] = [
                {k: float(v) for k, v in row.items() if v and not k.startswith("_")} for row in csv.DictReader(file)
            ]
    return found


def train_cases(rank: int, cases: list[Case], ranks: int, folder: str) -> list[dict[str, Any]]:
    """Run several cases in the same processes and return their results."""
    return [train(case, ranks, Path(folder) / f"{n}") for n, case in enumerate(cases)]


def as_predicted(self: Any, made: Any, *_: Any) -> Trial:
    """Return a trial that agrees with the prediction, in place of a trial with a faked profile."""
    return Trial(1.0, 1.0, (1.0,) * len(made.layers))


def differences(a: Any, b: Any, tolerance: float = 1e-10, at: str = "") -> list[str]:
    """Return descriptions of the places where two trees differ in keys, shapes, or numbers by more than `tolerance`."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{at}: {key!r} is in one only" for key in sorted(a.keys() ^ b.keys(), key=str)]
        return missing + [d for k in a if k in b for d in differences(a[k], b[k], tolerance, f"{at}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{at}: {len(a)} and {len(b)} entries"]
        return [d for n, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, tolerance, f"{at}/{n}")]
    if np.shape(a) != np.shape(b):
        return [f"{at}: shapes {np.shape(a)} and {np.shape(b)}"]
    if isinstance(a, (bool, str)) or a is None or b is None:
        return [] if type(a) is type(b) and a == b else [f"{at}: {a} and {b}"]
    worst = float(
        np.abs(np.subtract(a, b, dtype=np.result_type(np.asarray(a), np.asarray(b), np.int8))).max(initial=0.0)
    )
    return [] if worst <= tolerance else [f"{at}: differ by {worst:.3g}"]
