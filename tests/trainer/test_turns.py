"""Whose turn comes next, in virtual time."""

from __future__ import annotations

from lightning_pipes.ir import Cut, F, Kind, Span
from lightning_pipes.sim.timeline import Event
from lightning_pipes.trainer.turns import TurnOrder, seconds_of

STAGES = 4


def turns(order: TurnOrder, rows: dict[int, int], number: int) -> list[int]:
    """The next turns of siblings with batches of so many rows, who go on and on."""
    found = []
    for _ in range(number):
        sibling = order.next()
        found.append(sibling)
        order.enter(sibling, cut(rows[sibling]))
    return found


def cut(rows: int, microbatches: int = 1) -> Cut:
    return Cut.even(rows, microbatches, STAGES)


def started(rows: dict[int, int]) -> TurnOrder:
    order = TurnOrder()
    for sibling, each in rows.items():
        order.enter(sibling, cut(each))
    return order


MIXED = {sibling: (32, 8)[sibling % 2] for sibling in range(2 * STAGES)}


def share_of_small(found: list[int]) -> float:
    """Of the turns, those of siblings with small batches."""
    return sum(MIXED[sibling] == 8 for sibling in found) / len(found)


def test_small_batches_come_more_often() -> None:
    found = turns(started(MIXED), MIXED, 400)
    assert share_of_small(found) > 0.55
    assert set(found) == set(MIXED)
    assert found == turns(started(MIXED), MIXED, 400), "all ranks compute the same"


def test_equal_batches_take_turns() -> None:
    rows = dict.fromkeys(range(5), 16)
    assert turns(started(rows), rows, 10) == [*range(5), *range(5)]


def test_measured_times_decide() -> None:
    """Where rows cost nothing, small batches gain nothing."""
    order = started(MIXED)
    order.next()
    order.take_times(
        {(kind, stage, n): [0.1, 0.3] for kind in (Kind.F, Kind.B) for stage in range(STAGES) for n in (8, 32)}
    )
    assert abs(share_of_small(turns(order, MIXED, 400)) - 0.5) < 0.01


def test_who_leaves_has_no_turn() -> None:
    rows = {0: 8, 1: 8, 2: 8}
    order = started(rows)
    assert order.next() == 0
    order.leave(0)
    order.enter(7, cut(8))
    assert len(order) == 3
    assert set(turns(order, {**rows, 7: 8}, 12)) == {1, 2, 7}
    order.leave(99)  # never handed a batch in
    assert len(order) == 3


def test_larger_batches_count_from_then_on() -> None:
    """As when a sibling validates with small batches before it trains."""
    small = dict.fromkeys(MIXED, 8)
    assert share_of_small(turns(started(small), small, 400)) == 0.5
    assert share_of_small(turns(started(small), MIXED, 400)) > 0.55
    assert turns(started(MIXED), small, 400) == turns(started(MIXED), MIXED, 400), "the last batch may be short"


def test_seconds_are_those_of_computations() -> None:
    events = [Event(0, F(0, Span(0, 8)), 0, 2_000_000_000), Event(0, F(0, Span(0, 8))._replace(kind=Kind.SF), 0, 9)]
    assert seconds_of(events) == {(Kind.F, 0, 8): [2.0]}
