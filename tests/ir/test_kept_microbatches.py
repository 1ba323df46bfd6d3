"""Stages that recompute some micro-batches and keep the activations of the others."""

import random
from dataclasses import replace
from importlib import import_module

import pytest

from lightning_pipes.cost import CostModel, LayerProfile, ModelProfile
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    Cut,
    F,
    Kind,
    Plan,
    PlanError,
    Program,
    ProgramError,
    Schedule,
    Span,
    add_recomputations,
    cost_classes,
    lower,
    verify,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.memory import held_rows, peak_bytes, stage_bytes, stage_peak
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import simulate
from lightning_pipes.sim.loops import static
from lightning_pipes.sim.records.record import plan_data, plan_of
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_costs, tiny_plan, uniform
from tests.cases import for_each

FIXED = ["1f1b", "gpipe", "kfkb", "zero_bubble", "interleaved", "v"]


def some_plan(name: str, ranks: int, m: int, kept: tuple[int, int], early: bool) -> tuple[Program, Plan]:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    plan = even_plan(schedule, ranks, m, m, recompute=True)
    plan = replace(plan, early_recompute=early, kept_microbatches=(kept,) * plan.n_stages)
    return schedule.program(plan), plan


def test_the_first_of_every_group_keep_their_activations():
    plan = replace(Plan.even(2, 5, 10, recompute=(True, False)), kept_microbatches=((2, 3), (1, 2)))
    spans = plan.spans(Kind.F, 0)
    assert [plan.recomputes(0, 0, span) for span in spans] == [False, False, True, False, False]
    assert not any(plan.recomputes(1, 0, span) for span in spans)
    assert plan.kept_microbatches == ((2, 3), (0, 1))  # the second stage does not recompute
    assert [i.span for i, _ in cost_classes(Kind.R, 0, plan)] == [spans[2]]
    assert [plan.recomputed_share(s) for s in (0, 1)] == pytest.approx([0.2, 0.0])
    assert not plan.recomputes_all(0)
    assert replace(plan, kept_microbatches=()).recomputes_all(0)


def test_each_rank_of_a_stage_counts_its_own_micro_batches():
    cut = replace(Cut.even(6, 6, 2), replicas=((0, 1, 0, 1, 0, 1), (0,) * 6))
    plan = Plan((0, 2), (cut,), recompute=(True, False), replicas=((0, 1), (2,)), kept_microbatches=((1, 3), (0, 1)))
    assert sorted(plan.kept_spans(0)) == [Span(0, 1), Span(1, 2)]
    assert replace(plan, kept_microbatches=((1, 2), (0, 1))).kept_spans(0) == {Span(n, n + 1) for n in (0, 1, 4, 5)}


@for_each("kept", [(), ((0, 1), (0, 1)), ((0, 7), (3, 4))])
def test_equal_plans_are_equal(kept):
    plan = Plan.even(2, 4, recompute=(True, False))
    assert replace(plan, kept_microbatches=kept) == plan
    assert replace(plan, recompute=(), kept_microbatches=((1, 2), (1, 2))) == replace(plan, recompute=())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kept_microbatches": ((1, 2),)}, "kept_microbatches has 1 entries for 2 stages"),
        ({"kept_microbatches": ((2, 2), (0, 1))}, r"stage 0 is \(2, 2\).*set recompute of this stage to False"),
        ({"kept_microbatches": ((-1, 2), (0, 1))}, r"stage 0 is \(-1, 2\)"),
        ({"kept_microbatches": ((0, 0), (0, 1))}, r"stage 0 is \(0, 0\)"),
        ({"kept_microbatches": ((1,), (0, 1))}, "kept_microbatches"),
        ({"kept_microbatches": ((0.5, 1), (0, 1))}, "kept_microbatches"),
        ({"kept_microbatches": ((True, 2), (0, 1))}, "kept_microbatches"),
        ({"kept_microbatches": "12"}, "kept_microbatches"),
        ({"kept_microbatches": ((1, 2), (0, 1)), "whole_forward": (True, False)}, "stage 0 keeps.*whole_forward"),
        (
            {
                "kept_microbatches": ((1, 2), (0, 1)),
                "jobs": (Cut(4, Cut.even(4, 4, 2).forward, Cut.even(4, 2, 2).forward),),
            },
            "stage 0 keeps 1 of 2 micro-batches, but its backwards cut a batch differently",
        ),
    ],
)
def test_refuses_contradictions(fields, what):
    with pytest.raises(PlanError, match=what):
        replace(Plan.even(2, 4, recompute=(True, True)), **fields)


def test_only_recomputed_micro_batches_have_an_r():
    plan = replace(tiny_plan(2, 3), recompute=(True, True), early_recompute=True, kept_microbatches=((1, 2), (1, 3)))
    assert lower(OneFOneB().program(plan), plan).to_lines() == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 R0.1 RB0.1 B0.1 RB0.2 B0.2 STEP0",
        "RF1.0 F1.0 B1.0 SB1.0 RF1.1 F1.1 R1.1 B1.1 SB1.1 RF1.2 F1.2 R1.2 B1.2 SB1.2 STEP1",
    ]


@pytest.mark.parametrize(
    ("row", "what", "simulated"),
    [
        ("F0.0 F0.1 R0.0 B0.0 R0.1 B0.1 STEP0", r"R0\[0:1\] does not belong", "keeps the activations of this micro-b"),
        ("F0.0 R0.0 F0.1 B0.0 B0.1 STEP0", r"R0\[0:1\] does not belong", "keeps the activations of this micro-b"),
        ("F0.0 F0.1 B0.0 B0.1 R0.1 STEP0", "wait for each other", "wait for each other"),
        ("R0.1 F0.0 F0.1 B0.0 B0.1 STEP0", "wait for each other", "wait for each other"),
    ],
)
def test_finds_wrong_recomputations(row, what, simulated):
    plan = replace(tiny_plan(2, 2), recompute=(True, False), early_recompute=True, kept_microbatches=((1, 2), (0, 1)))
    rows = ["F0.0 F0.1 B0.0 R0.1 B0.1 STEP0", "F1.0 B1.0 F1.1 B1.1 STEP1"]
    verify(Program.parse(rows, plan), plan)
    assert Program.parse(rows, plan).to_lines() == rows
    wrong = Program.parse([row, rows[1]], plan)
    with pytest.raises(ProgramError, match=what):
        verify(wrong, plan)
    with pytest.raises(ProgramError, match=simulated):
        simulate(wrong, plan, CostModel.uniform(2, 1.0, 2.0))


@for_each("name", FIXED)
@for_each("early", [False, True])
@for_each("kept", [(1, 2), (2, 3), (1, 5), (7, 8)])
def test_quick_and_slow_simulations_agree(name, early, kept, monkeypatch):
    """The numbering of regular programs finds the same times and bytes as the one that checks every instruction."""
    program, plan = some_plan(name, 3, 7, kept, early)
    costs = replace(
        random_costs(plan, seed=3),
        activation_bytes=tuple(range(11, 11 + plan.n_stages)),
        forward_bytes=tuple(map(float, range(1, plan.n_stages))),
        working_bytes=(2.0,) * plan.n_stages,
    )
    assert static.number_regular(program, plan) is not None
    quick, stats = simulate(program, plan, costs), verify(program, plan)
    assert quick.peak_bytes == peak_bytes(program, plan, costs)
    with monkeypatch.context() as patch:
        for where in (static, import_module("lightning_pipes.ir.verify")):
            patch.setattr(where, "is_regular", lambda *_: False)
        again = replace(plan, layers=tuple(Span(s, s + 1) for s in range(plan.n_stages)))  # not found in a cache
        assert static.number_regular(program, again) is None
        slow = simulate(program, again, costs)
        assert verify(program, again) == stats
    assert sorted(slow.events) == sorted(quick.events)
    assert slow.peak_bytes == quick.peak_bytes


@for_each("name", FIXED)
@for_each("early", [False, True])
def test_each_operation_costs_what_its_micro_batch_needs(name, early):
    program, plan = some_plan(name, 2, 6, (1, 3), early)
    costs = random_costs(plan, seed=5)
    for e in simulate(program, plan, costs).computations:
        i = e.instruction
        kinds = [i.kind] if i.kind is not Kind.R else [Kind.F]
        if not early and i.kind in (Kind.B, Kind.I) and plan.recomputes(i.stage, 0, i.span):
            kinds.append(Kind.F)
        rows = () if i.kind is Kind.STEP else (i.span.rows,)
        assert e.end - e.start == sum(round(1e9 * costs.seconds_at(kind, i.stage, *rows)) for kind in kinds)


def test_memory_by_hand():
    """Stage 0 of 1F1B with 2 stages holds two micro-batches: one with activations (10) and one input (3)."""
    plan, costs = uniform(2, 4, 1, 2, activation_bytes=10)
    costs = replace(costs, forward_bytes=(3.0,))
    plan = replace(plan, ranks=(1, 0), recompute=(False, True))  # stage 1 receives an input
    row = Program.parse(
        ["F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3 STEP1", "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 STEP0"], plan
    )
    every, some = plan, replace(plan, kept_microbatches=((0, 1), (1, 2)))
    none = replace(plan, recompute=())
    assert [peak_bytes(row, each, costs)[0] for each in (none, some, every)] == [20, 10 + 3 + 10, 3 + 3 + 10]
    # F1.0 keeps 10, F1.1 its input; B1.0 frees 10; F1.2 keeps 10 and B1.1 makes 10 again
    assert simulate(row, some, costs).peak_bytes == peak_bytes(row, some, costs)


@for_each("seed", range(30))
def test_bounds_of_memory(seed):
    """No program needs more than `stage_peak`, nor less than `stage_bytes`, whatever it holds."""
    rng = random.Random(seed)
    name, n = rng.choice(["1f1b", "gpipe", "kfkb", "zero_bubble"]), rng.choice([2, 3])
    every = rng.randrange(2, 5)
    program, plan = some_plan(name, n, rng.randrange(1, 9), (rng.randrange(1, every), every), rng.random() < 0.5)
    saved, sent = rng.sample(range(1, 60), n), rng.sample(range(1, 60), n)
    layers = [
        LayerProfile(str(s), ((1, 1.0),), ((1, 2.0),), saved=((1, float(saved[s])),), output=((1, float(sent[s])),))
        for s in range(n)
    ]
    profile = ModelProfile(tuple(layers))
    plan = replace(plan, layers=tuple(Span(s, s + 1) for s in range(n)))
    costs = replace(random_costs(plan, seed), activation_bytes=tuple(saved), forward_bytes=tuple(map(float, sent[:-1])))
    peak, held = peak_bytes(program, plan, costs), held_rows(program, plan)
    for s in range(n):
        assert stage_peak(plan, costs, s, held[s]) >= peak[s]
        least = stage_bytes(profile, plan, s, held[s])(s, s + 1)  # type: ignore[arg-type]
        assert least <= peak[s]
        alone = replace(plan, kept_microbatches=())
        assert (
            stage_peak(plan, costs, s, held[s])
            <= max(
                stage_peak(each, costs, s, held[s])
                for each in (alone, replace(plan, recompute=(), early_recompute=False))
            )
            + saved[s]
        )


def test_costs_are_recovered_from_a_recorded_run():
    for early in (False, True):
        program, plan = some_plan("1f1b", 3, 6, (1, 2), early)
        costs = CostModel.uniform(3, 3e-9, 7e-9)
        found = CostModel.from_timelines(simulate(program, plan, costs))
        for s in range(3):
            assert found.seconds_at(Kind.F, s, 1) == pytest.approx(3e-9)
            assert found.seconds_at(Kind.B, s, 1) == pytest.approx(7e-9)


def test_plans_are_written_and_read():
    _, plan = some_plan("1f1b", 3, 6, (1, 2), True)
    assert plan.kept_microbatches == ((1, 2), (1, 2), (0, 1))
    assert plan_of(plan_data(plan)) == plan
    old = plan_data(plan)
    del old["kept_microbatches"]
    assert plan_of(old) == replace(plan, kept_microbatches=())


def test_a_short_batch_may_keep_all_of_its_micro_batches():
    program, plan = some_plan("1f1b", 2, 2, (3, 4), True)
    assert not any(i.kind is Kind.R for i in add_recomputations(program, plan).iter_instructions())
    assert plan.kinds_of_stage(0) == (Kind.F, Kind.B)
    verify(program, plan)
    assert all(i.kind in COMPUTE_KINDS for i in program.iter_instructions())
    assert not plan.recomputes(0, 0, F(0, Span(0, 1)).span)
