"""Several processes share one GPU and send tensors through pinned memory and gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine import Engine, FailureWatch, Item, Stage, make_transport
from lightning_pipes.ir import Plan, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, WIDTH, STAGES = 16, 256, 4


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)).double() for _ in range(STAGES)]


def data(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator).to(device)
    return x[0], x[1]


def train(rank: int, name: str, settings: dict[str, Any], ranks: int, recompute: bool) -> dict[str, torch.Tensor]:
    """Train for five steps on one rank, the last one with a short batch, and return the weights of its stages."""
    device = torch.device("cuda:0")
    schedule = make_schedule(name, **settings)
    assert isinstance(schedule, Schedule)
    where = schedule.place_stages(ranks)
    n = len(where)
    plan = Plan.even(n, 4, ROWS, where, recompute=[recompute] * n)
    layers = model()

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x, target = item.data
        out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
        if stage.number < n - 1:
            return out
        return ((out - target[span.start : span.stop]) ** 2).mean() * span.rows / item.rows

    stages = []
    for s in plan.stages[rank]:
        mine = {k: layers[k].to(device) for k in range(s * STAGES // n, (s + 1) * STAGES // n)}
        optimizer = torch.optim.SGD([p for m in mine.values() for p in m.parameters()], lr=0.1)

        def step(item: Item, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        stages.append(Stage(s, mine, body, step, seed=1, device=device))
    watch, transport = None, None
    if ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
    else:
        watch = FailureWatch(None, rank)
    transport = make_transport(plan, rank, range(ranks), device, watch)
    engine = Engine(plan, schedule.program(plan), stages, transport, rank=rank, device=device, watch=watch)
    for number in range(5):
        rows = ROWS if number < 4 else 7
        engine.inject(Item(number, rows, data(number, device)))
        engine.drain()
    torch.cuda.synchronize()
    engine.close()
    watch.close()
    return {
        f"{number}.{key}": value.cpu()
        for s in stages
        for number, layer in s.layers.items()
        for key, value in layer.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "settings", "ranks"), [("1f1b", {}, 4), ("gpipe", {}, 2), ("kfkb", {"k": 2}, 4), ("interleaved", {}, 2)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_equal_one_process(name: str, settings: dict[str, Any], ranks: int, recompute: bool) -> None:
    """The weights equal training in one process on the GPU, up to rounding."""
    parts = run_ranks(train, ranks, name, settings, ranks, recompute, timeout=120)
    got = {key: value for part in parts for key, value in part.items()}
    (wanted,) = run_ranks(train, 1, "gpipe", {}, 1, False, timeout=120)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-12, msg=key)
