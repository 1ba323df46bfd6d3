"""Check the orders of rounds that correspond to a schedule for one job, by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jap import methods
from benchmarks.papers.jap.jobs import random_array
from benchmarks.papers.jap.lending import lending
from benchmarks.papers.jap.run import order_like
from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Plan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.ranks import run_ranks
from tests.arrays.jobs import Net
from tests.trainer.lit import quiet
from tests.trainers import make_trainer


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


def lend(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[int, int, int]]:
    """Return the weights of a rank after three batches with 1F1B, with and without lending.

    The last element of the result has the numbers of held, kept and lent activations.
    """
    quiet()
    dist.init_process_group("gloo")

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x = Net(0.01), torch.randn(36, 6)
        strategy = PipelineStrategy("1f1b", microbatches=6, partition=[2, 4, 5])
        make_trainer(devices=4, strategy=strategy, max_epochs=1, limit_val_batches=0).fit(
            module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12)
        )
        return [p.detach().clone() for p in module.parameters()]

    with lending(4) as lender:
        lent = train()
    return lent, train(), (lender.held, lender.kept, lender.lent)


def test_activations_that_are_lent_come_back():
    """Check that lending activations does not change the weights and limits the held activations.

    With 1F1B on four stages, the first stage would hold four micro-batches. It lends some to the last stage, so that no
    stage holds more than three, including the activations that it keeps for others. The first rank has the last stage.
    """
    results = run_ranks(lend, 4, timeout=90)
    for lent, alone, _ in results:
        for a, b in zip(lent, alone, strict=True):
            assert torch.equal(a, b)
    last, third, second, first = [counts for *_, counts in results]
    assert first == (3, 0, 3 * 4), "of six micro-batches of three batches"
    assert second == (3, 0, 0)
    assert third == (2, 0, 0)
    assert last == (1, 2, 0)


def test_every_way_to_order_an_array_gives_one():
    problem = random_array(3, 2, seed=0)
    for method, found in methods(problem, 0.01, genetic=True).items():
        problem.check(found.starts)
        assert found.makespan >= found.bound, method
