"""What a rank knows of its own future."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipes.engine.compute.order import ReadyOrder, StaticOrder
from lightning_pipes.engine.messages.mailbox import Mailbox
from lightning_pipes.ir import Kind, LayerUse, Program, Span, adapt_plan, lower
from lightning_pipes.ir.program import shift_batches
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.generators import tiny_plan


class Everything:
    """A mailbox with every message."""

    def has_message(self, key: Any) -> bool:
        return True


def far(program: Program, rank: int) -> list[Any]:
    """The row, far beyond the batches that come."""
    turns = [i for turn in range(20) for i in shift_batches(program.cycle[rank], turn)] if program.is_endless else []
    return [*program.head[rank], *turns]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("schedule", [PipeDream(), OneFOneB()])
def test_coming(schedule: Any, rank: int, microbatches: int) -> None:
    plan = adapt_plan(tiny_plan(4, microbatches), schedule)
    program = lower(schedule.program(plan), plan)
    order, mailbox, ran, batches = StaticOrder(program, rank), Everything(), [], 5 if program.is_endless else 1
    for batch in range(batches):
        order.add((0, batch), plan.jobs[0].rows, LayerUse(()))
        if batch == batches - 1:
            order.close()
        while (i := order.next_instruction(mailbox, 0)) is not None:  # type: ignore[arg-type]
            wanted = [each for each in far(program, rank) if each.batch <= batch and each not in ran]
            assert list(order.upcoming_instructions()) == wanted
            assert wanted[0] == i
            ran.append(i)
            order.mark_done(i)
    assert not list(order.upcoming_instructions())
    assert len(ran) == len([i for i in far(program, rank) if i.batch < batches])


def test_layers_of_forwards_and_of_batches_that_come_back_take_turns() -> None:
    """Six batches whose forwards are all ready on the first stage: a gradient may come at any time."""
    policy = CSP()
    plan = adapt_plan(tiny_plan(2, 2), policy)
    order = ReadyOrder(policy, plan, rank=0)
    for batch in range(6):
        order.add((0, batch), plan.jobs[0].rows, LayerUse.from_names([str(batch), "9"], (Span(0, 9), Span(9, 10))))
    mailbox: Any = Mailbox()
    for _ in range(7):  # three forwards and sends of two micro-batches each, but the last one
        i = order.next_instruction(mailbox, 0)
        assert i is not None
        while i.kind is not Kind.F:
            assert order.next_instruction(mailbox, 0) == i, "asking changes nothing"
            order.mark_begun(i)
            order.mark_done(i)
            i = order.next_instruction(mailbox, 0)
            assert i is not None
        order.mark_begun(i)
        order.mark_done(i)
    assert list(order.upcoming_layers()) == ["3", "4", "0", "5", "1", "2"]
