"""What channels do over a long run: nothing piles up, nothing is lost, nobody waits in vain."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_pipes.engine import Engine, Item, Mailbox
from lightning_pipes.engine.messages.message import Decoder, Encoder, Message, ReceiveBuffer, Wire
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
from lightning_pipes.testing.loopback import Loopback
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.testing.timeouts import scale_timeout
from tests.engine.pipes import ROWS, TRANSPORTS, WIDTH, batch, connect, layers, make_stages

RECEIVE = Instruction(Kind.RF, 1, 0, 0, Span(0, 2))


def program_of(plan: Plan, name: str = "1f1b") -> Any:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    return schedule.program(plan)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def many_shapes(rank: int, transport_name: str) -> list[int]:
    """Open files after some steps with a shape of their own, and after many more."""
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
    for early, late in run_ranks(many_shapes, 2, transport):
        assert late <= early + 4


def poll(rank: int, transport_name: str) -> bool:
    """Makes progress without ever waiting in the engine."""
    plan = Plan.even(2, 4, ROWS)
    watch, transport = connect(rank, plan, transport_name)
    engine = Engine(plan, program_of(plan), make_stages(plan, rank, layers()), transport, rank=rank, watch=watch)
    engine.inject(Item(0, ROWS, batch()))
    engine.end_window()
    deadline = time.monotonic() + scale_timeout(20)
    while not engine.satisfied and time.monotonic() < deadline:
        engine.progress(wait=False)
    done = engine.satisfied
    if done:
        engine.drain()
    engine.close()
    watch.close()
    return done


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_progress_without_waiting(transport: str) -> None:
    assert run_ranks(poll, 2, transport) == [True, True]


def test_wires_are_used_again_and_dropped() -> None:
    made: list[int] = []
    dropped: list[Wire] = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    encoder, decoder = Encoder(allocate, dropped.append), Decoder()
    for turn in range(
        3
    ):  # a steady stream: one wire for the first message, which tells the structure, one for all others
        for _ in range(5):
            x = torch.randn(2, 3)
            wire, tensors = encoder.encode((turn, RECEIVE), x, (True,), 0)
            wire.copy_tensors(tensors)
            message = decoder.decode(wire.buffer, 0, 0)
            assert torch.equal(message.tree, x)
            assert message.flags == (True,)
            assert message.key == (turn, RECEIVE)
            encoder.release(wire)
    assert len(made) == 2
    for size in range(4, 104):  # shapes that never come back
        wire, _ = encoder.encode((9, RECEIVE), torch.randn(2, size), (True,), 0)
        encoder.release(wire)
    assert len(made) - len(dropped) <= 8


def test_what_was_copied_from_a_slot_stays_when_the_slot_is_filled_again() -> None:
    encoder, decoder = Encoder(), Decoder()
    first, _ = encoder.encode((0, RECEIVE), torch.zeros(2), (True,), 0)
    decoder.decode(first.buffer, 0, 0)  # tells the structure
    wire, _ = encoder.encode((1, RECEIVE), torch.zeros(2), (True,), 5)
    slot, came = ReceiveBuffer(wire.buffer), []
    for turn in range(1, 4):
        encoder.release(wire)
        again, tensors = encoder.encode((turn, RECEIVE), torch.full((2,), float(turn)), (True,), 5)
        assert again is wire
        wire.copy_tensors(tensors)
        came.append(decoder.decode_copy(slot, 7))
    assert [m.tree.tolist() for m in came] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert [(m.key, m.flags, m.sent, m.arrived) for m in came] == [((t, RECEIVE), (True,), 5, 7) for t in (1, 2, 3)]


def test_a_mailbox_whose_owner_never_waits_stays_small() -> None:
    box = Mailbox()
    for turn in range(1000):
        box.put(Message((turn, RECEIVE), None, ()))
        assert box.take_message((turn, RECEIVE)) is not None
    assert box._changes.qsize() == 0
    assert box.take_new(1) == []
    box.put(Message((1, RECEIVE), None, ()))
    box.put(Message((2, RECEIVE), None, ()))
    box.take_message((1, RECEIVE))
    assert box.wait_new(2) == [RECEIVE]  # the ring that `take` swallowed is not missed
    assert box.has_message((2, RECEIVE))


@dataclass(frozen=True)
class Lazy(Policy):
    """Never picks a backward."""

    name: str = "lazy"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return next((i for i in ready if i.kind is Kind.F), None)


@dataclass(frozen=True)
class Wild(Policy):
    """Picks what is not there."""

    name: str = "wild"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return ready[0]._replace(stage=7)


@dataclass(frozen=True)
class Eager(Policy):
    """Forwards first, as many as the plan's limits allow."""

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
