"""When a stage runs its forwards again, and what it keeps until then and afterwards."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item
from lightning_pipes.ir import Cut, Kind, Plan, PlanError, Policy, Program, adapt_plan, even_spans
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import ROWS, assert_close, batch, gradients, layers, make_stages


class Graph:
    """Exists as long as the graph of a forward of `Log`."""


class Mark(torch.autograd.Function):
    """Copies its input, and records its backward in a log."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log) -> torch.Tensor:
        ctx.log, ctx.graph = log, Graph()
        log.graphs.add(ctx.graph)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.log.calls += "B"
        ctx.log.held.append(len(ctx.log.graphs))
        return gradients[0], None


class Log(nn.Module):
    """Records its forwards without a graph (f), its forwards with a graph (F), and its backwards (B).

    Attributes:
        calls: the records.
        graphs: the graphs of its forwards that exist.
        held: the number of graphs during each backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = ""
        self.graphs = weakref.WeakSet[Graph]()
        self.held: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += "F" if torch.is_grad_enabled() else "f"
        out: torch.Tensor = Mark.apply(x, self) if torch.is_grad_enabled() else x  # type: ignore[no-untyped-call]
        return out


def train(plan: Plan, row: str) -> tuple[Log, list[nn.Module]]:
    """Train one batch on two ranks, the first one in the order of `row`. Return its log and the layers."""
    first, second = layers(2)
    log = Log()
    model: list[nn.Module] = [nn.Sequential(first, log), second]
    last = [f"{kind}1.{n}" for kind in (Kind.F, Kind.B) for n in range(len(plan.spans(kind, 1)))]
    program = Program.parse([f"{row} STEP0", f"{' '.join(last)} STEP1"], plan)
    pipe = Loopback(plan, program, lambda r: make_stages(plan, r, model))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    pipe.drain()
    return log, model


def make_plan(forwards: int, backwards: int, whole: bool = False) -> Plan:
    """Return a plan of two stages in which stage 0 recomputes, or has whole forwards."""
    forward, backward = even_spans(ROWS, forwards), even_spans(ROWS, backwards)
    cut = Cut(ROWS, (forward,) * 2, (backward,) * 2)
    return Plan((0, 1), (cut,), recompute=(not whole, False), whole_forward=(whole, False), early_recompute=True)


@pytest.mark.parametrize(
    ("plan", "row", "calls"),
    [
        (make_plan(2, 2), "F0.0 F0.1 R0.0 R0.1 B0.0 B0.1", "ffFFBB"),
        (make_plan(2, 2), "F0.0 F0.1 R0.0 B0.0 R0.1 B0.1", "ffFBFB"),
        (make_plan(4, 2), "F0.0 F0.1 F0.2 F0.3 R0.0 R0.1 B0.0 B0.1", "ffffFFFFBBBB"),
        (make_plan(4, 2), "F0.0 F0.1 R0.0 F0.2 F0.3 B0.0 R0.1 B0.1", "ffFFffBBFFBB"),
        (make_plan(2, 4, whole=True), "F0.0 F0.1 R0.0 R0.1 B0.0 B0.1 R0.2 B0.2 R0.3 B0.3", "ffFFBBFBFB"),
    ],
)
def test_an_instruction_runs_the_forwards_of_its_backward_again(plan: Plan, row: str, calls: str) -> None:
    """Check that no forward runs again earlier than in its R, as late as in its backward, or twice."""
    log, model = train(plan, row)
    assert log.calls == calls
    plain = " ".join(word for word in row.split() if word[0] != "R")
    once = replace(plan, recompute=(), early_recompute=False, whole_forward=())
    assert_close(gradients(model), gradients(train(once, plain)[1]))


def test_only_recomputed_activations_of_later_backwards_are_held() -> None:
    plan = make_plan(4, 4)
    assert train(plan, "F0.0 F0.1 F0.2 F0.3 R0.0 B0.0 R0.1 B0.1 R0.2 B0.2 R0.3 B0.3")[0].held == [1, 1, 1, 1]
    assert train(plan, "F0.0 F0.1 F0.2 F0.3 R0.0 R0.1 R0.2 B0.0 B0.1 R0.3 B0.2 B0.3")[0].held == [3, 2, 2, 1]


def test_some_micro_batches_keep_their_graphs() -> None:
    """Stage 0 keeps the graphs of the micro-batches 0 and 2 from their forwards to their backwards."""
    plan = replace(make_plan(4, 4), kept_microbatches=((1, 2), (0, 1)))
    row = "F0.0 F0.1 F0.2 F0.3 B0.0 R0.1 B0.1 B0.2 R0.3 B0.3"
    log, model = train(plan, row)
    assert log.calls == "FfFfBFBBFB"
    assert log.held == [2, 2, 1, 1]
    plain = " ".join(word for word in row.split() if word[0] != "R")
    assert_close(gradients(model), gradients(train(replace(plan, recompute=(), early_recompute=False), plain)[1]))
    late = replace(plan, early_recompute=False)
    assert train(late, plain)[0].calls == log.calls


def test_a_policy_needs_a_plan_without_instructions_for_recomputations() -> None:
    """Check the error of the engine and of the simulator, and that `adapt_plan` creates the plan that they need."""
    ready = make_schedule("ready")
    assert isinstance(ready, Policy)
    plan, costs = make_plan(2, 2), CostModel.uniform(2, 1e-3, 1e-3)
    for use in (
        lambda: Loopback(plan, ready, lambda r: make_stages(plan, r, layers(2))),
        lambda: simulate(ready, plan, costs),
        lambda: makespan(ready, plan, costs),
    ):
        with pytest.raises(PlanError, match=r"ready decides its order .* Use adapt_plan\(plan, policy\)"):
            use()
    adapted = adapt_plan(plan, ready)
    assert adapted == replace(plan, early_recompute=False)
    assert simulate(ready, adapted, costs).makespan == makespan(ready, adapted, costs) > 0
