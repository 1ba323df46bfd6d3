"""Check the simulated times of fixed orders."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import (
    STEP,
    B,
    Cut,
    DeadlockError,
    F,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    ProgramError,
    Span,
    lower,
)
from lightning_pipes.sim import makespan, simulate, simulator
from lightning_pipes.sim.loops import static
from lightning_pipes.sim.loops.static import number_regular
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan, uniform
from tests.cases import count_calls, for_each
from tests.ir.programs import pipedream, split
from tests.sim.links import sending
from tests.sim.longest_path import starts

ONE = Span(0, 1)


def check(program, plan, costs, blocking=False):
    timeline = simulate(program, plan, sending(costs, blocking))
    assert {e.instruction: e.start for e in timeline.events} == starts(program, plan, costs, blocking)
    assert timeline.makespan == makespan(program, plan, sending(costs, blocking))


def recomputed(plan, seed):
    """Return a plan in which every second stage recomputes before the gradient arrives."""
    return replace(plan, recompute=tuple(s % 2 == seed % 2 for s in range(plan.n_stages)), early_recompute=True)


@for_each("blocking", [False, True])
@for_each("seed", range(25))
def test_longest_path_with_unequal_spans(seed, blocking):
    plan = random_plan(seed)
    check(GPipe().program(plan), plan, random_costs(plan, seed), blocking)
    plan = recomputed(plan, seed)
    check(GPipe().program(plan), plan, random_costs(plan, seed), blocking)


@for_each("blocking", [False, True])
@for_each("seed", range(25))
def test_longest_path_of_kfkb(seed, blocking):
    plan = random_plan(seed, unequal=False)
    costs = replace(random_costs(plan, seed), overhead=(seed % 3) * 1e-9)
    check(KFKB(1 + seed % 4).program(plan), plan, costs, blocking)


@pytest.mark.parametrize("seed", range(6))
def test_longest_path_of_split_backward(seed):
    plan = random_plan(seed, unequal=False)
    program = split(GPipe().program(plan))
    plan = replace(plan, split_backward=True)
    check(program, plan, random_costs(plan, seed))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (2, 3, 3), (3, 2, 6), (1, 3, 2)])
def test_longest_path_of_interleaved(p, v, m):
    """Check interleaved stages, whose activations and gradients share a link on two ranks."""
    plan = tiny_plan(p * v, m, ranks=tuple(range(p)) * v)
    check(Interleaved(v).program(plan), plan, random_costs(plan, seed=p + v + m))


def test_after_delays_what_it_names():
    plan, costs = uniform(2, 3, f=1, b=2)
    plan = replace(plan, after={F(0, Span(2, 3)): (B(1, Span(0, 1)),)})
    order = GPipe().program(plan)
    rows = (order.head[0], (order.head[1][0], order.head[1][3], *order.head[1][1:3], *order.head[1][4:]))
    check(Program(rows), plan, costs)
    times = {e.instruction: (e.start, e.end) for e in simulate(Program(rows), plan, costs).events}
    assert times[B(1, Span(0, 1))] == (2, 4)
    assert times[F(0, Span(2, 3))] == (4, 5)


@for_each("seed", range(10))
def test_shorter_instructions_never_make_a_fixed_order_longer(seed):
    plan = random_plan(seed)
    costs = random_costs(plan, seed)
    rng = random.Random(seed)
    shorter = {
        key: tuple((rows, t * scale) for rows, t in table)
        for key, table in costs.seconds.items()
        for scale in [rng.random()]
    }
    program = GPipe().program(plan)
    assert makespan(program, plan, replace(costs, seconds=shorter)) <= makespan(program, plan, costs) + 1


def test_a_link_moves_one_message_at_a_time_and_latency_does_not_occupy_it():
    plan, costs = uniform(2, 3, f=1, b=1, link=5, latency=100)
    timeline = simulate(GPipe().program(plan), plan, costs)
    sent = [(e.start, e.end) for e in timeline.transfers if e.instruction.kind is Kind.SF]
    assert sent == [(1, 106), (6, 111), (11, 116)]


def test_sends_overlap_computation_unless_they_block():
    plan, costs = uniform(2, 2, f=3, b=3, link=2)
    program = GPipe().program(plan)

    def forwards(blocking):
        timeline = simulate(program, plan, sending(costs, blocking))
        return [e.start for e in timeline.computations if e.instruction.kind is Kind.F and e.rank == 0]

    assert forwards(False) == [0, 3]
    assert forwards(True) == [0, 5]


def test_overhead_comes_before_every_computation():
    plan, costs = uniform(1, 4, f=10, b=20, overhead=3)
    timeline = simulate(GPipe().program(plan), plan, costs)
    assert timeline.makespan == 4 * (10 + 20) + 9 * 3
    assert timeline.busy == (4 * (10 + 20),)


def test_updates_take_their_time():
    plan, costs = uniform(3, 5, f=1, b=2, step=7)
    assert simulate(OneFOneB().program(plan), plan, costs).makespan == (5 + 3 - 1) * 3 + 7


def test_a_cycle_is_reported_with_who_waits_for_what():
    plan, costs = uniform(2, 2, f=1, b=2)
    crossed = Program.parse(["F0.0 B0.0 F0.1 B0.1 STEP0", "F1.0 F1.1 B1.0 B1.1 STEP1"], plan)
    with pytest.raises(DeadlockError, match=r"rank 0 waits at RB0\[0:1\] for SB1.*rank 1 waits at RF1\[1:2\] for SF0"):
        simulate(crossed, plan, costs)


def test_missing_sends_are_reported():
    plan, costs = uniform(2, 1, f=1, b=2)
    with pytest.raises(DeadlockError, match="rank 1 waits at RF1"):
        simulate(Program.parse(["B0.0", "F1.0 B1.0"], plan), plan, costs)


def test_rows_must_match_ranks():
    plan, costs = uniform(2, 1, f=1, b=2)
    with pytest.raises(ProgramError, match="3 rows"):
        simulate(GPipe().program(tiny_plan(3, 1)), plan, costs)


def test_a_schedule_is_not_a_program():
    plan, costs = uniform(2, 1, f=1, b=2)
    with pytest.raises(TypeError, match=r"schedule.program\(plan\)"):
        simulate(GPipe(), plan, costs)


def test_costs_must_know_every_stage():
    plan, _ = uniform(3, 1, f=1, b=2)
    with pytest.raises(PlanError, match="stage 2"):
        simulate(GPipe().program(plan), plan, uniform(2, 1, f=1, b=2)[1])


@pytest.mark.parametrize("batches", [1, 2, 3, 10])
def test_endless_programs_run_as_many_batches_as_asked(batches):
    """Check the makespan of two ranks with one batch in advance.

    Filling the pipeline takes f, then rank 1 takes f + b for each batch, and draining takes b.
    """
    plan = replace(tiny_plan(2, 1), versions=(2, 1))
    _, costs = uniform(2, 1, f=2, b=4)
    timeline = simulate(pipedream(), plan, costs, batches=batches)
    assert timeline.makespan == 2 + batches * (2 + 4) + 4
    assert len(timeline.computations) == batches * 2 * 3


def test_endless_programs_by_default_run_three_more_than_the_head():
    plan = replace(tiny_plan(2, 1), versions=(2, 1))
    _, costs = uniform(2, 1, f=2, b=4)
    assert simulate(pipedream(), plan, costs) == simulate(pipedream(), plan, costs, batches=5)


def test_several_jobs_overlap():
    """Check that two jobs of one micro-batch each fill each other's bubbles."""
    plan = replace(tiny_plan(2, 1), jobs=tiny_plan(2, 1).jobs * 2)
    _, costs = uniform(2, 1, f=1, b=2)
    lines = ["F0.0 j1:F0.0 B0.0 STEP0 j1:B0.0 j1:STEP0", "F1.0 B1.0 STEP1 j1:F1.0 j1:B1.0 j1:STEP1"]
    assert simulate(Program.parse(lines, plan), plan, costs).makespan == (2 + 2 - 1) * 3


@for_each("early", [False, True])
@for_each("seed", range(10))
def test_peaks_by_sweeping_over_the_timeline(seed, early):
    plan = random_plan(seed, unequal=seed % 2 == 0)
    n = plan.n_stages
    recompute = tuple(seed % 3 == 0 and s % 2 == 1 for s in range(n))
    plan = replace(plan, recompute=recompute, early_recompute=early)
    costs = replace(
        random_costs(plan, seed),
        activation_bytes=tuple(range(3, 3 + n)),
        weight_bytes=(100,) * n,
        forward_bytes=(2.0,) * (n - 1),
    )
    timeline = simulate(GPipe().program(plan), plan, costs)
    for rank in range(plan.n_ranks):
        held = peak = 100
        for e in timeline.computations:
            i = e.instruction
            if e.rank != rank or i.kind is Kind.STEP:
                continue
            mine, kept = 3 + i.stage, 3 + i.stage
            if recompute[i.stage]:
                kept = 2 if i.stage else 0
            if i.kind is Kind.F:
                held += kept * i.span.rows
                peak = max(peak, held)
            elif i.kind is Kind.R:
                peak = max(peak, held + mine * i.span.rows)
            else:
                peak = max(peak, held + (mine * i.span.rows if recompute[i.stage] else 0))
                held -= kept * i.span.rows
        assert held == 100
        assert timeline.peak_bytes[rank] == peak


def test_memory_limit():
    plan, costs = uniform(3, 6, f=1, b=2, activation_bytes=10)
    assert simulate(OneFOneB().program(plan), plan, costs, memory_limit=30).peak_bytes == (30, 20, 10)
    assert simulate(OneFOneB().program(plan), plan, costs, memory_limit=(30, 20, 10)).makespan == (6 + 3 - 1) * 3
    with pytest.raises(DeadlockError, match=r"rank 1 waits at F1\[1:2\] for 10 bytes: it holds 10 and may hold 19"):
        simulate(OneFOneB().program(plan), plan, costs, memory_limit=(30, 19, 10))
    with pytest.raises(PlanError, match="weights alone"):
        simulate(OneFOneB().program(plan), plan, replace(costs, weight_bytes=(0, 50, 0)), memory_limit=40)


def test_the_default_is_a_free_link():
    plan = tiny_plan(4, 8)
    costs = CostModel.uniform(4, 1e-9, 2e-9, message_bytes=1e9)
    assert simulate(OneFOneB().program(plan), plan, costs).makespan == (8 + 4 - 1) * 3


def test_bandwidth_and_latency_in_the_closed_form():
    """Check that GPipe takes 2 (p - 1)(link + latency) longer with links that keep up.

    Such a link delays only the first forward and the last gradient.
    """
    plan = Plan.even(4, 8)
    costs = CostModel.uniform(4, 10e-9, 20e-9, message_bytes=6, link=Link(bandwidth=1e9, latency=3e-9))
    assert simulate(GPipe().program(plan), plan, costs).makespan == (8 + 4 - 1) * 30 + 2 * 3 * (6 + 3)


@pytest.mark.parametrize(
    ("link", "one", "two", "three"),
    [
        (5, 1820, 1650, 1650),
        (10, 2020, 1680, 1680),
        (20, 2420, 1740, 1740),
        (40, 3220, 2100, 1900),
        (60, 4020, 2700, 2460),
    ],
)
def test_kfkb_over_slow_links_equals_another_model(link, one, two, three):
    """Compare with a prototype whose numbers are within 5 % of steps on shaped links, up to 40 ms per message."""
    plan, costs = uniform(4, 24, f=20, b=40, link=link)
    assert [makespan(KFKB(k).program(plan), plan, costs) for k in (1, 2, 3)] == [one, two, three]


def test_receives_in_odd_places_hold_up_what_comes_after_them():
    plan, costs = uniform(2, 2, f=1, b=2, link=3)
    a, b = plan.spans(Kind.F, 0)

    def r(kind, stage, span):
        return Instruction(kind, stage, span=span)

    lines = Program(
        (
            (
                F(0, a),
                r(Kind.SF, 0, a),
                F(0, b),
                r(Kind.SF, 0, b),
                r(Kind.RB, 0, a),
                B(0, a),
                r(Kind.RB, 0, b),
                B(0, b),
            ),
            (
                r(Kind.RF, 1, a),
                r(Kind.RF, 1, b),
                F(1, a),
                B(1, a),
                r(Kind.SB, 1, a),
                F(1, b),
                B(1, b),
                r(Kind.SB, 1, b),
            ),
        )
    )
    rows = tuple((*row, STEP(s)) for s, row in enumerate(lines.head))
    check(Program(rows), plan, costs)
    first = {e.instruction: e.start for e in simulate(Program(rows), plan, costs).events}
    assert first[F(1, a)] == 7  # its own message arrives at 4, the second one at 7


def test_fast_enough_to_search_with():
    """Check that eight stages, 64 micro-batches and transfers need few Python calls per instruction.

    Such a simulation takes a few milliseconds.
    """
    plan, costs = uniform(8, 64, f=1, b=2, link=1)
    program = OneFOneB().program(plan)
    simulate(program, plan, costs)
    assert count_calls(lambda: simulate(program, plan, costs)) < 12 * sum(map(len, program.head))


def test_times_beyond_what_can_be_counted_are_refused():
    plan = Plan.even(2, 8)
    with pytest.raises(PlanError, match="operations of up to 9e\\+08 s each are more than can be simulated"):
        simulate(OneFOneB().program(plan), plan, CostModel.uniform(2, 9e8, 9e8))
    with pytest.raises(PlanError, match="1e\\+10 s is too long to simulate; check the units"):
        simulate(OneFOneB().program(plan), plan, CostModel.uniform(2, 1e10, 1.0))


TWO_JOBS = Plan((0, 1), (Cut.even(4, 4, 2), Cut.even(6, 3, 2)))


def after_another(plan: Plan) -> Program:
    """Return a program that runs the jobs one after another."""
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
    renamed = {-1: -1}  # links are numbered in a different order
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
    assert number_regular(lower(program, plan), plan) is None  # transfers may be anywhere in a lowered program
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
    """Check the number of Python calls for 16 stages, 256 micro-batches and 16 000 operations.

    Without the fast path, compilation takes many times this number of calls.
    """
    plan = tiny_plan(16, 256)
    program = KFKB(1).program(plan)
    compiled = []
    calls = count_calls(lambda: compiled.append(static.compile_program(program, plan)))
    assert len(compiled[0].instructions) == 16 * 256 * 2 + 15 * 256 * 2 + 16
    assert calls < 30 * len(compiled[0].instructions)
