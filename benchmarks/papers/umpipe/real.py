"""Unequal micro-batches of real layers on two processes, by ordinary Trainers: convolutions, then recurrent layers.

Every schedule trains the same model from the same weights, in turns; the least and the median of its steps count.
Stages are cut by hand between the kinds of layers, so that micro-batches alone differ.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.emulated import request_realtime_priority
from benchmarks.harness.silence import QUIET, hush
from benchmarks.papers.umpipe.executed import LAYERS, ROWS
from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Policy, Schedule
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.umpipe import UM1F1B, UMPipe
from lightning_pipes.testing.ranks import run_ranks

EQUAL = (1, 2, 4, 8)
"""Numbers of equal micro-batches."""
SKIPPED = 2
"""First steps that do not count."""
UNEQUAL = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 1))
"""Micro-batches of the convolutions, and of the recurrent layers."""


class Mixed(pl.LightningModule):
    """Convolutions, then recurrent layers, which have one number for each of their inputs."""

    def __init__(self, convolutions: int, recurrent: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        (first, self.width), (last, width) = LAYERS["convolution"], LAYERS["recurrent"]
        narrowing = nn.Linear(self.width, width)
        self.layers = nn.Sequential(
            *[first() for _ in range(convolutions)], narrowing, *[last() for _ in range(recurrent)]
        )
        self.began: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.layers(batch)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(
    rank: int,
    schedules: dict[str, tuple[Schedule | Policy, int | None]],
    layers: tuple[int, int],
    turns: int,
    steps: int,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of steps by schedule, and the sum of all weights after each."""
    hush()
    request_realtime_priority()
    torch.set_num_threads(1)
    data = torch.randn((steps + SKIPPED) * ROWS, LAYERS["convolution"][1], generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    sums = {}
    for _ in range(turns):
        for name, (schedule, microbatches) in schedules.items():
            module = Mixed(*layers)
            strategy = PipelineStrategy(
                schedule, microbatches=microbatches, partition=[layers[0] + 1], check_loss=False
            )
            trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **QUIET)
            trainer.fit(module, DataLoader(data, ROWS))  # type: ignore[arg-type]
            began = module.began[SKIPPED:]
            seconds[name] += [after - before for before, after in pairwise(began)]
            sums[name] = float(sum(p.detach().double().sum() for p in module.parameters()))
    return seconds, sums


def compare_schedules(quick: bool) -> tuple[list[str], dict[str, float]]:
    """Return the lines of the table, and how many times as long the best equal ones take."""
    schedules: dict[str, tuple[Schedule | Policy, int | None]] = {}
    for m in EQUAL:
        schedules |= {f"gpipe {m}": (GPipe(), m), f"1f1b {m}": (OneFOneB(), m)}
    for counts in UNEQUAL:
        text = " ".join(map(str, counts))
        schedules |= {
            f"umpipe {text}": (UMPipe(counts, counts), None),
            f"um1f1b {text}": (UM1F1B(counts, counts), None),
        }
    found = run_ranks(train, 2, schedules, (4, 2), 1 if quick else 6, 6 if quick else 8, timeout=600)
    seconds, sums = found[0]
    if max(sums.values()) - min(sums.values()) > 1e-3 * max(map(abs, sums.values())):
        raise AssertionError(f"schedules end with other weights: {sums}")
    least = {name: min(each) for name, each in seconds.items()}
    lines = ["Real layers on two processes: 4 convolutions, 2 recurrent; ms of a step of 64 samples, least and median"]
    best = {}
    for kind in ("gpipe", "umpipe", "1f1b", "um1f1b"):
        mine = sorted((name for name in least if name.split()[0] == kind), key=lambda name: least[name])
        best[kind] = least[mine[0]]
        lines += [
            f"  {name:14} {1e3 * least[name]:7.1f} {1e3 * statistics.median(seconds[name]):7.1f}" for name in mine[:2]
        ]
    gains = {"real_umpipe_gain": best["gpipe"] / best["umpipe"], "real_um1f1b_gain": best["1f1b"] / best["um1f1b"]}
    return lines, {name: round(gain, 4) for name, gain in gains.items()}
