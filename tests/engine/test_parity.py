"""Compare every schedule with one process that trains the same model without a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine import Item
from lightning_pipes.ir import Plan, Policy, Program, Schedule, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.pipes import (
    ROWS,
    TRANSPORTS,
    assert_close,
    batch,
    connect,
    gradients,
    layers,
    make_stages,
    sgd_step,
    squared_error,
    weights,
)

SCHEDULES = [
    ("gpipe", {}, 2),
    ("gpipe", {}, 4),
    ("1f1b", {}, 2),
    ("1f1b", {}, 4),
    ("kfkb", {"k": 2}, 2),
    ("kfkb", {"k": 2}, 4),
    ("interleaved", {}, 2),
    ("zero_bubble", {}, 2),
    ("zero_bubble", {}, 4),
    ("zero_bubble", {"extra": (1, 0, 2), "limits": (8, 9, 8, 8)}, 4),
    ("ready", {"split": True}, 4),
    ("hanayo", {}, 2),
    ("v", {}, 4),
    ("v", {"k": 2}, 2),
    ("v", {"split": False}, 2),
    ("ready", {}, 2),
    ("ready", {"slack": 0}, 4),
]


def ordered(
    name: str, settings: dict[str, Any], ranks: int, microbatches: int, recompute: str = ""
) -> tuple[Plan, Program | Policy]:
    """Return a plan for a schedule, and the program or policy that orders it. `recompute` is "", "late" or "early"."""
    schedule = make_schedule(name, **settings)
    where = schedule.place_stages(ranks)
    plan = Plan.even(len(where), microbatches, ROWS, where, recompute=[bool(recompute)] * len(where))
    plan = adapt_plan(replace(plan, early_recompute=recompute == "early"), schedule)
    return plan, schedule.program(plan) if isinstance(schedule, Schedule) else schedule


def alone(model: list[nn.Module], steps: int = 1, rows: int = ROWS) -> list[nn.Module]:
    """Train `model` without a pipeline and return it. The gradients of the last step are kept."""
    net = nn.Sequential(*model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        x, target = batch(number, rows)
        squared_error(net(x), target).backward()
        if number < steps - 1 or steps == 3:
            optimizer.step()
    return model


@for_each(("name", "settings", "ranks"), SCHEDULES)
@for_each("microbatches", [1, 3, 8])
@for_each("recompute", ["", "late", "early"])
def test_gradients(name: str, settings: dict[str, Any], ranks: int, microbatches: int, recompute: str) -> None:
    plan, order = ordered(name, settings, ranks, microbatches, recompute)
    model = layers(8)
    pipe = Loopback(plan, order, lambda r: make_stages(plan, r, model))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    pipe.drain()
    assert_close(gradients(model), gradients(alone(layers(8))))


@pytest.mark.parametrize(("name", "settings"), [("ready", {}), ("ready", {"alternate": False}), ("gpipe", {})])
def test_gradients_are_bitwise_equal_to_1f1b(name: str, settings: dict[str, Any]) -> None:
    """The gradients equal the gradients of 1F1B bit by bit, because every stage runs the micro-batches in order."""
    found = []
    for chosen in (("1f1b", {}), (name, settings)):
        plan, order = ordered(*chosen, 4, 8)
        model = layers(8)
        pipe = Loopback(plan, order, lambda r, plan=plan, model=model: make_stages(plan, r, model))  # type: ignore[misc]
        pipe.inject(lambda: Item(0, ROWS, batch()))
        pipe.drain()
        found.append(gradients(model))
    assert_close(found[1], found[0], exact=True)


@for_each("rows", [1, 5, 7])
@for_each("name", ["1f1b", "zero_bubble", "ready"])
def test_short_batch(name: str, rows: int) -> None:
    """Gradients are correct if a batch has fewer than the 8 samples of the plan and some micro-batches are empty."""
    plan, order = ordered(name, {}, 2, 4)
    model = layers()
    pipe = Loopback(plan, order, lambda r: make_stages(plan, r, model))
    pipe.inject(lambda: Item(0, rows, batch(0, rows)))
    pipe.drain()
    assert_close(gradients(model), gradients(alone(layers(), rows=rows)))


def three_steps(
    rank: int, name: str, settings: dict[str, Any], ranks: int, transport_name: str
) -> dict[str, torch.Tensor]:
    """Train for three steps on one rank and return the weights of its stages."""
    plan, order = ordered(name, settings, ranks, 4)
    watch, transport = connect(rank, plan, transport_name)
    from lightning_pipes.engine import Engine

    model = layers()
    engine = Engine(plan, order, make_stages(plan, rank, model, sgd_step()), transport, rank=rank, watch=watch)
    for number in range(3):
        engine.inject(Item(number, ROWS, batch(number)))
        engine.drain()
    engine.close()
    watch.close()
    mine = [str(n) for stage in engine._stages for n in stage.layers]
    return {n: w for n, w in weights(model).items() if n.split(".")[0] in mine}


@pytest.mark.parametrize(
    ("name", "settings", "ranks", "transport"),
    [(*s, t) for s in SCHEDULES[:7] for t in TRANSPORTS] + [(*s, "local") for s in SCHEDULES[7:]],
)
def test_weights_after_three_steps_on_processes(
    name: str, settings: dict[str, Any], ranks: int, transport: str
) -> None:
    parts = run_ranks(three_steps, ranks, name, settings, ranks, transport, timeout=60)
    got = {n: w for part in parts for n, w in part.items()}
    reference = weights(alone(layers(), steps=3))
    assert_close({n: got[n] for n in reference}, reference)
