"""Stages that recompute some micro-batches compute the same bits, and run exactly the forwards that the plan names."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item, Stage
from lightning_pipes.ir import Kind, Plan, Schedule, Span, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.recomputation import place_recomputations
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.pipes import WIDTH, assert_close, batch, body, gradients, make_stages, sgd_step

SCHEDULES: list[tuple[str, dict[str, Any], int]] = [
    ("gpipe", {}, 2),
    ("1f1b", {}, 4),
    ("kfkb", {"k": 2}, 2),
    ("interleaved", {}, 2),
    ("zero_bubble", {}, 2),
    ("v", {}, 2),
    ("v", {"split": False}, 2),
    ("ready", {}, 4),
]
ROWS = 12
PATTERNS = [(1, 2), (2, 3), (3, 4)]


class Layer(nn.Module):
    """A layer with dropout, buffers that change, and an in-place change of its input. It counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.with_graph = self.without_graph = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(1.5)  # raises in the first run with a graph, so the stage runs the layer again with a copy
        if torch.is_grad_enabled():
            self.with_graph += 1
        else:
            self.without_graph += 1
        x = x * (1 + 0.1 * self.calls)
        self.calls += 1  # the second run reads the value that the first run has read
        return self.drop(self.norm(self.linear(x).tanh()))


def own_samples(stage: Stage, item: Item, span: Span, received: Any) -> Any:
    """Run a stage as `pipes.body` does, with separate copies of the samples, which the first layer changes in place."""
    x, target = item.data
    copied = Item(item.number, item.rows, (x.clone(), target)) if stage.number == 0 else item
    return body(stage, copied, span, received)


def plan_of(schedule: Any, ranks: int, m: int, recompute: str, kept: tuple[int, int]) -> Plan:
    where = schedule.place_stages(ranks)
    plan = Plan.even(len(where), m, ROWS, where, recompute=[bool(recompute)] * len(where))
    plan = replace(plan, early_recompute=recompute == "early", kept_microbatches=(kept,) * len(where))
    return adapt_plan(plan, schedule)


@cache
def trained(name: str, settings: tuple[tuple[str, Any], ...], ranks: int, recompute: str, kept: tuple[int, int]) -> Any:
    """Train for two steps, the second one with a short batch; return the gradients, weights, buffers and counts."""
    schedule = make_schedule(name, **dict(settings))
    plan = plan_of(schedule, ranks, 4, recompute, kept)
    order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
    torch.manual_seed(0)
    model: list[nn.Module] = [Layer().double() for _ in range(8)]
    pipe = Loopback(plan, order, lambda r: make_stages(plan, r, model, sgd_step(), own_samples))
    found = []
    for number, rows in enumerate((ROWS, ROWS - 1)):
        pipe.inject(lambda number=number, rows=rows: Item(number, rows, batch(number, rows)))  # type: ignore[misc]
        pipe.drain()
        found.append({k: t.clone() for k, t in nn.ModuleList(model).state_dict().items()})
    counts = [(each.without_graph, each.with_graph) for each in model]  # type: ignore[attr-defined]
    stage_of = [s for s in range(plan.n_stages) for _ in range(8 // plan.n_stages)]
    wanted = [sum(plan.recomputes(s, 0, span) for span in plan.spans(Kind.F, s)) for s in stage_of]
    return found, counts, [(2 * again, 2 * 4) for again in wanted]


@for_each(("name", "settings", "ranks"), SCHEDULES)
@for_each("recompute", ["late", "early"])
@for_each("kept", PATTERNS)
def test_has_the_bits_of_other_settings(
    name: str, settings: dict[str, Any], ranks: int, recompute: str, kept: tuple[int, int]
) -> None:
    key = name, tuple(settings.items()), ranks
    states, counts, wanted = trained(*key, recompute, kept)
    assert counts == wanted
    assert 0 < counts[0][0] < 8
    for other in (trained(*key, "", (0, 1)), trained(*key, recompute, (0, 1))):
        for found, expected in zip(states, other[0], strict=True):
            assert_close(found, expected, exact=True)


@for_each("name", ["1f1b", "v"])
def test_recomputations_in_bubbles_have_the_same_bits(name: str) -> None:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    found = []
    for kept in ((0, 1), (1, 3)):
        plan = plan_of(schedule, 2, 6, "early", kept)
        costs = CostModel.uniform(plan.n_stages, 1e-9, 2e-9, activation_bytes=10, message_bytes=1)
        order = place_recomputations(schedule.program(plan), plan, costs, [10**9] * 2)
        torch.manual_seed(0)
        model: list[nn.Module] = [Layer().double() for _ in range(8)]
        pipe = Loopback(plan, order, lambda r, plan=plan, model=model: make_stages(plan, r, model, body=own_samples))  # type: ignore[misc]
        pipe.inject(lambda: Item(0, ROWS, batch()))
        pipe.drain()
        found.append(gradients(model))
    assert_close(found[1], found[0], exact=True)


def test_the_pattern_may_change_between_windows() -> None:
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    torch.manual_seed(0)
    model: list[nn.Module] = [Layer().double() for _ in range(4)]
    plan = plan_of(schedule, 2, 4, "late", (0, 1))
    pipe = Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, r, model, body=own_samples))
    counts = []
    for number, kept in enumerate(((0, 1), (1, 2), (3, 4), (0, 1))):
        plan = plan_of(schedule, 2, 4, "late", kept)
        pipe.adopt(plan, schedule.program(plan))
        pipe.inject(lambda number=number: Item(number, ROWS, batch(number)))  # type: ignore[misc]
        pipe.drain()
        counts.append(model[0].without_graph)
    assert counts == [4, 6, 7, 11]
