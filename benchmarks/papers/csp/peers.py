"""CSP on a small supernet of real layers compared with other ways to train it, executed on two cores.

All train the same subnets on the same batches, in several alternating rounds: `csp` on two processes; one subnet after
another in a pipeline, with schedules that flush; one-shot training under DDP, as in the examples of NNI, with one
process per core and half of the batch on each; and one process that uses both cores.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.report import QUIET, Output, describe_machine, hush
from lightning_pipes import PipelineStrategy
from lightning_pipes.supernets import ChoiceBlock, SubnetStream, Supernet, Uniform
from lightning_pipes.testing.ranks import run_ranks

BLOCKS, CANDIDATES, WIDTH, ROWS = 12, 16, 384, 64
HIDDEN = (256, 512, 768, 1024)
WARM = 8
"""The number of batches that do not count."""


class Residual(nn.Module):
    """A candidate with a given hidden width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Search(L.LightningModule):
    """A module that trains one subnet in each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (ChoiceBlock(Residual(HIDDEN[n % len(HIDDEN)]) for n in range(CANDIDATES)) for _ in range(BLOCKS))
        self.net = Supernet(*blocks, nn.Linear(WIDTH, 10), shared="frozen")

    def layers_of_batch(self, batch: Any) -> Any:
        """Return the layers of the batch's subnet."""
        return self.net.layers_of(batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of the classification."""
        (x, y), subnet = batch
        return F.cross_entropy(self.net((x, subnet)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Measures the seconds from the end of batch `WARM` to the end of training."""

    began = seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == WARM:
            self.began = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.began


def batches(subnets: int, rows: int) -> Any:
    """Return batches of random inputs, whose labels are given by a linear map."""
    generator = torch.Generator().manual_seed(0)
    x, teacher = (torch.randn(n, m, generator=generator) for n, m in ((ROWS * subnets, WIDTH), (WIDTH, 10)))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x @ teacher).argmax(1)), rows)


def fit(rank: int, name: str, subnets: int) -> float:
    """Return the subnets per second of one way to train them."""
    hush()
    processes = 1 if name == "one process" else 2
    torch.set_num_threads(2 // processes)
    strategy: Any = "auto"
    if name == "ddp":
        strategy = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
    elif name != "one process":
        schedule, microbatches = name.split()
        strategy = PipelineStrategy(schedule, microbatches=int(microbatches), partition=[BLOCKS // 2])
    module, clock = Search(), Clock()
    stream = SubnetStream(Uniform(module.net.space, seed=1))
    loader = batches(subnets, ROWS // 2 if name == "ddp" else ROWS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        max_steps=subnets,
        strategy=strategy,
        callbacks=[clock],
        **QUIET,
    )
    trainer.fit(module, stream.pair_with(loader))
    return (subnets - WARM) / clock.seconds


def peers(subnets: int, rounds: int, ways: Sequence[str]) -> Output:
    """Yield the median, least and largest subnets per second of each way, and the ratio of the best csp to it."""
    yield f"{describe_machine()}, {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}\n"
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            run = partial(run_ranks, fit, 1 if name == "one process" else 2)
            found[name].append(run(name, subnets, timeout=300)[0])
    rate = {name: statistics.median(values) for name, values in found.items()}
    csp, flushed = (max(rate[name] for name in ways if name.startswith(each)) for each in ("csp", ("1f1b", "zero")))
    yield f"{BLOCKS} blocks of {CANDIDATES}, {ROWS} rows: subnets/s, median (least to most), ratio of the best csp"
    for name, values in found.items():
        yield f"{name:16} {rate[name]:7.1f} ({min(values):.1f} to {max(values):.1f}) {csp / rate[name]:6.2f}"
    yield "Left out: more than two processes; NNI itself, whose strategies run the same loop as DDP here."
    others = {"vs_one_by_one": flushed, "vs_ddp": rate["ddp"], "vs_one_process": rate["one process"]}
    yield {key: round(csp / value, 3) for key, value in others.items()}
