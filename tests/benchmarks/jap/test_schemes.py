"""Orders of rounds that are those of a schedule for one job, by hand."""

from __future__ import annotations

from benchmarks.jap import methods
from benchmarks.papers.jap.jobs import random_array
from benchmarks.papers.jap.run import order_like
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Plan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB


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
