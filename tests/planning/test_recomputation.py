"""Check where recomputations are placed, and that placement does not change a bit of the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item
from lightning_pipes.ir import Kind, Plan, Program, Schedule, verify
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.planning.recomputation import place_recomputations
from lightning_pipes.sim import simulate
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


@for_each("name", SCHEDULES)
@for_each("room", [0, 10, ROOM])
def test_no_step_is_longer_and_no_rank_holds_more(name: str, room: int) -> None:
    program, plan, costs = problem(name)
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
    late = plan.with_late_recompute()
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
