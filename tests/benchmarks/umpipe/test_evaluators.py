"""Check that the paper's array evaluators, in numpy and in torch, give the same integers as the loops."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.papers.umpipe.evaluators import by_sample, one_level, two_level
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search.chain import chains_of_network
from tests.strategies.umpipe.search.examples import random_network


@pytest.mark.parametrize("xp", [np, torch])
@pytest.mark.parametrize("evaluator", [one_level, two_level])
def test_against_the_loop_over_samples(evaluator, xp: ModuleType) -> None:
    rng = np.random.default_rng(4)
    for stages, rows in ((1, 1), (1, 6), (2, 5), (3, 12), (4, 23)):
        chain, _ = chains_of_network(random_network(rng, stages, rows, 6))
        people = rng.integers(0, chain.options, (15, chain.processes))
        assert evaluator(chain, people, xp).tolist() == [by_sample(chain, genes) for genes in people]


@pytest.mark.parametrize("xp", [np, torch])
def test_times_of_more_than_32_bits(xp: ModuleType) -> None:
    times = np.array([[2**40, 2**30]])
    chain, _ = chains_of_network(Network(6, (6, 1), times, times))
    people = np.array([[0], [1]])
    assert two_level(chain, people, xp).tolist() == [2**40, 6 * 2**30] == one_level(chain, people, xp).tolist()
