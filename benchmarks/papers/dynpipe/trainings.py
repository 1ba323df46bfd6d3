"""Trainings beside neighbours that come and go, for benchmarks/dynpipe.py: layers that compute, beside processes that
compete with them, and layers that sleep for their time, longer while a neighbour is said to be there."""

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
from lightning_pipes.testing.neighbours import Neighbour
from tests.strategies.dynpipe.neighbourhood import visiting_slowdown

ROWS, WIDTH = 8, 16
REAL_ROWS, REAL_SHAPE = 2, (32, 96)
"""Of a real micro-batch: samples, and the shape of one, tokens by width."""
LAYER = 4.0e-3
"""Seconds of an emulated layer's forward for a whole batch; backward takes twice as long."""
ASYNCHRONOUS = "pipedream", "dynpipe"

_slow = 1.0  # by how much layers of this process take longer now


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
    """A linear layer that takes the time of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sleep.apply(x + self.lin(x).tanh(), LAYER * len(x) / ROWS)  # type: ignore[no-untyped-call]
        return out


def real_block() -> nn.Module:
    """A transformer's block, small enough for one core."""
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
    """A training with a neighbour.

    Attributes:
        schedule, replan: of the strategy.
        ranks: of the pipeline, one stage each.
        layers: of the model.
        steps: training batches.
        slow: by how much the layers of stage `at` take longer, by the batch from which on they do.
        visitors: load, stay and seed of `visitors`, where neighbours come to all stages.
        real: two ranks compute, and processes compete with that of stage `at` where `slow` is not 1.
        monitor: with an InterferenceMonitor.
        layout: the layers at which stages begin; even by default.
        resume: the checkpoint that it goes on from.
        folder: where it leaves one.
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
        """By how much a stage is slowed down in that batch."""
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
    """Of a batch."""
    if case.schedule in ASYNCHRONOUS:
        return 1
    return 4 * case.ranks if case.real else case.ranks


class Trace(pl.Callback):
    """Times of batches on this rank; and the neighbour's doings."""

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
                self._beside.enter_context(Neighbour(self.case.kind, core=self.core))
        self._factor = factor
        _slow = 1.0 if self.case.real else factor

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.ended.append(time.monotonic())
        self.processor.append(time.process_time())
        self.losses.append(float(outputs["loss"]))
        if trainer.strategy.current_run.windows:  # of a schedule that flushes
            events = trainer.strategy.current_run.windows[-1].events
            self.busy.append(sum(e.end - e.start for e in events if e.instruction.kind in (Kind.F, Kind.B)) / 1e9)
        self.layers.append([tuple(span) for span in trainer.strategy.current_run.local_layers.holdings.layers])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        global _slow
        _slow = 1.0  # else the next training would measure its layers beside this one's neighbour
        self._beside.close()


def make_blocks(case: Case) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return layers that sleep, or transformer blocks, and noise."""
    shape, rows = (REAL_SHAPE, REAL_ROWS * microbatches(case)) if case.real else ((WIDTH,), ROWS)
    data = torch.randn(rows * case.steps, *shape, generator=torch.Generator().manual_seed(0))
    return Lit(case.layers, case.real), DataLoader(TensorDataset(data), batch_size=rows)


def train(rank: int, case: Case) -> dict[str, Any]:
    """Times, layers of stages, the last loss and a hash of the weights."""
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
    """Trainings one after the other in the same processes."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return [train(rank, case) for case in cases]
