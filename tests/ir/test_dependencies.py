"""Check the dependencies of instructions sample by sample."""

from itertools import product

from lightning_pipes.ir import DependencyTracker, Kind, batch_instructions, needs
from lightning_pipes.testing.generators import random_plan
from tests.cases import for_each
from tests.ir.programs import samples


def everything(plan):
    return [i for rank in range(plan.n_ranks) for i in batch_instructions(plan, rank, 0, 0)]


@for_each("seed", range(20))
def test_needs_sample_by_sample(seed):
    """Check that an instruction needs exactly the instructions that directly produced its samples."""
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


@for_each("seed", range(10))
def test_tracker_against_needs(seed):
    """Check that an instruction is ready exactly when all its needs are done, in any order of additions."""
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
    assert not tracker._waiting
