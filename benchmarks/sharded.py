"""What sharding saves: optimizer states of a replica, and peak memory while a rank loads its own layers.

    python benchmarks/sharded.py [--quick] [--json]

Two stages of two replicas train with `shard_optimizer` and without it: `zero1_state_share` is the larger of the shares
of its stage's states that a process keeps, and `zero1_difference` the largest difference of weights. Then two ranks
fill layers on `meta` from one safetensors file: `load_peak_over_own` is the larger of their peaks of resident memory
above that before `fit`, over the bytes of the rank's own layers, of which one tensor is a sixteenth. Quick mode has
smaller layers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.report import make_parser
from benchmarks.harness.silence import QUIET
from lightning_pipes import PipelineStrategy, load_pretrained
from lightning_pipes.engine.allocator import read_status_bytes
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import quiet

LAYERS, WIDTH, QUICK_WIDTH, TOKENS = 32, 3072, 2048, 4000
ROWS, BATCHES = 8, 4
TRAINED_LAYERS, TRAINED_WIDTH = 8, 64  # whose states are counted


class Net(pl.LightningModule):
    """Linear layers, with an embedding that has most of the parameters of its stage."""

    def __init__(self, layers: int = TRAINED_LAYERS, width: int = TRAINED_WIDTH, file: Path | None = None) -> None:
        super().__init__()
        self.count, self.width, self.file = layers, width, file
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        with torch.device("cpu" if self.file is None else "meta"):
            middle = [nn.Linear(self.width, self.width) for _ in range(self.count)]
            first = nn.Embedding(TOKENS, self.width) if self.file is None else nn.Identity()
            self.layers = nn.Sequential(first, *middle)
        if self.file is not None:
            load_pretrained(self.layers, self.file)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.layers is not None
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    net: Net, strategy: PipelineStrategy, devices: int, inputs: torch.Tensor, callback: pl.Callback, batches: int
) -> None:
    """Train on some batches."""
    quiet()
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=batches, callbacks=[callback], **QUIET
    )
    trainer.fit(net, DataLoader(TensorDataset(inputs), batch_size=ROWS))


def train_sharded(rank: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return the bytes of optimizer states of this process, and the weights, without and with shards."""
    found = []
    for shard in (False, True):
        pl.seed_everything(0, verbose=False)
        kept: list[int] = []

        def count(trainer: pl.Trainer, module: pl.LightningModule, kept: list[int] = kept) -> None:
            states = [t for state in trainer.optimizers[0].state.values() for t in state.values()]
            kept.append(sum(t.nbytes for t in states))

        net = Net()
        strategy = PipelineStrategy(partition=[4], data_parallel=2, shard_optimizer=shard)
        inputs = torch.randint(TOKENS, (2 * BATCHES * ROWS, 4))
        fit(net, strategy, 4, inputs, LambdaCallback(on_train_end=count), BATCHES)
        found.append((kept[0], dict(net.state_dict())))
    return found


def load_layers(rank: int, file: str, width: int) -> float:
    """Return the peak memory while this rank fills its layers, over the bytes of these layers."""
    found: list[float] = []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read_status_bytes("VmRSS") or 0

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        own = sum(p.nbytes for p in module.parameters() if not p.is_meta)
        found.append(((read_status_bytes("VmHWM") or 0) - before) / own)

    inputs = torch.randn(ROWS, width)
    strategy = PipelineStrategy(partition=[1 + LAYERS // 2], gather="none")
    fit(Net(LAYERS, width, Path(file)), strategy, 2, inputs, LambdaCallback(on_train_start=look), 1)
    return found[0]


def main() -> None:
    """Print the table."""
    options = make_parser(__doc__, f"layers of {QUICK_WIDTH} units instead of {WIDTH}").parse_args()
    width = QUICK_WIDTH if options.quick else WIDTH
    ranks = run_ranks(train_sharded, 4, timeout=120)
    whole, sharded = ([found[n] for found in ranks] for n in (0, 1))
    differences = [
        (mine[name].double() - weight.double()).abs().max().item()
        for (_, weights), (_, mine) in zip(whole, sharded, strict=True)
        for name, weight in weights.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "layers.safetensors")
        with torch.no_grad():
            layers = nn.Sequential(nn.Identity(), *(nn.Linear(width, width) for _ in range(LAYERS)))
            save_file(layers.state_dict(), file)
        del layers
        peaks = run_ranks(load_layers, 2, str(file), width, timeout=300)
    result = {
        "zero1_state_share": round(max(own / of for (of, _), (own, _) in zip(whole, sharded, strict=True)), 4),
        "zero1_difference": max(differences),
        "load_peak_over_own": round(max(peaks), 3),
    }
    print("| | |\n| --- | --- |")
    for name, value in result.items():
        print(f"| {name.replace('_', ' ')} | {value} |")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
