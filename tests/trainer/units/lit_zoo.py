"""The plain modules of the zoo as LightningModules, trained with and without a pipeline."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import plain_values, quiet
from tests.trainer.units.zoo import CASES

CUT = {"module": "", "microbatches": 2}
"""Of modules whose loss is a mean over samples, none of which sees the others."""
WHOLE = {"module": "", "microbatches": 1}
"""Of modules with batch normalisation, or a loss that is no mean over samples."""
DRAWING: dict[str, dict[str, Any]] = {
    "lstm and gru": CUT,
    "nn.Transformer": CUT,
    "train mode mix": WHOLE,
    "gan with one backward": CUT,
}
"""These draw random numbers, which plain Lightning draws from one stream."""


class LitZoo(pl.LightningModule):
    """A case of the zoo; it logs its loss, counts its steps and validates."""

    def __init__(self, name: str) -> None:
        super().__init__()
        case = CASES[name]()
        self.net, self.run_case = case.model, case.step
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.run_case(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.run_case(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Keeps(pl.Callback):
    """Keeps what a run has logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.here: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.here = [name for name, _ in trainer.lightning_module.named_parameters()]


def train_zoo(name: str, ranks: int, folder: str, **settings: Any) -> dict[str, Any]:
    """Train a case for two epochs of two batches, and return what came out; `ranks` of 0 is plain Lightning."""
    quiet()
    torch.set_num_threads(1)
    batch = CASES[name]().batch
    both = TensorDataset(*(torch.cat([t, t.flip(-1) if t.ndim > 1 else t]) for t in batch))
    loader = DataLoader(both, batch_size=len(batch[0]))
    keeps = Keeps()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks or 1,
        strategy=PipelineStrategy(**settings) if ranks else "auto",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[keeps],
        default_root_dir=folder,
    )
    torch.manual_seed(0)
    module = LitZoo(name)
    trainer.fit(module, loader, loader)
    path = f"{folder}/{name.replace(' ', '_').replace('.', '')}_{ranks}.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True) if trainer.is_global_zero else {}
    return {
        "losses": keeps.losses,
        "here": keeps.here,
        "val": float(trainer.callback_metrics["val"]),
        "weights": plain_values(module.state_dict()),
        "saved": plain_values(state.get("state_dict", {})),
        "optimizer": plain_values([o["state"] for o in state.get("optimizer_states", [])]),
    }


def train_many(rank: int, cases: list[tuple[str, dict[str, Any]]], ranks: int, folder: str) -> list[dict[str, Any]]:
    """Train cases one after another on this rank, each with its settings."""
    return [train_zoo(name, ranks, folder, **settings) for name, settings in cases]
