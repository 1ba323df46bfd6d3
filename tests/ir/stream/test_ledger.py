"""Check batches that use different layers.

In any valid order, they read and write the versions that they would if the batches ran one after another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from lightning_pipes.ir import (
    STEP,
    Delayed,
    DependencyTracker,
    F,
    Instruction,
    Kind,
    LayerUse,
    LayerVersion,
    Ledger,
    Plan,
    PlanError,
    Policy,
    RankView,
    Span,
    batch_instructions,
    check_stream,
    ready_key,
    unroll_stream,
    verify,
)
from lightning_pipes.ir.program import Program
from tests.cases import for_each

LAYERS = (Span(0, 3), Span(3, 5), Span(5, 8))
PLAN = Plan.even(3, 2, layers=LAYERS)
PARTS = ["0", "1", "2.0", "2.1", "3", "4.0.a", "4.0", "4", "5", "6", "7"]


@dataclass(frozen=True)
class Four(Policy):
    """A policy with four batches in flight."""

    depth: int = 4
    name: ClassVar[str] = "four"
    flushes: ClassVar[bool] = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        return ready[0]


def drawn(rng: random.Random) -> LayerUse:
    names = [name for name in PARTS if rng.random() < 0.4]
    steps = None if rng.random() < 0.5 else [name for name in names if rng.random() < 0.6]
    return LayerUse.from_names(names, LAYERS, steps)


def leaves(names: frozenset[str]) -> Iterator[str]:
    """Yield the smallest parts of the named layers."""
    for name in names:
        yield from {"2": ["2.0", "2.1"], "4": ["4.0.a", "4.1"], "4.0": ["4.0.a"]}.get(name, [name])


def in_any_order(plan: Plan, rng: random.Random) -> list[Instruction]:
    """Return all instructions in a random order that respects their dependencies."""
    tracker = DependencyTracker(plan)
    ready = []
    for rank in range(plan.n_ranks):
        for batch in range(plan.batches):
            ready += tracker.add(batch_instructions(plan, rank, 0, batch))
    order = []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(i)
        ready += tracker.complete(i)
    assert not tracker._waiting
    return order


@for_each("seed", range(40))
def test_any_order_reads_what_one_after_another_would(seed: int) -> None:
    rng = random.Random(seed)
    uses = [drawn(rng) for _ in range(9)]
    order = in_any_order(unroll_stream(PLAN, uses, depth=9), rng)
    wanted: dict[tuple[int, str], int] = {}  # (batch, part): the batch that stepped it last
    last: dict[str, int] = {}
    for batch, use in enumerate(uses):
        for stage in range(3):
            wanted |= {(batch, part): last.get(part, -1) for part in leaves(use.layers[stage])}
        for stage in range(3):
            last |= dict.fromkeys(leaves(use.stepped_layers(stage)), batch)
    now: dict[str, int] = {}
    for i in order:
        if i.kind in (Kind.F, Kind.B):  # the layers that a forward reads do not change until its last backward
            for part in leaves(uses[i.batch].layers[i.stage]):
                assert now.get(part, -1) == wanted[i.batch, part], (str(i), part)
        elif i.kind is Kind.STEP:
            now |= dict.fromkeys(leaves(uses[i.batch].stepped_layers(i.stage)), i.batch)
    assert now == last


def test_batches_without_shared_layers_do_not_wait() -> None:
    ledger = Ledger(PLAN, [0])
    assert ledger.enter(0, LayerUse.from_names(["0", "3"], LAYERS)) == {}
    assert ledger.enter(1, LayerUse.from_names(["1", "3"], LAYERS)) == {}  # stage 1 is on another rank
    waits = ledger.enter(2, LayerUse.from_names(["0", "1"], LAYERS))
    assert waits == {F(0, span, batch=2): (STEP(0, batch=0), STEP(0, batch=1)) for span in PLAN.spans(Kind.F, 0)}


def test_readers_do_not_wait_for_each_other_and_a_step_waits_for_them() -> None:
    ledger = Ledger(PLAN, [0])
    for batch in (0, 1):
        assert ledger.enter(batch, LayerUse.from_names(["0"], LAYERS, steps=[])) == {}
    assert ledger.enter(2, LayerUse.from_names(["0"], LAYERS)) == {
        STEP(0, batch=2): (STEP(0, batch=0), STEP(0, batch=1))
    }
    ledger.mark_done(STEP(0, batch=0))
    assert ledger.enter(3, LayerUse.from_names(["0"], LAYERS)).keys() == {
        F(0, span, batch=3) for span in PLAN.spans(Kind.F, 0)
    }


def test_versions_count_steps_and_name_the_last_batch() -> None:
    ledger = Ledger(PLAN, [0])
    ledger.enter(0, LayerUse.from_names(["0", "1", "3"], LAYERS))
    ledger.enter(1, LayerUse.from_names(["0", "1", "2.0"], LAYERS, steps=["0"]))
    assert ledger.versions == {}
    ledger.mark_done(STEP(0, batch=0))
    assert ledger.versions == {"0": LayerVersion(1, 0), "1": LayerVersion(1, 0)}
    ledger.mark_done(STEP(0, batch=1))
    assert ledger.versions == {"0": LayerVersion(2, 1), "1": LayerVersion(1, 0)}
    assert list(ledger.uses) == [0, 1]
    ledger.remove_batch(0)
    assert list(ledger.uses) == [1]
    assert ledger.enter(2, LayerUse.from_names(["0", "1"], LAYERS)) == {}  # every dependency is done


def test_expected_order_of_batches_on_a_stage() -> None:
    ledger = Ledger(PLAN, [0])
    for batch, names in enumerate((["0"], ["1"], ["0"], ["1"], ["0"])):
        ledger.enter(batch, LayerUse.from_names(names, LAYERS))
    assert ledger.follows == {0: set(), 1: set(), 2: {0}, 3: {1}, 4: {2}}
    assert ledger.expected_order([]) == [0, 1, 2, 3, 4]
    assert ledger.expected_order([1, 0]) == [1, 0, 3, 2, 4], "the batch that began first returns first"
    ledger.remove_batch(0)
    assert ledger.expected_order([1]) == [1, 2, 3, 4], "no batch waits for a batch that was removed"


def test_depth_holds_back_batches() -> None:
    plan = unroll_stream(PLAN, [LayerUse.from_names([str(n)], LAYERS) for n in range(6)], depth=2)
    tracker = DependencyTracker(plan)
    for batch in range(6):
        tracker.add(batch_instructions(plan, 0, 0, batch))
    first = PLAN.spans(Kind.F, 0)[0]
    assert tracker.unmet_needs(F(0, first, batch=1)) == []
    assert tracker.unmet_needs(F(0, first, batch=3)) == [STEP(0, batch=0), STEP(0, batch=1)]


def test_one_after_another_by_hand_is_a_correct_order() -> None:
    plan = unroll_stream(replace(PLAN, ranks=(0, 0, 0)), [LayerUse.from_names(["0", "5"], LAYERS)] * 3, depth=2)
    row = []
    for batch in range(3):
        forwards = [i for i in batch_instructions(plan, 0, 0, batch) if i.kind is Kind.F]
        backwards = [i for i in batch_instructions(plan, 0, 0, batch) if i.kind is Kind.B]
        steps = [i for i in batch_instructions(plan, 0, 0, batch) if i.kind is Kind.STEP]
        row += [*forwards, *sorted(backwards, key=lambda i: -i.stage), *steps]
    verify(Program((tuple(row),)), plan)


WRONG = {
    "layer '9', which does not exist": lambda: LayerUse.from_names(["9"], LAYERS),
    "layer 'head', which does not exist": lambda: LayerUse.from_names(["head"], LAYERS),
    "steps '1', but does not use it": lambda: LayerUse.from_names(["0"], LAYERS, steps=["1"]),
    "batch 1 uses layer '0' on stage 1, but batch 0 uses it on stage 0": lambda: unroll_stream(
        PLAN,
        [
            LayerUse((frozenset({"0"}), frozenset(), frozenset())),
            LayerUse((frozenset(), frozenset({"0"}), frozenset())),
        ],
        4,
    ),
    "for 2 stages, but the plan has 3": lambda: Ledger(PLAN, [0]).enter(0, LayerUse((frozenset(), frozenset()))),
    "one job": lambda: check_stream(Four(), replace(PLAN, jobs=PLAN.jobs * 2)),
    "versions": lambda: check_stream(Four(), replace(PLAN, versions=(2, 1, 1))),
    "limits": lambda: check_stream(Four(), replace(PLAN, limits=(7, 8, 8))),
    "after": lambda: check_stream(Four(), replace(PLAN, after={STEP(0): (STEP(1),)})),
    "depth of four must be at least 1": lambda: check_stream(Four(0), PLAN),
}


@pytest.mark.parametrize("what", WRONG)
def test_refuses(what: str) -> None:
    with pytest.raises(PlanError, match=what):
        WRONG[what]()


def test_limits_with_room_for_all_under_way_do() -> None:
    check_stream(Four(), replace(PLAN, limits=(8, 8, 8)))


def test_ready_key_takes_backwards_first_and_the_lowest_batch() -> None:
    a, b = PLAN.spans(Kind.F, 0)
    ready = [F(0, b, batch=1), F(0, a, batch=2), STEP(0, batch=3), F(0, a, batch=1)]
    assert sorted(ready, key=ready_key) == [ready[2], ready[3], ready[0], ready[1]]


# Layers with delayed reads ----------------------------------------------------------------------------------------


def late(rng: random.Random, delays: dict[str, Delayed]) -> LayerUse:
    names = [name for name in ("0", "1", "2.0", "2.1", "3", "5", "6") if rng.random() < 0.5]
    return LayerUse.from_names(names, LAYERS, delays={name: by for name, by in delays.items() if name in names})


@for_each("seed", range(30))
def test_any_order_reads_late_layers_as_they_were(seed: int) -> None:
    """Check by hand that each STEP stores a version, and that a batch's forwards find the version they request."""
    rng = random.Random(seed)
    delays = {name: Delayed(rng.randrange(1, 5)) for name in ("0", "2.1", "5")}
    uses = [late(rng, delays) for _ in range(9)]
    order = in_any_order(unroll_stream(PLAN, uses, depth=9), rng)
    steppers = {name: [n for n, use in enumerate(uses) if any(name in x for x in use.layers)] for name in delays}
    stepped: dict[str, list[int]] = {name: [] for name in delays}
    for i in order:
        mine = [name for name in delays if i.kind in (Kind.F, Kind.STEP) and name in uses[i.batch].layers[i.stage]]
        for name in mine:
            if i.kind is Kind.STEP:
                stepped[name].append(i.batch)
            else:
                wanted = [n for n in steppers[name] if n <= i.batch - delays[name].by]
                assert stepped[name][: len(wanted)] == wanted, (str(i), name)
    assert stepped == steppers


def test_late_reads_do_not_wait_for_the_previous_batch() -> None:
    ledger, spans = Ledger(PLAN, [0]), PLAN.spans(Kind.F, 0)
    use = LayerUse.from_names(["0"], LAYERS, delays={"0": Delayed(2)})
    assert ledger.enter(0, use) == {}
    assert ledger.enter(1, use) == {STEP(0, batch=1): (STEP(0, batch=0),)}
    waits = ledger.enter(2, use)
    assert waits == {
        **{F(0, span, batch=2): (STEP(0, batch=0),) for span in spans},
        STEP(0, batch=2): (STEP(0, batch=1),),
    }


def test_bulks_read_the_version_at_their_start() -> None:
    ledger = Ledger(PLAN, [0])
    waits = [ledger.enter(n, LayerUse.from_names(["0"], LAYERS, delays={"0": Delayed(n % 3 + 1)})) for n in range(7)]
    read = [{step.batch for i, steps in each.items() if i.kind is Kind.F for step in steps} for each in waits]
    assert read == [set(), set(), set(), {2}, {2}, {2}, {5}]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (
            {"0": Delayed(1)},
            {},
            "batch 1 reads layer '0' without a delay, but an earlier batch has read '0' differently",
        ),
        ({}, {"0": Delayed(1)}, "batch 1 reads layer '0' late, but an earlier batch has read '0' differently"),
    ],
)
def test_late_and_not_late_do_not_mix(first: dict[str, Delayed], then: dict[str, Delayed], said: str) -> None:
    ledger = Ledger(PLAN, [0])
    ledger.enter(0, LayerUse.from_names(["0"], LAYERS, delays=first))
    with pytest.raises(PlanError, match=said):
        ledger.enter(1, LayerUse.from_names(["0"], LAYERS, delays=then))


def test_part_of_a_late_layer_is_refused() -> None:
    ledger = Ledger(PLAN, [0])
    ledger.enter(0, LayerUse.from_names(["2"], LAYERS, delays={"2": Delayed(1)}))
    for delays in ({}, {"2.1": Delayed(1)}):
        with pytest.raises(PlanError, match="under the same name"):
            ledger.enter(1, LayerUse.from_names(["2.1"], LAYERS, delays=delays))


def test_versions_do_not_go_back() -> None:
    ledger = Ledger(PLAN, [0])
    for batch, by in enumerate((1, 1, 2)):
        ledger.enter(batch, LayerUse.from_names(["0"], LAYERS, delays={"0": Delayed(by)}))
    with pytest.raises(PlanError, match="4 batches late, an older version than the batch before"):
        ledger.enter(3, LayerUse.from_names(["0"], LAYERS, delays={"0": Delayed(4)}))


@pytest.mark.parametrize(
    ("steps", "by", "said"), [(None, 0, "0 batches late; it must be at least 1"), ([], 1, "late, but does not step it")]
)
def test_refuses_delays_that_make_no_sense(steps: list[str] | None, by: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        LayerUse.from_names(["0"], LAYERS, steps, {"0": Delayed(by)})
