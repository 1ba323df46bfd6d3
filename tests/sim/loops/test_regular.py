"""Compiled by looking at the first micro-batch only, and by looking at all: the same."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, Cut, DeadlockError, F, Kind, Plan, Program, ProgramError, Span, lower
from lightning_pipes.sim import makespan, simulate, simulator
from lightning_pipes.sim.loops import static
from lightning_pipes.sim.loops.regular import number_regular
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan
from tests.ir.programs import pipedream, split

TWO_JOBS = Plan((0, 1), (Cut.even(4, 4, 2), Cut.even(6, 3, 2)))


def after_another(plan: Plan) -> Program:
    """The jobs one after the other."""
    rows = []
    for stage in range(plan.n_stages):
        row = []
        for job in range(len(plan.jobs)):
            row += [F(stage, span, job) for span in plan.spans(Kind.F, stage, job)]
            row += [B(stage, span, job) for span in plan.spans(Kind.B, stage, job)]
            row.append(STEP(stage, job))
        rows.append(tuple(row))
    return Program(tuple(rows))


def cases():
    for seed in range(8):
        plan = random_plan(seed, unequal=False)
        yield KFKB(1 + seed % 3).program(plan), plan
        yield split(GPipe().program(plan)), replace(plan, split_backward=True)
    for p, v, m in [(2, 2, 4), (2, 3, 3), (3, 2, 6), (1, 3, 2), (3, 2, 7)]:
        plan = tiny_plan(p * v, m, ranks=tuple(range(p)) * v)
        yield Interleaved(v).program(plan), plan
    yield pipedream().unroll(6), replace(tiny_plan(2, 1), versions=(2, 1))
    yield after_another(TWO_JOBS), TWO_JOBS


@pytest.mark.parametrize("case", list(cases()), ids=itertools.count())
def test_the_same_in_every_respect(case, monkeypatch):
    program, plan = case
    quick = number_regular(program, plan)
    monkeypatch.setattr(static, "number_regular", lambda program, plan: None)
    slow = static.compile_program.__wrapped__(program, plan)
    assert quick is not None
    assert tuple(quick.instructions) == slow.instructions
    assert tuple(quick.like) == slow.like
    assert [quick.ranks, quick.groups, quick.first, quick.before] == [slow.ranks, slow.groups, *slow.table.lists[3:]]
    renamed = {-1: -1}  # links are numbered in another order
    for here, there in zip(quick.links, slow.table.lists.link, strict=True):
        assert renamed.setdefault(here, there) == there
    assert len(set(renamed.values())) == len(renamed)
    for here, there in renamed.items():
        assert there < 0 or quick.pairs[here] == slow.pairs[there]


@pytest.mark.parametrize("seed", range(4))
def test_the_same_times(seed, monkeypatch):
    plan = tiny_plan(4, 6)
    program, costs = KFKB(2).program(plan), random_costs(plan, seed)
    quick = simulate(program, plan, costs)
    monkeypatch.setattr(static, "number_regular", lambda program, plan: None)
    monkeypatch.setattr(simulator, "compile_program", static.compile_program.__wrapped__)
    assert quick == simulate(program, plan, costs)


def test_other_plans_are_left_to_others():
    plan = tiny_plan(2, 3)
    program = GPipe().program(plan)
    assert number_regular(program, replace(plan, after={F(0, Span(2, 3)): (B(1, Span(0, 1)),)})) is None
    assert number_regular(lower(program, plan), plan) is None  # its transfers may stand anywhere
    unequal = Plan((0, 1), (Cut(3, plan.jobs[0].forward, backward=((Span(0, 3),),) * 2),))
    assert number_regular(GPipe().program(unequal), unequal) is None


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([[B(0, Span(0, 1)), F(0, Span(0, 1)), STEP(0)], [F(1, Span(0, 1)), B(1, Span(0, 1)), STEP(1)]], DeadlockError),
        ([[F(0, Span(0, 1)), STEP(0), B(0, Span(0, 1))], [F(1, Span(0, 1)), B(1, Span(0, 1)), STEP(1)]], DeadlockError),
        ([[F(0, Span(0, 1))]], ProgramError),
    ],
)
def test_programs_that_can_not_run_are_explained(rows, error):
    program = Program(tuple(map(tuple, rows)))
    with pytest.raises(error):
        makespan(program, tiny_plan(2, 1), CostModel.uniform(2, 1.0, 2.0))


def test_what_is_on_another_rank_is_left_to_others():
    one = Span(0, 1)
    stray = Program(((F(0, one), STEP(0)), (F(1, one), B(1, one), B(0, one), STEP(1))))
    assert number_regular(stray, tiny_plan(2, 1)) is None


def test_a_step_needs_all_micro_batches():
    one, two = Span(0, 1), Span(1, 2)
    plan = tiny_plan(1, 2)
    early = Program(((F(0, one), F(0, two), B(0, one), STEP(0), B(0, two)),))
    assert number_regular(early, plan) is None
    with pytest.raises(DeadlockError):
        makespan(early, plan, CostModel.uniform(1, 1.0, 2.0))


def test_large_programs_compile_fast():
    """64 stages, 512 micro-batches, 130 000 operations; one by one they take ten times as long."""
    plan = tiny_plan(64, 512)
    program = KFKB(1).program(plan)
    started = time.process_time()
    assert len(static.compile_program(program, plan).instructions) == 64 * 512 * 2 + 63 * 512 * 2 + 64
    assert time.process_time() - started < 10
