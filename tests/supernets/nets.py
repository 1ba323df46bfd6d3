"""A small supernet whose result depends on the order of its updates, trained by a Trainer and by a plain loop."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_pipes import MemorySwap, PipelineStrategy, ReproducibilityLog
from lightning_pipes.engine.compute.rng import replica_seed, seed_all, stream_seed
from lightning_pipes.ir import Policy, Span
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.supernets import (
    ChoiceBlock,
    Evolution,
    Explorer,
    ExplorerFeedback,
    SharedLayer,
    Subnet,
    SubnetStream,
    Supernet,
    Uniform,
    bulk_synchronous,
)
from lightning_pipes.trainer.loop.run import StageListener
from tests.trainer.lit import quiet
from tests.trainer.one_gpu import SHARED, on_one_gpu
from tests.trainers import make_trainer

ROWS, WIDTH, TOKENS, BLOCKS, CANDIDATES = 8, 8, 12, 8, 6
CUTS: dict[int, list[int]] = {1: [], 2: [5], 3: [4, 7], 4: [3, 5, 8], 8: [2, 3, 4, 5, 6, 7, 8]}
PARTS = (Span(0, 4), Span(4, 8))
"""The micro-batches of a batch."""
DELAY = 5
WARNED: list[str] = []
"""Warnings about a step after every batch, from the last fit in this process."""
FACTS: dict[str, str] = {}
"""Facts in the report of the last fit in this process."""


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


def candidates(statistics: bool) -> list[nn.Module]:
    """Return candidates of a block, with statistics of norms or all of one kind."""
    if not statistics:
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(CANDIDATES)]
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.BatchNorm1d(WIDTH, affine=False),  # no parameters, but statistics that change
        Residual(),
        nn.Identity(),
        nn.Linear(WIDTH, WIDTH),
    ]


def supernet(shared: str, statistics: bool = True) -> Supernet:
    """Return a supernet of an embedding, choice blocks, and a norm with a head.

    `shared` is the way in which subnets share the embedding and the head.
    """
    embedding = nn.Sequential(nn.Embedding(TOKENS, WIDTH), Mean())
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3))
    blocks = (ChoiceBlock(candidates(statistics)) for _ in range(BLOCKS))
    delay = DELAY if shared == "delayed" else None
    return Supernet(embedding, *blocks, SharedLayer(head, shared, delay), shared=shared, delay=delay)  # type: ignore[arg-type]


class Lit(pl.LightningModule):
    """The LightningModule of the supernet.

    With a `bulk`, subnets read the weights that the last subnet before their bulk has left.
    """

    def __init__(self, shared: str, dies_at: int = -1, bulk: int = 0) -> None:
        super().__init__()
        self.net = supernet(shared, statistics=not bulk)
        self.dies_at, self.bulk = dies_at, bulk

    def layers_of_batch(self, batch: Any) -> Any:
        layers = self.net.layers_of(batch[-1])
        return bulk_synchronous(layers, batch[-1].id, self.bulk) if self.bulk else layers

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), subnet = batch
        if subnet.id == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(self.net((x, subnet)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net((batch[0], Subnet([batch_idx] * BLOCKS))), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


class Cut(Lit):
    """A module in which each subnet has its own random cut into `stages` stages."""

    stages = 1

    def cut_of_batch(self, batch: Any) -> list[int]:
        rng = random.Random(batch[-1].id)
        return sorted(rng.choices(range(1, len(self.net)), k=self.stages - 1))

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.validated(batch))

    def validated(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net((x, Subnet([n % CANDIDATES for n in range(BLOCKS)]))), y)


class Batches(Dataset[Any]):
    """A dataset of batches of random tokens and labels, each with its own seed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(number)
        return torch.randint(TOKENS, (ROWS, 4), generator=g), torch.randint(3, (ROWS,), generator=g)


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(Batches(count), batch_size=None)


class Losses(Callback, StageListener):
    """A callback that records the exact loss of each subnet by its number."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.current_run.listeners.append(self)

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        self.found[batch[-1].id] = float(out).hex()


def new_module(shared: str, dies_at: int = -1, bulk: int = 0, kind: type[Lit] = Lit) -> Lit:
    torch.manual_seed(3)
    return kind(shared, dies_at, bulk)


def explorer(shared: str) -> Explorer:
    """Return an explorer for this way to share layers.

    Frozen layers are chosen by an evolution, whose generations end in the middle of epochs.
    """
    space = supernet(shared).space
    return Evolution(space, population=7, parents=3, seed=1) if shared == "frozen" else Uniform(space, seed=1)


def fit(
    rank: int,
    ranks: int,
    shared: str,
    batches: int,
    folder: str,
    resume: str | None = None,
    dies_at: int = -1,
    recompute: bool = False,
    every: int | None = None,
    schedule: str | Policy | None = None,
    bulk: int = 0,
    memory: MemorySwap | None = None,
    validates: int | None = None,
    kind: type[Lit] = Lit,
    gpu: bool = False,
    strategy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for two epochs, and return hashes of all layers, the losses, and the number of reported losses.

    The folder gets a checkpoint every `every` steps, and the reproducibility logs of the ranks.
    """
    quiet()
    torch.set_num_threads(1)
    module = new_module(shared, dies_at if rank == 0 else -1, bulk, kind)
    losses, stream = Losses(), SubnetStream(explorer(shared))
    others: list[Callback] = [] if memory is None else [memory]
    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every or batches * 10, save_top_k=-1)
    log, streams = ReproducibilityLog(folder, every_n_batches=1), schedule != "1f1b"
    stages = ranks // (strategy or {}).get("data_parallel", 1)
    if isinstance(module, Cut):
        module.stages = stages
    place: dict[str, Any] = on_one_gpu(ranks) if gpu else {"devices": ranks}
    more: dict[str, Any] = (SHARED if gpu else {}) | (strategy or {})
    trainer = make_trainer(
        **place,
        strategy=PipelineStrategy(schedule or CSP(depth=8), 2, partition=CUTS[stages], recompute=recompute, **more),
        max_epochs=2,
        val_check_interval=validates,
        num_sanity_val_steps=0,
        callbacks=[ExplorerFeedback(stream), keeper, *others, *([losses, log] if streams else [])],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held_out = loader(3) if validates else None
        trainer.fit(module, stream.pair_with(loader(batches)), held_out, ckpt_path=resume, weights_only=False)
    WARNED[:] = [text for text in map(str, (each.message for each in caught)) if "every batch steps" in text]
    FACTS.clear()
    if memory is not None and trainer.is_global_zero:
        FACTS.update(trainer.strategy.report.record.facts)
    return {"weights": hashes(module), "losses": losses.found, "told": stream.n_reported}


def steppers(folder: str) -> dict[str, set[str]]:
    """Return the ranks that stepped each layer, according to the reproducibility logs of all ranks."""
    found = defaultdict(set)
    for path in Path(folder, "reproducibility").glob("*-rank*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            for name in line["layers"] if "B" in line else ():
                found[name].add(path.stem.partition("-")[2])
    return found


def hashes(module: nn.Module) -> dict[str, str]:
    """Return a hash of each tensor in the state of a module, by name."""
    return {n: hashlib.blake2b(t.cpu().numpy().tobytes()).hexdigest() for n, t in module.state_dict().items()}


def alone(shared: str, batches: int, drains: Sequence[int] = (), replicas: int = 1) -> dict[str, Any]:
    """Train in one process with plain PyTorch, one subnet after another, and return the same values as `fit`.

    Only the seeds of dropout come from lightning_pipes. For "delayed", the weights after each subnet are kept, because
    later subnets read them.

    Args:
        shared: the way in which subnets share layers.
        batches: the number of batches of an epoch.
        drains: numbers of subnets after which all earlier subnets have ended, in addition to the ends of epochs.
        replicas: the number of replicas. Each has its own batch for a subnet. Gradients are averaged, and buffers
            come from the first replica.
    """
    torch.set_num_threads(1)  # as in `fit`, because sums on several threads differ in the last bit
    module = new_module(shared)
    [optimizer], [scheduler] = module.configure_optimizers()
    subnets, losses = SubnetStream(explorer(shared)), {}
    late = [layer for layer in module.net if getattr(layer, "delay", None)]
    parameters = [p for layer in late for p in layer.parameters()]
    number = 0
    for epoch in range(2):
        left = [[p.detach().clone() for p in parameters]]
        for of_all, subnet in zip(zip(*shares(batches, replicas, epoch), strict=True), subnets, strict=False):
            for p, older in zip(parameters, left[max(0, len(left) - DELAY)], strict=True):
                p.data = older.clone()
            total, found, before = [], [], [b.clone() for b in module.buffers()]
            for replica, (x, y) in enumerate(of_all):
                after = [b.clone() for b in module.buffers()]
                for b, value in zip(module.buffers(), before, strict=True):
                    b.copy_(value)
                total.append(backward(module, x, y, subnet, number, replica))
                found.append([p.grad for p in module.parameters()])
                optimizer.zero_grad()
                for b, value in zip(module.buffers(), after, strict=True) if replica else ():
                    b.copy_(value)
            for p, gradients in zip(module.parameters(), zip(*found, strict=True), strict=True):
                p.grad = gradients[0] if None in gradients else sum(gradients[1:], gradients[0]) / replicas
            losses[subnet.id] = [float(each).hex() for each in total]
            subnets.report_loss(subnet, float(total[0]))
            for p, newest in zip(parameters, left[-1], strict=True):
                p.data = newest.clone()
            optimizer.step()
            optimizer.zero_grad()
            scheduler["scheduler"].step()
            left.append([p.detach().clone() for p in parameters])
            number += 1
            if number in drains:
                left = left[-1:]
    first = {n: each[0] for n, each in losses.items()}
    return {"weights": hashes(module), "losses": first if replicas == 1 else losses, "told": number}


plain = cache(alone)


def after(found: dict[str, Any], subnet: int) -> dict[str, Any]:
    """Return the results without the losses of the first subnets, which a resumed run does not have."""
    return found | {"losses": {n: loss for n, loss in found["losses"].items() if n >= subnet}}


def shares(batches: int, replicas: int, epoch: int) -> list[DataLoader[Any]]:
    """Return the batches of each replica, distributed as by a Trainer."""
    data: Dataset[Any] = Batches(batches)
    if replicas == 1:
        return [loader(batches)]
    samplers = [DistributedSampler(data, replicas, replica) for replica in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [DataLoader(data, batch_size=None, sampler=sampler) for sampler in samplers]


def backward(module: Lit, x: torch.Tensor, y: torch.Tensor, subnet: Subnet, number: int, replica: int) -> torch.Tensor:
    """Run forward and backward of a batch in micro-batches, and return its loss."""
    total, seed = torch.tensor(0.0), replica_seed(0, replica)
    for part in PARTS:
        out: Any = (x[part.start : part.stop], subnet)
        for n, layer in enumerate(module.net):
            seed_all(stream_seed(seed, 0, n, number, part), torch.device("cpu"))
            out = layer(out)
        seed_all(stream_seed(seed, 0, -2, number, part), torch.device("cpu"))
        loss = F.cross_entropy(out, y[part.start : part.stop])
        (loss * 0.5).backward()
        total = loss.detach() * 0.5 + total
    return total
