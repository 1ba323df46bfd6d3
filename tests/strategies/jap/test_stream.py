"""Compare the order without rounds with the simulator and with orders by hand."""

import random

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, Kind, PlanError, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap import Job, stream_jobs
from tests.cases import for_each
from tests.strategies.jap.random_arrays import batch_sizes, random_costs

SAMPLES = 384


def even(rows, stages, batches, microbatches=1):
    return Job(Cut.even(rows, microbatches, stages), batches)


def odd_costs(stages, seed):
    """Return costs in whole nanoseconds that use every feature of `CostModel`.

    They have slow links, latency, optimizer steps and a fixed overhead.
    """
    rng = random.Random(seed)
    seconds = {}
    for s in range(stages):
        for kind in (Kind.F, Kind.B, Kind.SF, Kind.SB):
            once, each = rng.randrange(1, 9), rng.randrange(1, 9)
            seconds[kind, s] = ((1, (once + each) * 1e-9), (1001, (once + 1001 * each) * 1e-9))
        seconds[Kind.STEP, s] = ((0, rng.randrange(5) * 1e-9),)
    return CostModel(seconds, link=Link(latency=rng.randrange(6) * 1e-9), overhead=rng.randrange(3) * 1e-9)


@for_each("seed", range(12))
def test_the_simulator_gives_the_same_times(seed):
    """Check that the simulator needs the same time to replay the order.

    The stream decides for each stage independently of the other stages.
    """
    rng = random.Random(seed)
    stages, resident = rng.randint(1, 5), rng.randint(1, 4)
    costs = odd_costs(stages, seed)
    jobs = [even(rng.randint(1, 6), stages, rng.randint(1, 5), rng.randint(1, 3)) for _ in range(rng.randint(1, 7))]
    array = stream_jobs(jobs, costs, resident)
    verify(array.program, array.plan)
    assert simulate(array.program, array.plan, costs).makespan == array.time


def test_small_order():
    """Check the order of two jobs with f = 1 and b = 2, first come, first served.

    An update directly follows its backward.
    """
    array = stream_jobs([even(1, 2, 2)] * 2, CostModel.uniform(2, 1e-9, 2e-9))
    assert array.program.to_lines() == [
        "F0.0 j1:F0.0 B0.0 STEP0 F0.0@1 j1:B0.0 j1:STEP0 j1:F0.0@1 B0.0@1 STEP0@1 j1:B0.0@1 j1:STEP0@1",
        "F1.0 j1:F1.0 B1.0 STEP1 j1:B1.0 j1:STEP1 F1.0@1 B1.0@1 STEP1@1 j1:F1.0@1 j1:B1.0@1 j1:STEP1@1",
    ]
    assert array.time == 16


def test_backwards_first_within_a_job():
    """Check that one job runs in 1F1B order, and that the micro-batches of two jobs alternate."""
    costs = CostModel.uniform(2, 1e-9, 2e-9)
    (_, last) = stream_jobs([even(3, 2, 1, 3)], costs).program.to_lines()
    assert last == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 STEP1"
    (first, _) = stream_jobs([even(2, 2, 1, 2)] * 2, costs).program.to_lines()
    assert first.startswith("F0.0 j1:F0.0 F0.1 j1:F0.1 ")


def test_the_next_job_takes_a_free_place_at_once():
    costs = CostModel.uniform(2, 1e-9, 2e-9, rows=1)
    row = stream_jobs([even(1, 2, batches) for batches in (2, 1, 3, 5)], costs, 2).program.head[0]
    first = {job: min(n for n, i in enumerate(row) if i.job == job) for job in range(4)}
    assert sorted(first, key=first.get) == [0, 1, 2, 3]
    ends = max(n for n, i in enumerate(row) if i.job == 1)
    assert next(i.job for i in row[ends + 1 :] if i.kind is Kind.F and i.job != 0) == 2


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: stream_jobs([], CostModel.uniform(1, 1, 1)), "resident jobs must be at least 1"),
        (lambda: stream_jobs([even(1, 1, 1)], CostModel.uniform(1, 1, 1), 0), "resident jobs must be at least 1"),
        (lambda: stream_jobs([even(1, 1, 1), even(1, 2, 1)], CostModel.uniform(1, 1, 1)), "cut for the same stages"),
        (lambda: even(1, 2, 0), "batches of a job must be at least 1"),
        (lambda: Job(Cut(2, (Cut.even(2, 1, 1).forward[0], Cut.even(2, 2, 1).forward[0])), 1), "same spans"),
    ],
)
def test_refused(mistake, says):
    with pytest.raises(PlanError, match=says):
        mistake()


def epoch(stages, resident, imbalance, microbatches=1):
    """Return the time of an epoch of the paper's 64 jobs relative to the busy time of the busiest stage.

    The jobs start with the longest one.
    """
    costs = random_costs(stages, imbalance=imbalance, seed=1)
    # Small batch sizes have the most batches, and every batch has a fixed cost.
    sizes = sorted(batch_sizes(64).tolist())
    jobs = [even(rows, stages, SAMPLES // rows, microbatches) for rows in sizes]
    whole = stream_jobs([even(rows, stages, SAMPLES // rows) for rows in sizes], costs)
    return stream_jobs(jobs, costs, resident).time / max(simulate(whole.program, whole.plan, costs).busy)


@pytest.mark.parametrize(("imbalance", "most"), [(0, 1.02), (0.4, 1.03)])
def test_as_many_jobs_as_stages_fill_the_pipeline(imbalance, most):
    assert 1 <= epoch(8, 8, imbalance) <= most


@pytest.mark.parametrize("imbalance", [0, 0.4])
def test_half_as_many_with_micro_batches(imbalance):
    """Check the time of an epoch with half the resident jobs and with micro-batches.

    The epoch takes about 1.45 times the work of the busiest stage. A factor of 1.20 of this is the higher cost of split
    batches.
    """
    assert epoch(8, 4, imbalance, 2) <= 1.50
    assert epoch(8, 4, imbalance) > 1.55
