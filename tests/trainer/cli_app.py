"""A script that a user may write: `python cli_app.py fit --trainer.strategy=pipeline_1f1b`."""

import lightning_pipes  # noqa: F401, I001 (before Lightning, where an import sorter may put it)
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(LightningModule):
    """A small classifier whose layers run in a pipeline."""

    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class MyData(LightningDataModule):
    """Random samples in double precision."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        g = torch.Generator().manual_seed(0)
        samples = TensorDataset(torch.randn(32, 4, generator=g).double(), torch.randint(0, 2, (32,), generator=g))
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)


def main(args: list[str] | None = None) -> LightningCLI:
    """Run LightningCLI with `args`, or with the arguments of the command line."""
    return LightningCLI(MyModule, MyData, args=args, seed_everything_default=1)


if __name__ == "__main__":
    main()
