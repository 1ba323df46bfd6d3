"""The upcoming instructions and layers that the orders of a rank predict."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipes.engine.compute.order import PredictedOrder, StaticOrder, StreamOrder
from lightning_pipes.engine.messages.mailbox import Mailbox
from lightning_pipes.engine.residency.upcoming import PredictorChoice, UpcomingTasks
from lightning_pipes.ir import Instruction, Kind, LayerUse, Program, Span, adapt_plan, lower
from lightning_pipes.ir.program import shift_batches
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.generators import tiny_plan


class Everything:
    """A mailbox in which every message has arrived."""

    def has_message(self, key: Any) -> bool:
        return True


def far(program: Program, rank: int) -> list[Any]:
    """Return the instructions of a rank for many more batches than the test injects."""
    turns = [i for turn in range(20) for i in shift_batches(program.cycle[rank], turn)] if program.is_endless else []
    return [*program.head[rank], *turns]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("schedule", [PipeDream(), OneFOneB()])
def test_coming(schedule: Any, rank: int, microbatches: int) -> None:
    """`upcoming_instructions` of a static order is the rest of the program's row for the injected batches."""
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
    """On the first stage, layers of ready forwards alternate with layers of batches whose gradients may arrive next."""
    policy = CSP()
    plan = adapt_plan(tiny_plan(2, 2), policy)
    order = StreamOrder(policy, plan, rank=0)
    for batch in range(6):
        order.add((0, batch), plan.jobs[0].rows, LayerUse.from_names([str(batch), "9"], (Span(0, 9), Span(9, 10))))
    mailbox: Any = Mailbox()
    for _ in range(7):  # two forwards of each of the batches 0 to 2, and the first forward of batch 3
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


class Post:
    """A transport on which every message has already arrived."""

    is_done = staticmethod(lambda: True)

    def __init__(self, told: dict[int, list[tuple[int, int]]]) -> None:
        self.told, self.sent = told, dict[int, Any]()

    def send(self, rank: int, key: Any, content: Any) -> None:
        self.sent[key[1]] = content

    def receive(self, rank: int, key: Any, on_arrival: Any) -> Any:
        letter = Post({})
        letter.content = self.told.get(key[1], [])  # type: ignore[attr-defined]
        return letter


STREAM = [["0.0", "1.0"], ["0.1", "1.1"], ["0.0", "1.2"], ["0.2", "1.0"]]
"""The layers of each batch. Batch 0 shares a layer of stage 0 with batch 2, and a layer of stage 1 with batch 3."""


def predicted(name: str, rank: int, told: dict[int, list[tuple[int, int]]]) -> tuple[list[tuple[str, list[str]]], Post]:
    """Run the stream on one rank and return each task with the layers that are predicted when it begins.

    On the first stage, a gradient arrives only when no other task is ready.
    """
    policy, post = CSP(depth=8), Post(told)
    plan = adapt_plan(tiny_plan(2, 1), policy)
    choice = PredictorChoice(name, lambda layer: 1.0, post)
    order = PredictedOrder(UpcomingTasks(choice, policy, plan, rank, 0, lambda: None), policy, plan, rank)
    for batch, names in enumerate(STREAM):
        order.add((0, batch), plan.jobs[0].rows, LayerUse.from_names(names, (Span(0, 1), Span(1, 2))))
    (span,) = plan.spans(Kind.F, 0)
    coming = [Instruction(Kind.RB if rank == 0 else Kind.RF, rank, 0, batch, span) for batch in range(len(STREAM))]
    arrived = [] if rank == 0 else coming[:]
    mailbox: Any = Mailbox()
    mailbox.take_new = lambda number: [arrived.pop(0) for _ in range(len(arrived))]
    found = [("", list(order.upcoming_layers()))]
    while (i := order.next_instruction(mailbox, 0)) is not None or (coming and rank == 0):
        if i is None:
            arrived.append(coming.pop(0))
            continue
        order.mark_begun(i)
        if i.kind in (Kind.F, Kind.B):
            found.append((f"{i.kind.value}{i.batch}", list(order.upcoming_layers())))
        order.mark_done(i)
    return found, post


def test_the_last_stage_tells_which_backward_follows_its_next_forward() -> None:
    """When B0 begins, the last stage assumes that batch 0 has stepped. Then F1 may run, and a record of B1 is sent."""
    found, post = predicted("algorithm_3", 1, {})
    tasks = [("F0", "1.1"), ("B0", "1.1"), ("F1", "1.2"), ("B1", "1.2"), ("F2", "1.0"), ("B2", "1.0")]
    assert found == [("", []), *[(task, [layer]) for task, layer in tasks], ("F3", []), ("B3", [])]
    assert post.sent == {0: [(1, 1)], 1: [(2, 2)], 2: [(3, 3)], 3: []}


def test_a_stage_brings_what_the_one_behind_has_told_when_the_forward_before_it_runs() -> None:
    """B0 allows F2 to run, which uses layer 0.0. By the received record, B1 comes next, which uses layer 0.1."""
    found, post = predicted("algorithm_3", 0, {0: [(1, 1)], 1: [(2, 2)], 2: [(3, 3)]})
    assert found[:6] == [("", ["0.0"]), ("F0", ["0.1"]), ("F1", ["0.2"]), ("F3", []), ("B0", ["0.0"]), ("F2", ["0.1"])]
    assert post.sent == {}


def test_a_simulated_order_is_followed() -> None:
    """The simulated order of stage 0 is F0, F1 and F3, which need no other batch, then B0, and F2, which needs B0."""
    found, _ = predicted("simulated", 0, {})
    assert [task for task, _ in found] == ["", "F0", "F1", "F3", "B0", "F2", "B1", "B2", "B3"]
    assert found[1] == ("F0", ["0.1", "0.2", "0.0", "0.0"])
    assert found[4][1][0] == "0.0"
