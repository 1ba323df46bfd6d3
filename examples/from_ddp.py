"""From DDP to a pipeline: one module and one data module, with either strategy.

python examples/from_ddp.py ddp
python examples/from_ddp.py pipeline --verify 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data import Digits
from torch import Tensor, nn

from lightning_pipes import PipelineStrategy


class Classifier(L.LightningModule):  # an ordinary LightningModule, the same for both strategies
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_start(self) -> None:
        held = sum(p.numel() for p in self.parameters() if not p.is_meta)
        print(f"rank {self.global_rank} holds {held / 1e6:.1f} million parameters\n", end="")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-4)


if __name__ == "__main__":  # each process runs this script
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", choices=["ddp", "pipeline"])
    parser.add_argument("--verify", type=int, default=0, help="batches that are compared with one plain process")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/from_ddp"), help="the directory of the report")
    arguments = parser.parse_args()

    L.seed_everything(0, verbose=False)
    strategy: Any = "ddp"
    if arguments.strategy == "pipeline":
        strategy = PipelineStrategy("1f1b", microbatches=8, verify=arguments.verify)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Classifier(arguments.width, arguments.depth), Digits(batch_size=256))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps")
        if isinstance(strategy, PipelineStrategy):
            print(
                f"bubble {strategy.report.bubble_measured:.0%}, picture {strategy.report.save(arguments.out).picture}"
            )
            print(strategy.report.advice.sentence)
