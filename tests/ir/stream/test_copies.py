"""Check layers that move between ranks.

In any valid order, every copy has the version that it would have if the batches ran one after another.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from lightning_pipes.ir import (
    STEP,
    Delayed,
    DependencyTracker,
    F,
    Instruction,
    Kind,
    LayerUse,
    Ledger,
    Plan,
    PlanError,
    Span,
    Transfer,
    batch_instructions,
    unroll_stream,
)
from tests.cases import for_each

LAYERS = (Span(0, 3), Span(3, 5), Span(5, 8))
PLAN = Plan.even(3, 2, layers=LAYERS)
NAMES = ["0", "1", "2.0", "2.1", "3", "4.0", "4.1", "5", "6.0", "6.1", "7"]


def cut_at(*ends: int) -> tuple[Span, ...]:
    """Return the layers of three stages."""
    return Span(0, ends[0]), Span(ends[0], ends[1]), Span(ends[1], 8)


def drawn(rng: random.Random) -> LayerUse:
    names = [name for name in NAMES if rng.random() < 0.4]
    steps = None if rng.random() < 0.5 else [name for name in names if rng.random() < 0.6]
    cut = None if rng.random() < 0.1 else cut_at(*sorted(rng.choices(range(9), k=2)))
    return LayerUse.from_names(names, LAYERS, steps, cut=cut)


def in_any_order(plan: Plan, rng: random.Random) -> list[Instruction]:
    """Return all instructions in a random order that respects their dependencies."""
    tracker, ready, order = DependencyTracker(plan), [], []
    for rank in range(plan.n_ranks):
        for batch in range(plan.batches):
            ready += tracker.add(batch_instructions(plan, rank, 0, batch))
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        ready += tracker.complete(order[-1])
    assert not tracker._waiting
    return order


def wanted_versions(uses: list[LayerUse]) -> tuple[dict[tuple[int, str], int], dict[str, int]]:
    """Return the batch that last stepped each layer before a batch uses it, and at the end of the stream."""
    wanted: dict[tuple[int, str], int] = {}
    last: dict[str, int] = {}
    for batch, use in enumerate(uses):
        wanted |= {(batch, name): last.get(name, -1) for names in use.layers for name in names}
        last |= {name: batch for stage in range(3) for name in use.stepped_layers(stage)}
    return wanted, last


@for_each("ranks", [(0, 1, 2), (0, 1, 0)])
@for_each("seed", range(30))
def test_every_copy_is_the_last_version(seed: int, ranks: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    plan = Plan.even(3, 2, ranks=ranks, layers=LAYERS)
    uses = [drawn(rng) for _ in range(12)]
    wanted, last = wanted_versions(uses)
    ledger = Ledger(plan, range(3))
    travels: list[Transfer] = []
    for batch, use in enumerate(uses):
        ledger.enter(batch, use)
        travels += ledger.batch_transfers(batch)
    assert len(travels) > 5
    copies: dict[tuple[int, str], int] = defaultdict(lambda: -1)
    busy: dict[tuple[int, str], set[int]] = defaultdict(set)  # batches between forward and step
    parcels = {t: -1 for t in travels if t.after is None}
    for i in in_any_order(unroll_stream(plan, uses, depth=12), rng):
        if i.kind not in (Kind.F, Kind.B, Kind.STEP):
            continue
        use, rank = uses[i.batch], plan.ranks[i.stage]
        for transfer in ledger.incoming_transfers(i.batch, i.stage) if i.kind is Kind.F else ():
            if transfer in parcels:
                at = rank, transfer.name
                assert transfer.target == rank
                assert not busy[at], (str(i), transfer)
                copies[at] = parcels.pop(transfer)
        for name in use.layers[i.stage]:
            assert copies[rank, name] == wanted[i.batch, name], (str(i), name)
            if i.kind is Kind.F:
                busy[rank, name].add(i.batch)
            elif i.kind is Kind.STEP:
                busy[rank, name].discard(i.batch)
                copies[rank, name] = i.batch if name in use.stepped_layers(i.stage) else copies[rank, name]
        if i.kind is Kind.STEP:
            parcels |= {t: copies[t.source, t.name] for t in travels if t.after == i}
    assert not parcels
    for way in ledger.return_transfers():
        copies[way.target, way.name] = copies[way.source, way.name]
    homes = {name: ranks[next(s for s, (a, b) in enumerate(LAYERS) if a <= int(name[0]) < b)] for name in NAMES}
    assert {name: copies[homes[name], name] for name in last} == last


def test_a_rank_alone_knows_what_all_know() -> None:
    rng = random.Random(5)
    uses = [drawn(rng) for _ in range(30)]
    books = [Ledger(PLAN, PLAN.stages[rank]) for rank in range(3)]
    for batch, use in enumerate(uses):
        for book in books:
            book.enter(batch, use)
            if rng.random() < 0.7:  # the ranks progress differently
                for stage in range(3):
                    book.mark_done(STEP(stage, batch=rng.randrange(batch + 1)))
        assert books[0].batch_transfers(batch) == books[1].batch_transfers(batch) == books[2].batch_transfers(batch)
    assert books[0].return_transfers() == books[1].return_transfers() == books[2].return_transfers()


def test_a_layer_goes_where_it_is_used_and_only_then() -> None:
    ledger = Ledger(PLAN, [1])
    ledger.enter(0, LayerUse.from_names(["2.0", "3"], LAYERS))
    assert list(ledger.batch_transfers(0)) == []
    for batch, after in ((1, STEP(0, batch=0)), (2, None)):
        ledger.enter(batch, LayerUse.from_names(["2.0"], LAYERS, cut=cut_at(2, 5)))
        wanted = [Transfer("2.0", 1, 0, 1, after)] if after else []
        assert list(ledger.batch_transfers(batch)) == wanted
    assert ledger.return_transfers() == [Transfer("2.0", -1, 1, 0, STEP(1, batch=2))]
    ledger.enter(3, LayerUse.from_names(["2.0"], LAYERS))
    assert list(ledger.batch_transfers(3)) == [Transfer("2.0", 3, 1, 0, STEP(1, batch=2))]
    assert ledger.return_transfers() == []


def test_replacement_of_a_copy_waits_for_its_readers() -> None:
    ledger = Ledger(PLAN, [1])
    here, home = cut_at(2, 5), None
    ledger.enter(0, LayerUse.from_names(["2.0"], LAYERS, steps=[], cut=here))
    ledger.enter(1, LayerUse.from_names(["2.0"], LAYERS, cut=home))
    waits = ledger.enter(2, LayerUse.from_names(["2.0"], LAYERS, steps=[], cut=here))
    assert waits == {F(1, span, batch=2): (STEP(1, batch=0),) for span in PLAN.spans(Kind.F, 1)}
    assert ledger.incoming_transfers(2, 1) == [Transfer("2.0", 2, 0, 1, STEP(0, batch=1))]
    assert ledger.enter(3, LayerUse.from_names(["2.0"], LAYERS, steps=[], cut=here)).keys() == {
        F(1, span, batch=3) for span in PLAN.spans(Kind.F, 1)
    }
    assert ledger.incoming_transfers(3, 1) == ledger.incoming_transfers(2, 1)  # the same transfer


def test_unneeded_copy_is_known() -> None:
    ledger = Ledger(PLAN, [1])
    ledger.enter(0, LayerUse.from_names(["2.0"], LAYERS, cut=cut_at(2, 5)))
    assert not ledger.is_stale("2.0", 1)
    ledger.enter(1, LayerUse.from_names(["2.0"], LAYERS, cut=cut_at(2, 5), steps=[]))
    ledger.enter(2, LayerUse.from_names(["2.0"], LAYERS))
    assert not ledger.is_stale("2.0", 1)  # batch 1 reads it
    ledger.mark_done(STEP(1, batch=1))
    assert not ledger.is_stale("2.0", 1)  # batch 0 steps it
    ledger.mark_done(STEP(1, batch=0))
    assert ledger.is_stale("2.0", 1)
    assert not ledger.is_stale("2.0", 0)


def enter(*uses: LayerUse) -> None:
    ledger = Ledger(PLAN, [0])
    for batch, use in enumerate(uses):
        ledger.enter(batch, use)


def test_refuses_what_would_be_two_copies() -> None:
    other = cut_at(2, 5)
    with pytest.raises(PlanError, match=r"layer '2' on rank 1, but '2.0', .* has been on rank 0. .*same names"):
        enter(LayerUse.from_names(["2.0"], LAYERS, cut=LAYERS), LayerUse.from_names(["2"], LAYERS, cut=other))
    with pytest.raises(PlanError, match=r"layer '2.0.a' on rank 0, but '2.0', .* has been on rank 1"):
        enter(LayerUse.from_names(["2.0"], LAYERS, cut=other), LayerUse.from_names(["2.0.a"], LAYERS, cut=LAYERS))
    with pytest.raises(PlanError, match=r"layer '2' late on stage 1, but its home is stage 0"):
        enter(LayerUse.from_names(["2"], LAYERS, delays={"2": Delayed(1)}, cut=other))
    for wrong in ([Span(0, 3), Span(3, 8)], [Span(0, 3), Span(4, 5), Span(5, 8)], [Span(1, 3), Span(3, 5), Span(5, 8)]):
        with pytest.raises(PlanError, match="every layer has to be in one stage, in order"):
            LayerUse((frozenset(), frozenset(), frozenset()), cut=tuple(wrong))
    with pytest.raises(PlanError, match="cut into 7 layers, but the plan has 8"):
        enter(LayerUse.from_names([], LAYERS, cut=[Span(0, 3), Span(3, 5), Span(5, 7)]))
