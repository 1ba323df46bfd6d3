"""Channels and scheduling in long runs: resources are released, and an order that cannot continue is reported."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_pipes.engine import Engine, Item
from lightning_pipes.ir import (
    DeadlockError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Policy,
    ProgramError,
    RankView,
    Schedule,
    Span,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks, scale_timeout
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import ROWS, TRANSPORTS, WIDTH, batch, connect, layers, make_stages


def program_of(plan: Plan, name: str = "1f1b") -> Any:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    return schedule.program(plan)


def open_files() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def many_shapes(rank: int, transport_name: str) -> list[int]:
    """Run 120 steps with inputs of different shapes. Return the number of open files after 30 and after 120 steps."""
    plan = Plan.even(2, 2, ROWS)
    watch, transport = connect(rank, plan, transport_name)
    model = layers(2)
    engine = Engine(plan, program_of(plan), make_stages(plan, rank, model), transport, rank=rank, watch=watch)
    counts = []
    for number in range(120):
        x = torch.randn(ROWS, 1 + number, WIDTH, dtype=torch.float64)
        engine.inject(Item(number, ROWS, (x, torch.zeros_like(x))))
        engine.drain()
        if number in (29, 119):
            counts.append(open_files())
    engine.close()
    watch.close()
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_changing_shapes_leave_nothing_open(transport: str) -> None:
    """The number of open files does not grow over many steps with different shapes."""
    for early, late in run_ranks(many_shapes, 2, transport):
        assert late <= early + 4


def poll(rank: int, transport_name: str) -> bool:
    """Run one batch by calling `progress(wait=False)` in a loop, and return whether it finished in time."""
    plan = Plan.even(2, 4, ROWS)
    watch, transport = connect(rank, plan, transport_name)
    engine = Engine(plan, program_of(plan), make_stages(plan, rank, layers()), transport, rank=rank, watch=watch)
    engine.inject(Item(0, ROWS, batch()))
    engine.end_window()
    deadline = time.monotonic() + scale_timeout(20)
    while not engine.is_satisfied and time.monotonic() < deadline:
        engine.progress(wait=False)
    done = engine.is_satisfied
    if done:
        engine.drain()
    engine.close()
    watch.close()
    return done


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_progress_without_waiting(transport: str) -> None:
    assert run_ranks(poll, 2, transport) == [True, True]


@dataclass(frozen=True)
class Lazy(Policy):
    """A policy that never picks a backward."""

    name: str = "lazy"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return next((i for i in ready if i.kind is Kind.F), None)


@dataclass(frozen=True)
class Wild(Policy):
    """A policy that picks an instruction of a stage that does not exist."""

    name: str = "wild"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return ready[0]._replace(stage=7)


@dataclass(frozen=True)
class Eager(Policy):
    """A policy that runs forwards first, as many as the limits of the plan allow."""

    name: str = "eager"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return max(ready, key=lambda i: i.kind is Kind.F)


def test_a_policy_that_holds_everything_back_is_reported() -> None:
    plan = Plan.even(1, 2, ROWS)
    pipe = Loopback(plan, Lazy(), lambda r: make_stages(plan, r, layers()))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    with pytest.raises(DeadlockError, match=r"'lazy'.*hold back B0"):
        pipe.engines[0].drain()


def test_a_policy_that_picks_what_is_not_ready_is_reported() -> None:
    plan = Plan.even(1, 2, ROWS)
    pipe = Loopback(plan, Wild(), lambda r: make_stages(plan, r, layers()))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    with pytest.raises(ProgramError, match=r"picked F7.*not ready"):
        pipe.progress()


@pytest.mark.parametrize("limit", [2, 4, 8])
def test_limits_hold_forwards_back(limit: int) -> None:
    """The largest number of samples between forward and backward on stage 0 is exactly the limit of the plan."""
    plan = Plan(Plan.even(2, 4, ROWS).ranks, Plan.even(2, 4, ROWS).jobs, limits=(limit, limit))
    pipe = Loopback(plan, Eager(), lambda r: make_stages(plan, r, layers()))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    pipe.drain()
    held = most = 0
    for event in pipe.engines[0].events:
        i = event.instruction
        if i.stage == 0 and i.kind in (Kind.F, Kind.B):
            held += i.span.rows if i.kind is Kind.F else -i.span.rows
            most = max(most, held)
    assert most == limit


def test_adopting_another_cut_of_the_model_is_refused() -> None:
    plan = Plan.even(2, 4, ROWS, layers=[Span(0, 2), Span(2, 4)])
    moved = Plan.even(2, 4, ROWS, layers=[Span(0, 1), Span(1, 4)])
    pipe = Loopback(plan, program_of(plan), lambda r: make_stages(plan, r, layers()))
    with pytest.raises(PlanError, match="layers"):
        pipe.adopt(moved, program_of(moved))


def test_evaluation_makes_no_graph() -> None:
    plan = Plan.even(1, 2, ROWS)
    pipe = Loopback(plan, program_of(plan), lambda r: make_stages(plan, r, layers()))
    item = Item(0, ROWS, batch())
    outputs = pipe.engines[0].evaluate(item)
    assert not any(output.requires_grad for _, output in outputs)
    assert item.training
