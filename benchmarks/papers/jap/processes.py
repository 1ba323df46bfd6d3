"""What one would do without a pipeline where the model fits one device: plain PyTorch, no Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
