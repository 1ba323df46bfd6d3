"""Layers of a supernet that take turns on a device in a real training: hits and waiting times.

Each of three stages has four choice blocks with 24 candidates, which sleep instead of computing, and memory for the
layers of three or four subnets. The states are really copied over an emulated link. Relative to its computation, a
layer takes as long to copy as the layers in NASPipe's Table 5, or three times as long.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from benchmarks.harness.emulated import EmulatedLayer, sleeping_layer
from benchmarks.harness.report import QUIET, Output, hush
from lightning_pipes import MemorySwap, PipelineStrategy
from lightning_pipes.engine.residency.upcoming import PREDICTORS
from lightning_pipes.sim.residency import Statistics
from lightning_pipes.supernets import ChoiceBlock, SubnetStream, Supernet, Uniform
from lightning_pipes.testing.ranks import run_ranks

STAGES, BLOCKS, CANDIDATES, WIDTH = 3, 12, 24, 64
FORWARD, BACKWARD, MICROBATCHES = 0.004, 0.008, 2
"""Seconds of a micro-batch, and the number of micro-batches."""
STATE = 52736
"""Bytes of a candidate with Adam's moments on the device."""
ON_DEMAND = "on_demand"
LINK, SLOW = 16e6, 5e6
"""Bytes per second.

A layer moves in 3.3 ms or 10.5 ms. The former is 14 % of its forward and backward of 24 ms (Table 5: 8 to 17 %,
separable convolutions 6 to 20 %).
"""


class Candidate(nn.Module):
    """A layer with weights that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sleeps = EmulatedLayer(sleeping_layer(FORWARD, BACKWARD, message_bytes=256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sleeps(self.linear(x))  # type: ignore[no-any-return]


class Search(L.LightningModule):
    """A module that trains one subnet in each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Supernet(*(ChoiceBlock(Candidate() for _ in range(CANDIDATES)) for _ in range(BLOCKS)))

    def layers_of_batch(self, batch: Any) -> Any:
        """Return the layers of the batch's subnet."""
        return self.net.layers_of(batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a loss that depends on all weights of the subnet."""
        (x,), subnet = batch
        return self.net((x, subnet)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam, with which a state is three times as large as the weights."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Measures the seconds of a training."""

    seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds += time.perf_counter()


def fit(rank: int, subnets: int, ways: list[tuple[int, float, str]]) -> list[Any]:
    """Train in several ways.

    Args:
        rank: the rank of this process.
        subnets: the number of subnets.
        ways: the number of contexts that fit on a device (0 if all layers stay on it), bytes per second, and the
            predictor.

    Returns:
        The seconds of each training, and the statistics of its swaps.
    """
    hush()
    torch.set_num_threads(1)
    found = []
    for contexts, bandwidth, predictor in ways:
        room, prefetch = contexts * STATE * BLOCKS // STAGES, predictor != ON_DEMAND
        memory = MemorySwap(room, bandwidth=bandwidth, prefetch=prefetch) if contexts else None
        if memory is not None and prefetch:
            memory.predictor = predictor
        module, clock = Search(), Clock()
        stream = SubnetStream(Uniform(module.net.space, seed=1))
        data = torch.utils.data.TensorDataset(torch.ones(4 * subnets, WIDTH))
        trainer = L.Trainer(
            accelerator="cpu",
            devices=STAGES,
            max_steps=subnets,
            strategy=PipelineStrategy(
                "csp",
                MICROBATCHES,
                recompute=True,
                partition=[BLOCKS // STAGES * k for k in range(1, STAGES)],
            ),
            callbacks=[clock] if memory is None else [clock, memory],
            **QUIET,
        )
        trainer.fit(module, stream.pair_with(torch.utils.data.DataLoader(data, 4)))
        found.append((clock.seconds, None if memory is None else memory.statistics))
    return found


def turns(subnets: int) -> Output:
    """Yield hits and waiting times by memory, link and predictor."""
    ways = [(0, LINK, "in_turn"), *((3, LINK, each) for each in (ON_DEMAND, *PREDICTORS))]
    ways += [(4, LINK, "in_turn"), *((3, SLOW, each) for each in PREDICTORS)]
    ranks = run_ranks(fit, STAGES, subnets, ways, timeout=1200)
    yield f"{platform.machine()}, torch {torch.__version__}, lightning {L.__version__}; {subnets} subnets, emulated"
    yield "room for  MB/s  predictor        s  over all | by stage: hits at switches, waiting as a share of time"
    keys: dict[str, float] = {}
    base = ranks[0][0][0]
    for n, (contexts, bandwidth, predictor) in enumerate(ways):
        seconds = ranks[0][n][0]
        each = [found[n][1] for found in reversed(ranks) if found[n][1] is not None]  # the last stage is on rank 0
        told = "  ".join(f"{s.hit_rate:6.1%} {s.stall_ns / 1e9 / seconds:6.2%}" for s in each)
        room = f"{contexts} subnets" if contexts else "all      "
        yield f"{room} {bandwidth / 1e6:5.0f}  {predictor:11} {seconds:6.2f} {seconds / base - 1:+8.1%} | {told}"
        if each:
            total = Statistics.sum_devices(each)
            name = f"{contexts}_at_{bandwidth / 1e6:.0f}" + ("" if predictor == PREDICTORS[0] else f"_{predictor}")
            keys[f"hit_rate_{name}"] = round(total.hit_rate, 4)
            keys[f"hit_rate_all_tasks_{name}"] = round(total.hits / total.leases, 4)
            keys[f"stall_share_{name}"] = round(sum(s.stall_ns for s in each) / 1e9 / seconds / STAGES, 4)
    yield "Left out: the computation of a GPU during copies; embeddings and heads, which stay on the device."
    yield keys
