"""Helpers of the checkpoint tests: a run that writes checkpoints, and a substitute for its control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import Keeper, Lit, data, plain_values, quiet
from tests.trainers import make_trainer


def fit(
    folder: Path, strategy: dict[str, Any], trouble: list[Callback], resume: Path | None = None, **more: Any
) -> dict[str, Any]:
    """Train on two ranks, write a checkpoint every two steps, and return the outputs and weights."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module = Lit(dropout=0.2).double()
    keeper = Keeper()
    trainer = make_trainer(
        strategy=PipelineStrategy(microbatches=2, **strategy),
        precision="64-true",
        max_epochs=3,
        callbacks=[
            keeper,
            *trouble,
            *more.pop("callbacks", [ModelCheckpoint(folder, "{step}", every_n_train_steps=2)]),
        ],
        **more,
    )
    trainer.fit(module, DataLoader(data(), 8, shuffle=True), ckpt_path=resume, weights_only=False)
    return {"outputs": keeper.outputs, "weights": plain_values(dict(module.state_dict()))}


class OneRank:
    """A substitute for the control of a pipeline of one rank."""

    size, position, ranks = 1, 0, (0,)

    def gather(self, thing: Any, to: int) -> list[Any]:
        return [thing]

    def broadcast(self, thing: Any, source: int) -> Any:
        return thing
