from dataclasses import replace

import pytest

from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    Cut,
    Kind,
    Plan,
    Program,
    ProgramError,
    Span,
    add_recomputations,
    lower,
)
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_plan, tiny_plan
from tests.cases import for_each
from tests.ir.programs import samples


@for_each("seed", range(20))
def test_every_send_has_one_receive_and_stands_after_what_it_carries(seed):
    plan = random_plan(seed)
    lowered = lower(GPipe().program(plan), plan)
    ends = {}
    for rank, row in enumerate(lowered.head):
        for at, i in enumerate(row):
            if i.kind in SEND_KINDS | RECEIVE_KINDS:
                forward = i.kind in (Kind.SF, Kind.RF)
                stage = i.stage if i.kind in SEND_KINDS else i.stage + (-1 if forward else 1)
                ends.setdefault((forward, stage, i.span), []).append((i.kind in SEND_KINDS, rank))
            if i.kind in SEND_KINDS:
                made = {
                    n for k, s, n in samples(row[:at]) if (k, s) == (Kind.F if i.kind is Kind.SF else Kind.B, i.stage)
                }
                assert made >= set(range(i.span.start, i.span.stop))
            if i.kind in RECEIVE_KINDS:
                use = Kind.F if i.kind is Kind.RF else Kind.B
                nxt = next(j for j in row[at:] if j.kind in COMPUTE_KINDS)
                assert (nxt.kind, nxt.stage) == (use, i.stage)
                assert nxt.span.overlaps(i.span)
    for both in ends.values():
        assert sorted(sent for sent, _ in both) == [False, True]


def test_a_recomputation_stands_before_the_gradient_of_its_backward():
    """Check that a rank recomputes before it waits for the gradient. The other stage receives no gradient."""
    plan = replace(tiny_plan(2, 2), recompute=(True, True), early_recompute=True)
    assert lower(OneFOneB().program(plan), plan).to_lines() == [
        "F0.0 SF0.0 F0.1 SF0.1 R0.0 RB0.0 B0.0 R0.1 RB0.1 B0.1 STEP0",
        "RF1.0 F1.0 R1.0 B1.0 SB1.0 RF1.1 F1.1 R1.1 B1.1 SB1.1 STEP1",
    ]
    split = replace(plan, split_backward=True, recompute=(True, False))
    lines = ["F0.0 F0.1 I0.0 W0.0 I0.1 W0.1 STEP0", "F1.0 I1.0 W1.0 F1.1 I1.1 W1.1 STEP1"]
    assert lower(Program.parse(lines, split), split).to_lines()[0] == (
        "F0.0 SF0.0 F0.1 SF0.1 R0.0 RB0.0 I0.0 W0.0 R0.1 RB0.1 I0.1 W0.1 STEP0"
    )
    late = replace(plan, early_recompute=False)
    assert not any(i.kind is Kind.R for i in lower(OneFOneB().program(late), late).iter_instructions())


def test_parts_of_whole_forwards_are_recomputed():
    """Check that only a backward that differentiates a part of a forward has an R."""
    cut = Cut(4, ((Span(0, 2), Span(2, 4)),) * 2, ((Span(0, 2), Span(2, 3), Span(3, 4)),) * 2)
    plan = Plan((0, 1), (cut,), whole_forward=(True, False), early_recompute=True)
    lines = ["F0.0 F0.1 B0.0 B0.1 B0.2 STEP0", "F1.0 F1.1 B1.0 B1.1 B1.2 STEP1"]
    assert add_recomputations(Program.parse(lines, plan), plan).to_lines() == [
        "F0.0 F0.1 B0.0 R0.1 B0.1 R0.2 B0.2 STEP0",
        lines[1],
    ]


def test_recomputations_stay_where_a_program_places_them():
    plan = replace(tiny_plan(2, 2), recompute=(True, False), early_recompute=True)
    lines = ["F0.0 R0.0 F0.1 B0.0 R0.1 B0.1 STEP0", "F1.0 B1.0 F1.1 B1.1 STEP1"]
    assert lower(Program.parse(lines, plan), plan).to_lines()[0] == (
        "F0.0 SF0.0 R0.0 F0.1 SF0.1 RB0.0 B0.0 R0.1 RB0.1 B0.1 STEP0"
    )


def test_lowering_twice_changes_nothing():
    plan = tiny_plan(3, 2)
    once = lower(GPipe().program(plan), plan)
    assert lower(once, plan) == once
    assert Program(tuple(tuple(i for i in row if i.kind in COMPUTE_KINDS) for row in once.head)) == GPipe().program(
        plan
    )


def test_neighbours_on_one_rank_send_nothing():
    plan = Plan.even(3, 2, ranks=(0, 0, 0))
    assert lower(GPipe().program(plan), plan) == GPipe().program(plan)


def test_rows_must_match_ranks():
    with pytest.raises(ProgramError, match="2 rows, but the plan has 3 ranks"):
        lower(GPipe().program(tiny_plan(2, 1)), tiny_plan(3, 1))
