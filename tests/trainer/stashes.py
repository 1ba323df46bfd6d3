"""Training runs whose weight versions are swapped in and out of a device, and the same runs without swapping."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_pipes import MemorySwap, PipelineStrategy
from tests.trainer.lit import Lit, data, plain_values, quiet
from tests.trainer.one_gpu import SHARED, on_one_gpu
from tests.trainers import make_trainer

BATCHES = 9
"""Batches of an epoch. Each has 4 samples, except the last one, which has 2."""
LINEAR = 1024
"""Bytes that the weights of one layer occupy on the device, where an allocator aligns both tensors."""
CUTS = {2: [4], 3: [5, 7]}


@dataclass(frozen=True)
class Stashing:
    """The arguments of one run. Two or three layers of the first stage have weights."""

    ranks: int
    schedule: str
    microbatches: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    gpu: bool = False
    relocation: str = "blocking"
    by_units: bool = False


class Counts(Callback):
    """A callback that counts the weight versions of the first stage between batches and records all cuts.

    Attributes:
        most: the largest number of versions, including the current weights.
        layers: every assignment of layers to stages that was in use.
    """

    def __init__(self) -> None:
        self.most = 0
        self.layers: set[Any] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        run = trainer.strategy.current_run
        self.layers.add(run.local_layers.holdings.layers)
        for stage in run.stages.values():
            found = 1 + len(getattr(stage.weights, "_kept", ()))
            self.most = max(self.most, found)
            assert found <= stage.weights.max_versions


def fit(case: Stashing, folder: str, memory: MemorySwap | None, resume: str | None = None) -> dict[str, Any]:
    """Run a case, with swapping if `memory` is given, and return its weights, metrics and counts."""
    quiet()
    pl.seed_everything(3, verbose=False)
    torch.set_num_threads(1)
    module, counts = Lit(dropout=0.2).double(), Counts()
    others: list[Callback] = [counts, *([] if memory is None else [memory])]
    if case.resumes:
        others.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1))
    arguments = {"every": 5} if case.schedule == "stashing_mover" else {}
    place: dict[str, Any] = on_one_gpu(case.ranks) if case.gpu else {"accelerator": "cpu", "devices": case.ranks}
    shared: dict[str, Any] = SHARED if case.gpu else {}
    cuts: list[Any] = [f"model.{n}" for n in CUTS[case.ranks]] if case.by_units else CUTS[case.ranks]
    strategy = PipelineStrategy(
        case.schedule,
        case.microbatches,
        partition=cuts,
        recompute=True,
        schedule_args=arguments,
        relocation=case.relocation,
        **shared,
    )
    trainer = make_trainer(
        **place,
        strategy=strategy,
        precision="64-true",
        logger=CSVLogger(folder, name="", version=0),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=others,
        **{"max_epochs": 2} | case.options,
    )
    held_out = DataLoader(data(13), batch_size=5)
    trainer.fit(module, DataLoader(data(4 * BATCHES - 2), batch_size=4), held_out, ckpt_path=resume, weights_only=False)
    return {
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
        "most": counts.most,
        "layers": len(counts.layers),
        "statistics": None if memory is None else memory.statistics,
        "logged": Path(folder, "version_0", "metrics.csv").read_text() if trainer.is_global_zero else "",
    }


def turning(versions: int, bandwidth: float | None = None) -> MemorySwap:
    """Return a MemorySwap with device memory for `versions` versions of three layers."""
    memory = MemorySwap(versions * 3 * LINEAR, bandwidth=bandwidth)
    memory._poison = True
    return memory
