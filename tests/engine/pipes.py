"""Layers, batches, stages and connections from which the tests build engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, ProcessGroupGloo

from lightning_pipes.engine import (
    FailureWatch,
    GlooTransport,
    Item,
    Stage,
    Transport,
    make_transport,
)
from lightning_pipes.ir import Instruction, Kind, Plan, Span

ROWS = 8
WIDTH = 6
RECEIVE = Instruction(Kind.RF, 1, 0, 0, Span(0, 2))


def layers(depth: int = 4, seed: int = 0, dropout: float = 0.0) -> list[nn.Module]:
    """Return a model of small layers in double precision, with reproducible weights."""
    torch.manual_seed(seed)
    made = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
        if dropout
        else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(depth)
    ]
    return [m.double() for m in made]


def batch(
    number: int = 0, rows: int = ROWS, job: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reproducible inputs and targets of a batch."""
    generator = torch.Generator().manual_seed(1000 * job + number)
    x = torch.randn(rows, WIDTH, dtype=dtype, generator=generator)
    return x, torch.randn(rows, WIDTH, dtype=dtype, generator=generator)


def cut(*sizes: int) -> tuple[Span, ...]:
    """Return consecutive spans with the given numbers of samples."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return tuple(Span(end - size, end) for size, end in zip(sizes, ends, strict=True))


def divide_evenly(
    depth: int, stages: int, microbatches: int, ranks: Sequence[int] | None = None, recompute: bool = False
) -> Plan:
    """Return a plan that divides `depth` layers evenly among the stages."""
    cuts = [s * depth // stages for s in range(stages + 1)]
    return Plan.even(stages, microbatches, ROWS, ranks, [Span(*each) for each in pairwise(cuts)], [recompute] * stages)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
    """Run the layers of one stage on one micro-batch.

    The first stage reads its rows of x from the batch. In training, the last stage returns the loss, weighted by the
    share of the batch's samples that this micro-batch contains.
    """
    x, target = item.data
    out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
    if not stage.is_last_of_test:  # type: ignore[attr-defined]
        return out
    if not item.training:
        return out
    return squared_error(out, target[span.start : span.stop]) * span.rows / item.rows


def make_stages(
    plan: Plan,
    rank: int,
    model: Sequence[nn.Module],
    step: Callable[[Sequence[nn.Module]], Callable[[Item], None]] | None = None,
    body: Callable[..., Any] = body,
    job: int = 0,
    seed: int = 0,
) -> list[Stage]:
    """Return the stages of one rank. The layers of `model` are divided evenly among all stages of the plan."""
    made = []
    for s in plan.stages[rank]:
        lo, hi = s * len(model) // plan.n_stages, (s + 1) * len(model) // plan.n_stages
        mine = {n: model[n] for n in range(lo, hi)}
        steps = step(list(mine.values())) if step else None
        stage = Stage(s, mine, body, steps, job=job, seed=seed)
        stage.is_last_of_test = s == plan.n_stages - 1  # type: ignore[attr-defined]
        made.append(stage)
    return made


def sgd_step(lr: float = 0.1) -> Callable[[Sequence[nn.Module]], Callable[[Item], None]]:
    """Return a function that creates the `step` of a stage, with SGD and momentum for the parameters of that stage."""

    def make(modules: Sequence[nn.Module]) -> Callable[[Item], None]:
        parameters = [p for m in modules for p in m.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9) if parameters else None

        def step(item: Item) -> None:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

        return step

    return make


TRANSPORTS = ("local", "gloo", "direct")
"""The transports that can connect two processes in these tests.

"direct" sends tensors over a separate group for each link, as is done with NCCL, but here these groups use gloo.
"""


def connect(rank: int, plan: Plan, transport: str = "auto") -> tuple[FailureWatch, Transport]:
    """Initialize the process group of a rank of `run_ranks`, and return a failure watch and a transport."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
    cpu, ranks = torch.device("cpu"), range(plan.n_ranks)
    if transport != "direct":
        return watch, make_transport(plan, rank, ranks, cpu, watch, transport)

    def over_gloo(store: PrefixStore, end: int) -> Any:
        return ProcessGroupGloo(store, end, 2)

    return watch, GlooTransport(plan, rank, ranks, cpu, watch, watch.sub_store(), over_gloo)


def gradients(model: Sequence[nn.Module]) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each parameter by name, without copying it."""
    return {n: p.grad for n, p in nn.ModuleList(model).named_parameters()}


def weights(model: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return a copy of each parameter by name."""
    return {n: p.detach().clone() for n, p in nn.ModuleList(model).named_parameters()}


def assert_close(got: dict[str, Any], wanted: dict[str, Any], exact: bool = False) -> None:
    """Check that two dictionaries of tensors are equal up to rounding, or bit by bit if `exact` is True."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(
                got[name], value, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-12, msg=name
            )
