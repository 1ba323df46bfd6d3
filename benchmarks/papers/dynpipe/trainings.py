"""Trainings next to neighbors that come and go, for benchmarks/dynpipe.py.

Real layers compute while other processes compete with them. Emulated layers sleep for their time, and sleep longer
while a trace specifies a neighbor.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.emulated import pause_until
from benchmarks.harness.report import QUIET
from lightning_pipes import InterferenceMonitor, PipelineStrategy
from lightning_pipes.ir import Kind
from lightning_pipes.tune.neighbors import Neighbor
from tests.strategies.dynpipe.neighbourhood import visiting_slowdown

ROWS, WIDTH = 8, 16
REAL_ROWS, REAL_SHAPE = 2, (32, 96)
"""The number of samples in a real micro-batch, and the shape (tokens, width) of a sample."""
LAYER = 4.0e-3
"""Forward seconds of an emulated layer for a whole batch. A backward takes twice as long."""
ASYNCHRONOUS = "pipedream", "dynpipe"

_slow = 1.0  # the current slowdown of the layers of this process


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        end = time.perf_counter() + seconds * _slow
        out = x.clone()
        pause_until(end)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        end = time.perf_counter() + 2 * ctx.seconds * _slow
        out = gradient.clone()
        pause_until(end)
        return out, None


class Emulated(nn.Module):
    """A small linear layer that takes the time of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sleep.apply(x + self.lin(x).tanh(), LAYER * len(x) / ROWS)  # type: ignore[no-untyped-call]
        return out


def real_block() -> nn.Module:
    """Return a transformer block that is small enough for one core."""
    return nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)


class Lit(pl.LightningModule):
    def __init__(self, layers: int, real: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*(real_block() if real else Emulated() for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        out: torch.Tensor = self.net(x)
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A training with a neighbor.

    Attributes:
        schedule: the schedule of the strategy.
        ranks: the number of ranks, with one stage each.
        layers: the number of layers of the model.
        steps: the number of training batches.
        slow: pairs of the first batch and the factor by which the layers of stage `at` take longer from then on.
        at: the stage with the neighbor.
        real: whether the layers compute on two ranks. Processes then compete with stage `at` while its factor is not 1.
        replan: whether the strategy re-plans. The schedule `dynpipe` always does.
        monitor: whether to use an InterferenceMonitor.
        kind: the kind of a real neighbor.
        stop: the number of steps after which the training ends. By default, all batches are trained.
        layout: the layers at which stages begin. By default, the partition is even.
        resume: the checkpoint to continue from, or an empty string.
        folder: the folder for a checkpoint at the end, or an empty string.
        every: the number of batches between two observations.
        windows: the number of consecutive observations in which a move has to save time.
        visitors: the load, the stay and the seed of `visiting_slowdown`, if neighbors come to all stages.
    """

    schedule: str
    ranks: int
    layers: int
    steps: int
    slow: tuple[tuple[int, float], ...] = ()
    at: int = 0
    real: bool = False
    replan: bool = True
    monitor: bool = False
    kind: str = "spin"
    stop: int | None = None
    layout: tuple[int, ...] = ()
    resume: str = ""
    folder: str = ""
    every: int = 8
    windows: int = 2
    visitors: tuple[float, float, int] | None = None

    def factor(self, stage: int, step: int) -> float:
        """Return the factor by which a stage is slowed down in a batch."""
        if self.visitors is not None:
            load, stay, seed = self.visitors
            return float(visiting_slowdown(self.ranks, load, stay, seed)(stage, step, 1)[0, 0])
        if stage != self.at:
            return 1.0
        return next((factor for begins, factor in reversed(self.slow) if step >= begins), 1.0)

    @property
    def cut(self) -> list[int]:
        return list(self.layout) or [s * self.layers // self.ranks for s in range(1, self.ranks)]


def microbatches(case: Case) -> int:
    """Return the number of micro-batches in a batch."""
    if case.schedule in ASYNCHRONOUS:
        return 1
    return 4 * case.ranks if case.real else case.ranks


class Trace(pl.Callback):
    """Records the batches of this rank, and starts and stops its neighbors."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.core, self.stage = case, rank, case.ranks - 1 - rank  # the last stage is on rank 0
        self.ended: list[float] = []
        self.processor: list[float] = []
        self.layers: list[Any] = []
        self.losses: list[float] = []
        self.busy: list[float] = []
        self._beside = ExitStack()
        self._factor = 1.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        global _slow
        factor = self.case.factor(self.stage, batch_idx)
        if self.case.real and factor != self._factor:
            self._beside.close()
            for _ in range(round(factor) - 1):
                self._beside.enter_context(Neighbor(self.case.kind, core=self.core))
        self._factor = factor
        _slow = 1.0 if self.case.real else factor

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.ended.append(time.monotonic())
        self.processor.append(time.process_time())
        self.losses.append(float(outputs["loss"]))
        if trainer.strategy.current_run.windows:  # only with a schedule that flushes
            events = trainer.strategy.current_run.windows[-1].events
            self.busy.append(sum(e.end - e.start for e in events if e.instruction.kind in (Kind.F, Kind.B)) / 1e9)
        self.layers.append([tuple(span) for span in trainer.strategy.current_run.local_layers.holdings.layers])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        global _slow
        _slow = 1.0  # the next training measures its layers without a neighbor
        self._beside.close()


def make_blocks(case: Case) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return a module with layers that sleep or with transformer blocks, and a loader of random samples."""
    shape, rows = (REAL_SHAPE, REAL_ROWS * microbatches(case)) if case.real else ((WIDTH,), ROWS)
    data = torch.randn(rows * case.steps, *shape, generator=torch.Generator().manual_seed(0))
    return Lit(case.layers, case.real), DataLoader(TensorDataset(data), batch_size=rows)


def train(rank: int, case: Case) -> dict[str, Any]:
    """Train, and return the records of this rank and a hash of the final weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case.real:
        os.sched_setaffinity(0, {rank})
    trace, m = Trace(case, rank), microbatches(case)
    arguments: dict[str, Any] = {"partition": case.cut}
    if case.schedule == "dynpipe":
        arguments["schedule_args"] = {"every": case.every, "windows": case.windows}
    elif case.replan:
        arguments["replan"] = {"every": case.every, "windows": case.windows}
    watching: list[pl.Callback] = [InterferenceMonitor()] if case.monitor else []
    stop = case.stop or case.steps
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=PipelineStrategy(case.schedule, m, **arguments),
        max_steps=stop,
        max_epochs=-1,
        callbacks=[trace, *watching],
        **QUIET,
    )
    module, loader = make_blocks(case)
    trainer.fit(module, loader, ckpt_path=case.resume or None, weights_only=False)
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.state_dict().values())).hexdigest()
    if case.folder:
        trainer.save_checkpoint(Path(case.folder) / "last.ckpt")
    names = "ended", "processor", "layers", "losses", "busy"
    return {"digest": digest, **{name: getattr(trace, name) for name in names}}


def several(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Run several trainings one after another in the same processes."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return [train(rank, case) for case in cases]
