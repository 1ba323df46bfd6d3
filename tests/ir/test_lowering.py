import pytest

from lightning_pipes.ir import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, Kind, Plan, Program, ProgramError, lower
from lightning_pipes.strategies.gpipe import GPipe
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
