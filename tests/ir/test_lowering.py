from itertools import product

import pytest

from lightning_pipes.ir import (
    COMPUTE,
    RECEIVES,
    SENDS,
    DependencyTracker,
    Kind,
    Plan,
    Program,
    ProgramError,
    batch_instructions,
    lower,
    needs,
)
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.testing.generators import random_plan, tiny_plan
from tests.cases import for_each


def everything(plan):
    return [i for rank in range(plan.n_ranks) for i in batch_instructions(plan, rank, 0, 0)]


def samples(instructions):
    return {(i.kind, i.stage, n) for i in instructions for n in range(i.span.start, i.span.stop)}


@for_each("seed", range(20))
def test_needs_sample_by_sample(seed):
    """An instruction needs exactly the instructions that made its samples, one hop before."""
    plan = random_plan(seed, split_backward=seed % 3 == 0)
    gradient = Kind.I if plan.split_backward else Kind.B
    for i in everything(plan):
        if i.kind is Kind.STEP:
            continue
        kinds = {
            Kind.F: [(Kind.RF, 0)] if i.stage else [],
            Kind.SF: [(Kind.F, 0)],
            Kind.RF: [(Kind.SF, -1)],
            Kind.SB: [(gradient, 0)],
            Kind.RB: [(Kind.SB, 1)],
            Kind.W: [(Kind.I, 0)],
        }.get(i.kind, [(Kind.F, 0)] + ([(Kind.RB, 0)] if i.stage + 1 < plan.n_stages else []))
        wanted = {(k, i.stage + d, n) for (k, d), n in product(kinds, range(i.span.start, i.span.stop))}
        got = needs(i, plan)
        assert wanted <= samples(got)
        assert all(any(n.span.overlaps(i.span) for n in [need]) for need in got)
        assert {(n.kind, n.stage) for n in got} == {(k, s) for k, s, _ in wanted}


@for_each("seed", range(20))
def test_every_send_has_one_receive_and_stands_after_what_it_carries(seed):
    plan = random_plan(seed)
    lowered = lower(GPipe().program(plan), plan)
    ends = {}
    for rank, row in enumerate(lowered.head):
        for at, i in enumerate(row):
            if i.kind in SENDS | RECEIVES:
                forward = i.kind in (Kind.SF, Kind.RF)
                stage = i.stage if i.kind in SENDS else i.stage + (-1 if forward else 1)
                ends.setdefault((forward, stage, i.span), []).append((i.kind in SENDS, rank))
            if i.kind in SENDS:
                made = {
                    n for k, s, n in samples(row[:at]) if (k, s) == (Kind.F if i.kind is Kind.SF else Kind.B, i.stage)
                }
                assert made >= set(range(i.span.start, i.span.stop))
            if i.kind in RECEIVES:
                use = Kind.F if i.kind is Kind.RF else Kind.B
                nxt = next(j for j in row[at:] if j.kind in COMPUTE)
                assert (nxt.kind, nxt.stage) == (use, i.stage)
                assert nxt.span.overlaps(i.span)
    for both in ends.values():
        assert sorted(sent for sent, _ in both) == [False, True]


def test_lowering_twice_changes_nothing():
    plan = tiny_plan(3, 2)
    once = lower(GPipe().program(plan), plan)
    assert lower(once, plan) == once
    assert Program(tuple(tuple(i for i in row if i.kind in COMPUTE) for row in once.head)) == GPipe().program(plan)


def test_neighbours_on_one_rank_send_nothing():
    plan = Plan.even(3, 2, ranks=(0, 0, 0))
    assert lower(GPipe().program(plan), plan) == GPipe().program(plan)


def test_rows_must_match_ranks():
    with pytest.raises(ProgramError, match="2 rows, the plan 3 ranks"):
        lower(GPipe().program(tiny_plan(2, 1)), tiny_plan(3, 1))


@for_each("seed", range(10))
def test_tracker_against_needs(seed):
    """Whatever order instructions are added in, one is ready exactly when all its needs have ended."""
    import random

    plan = random_plan(seed)
    rng = random.Random(seed)
    todo = everything(plan)
    rng.shuffle(todo)
    tracker, ready, done = DependencyTracker(plan), [], set()
    late = todo[len(todo) // 2 :]
    ready += tracker.add(todo[: len(todo) // 2])
    while ready or late:
        if late:
            ready += tracker.add([late.pop()])
        if not ready:
            continue
        i = ready.pop(rng.randrange(len(ready)))
        assert set(needs(i, plan)) <= done
        assert not tracker.unmet_needs(i)
        done.add(i)
        ready += tracker.complete(i)
    assert len(done) == len(todo)
    assert not tracker.waiting_instructions
