"""The memory that sharding saves: optimizer states, sharded stages, and the peak while a rank loads its layers.

    python benchmarks/sharded.py [--quick] [--json]

- Two stages with two replicas are trained with and without `shard_optimizer`. `zero1_state_share` is the share of its
  stage's optimizer states that a process keeps, the larger one of all processes. `zero1_difference` is the largest
  difference of weights.
- Two ranks fill layers on `meta` from one safetensors file. `load_peak_over_own` is the peak of resident memory above
  the memory before `fit`, divided by the bytes of the rank's own layers, the larger one of both ranks. One tensor is a
  sixteenth of these bytes.
- Two stages with two shards, by `fully_shard` and by `parallelize_module`, are trained in float64 with AdamW and
  compared with one process. `fsdp_equal` and `tp_equal` are true if no weight differs by more than 1e-10.

Without `--quick`, four processes also train a GPT with 113 M parameters with DDP, FSDP2 and pipelines. The table shows
the largest peak of resident memory of a process above the memory before its module was created, and the samples per
second. The column of tensors comes from a second run. It shows the largest number of bytes of tensors that were alive
at the same time in a process, according to the allocations that torch's profiler records.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.memory import count_tensor_bytes
from benchmarks.harness.report import QUIET, make_parser
from benchmarks.harness.timing import StepTimer
from lightning_pipes import PipelineStrategy, load_pretrained
from lightning_pipes.engine.allocator import load_libc, read_status_bytes
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import quiet

LAYERS, WIDTH, QUICK_WIDTH, TOKENS = 32, 3072, 2048, 4000
ROWS, BATCHES = 8, 4
TRAINED_LAYERS, TRAINED_WIDTH = 8, 64  # of the model whose optimizer states are counted
BLOCKS, BLOCK_WIDTH, HEADS, SEQUENCE = 16, 768, 12, 32  # of the GPT
EQUAL = 1e-10
ENVIRONMENT, MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", -3  # of glibc, as in malloc.h
PINNED = {ENVIRONMENT: str(2**16)}  # larger blocks are returned to the system immediately, in every row


class Net(pl.LightningModule):
    """Linear layers, with an embedding that has most of the parameters of its stage.

    Args:
        layers: the number of linear layers.
        width: the width of the layers.
        file: a safetensors file from which the layers are loaded. The model then has no embedding.
    """

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


class Block(nn.Module):
    """A transformer block of a GPT. Its heads may be divided among tensor-parallel ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        parts = (self.query, self.key, self.value)
        query, key, value = (p(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in parts)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        z: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return x + z


class GPT(pl.LightningModule):
    """A GPT whose `configure_model` shards its layers in the way of Lightning's ModelParallelStrategy.

    Args:
        blocks: the number of blocks.
        width: the width of the model.
        heads: the number of attention heads.
        shard: whether to shard the layers.
        meta: whether to create the layers on the meta device.
    """

    def __init__(self, blocks: int, width: int, heads: int, shard: bool, meta: bool) -> None:
        super().__init__()
        self.sizes, self.shard, self.meta = (blocks, width, heads), shard, meta
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        blocks, width, heads = self.sizes
        torch.manual_seed(0)
        with torch.device("meta" if self.meta else "cpu"):
            middle = [Block(width, heads) for _ in range(blocks)]
            self.layers = nn.Sequential(nn.Embedding(256, width), *middle, nn.Linear(width, 256))
        self.to(self.dtype)
        mesh = self.device_mesh
        if not self.shard or mesh is None:
            return
        columns, rows = ("query", "key", "value", "up"), ("out", "down")
        plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        for layer in self.layers:
            if mesh["tensor_parallel"].size() > 1 and isinstance(layer, Block):
                parallelize_module(layer, mesh["tensor_parallel"], plan)
            if mesh["data_parallel"].size() > 1:
                fully_shard(layer, mesh=mesh["data_parallel"])
        if mesh["data_parallel"].size() > 1:
            fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.layers is not None
        logits = self.layers(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    net: pl.LightningModule,
    strategy: Strategy | str,
    devices: int,
    inputs: torch.Tensor,
    callback: pl.Callback,
    batches: int,
) -> None:
    """Train a module on a number of batches."""
    quiet()
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=batches, callbacks=[callback], **QUIET
    )
    trainer.fit(net, DataLoader(TensorDataset(inputs), batch_size=ROWS))


def train_sharded(rank: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return the bytes of this process's optimizer states, and the weights, without and with `shard_optimizer`."""
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


def train_small(rank: int, folder: str, data_parallel: int, tensor_parallel: int) -> None:
    """Train a small GPT in two stages with two shards, or in one process, and save a checkpoint."""
    quiet()
    sharded = data_parallel * tensor_parallel > 1
    strategy: Any = "auto"
    if sharded:
        strategy = PipelineStrategy(data_parallel=data_parallel, tensor_parallel=tensor_parallel, microbatches=2)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4 if sharded else 1,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
        **QUIET,
    )
    inputs = torch.randint(256, (BATCHES * ROWS, 9), generator=torch.Generator().manual_seed(1))
    own = inputs[rank * data_parallel // 4 :: data_parallel]  # a replica gets every second sample of each batch
    trainer.fit(GPT(4, 32, 4, True, False), DataLoader(TensorDataset(own), batch_size=ROWS // data_parallel))
    trainer.save_checkpoint(Path(folder, f"{data_parallel} {tensor_parallel}"))


def find_differences(folder: str) -> tuple[float, float]:
    """Return the largest differences of weights from one process, for FSDP2 and for tensor parallelism."""
    train_small(0, folder, 1, 1)
    for data_parallel, tensor_parallel in ((2, 1), (1, 2)):
        run_ranks(train_small, 4, folder, data_parallel, tensor_parallel, timeout=120)
    plain, fsdp, tensors = (
        torch.load(Path(folder, name), weights_only=False)["state_dict"] for name in ("1 1", "2 1", "1 2")
    )
    fsdp_difference, tp_difference = (
        max((found[name] - weight).abs().max().item() for name, weight in plain.items()) for found in (fsdp, tensors)
    )
    return fsdp_difference, tp_difference


WAYS: dict[str, tuple[bool, bool]] = {
    "DDP": (False, False),
    "FSDP2": (True, True),
    "pipeline": (False, True),
    "pipeline of two stages, two replicas": (False, True),
    "pipeline of two stages + ZeRO-1": (False, True),
    "pipeline of two stages + FSDP2": (True, True),
}
"""For each way to train, whether layers are sharded, and whether they are created on `meta`."""


def train_large(rank: int, way: str, counts_tensors: bool) -> tuple[int, float]:
    """Train the large GPT, and return the peak bytes of this process and the seconds of a batch.

    Args:
        rank: the rank of this process.
        way: a name in WAYS.
        counts_tensors: whether to count the bytes of tensors. Otherwise, the peak is the resident memory above the
            memory before the module was created.
    """
    strategies: dict[str, Any] = {
        "DDP": "ddp",
        "FSDP2": ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        "pipeline": PipelineStrategy(partition="parameters", gather="none", microbatches=8),
    }
    shards = PipelineStrategy(
        partition="parameters", gather="none", microbatches=4, data_parallel=2, shard_optimizer="ZeRO" in way
    )
    shard, meta = WAYS[way]
    timer = StepTimer()
    libc = load_libc()
    if libc is not None:  # glibc would keep memory that FSDP2 frees; the variable is read before the fork
        libc.mallopt(MMAP_THRESHOLD, int(PINNED[ENVIRONMENT]))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_status_bytes("VmRSS") or 0
    rows = 2 if way in ("DDP", "FSDP2") else 8 if way == "pipeline" else 4
    inputs = torch.randint(256, (8 * BATCHES, SEQUENCE + 1))
    quiet()

    def train() -> None:
        net = GPT(BLOCKS, BLOCK_WIDTH, HEADS, shard, meta)
        trainer = pl.Trainer(
            accelerator="cpu", devices=4, strategy=strategies.get(way, shards), max_epochs=1, callbacks=[timer], **QUIET
        )
        trainer.fit(net, DataLoader(TensorDataset(inputs), batch_size=rows))

    if counts_tensors:
        peak = count_tensor_bytes(train).peak
    else:
        train()
        peak = (read_status_bytes("VmHWM") or 0) - before
    return peak, sum(timer.seconds[1:]) / len(timer.seconds[1:])


def measure_memory() -> dict[str, tuple[float, float, float]]:
    """Train the large GPT in all ways.

    Returns:
        For each way, the GiB of resident memory and of tensors of the largest process, and samples per second.
    """
    found = {}
    for way in WAYS:
        resident, tensors = (
            run_ranks(train_large, 4, way, counts, timeout=600, env=PINNED) for counts in (False, True)
        )
        peaks = [round(max(peak for peak, _ in ranks) / 2**30, 2) for ranks in (resident, tensors)]
        found[way] = (*peaks, round(8 / max(seconds for _, seconds in resident), 2))
    return found


def load_layers(rank: int, file: str, width: int) -> float:
    """Return the peak memory while this rank fills its layers, divided by the bytes of these layers."""
    found: list[float] = []
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_status_bytes("VmRSS") or 0

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        own = sum(p.nbytes for p in module.parameters() if not p.is_meta)
        found.append(((read_status_bytes("VmHWM") or 0) - before) / own)

    inputs = torch.randn(ROWS, width)
    strategy = PipelineStrategy(partition=[1 + LAYERS // 2], gather="none")
    fit(Net(LAYERS, width, Path(file)), strategy, 2, inputs, LambdaCallback(on_train_start=look), 1)
    return found[0]


def main() -> None:
    """Run all comparisons and print the tables."""
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
        fsdp_difference, tp_difference = find_differences(folder)
    result: dict[str, Any] = {
        "zero1_state_share": round(max(own / of for (of, _), (own, _) in zip(whole, sharded, strict=True)), 4),
        "zero1_difference": max(differences),
        "load_peak_over_own": round(max(peaks), 3),
        "fsdp_difference": fsdp_difference,
        "fsdp_equal": fsdp_difference <= EQUAL,
        "tp_difference": tp_difference,
        "tp_equal": tp_difference <= EQUAL,
    }
    print("| | |\n| --- | --- |")
    for name, value in result.items():
        print(f"| {name.replace('_', ' ')} | {value} |")
    if not options.quick:
        print("\n| GPT of 113 M parameters on 4 processes | peak of a process (GiB) | its tensors (GiB) | samples/s |")
        print("| --- | --- | --- | --- |")
        memory = measure_memory()
        for way, (peak, tensors, speed) in memory.items():
            print(f"| {way} | {peak} | {tensors} | {speed} |")
        result["memory"] = memory
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
