"""Jobs one after another: the schedules and numbers of micro-batches that are worth running, and torch's schedule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Policy, Schedule
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.deep import Deep
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.strategies.zero_bubble import ZeroBubble

# ---- The alternatives without a pipeline if the model fits on one device, in plain PyTorch without a Trainer.

Modules = Callable[[], Sequence[nn.Module]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Samples = Callable[[int], torch.Tensor]


def side_by_side(rank: int, modules: Modules, loss: Loss, samples: Samples, jobs: Sequence[int], batches: int) -> float:
    """Return the seconds until all jobs have ended, if each one is trained by one process.

    Args:
        rank: the rank of this process.
        modules: returns new layers.
        loss: the loss function.
        samples: returns a number of samples.
        jobs: the number of samples in a batch of each job. Jobs are dealt to the processes in descending order of this
            number.
        batches: the number of batches of each job.
    """
    dist.barrier()
    begun = time.monotonic()
    for rows in sorted(jobs, reverse=True)[rank :: dist.get_world_size()]:
        _train(nn.Sequential(*modules()), loss, samples, rows, batches)
    dist.barrier()
    return time.monotonic() - begun


def data_parallel(modules: Modules, loss: Loss, samples: Samples, jobs: Sequence[int], batches: int) -> float:
    """Return the seconds until all jobs have ended, if they run one after another with DDP on all processes."""
    ranks = dist.get_world_size()
    dist.barrier()
    begun = time.monotonic()
    for rows in jobs:
        _train(DistributedDataParallel(nn.Sequential(*modules())), loss, samples, rows // ranks, batches)
    dist.barrier()
    return time.monotonic() - begun


def _train(net: nn.Module, loss: Loss, samples: Samples, rows: int, batches: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = samples(rows * batches)
    for begin in range(0, len(data), rows):
        x = data[begin : begin + rows]
        optimizer.zero_grad()
        torch.autograd.backward(loss(net(x), x))
        optimizer.step()


SCHEDULES: tuple[Schedule | Policy, ...] = (
    GPipe(),
    OneFOneB(),
    KFKB(k=2),
    Deep(),
    Ready(),
    ZeroBubble(),
    *(Interleaved(stages_per_rank=v) for v in (2, 3, 4)),
    *(Hanayo(waves=w) for w in (1, 2)),
)
"""All of our schedules for one training without stale weights.

`per_link` on equal links and `jap` with one job are equal to `1f1b`. `umpipe` and `um1f1b` are meant for stages of
different kinds.
"""
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Single:
    """The settings with which one job runs on all ranks.

    Attributes:
        schedule: the schedule.
        microbatches: the number of micro-batches.
        stages: the number of stages on all ranks together.
        seconds: the simulated time of a batch.
    """

    schedule: Schedule | Policy
    microbatches: int
    stages: int
    seconds: float

    def __str__(self) -> str:
        return f"{schedule_label(self.schedule)} m={self.microbatches}"


def singles(
    ranks: int, rows: int, costs: Callable[[int, bool], CostModel | None], torchs: bool = False
) -> list[Single]:
    """Return all schedules with their best numbers of micro-batches in simulations, the fastest one first.

    Args:
        ranks: the number of ranks.
        rows: the number of samples in a batch.
        costs: returns the costs, given the number of stages and whether backwards are computed in two parts. It returns
            None if the model can't be cut into this number of stages.
        torchs: whether to return only schedules that torch also has.
    """
    found = []
    for schedule in SCHEDULES:
        where = schedule.place_stages(ranks)
        priced = costs(len(where), schedule.splits_backward)
        if priced is None:
            continue
        options = []
        for m in MICROBATCHES:
            if m <= rows and (not torchs or torch_can(schedule, m, ranks, rows)):
                plan = even_plan(schedule, ranks, m, rows)
                order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
                options.append((makespan(order, plan, priced) / 1e9, m))
                if len(options) > 3 and min(options) not in options[-3:]:
                    break  # smaller micro-batches are even slower
        if options:
            seconds, m = min(options)
            found.append(Single(schedule, m, len(where), seconds))
    return sorted(found, key=lambda single: single.seconds)


def by_torch(
    single: Single,
    layers: Sequence[nn.Module],
    rank: int,
    x: torch.Tensor,
    loss: Callable[..., torch.Tensor],
    steps: int,
) -> float:
    """Return the median seconds of a batch with torch.distributed.pipelining, without a Trainer and an optimizer step.

    Args:
        single: the schedule and its settings.
        layers: the module of each stage.
        rank: the rank of this process.
        x: the samples of a batch.
        loss: the loss function.
        steps: the number of steps that count, after a first one that does not.
    """
    ranks = dist.get_world_size()
    mine = range(rank, len(layers), ranks)
    stages: list[Any] = [PipelineStage(layers[s], s, len(layers), torch.device("cpu")) for s in mine]
    if len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, single.microbatches, loss_fn=loss)
    else:
        kind = Schedule1F1B if single.microbatches >= ranks else ScheduleGPipe  # 1F1B refuses fewer
        schedule = kind(stages[0], single.microbatches, loss_fn=loss)  # type: ignore[assignment]
    times = []
    for _ in range(steps + 1):
        dist.barrier()
        begun = time.monotonic()
        arguments = (x,) if rank == 0 else ()
        if stages[-1].is_last:
            schedule.step(*arguments, target=x)
        else:
            schedule.step(*arguments)
        dist.barrier()
        times.append(time.monotonic() - begun)
    return statistics.median(times[1:])


def torch_can(schedule: Schedule | Policy, microbatches: int, ranks: int, rows: int) -> bool:
    """Return whether torch has the same schedule for this number of micro-batches. torch needs equal micro-batches."""
    if rows % microbatches:
        return False
    if isinstance(schedule, Interleaved):
        return microbatches % max(1, microbatches // ranks) == 0
    return isinstance(schedule, (GPipe, OneFOneB))
