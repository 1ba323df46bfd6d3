"""Check the rules that order an array without a search."""

from lightning_pipes.strategies.jap.solvers.rules import longest_in_the_middle, order_by_rule
from tests.strategies.jap.random_arrays import random_array


def test_rules():
    problem = random_array(4, 2)  # batch sizes ascend with the job
    assert longest_in_the_middle(problem).tolist() == [0, 3, 1, 2]
    assert order_by_rule(problem, "longest first").order[0, 0] == 3
    assert order_by_rule(problem, "backward first").order[0, 0] == 0
