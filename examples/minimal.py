"""A minimal pipeline: `python examples/minimal.py` trains on the digits of scikit-learn with two processes."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_pipes import PipelineStrategy


def make_block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))


class Classifier(L.LightningModule):  # an ordinary LightningModule
    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        blocks = [make_block(width) for _ in range(depth)]
        self.layers = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-4)


if __name__ == "__main__":  # each process runs this script
    L.seed_everything(0, verbose=False)
    digits = load_digits()
    pairs = torch.utils.data.TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    strategy = PipelineStrategy("1f1b", microbatches=8)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=5)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(pairs, batch_size=256, drop_last=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.3f}, bubble {strategy.report.bubble_measured:.0%}")
