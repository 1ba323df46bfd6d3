"""A U-Net with skip connections in a pipeline of two processes: `python examples/unet.py`.

The module has no container of layers. It is cut between calls of its submodules, and its code stays as it is.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import lightning as L
import torch
from data import Digits
from torch import Tensor, nn

from lightning_pipes import PipelineStrategy


def convolve(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    """A U-Net for images of shape (batch, 1, 8, 8). The skips connect stages that are far apart."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down1, self.down2 = convolve(1, channels), convolve(channels, 2 * channels)
        self.middle = convolve(2 * channels, 2 * channels)
        self.up2, self.up1 = convolve(4 * channels, channels), convolve(2 * channels, channels)
        self.head = nn.Conv2d(channels, 1, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.grow(self.middle(self.pool(b)))
        d = self.grow(self.up2(torch.cat([c, b], 1)))
        return self.head(self.up1(torch.cat([d, a], 1)))  # type: ignore[no-any-return]


class Denoiser(L.LightningModule):
    """Removes noise from images. The noise depends on the image only, so it is the same on any number of stages."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = UNet(channels)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, _ = batch
        noisy = images + 0.3 * torch.sin(1e3 * images.cumsum(-1).cumsum(-2))
        loss = nn.functional.mse_loss(self.net(noisy), images)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":  # each process runs this script
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/unet"), help="the directory of the report")
    arguments = parser.parse_args()
    logging.getLogger("lightning_pipes").setLevel(logging.INFO)  # shows where the module is cut

    L.seed_everything(0, verbose=False)
    strategy = PipelineStrategy("1f1b", microbatches=4, verify=2)
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
    trainer.fit(Denoiser(arguments.channels), Digits(batch_size=128))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}, bubble {strategy.report.bubble_measured:.0%}")
        print(f"picture {strategy.report.save(arguments.out).picture}")
