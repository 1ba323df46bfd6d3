"""Check the orders of rounds that correspond to a schedule for one job, and the times of epochs, by hand."""

from __future__ import annotations

from benchmarks.jap import methods
from benchmarks.papers.jap.epochs import Epoch
from benchmarks.papers.jap.run import order_like
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Kind, Plan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from tests.strategies.jap.random_arrays import random_array


def test_jobs_are_micro_batches_of_the_schedule():
    plan = Plan((0, 1), (Cut.even(4, 1, 2), Cut.even(8, 1, 2), Cut.even(2, 1, 2)))
    costs = CostModel.uniform(2, 1.0, 2.0)

    def blocks(schedule):
        return [[(str(i.kind), i.job, i.span.rows) for i in row] for row in order_like(schedule)(plan, costs).head]

    a, b, c = (0, 4), (1, 8), (2, 2)
    assert blocks(GPipe()) == [[("F", *a), ("F", *b), ("F", *c), ("B", *a), ("B", *b), ("B", *c)]] * 2
    assert blocks(OneFOneB()) == [
        [("F", *a), ("F", *b), ("B", *a), ("F", *c), ("B", *b), ("B", *c)],
        [("F", *a), ("B", *a), ("F", *b), ("B", *b), ("F", *c), ("B", *c)],
    ]


def test_every_way_to_order_an_array_gives_one():
    problem = random_array(3, 2, seed=0)
    for method, found in methods(problem, 0.01, genetic=True).items():
        problem.check(found.starts)
        assert found.makespan >= found.bound, method


def test_epochs_of_equal_stages_take_the_time_of_theory() -> None:
    """Check jobs without fixed costs, whose batches take (m + p - 1)(f + b) of a micro-batch, one after another.

    Batches of 24 samples have no equal micro-batches with a power of two as their number, except 8: they are fastest
    with 16, and take as long as with 27 samples.
    """
    f, stages, jobs, samples = 10**6, 4, 8, 12 * 8
    tables = {kind: ((0, 0.0), (64, 64e-9 * n * f)) for kind, n in ((Kind.F, 1), (Kind.B, 2))}
    costs = CostModel({(kind, s): table for kind, table in tables.items() for s in range(stages)})
    epoch = Epoch(lambda where: costs, stages, "language", jobs, iterations=12)
    assert epoch.work == jobs * samples * 3 * f
    steps = {8: 8 + 3, 16: 16 + 3, 24: 27 + 3, 32: 32 + 3}
    assert epoch.one_by_one(GPipe()) == sum(2 * samples // rows * step * 3 * f for rows, step in steps.items())
    assert epoch.in_rounds(1) == jobs * stages * samples * 3 * f  # whole batches pass the stages one by one
    assert epoch.work < epoch.streamed(jobs) < epoch.in_rounds(jobs) < epoch.in_rounds(1)
