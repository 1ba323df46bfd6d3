"""Jobs one after another: which schedules and micro-batches are worth running, and torch's own schedule."""

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

# ---- What one would do without a pipeline where the model fits one device: plain PyTorch, no Trainer.

Modules = Callable[[], Sequence[nn.Module]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Samples = Callable[[int], torch.Tensor]


def side_by_side(rank: int, modules: Modules, loss: Loss, samples: Samples, jobs: Sequence[int], batches: int) -> float:
    """Seconds until all jobs are through, each by one process alone, the large ones dealt out first.

    Args:
        jobs: samples in a batch of each.
    """
    dist.barrier()
    begun = time.monotonic()
    for rows in sorted(jobs, reverse=True)[rank :: dist.get_world_size()]:
        _train(nn.Sequential(*modules()), loss, samples, rows, batches)
    dist.barrier()
    return time.monotonic() - begun


def data_parallel(modules: Modules, loss: Loss, samples: Samples, jobs: Sequence[int], batches: int) -> float:
    """Seconds until all jobs are through, one after another by all processes, each with its part of a batch."""
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
"""All that ships for one training with weights that are up to date. `per_link` without slow links and `jap` with one
job are `1f1b`; `umpipe` and `um1f1b` are for stages of different kinds."""
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Single:
    """How one job runs on all ranks.

    Attributes:
        stages: of all ranks.
        seconds: of a batch, simulated.
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
    """Every schedule with its best number of micro-batches, simulated, the fastest first.

    Args:
        torchs: only those that torch has, too.
        costs: by the number of stages, and whether backwards are computed in two parts; None where the model can't be
            cut into so many.
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
                    break  # smaller ones only lose more
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
    """Seconds of a batch by torch.distributed.pipelining alone, without a Trainer and without an update: the median of
    `steps` after one that does not count.

    Args:
        layers: of all stages, a module each.
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
    """Whether torch has the same schedule for so many micro-batches, which have to be equal."""
    if rows % microbatches:
        return False
    if isinstance(schedule, Interleaved):
        return microbatches % max(1, microbatches // ranks) == 0
    return isinstance(schedule, (GPipe, OneFOneB))
