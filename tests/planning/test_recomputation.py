"""Check where recomputations are placed, and that placement does not change a bit of the gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item
from lightning_pipes.ir import Cut, Kind, Plan, Program, Schedule, Span, add_recomputations, verify
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning import recomputation
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.planning.recomputation import place_recomputations
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.pipes import ROWS, WIDTH, assert_close, batch, gradients, layers, make_stages

SCHEDULES = ["1f1b", "gpipe", "kfkb", "zero_bubble", "interleaved", "hanayo", "v"]
ROOM = 10**9


def problem(name: str, ranks: int = 4) -> tuple[Program, Plan, CostModel]:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    plan = even_plan(schedule, ranks, ROWS, ROWS, recompute=True)
    costs = CostModel.uniform(plan.n_stages, 1e-9, 2e-9, activation_bytes=10, message_bytes=1)
    return schedule.program(plan), plan, costs


def test_one_more_micro_batch_fills_the_first_wait() -> None:
    """Stage 0 waits from 5 to 10 for its first gradient. With room for two, it also repeats a second forward there."""
    program, plan, costs = problem("1f1b")
    peaks = peak_bytes(program, plan, costs)
    row = place_recomputations(program, plan, costs, [peak + 10 for peak in peaks]).to_lines()[0]
    assert row.startswith("F0.0 F0.1 F0.2 F0.3 R0.0 R0.1 B0.0 F0.4 R0.2 B0.1 ")


def two_stages(backward: int, overhead: int = 0, again: int = 10) -> tuple[Program, Plan, CostModel]:
    """Return GPipe with three micro-batches. Stage 0 recomputes and waits for gradients. Times are in nanoseconds.

    Forwards take 10, and the backward of stage 0 takes 20.
    """
    plan = Plan.even(2, 3, recompute=[True, False])
    plan = replace(plan, early_recompute=True)
    times = {(Kind.F, 0): 10, (Kind.F, 1): 10, (Kind.R, 0): again, (Kind.B, 0): 20, (Kind.B, 1): backward}
    seconds = {key: ((1, 1e-9 * value),) for key, value in times.items()}
    costs = CostModel(seconds, overhead=1e-9 * overhead, activation_bytes=(10, 10))
    schedule = make_schedule("gpipe")
    assert isinstance(schedule, Schedule)
    return schedule.program(plan), plan, costs


@pytest.mark.parametrize(
    ("backward", "overhead", "row"),
    [
        (20, 0, "R0.0 R0.1 R0.2 B0.0 B0.1 B0.2"),
        (19, 0, "R0.0 R0.1 B0.0 R0.2 B0.1 B0.2"),
        (10, 0, "R0.0 R0.1 B0.0 R0.2 B0.1 B0.2"),
        (9, 0, "R0.0 B0.0 R0.1 B0.1 R0.2 B0.2"),
        (25, 5, "R0.0 R0.1 R0.2 B0.0 B0.1 B0.2"),
        (24, 5, "R0.0 R0.1 B0.0 R0.2 B0.1 B0.2"),
        (9, 5, "R0.0 B0.0 R0.1 B0.1 R0.2 B0.2"),
    ],
)
def test_a_wait_contains_the_recomputations_that_fit_into_it(backward: int, overhead: int, row: str) -> None:
    """Check placements that were computed by hand.

    With an overhead of o before each computation, the first gradient is ready at 40 + 5o + b, and stage 0 has ended
    three forwards and R0.0 at 40 + 4o. The wait of b + o has room for each further R that takes 10 + o. If R0.1 moves
    to this wait, R0.2 takes its former place.
    """
    program, plan, costs = two_stages(backward, overhead)
    assert place_recomputations(program, plan, costs, [ROOM] * 2).to_lines()[0] == f"F0.0 F0.1 F0.2 {row} STEP0"


def test_nothing_moves_for_a_small_gain() -> None:
    """Recomputations of 1 ns could move to the first wait, but would shorten the step by less than a hundredth."""
    program, plan, costs = two_stages(20, again=1)
    assert place_recomputations(program, plan, costs, [ROOM] * 2) == add_recomputations(program, plan)


def test_a_recomputation_follows_all_forwards_of_its_backward() -> None:
    """Stage 1 waits between two forwards, which one backward differentiates together."""
    halves, whole = (Span(0, 1), Span(1, 2)), (Span(0, 2),)
    cut = Cut(2, (halves, halves), (whole, whole))
    plan = Plan((0, 1), (cut,), recompute=(False, True), early_recompute=True)
    times = {(Kind.F, 0): 100, (Kind.F, 1): 1, (Kind.B, 0): 1, (Kind.B, 1): 1}
    costs = CostModel({key: ((1, 1e-9 * value),) for key, value in times.items()}, activation_bytes=(10, 10))
    program = Program.parse(["F0.0 F0.1 B0.0 STEP0", "F1.0 F1.1 B1.0 STEP1"], plan)
    placed = place_recomputations(program, plan, costs, [ROOM] * 2)
    assert placed.to_lines()[1] == "F1.0 F1.1 R1.0 B1.0 STEP1"


@pytest.mark.parametrize(("job", "batch"), [("j1:", ""), ("", "@1")])
def test_a_recomputation_follows_the_forward_of_its_own_job_and_batch(job: str, batch: str) -> None:
    """Stage 1 waits for the second of two forwards of the same samples, one for each job or batch."""
    one = Plan.even(2, 1, recompute=(False, True))
    plan = replace(one, jobs=one.jobs * 2) if job else replace(one, batches=2, versions=(2, 2))
    plan = replace(plan, early_recompute=True)
    times = {(Kind.F, 0): 100, (Kind.F, 1): 10, (Kind.B, 0): 10, (Kind.B, 1): 10}
    costs = CostModel({key: ((1, 1e-9 * value),) for key, value in times.items()}, activation_bytes=(10, 10))
    rows = [
        f"F0.0 {job}F0.0{batch} B0.0 STEP0 {job}B0.0{batch} {job}STEP0{batch}",
        f"F1.0 B1.0 STEP1 {job}F1.0{batch} {job}B1.0{batch} {job}STEP1{batch}",
    ]
    placed = place_recomputations(Program.parse(rows, plan), plan, costs, [ROOM] * 2)
    verify(placed, plan)
    assert placed.to_lines()[1] == rows[1].replace("B1.0", "R1.0 B1.0", 1).replace(
        f"{job}B1.0{batch}", f"{job}R1.0{batch} {job}B1.0{batch}"
    )


def test_a_wait_that_arises_from_a_move_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these durations, one look at the waits of the original order finds a longer step."""
    schedule = make_schedule("v")
    assert isinstance(schedule, Schedule)
    plan, rng = even_plan(schedule, 3, 6, 6, recompute=True), random.Random(54)
    times = {(kind, s): 1e-9 * rng.randint(1, 9) for kind in plan.compute_kinds for s in range(plan.n_stages)}
    costs = CostModel({key: ((1, value),) for key, value in times.items()}, activation_bytes=(10,) * plan.n_stages)
    program = schedule.program(plan)
    step = makespan(place_recomputations(program, plan, costs, [ROOM] * 3), plan, costs)
    monkeypatch.setattr(recomputation, "MAX_PASSES", 1)
    assert step < makespan(place_recomputations(program, plan, costs, [ROOM] * 3), plan, costs)


def test_recomputations_of_large_programs_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan, costs = problem("1f1b")
    monkeypatch.setattr(recomputation, "MAX_PLACED_INSTRUCTIONS", add_recomputations(program, plan).size - 1)
    assert place_recomputations(program, plan, costs, [ROOM] * 4) == add_recomputations(program, plan)


@for_each("name", SCHEDULES)
@for_each("room", [0, 10, ROOM])
@for_each("kept", [(0, 1), (1, 2), (2, 3)])
def test_no_step_is_longer_and_no_rank_holds_more(name: str, room: int, kept: tuple[int, int]) -> None:
    program, plan, costs = problem(name)
    plan = replace(plan, kept_microbatches=(kept,) * plan.n_stages)
    before, peaks = simulate(program, plan, costs), peak_bytes(program, plan, costs)
    placed = place_recomputations(program, plan, costs, [peak + room for peak in peaks])
    after = simulate(placed, plan, costs)
    assert verify(placed, plan) == verify(program, plan)
    assert after.makespan <= before.makespan
    assert all(now <= then + room for now, then in zip(after.peak_bytes, peaks, strict=True))
    assert placed == place_recomputations(program, plan, costs, [peak + room for peak in peaks])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "v"])
def test_gradients_have_the_same_bits(name: str) -> None:
    """Dropout draws the same numbers, and running statistics count each micro-batch once, wherever an R is."""
    program, plan, costs = problem(name)
    placed = place_recomputations(program, plan, costs, [ROOM] * plan.n_ranks)
    assert placed.head != program.head
    found: list[Any] = []
    for order, given in ((program, replace(plan, early_recompute=False)), (placed, plan)):
        model = [m for each in layers(plan.n_stages, dropout=0.5) for m in (each, nn.BatchNorm1d(WIDTH).double())]
        # one micro-batch of a BatchNorm needs two samples
        pair = replace(given, jobs=(Plan.even(plan.n_stages, ROWS, 2 * ROWS).jobs[0],))
        order = Program.parse(order.to_lines(), pair)
        pipe = Loopback(pair, order, lambda r, p=pair, m=model: make_stages(p, r, m))  # type: ignore[misc]
        pipe.inject(lambda: Item(0, 2 * ROWS, batch(0, 2 * ROWS)))
        pipe.drain()
        states = {f"{n}.{key}": value for n, m in enumerate(model) for key, value in m.named_buffers()}
        found.append((gradients(model), states))
    assert_close(found[1][0], found[0][0], exact=True)
    assert_close(found[1][1], found[0][1], exact=True)
    assert {int(v) for key, v in found[0][1].items() if key.endswith("num_batches_tracked")} == {ROWS}


def test_nothing_moves_without_a_limit_or_in_an_endless_order() -> None:
    program, plan, costs = problem("1f1b")
    assert peak_bytes(place_recomputations(program, plan, costs), plan, costs) == peak_bytes(program, plan, costs)
    late = replace(plan, early_recompute=False)
    assert place_recomputations(program, late, costs, [ROOM] * 4) == program
    schedule = make_schedule("pipedream")
    assert isinstance(schedule, Schedule)
    endless = schedule.program(replace(plan, versions=schedule.weight_versions(plan)))
    assert place_recomputations(endless, plan, costs, [ROOM] * 4).is_endless


def test_a_recomputation_stays_behind_its_forward() -> None:
    program, plan, costs = problem("gpipe", 2)
    row = place_recomputations(program, plan, costs, [ROOM] * 2).head[0]
    for at, i in enumerate(row):
        if i.kind is Kind.R:
            assert i._replace(kind=Kind.F) in row[:at]
            assert i._replace(kind=Kind.B) in row[at:]
