"""Compare the number of jobs that fit with a count that adds them one by one, and check E2 by hand."""

import random

import pytest

from benchmarks.papers.jap.jobs import Footprint, array_size, switching
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Kind, Plan, PlanError
from tests.cases import for_each


def fits(jobs, stages, device, host, slots):
    if host is not None and jobs * sum(s.state for s in stages) > host:
        return False
    there = jobs if host is None else min(jobs, slots)
    return all(there * s.state + jobs * s.kept + s.working <= device for s in stages)


@for_each("seed", range(60))
def test_one_more_job_does_not_fit(seed):
    rng = random.Random(seed)
    stages = [Footprint(rng.randint(1, 20), rng.randint(1, 9), rng.randint(0, 9)) for _ in range(rng.randint(1, 4))]
    device, host, slots = rng.randint(5, 90), rng.choice([None, 200, 900]), rng.randint(2, 4)
    jobs = 0
    while fits(jobs + 1, stages, device, host, slots):
        jobs += 1
    assert array_size(stages, device, host, slots) == jobs


def test_a_slot_alone_switches_nothing():
    with pytest.raises(PlanError, match="one for the next"):
        array_size([Footprint(1, 1)], 9, 9, slots=1)


def test_states_move_while_the_shortest_block_runs():
    """Check the transfer of states during the shortest block.

    The two stages are on one host, and 3 GB are transferred at 1 GB/s. The shortest block takes just as long: a forward
    of 4 s, less 1 s for its message.
    """
    seconds = {(Kind.F, s): ((1, 4.0), (2, 8.0)) for s in range(2)} | {(Kind.B, s): ((1, 9.0),) for s in range(2)}
    costs = CostModel(seconds | {(Kind.SF, 0): ((1, 1.0),), (Kind.SB, 1): ((1, 1.0),)})
    plan = Plan((0, 1), (Cut.even(1, 1, 2), Cut.even(2, 1, 2)))
    states = [[10**9, 10**9], [2 * 10**9, 10**9]]
    (both,) = switching(plan, costs, states, [(0, 1)], 1e9)
    assert (both.transfer, both.block, both.is_hidden) == (3.0, 3.0, True)
    (both,) = switching(plan, costs, states, [(0, 1)], 0.5e9)
    assert (both.is_hidden, both.visible_seconds) == (False, 3.0)
    assert "a switch costs up to 3 s. Use batches 2 times as large" in str(both)
    one, two = switching(plan, costs, states, [(0,), (1,)], 0.5e9)
    assert (one.is_hidden, one.visible_seconds, two.is_hidden, two.block) == (False, 1.0, True, 4.0)
    with pytest.raises(PlanError, match="2 jobs on 2 stages"):
        switching(plan, costs, states[:1], [(0,)], 1.0)
