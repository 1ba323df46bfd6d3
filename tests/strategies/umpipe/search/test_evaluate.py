"""Compare the evaluators with each other, with the simulator, and with the paper's figures."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Instruction, Kind, Plan, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.search.chain import chains_of_network, evaluate_genes
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS
from tests.strategies.umpipe.overlapped.runs import sizes_of_scheme
from tests.strategies.umpipe.search.examples import (
    by_sample,
    every_chain,
    figure_1,
    figure_2,
    random_network,
    random_schemes,
)
from tests.strategies.umpipe.search.greedy import best_equal_scheme, equal_scheme, evaluate_schemes


class Flat(CostModel):
    """Costs that charge a chunk the time in the network, even if the executor had to compute a part of it again."""

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        return round(self.seconds_at(i.kind, i.stage, i.span.rows) * 1e9)


def simulated(network: Network, scheme: Scheme) -> int:
    """Return the makespan that the simulator finds for a GPipe order on spans of the scheme's sizes."""
    rows, last = network.rows, network.stages - 1
    forward, backward = (
        [tuple(Span(a, min(a + size, rows)) for a in range(0, rows, size)) for size in sizes]
        for sizes in sizes_of_scheme(network, scheme)
    )
    backward.reverse()  # in the order of stages
    cut = Cut(
        rows,
        forward=tuple(forward[::2]),
        backward=tuple(backward[::2]),
        forward_links=(*forward[1::2], forward[-1]),
        backward_links=(backward[0], *backward[1::2]),
    )
    seconds = {}
    for kinds, times, genes, stage_of in (
        ((Kind.F, Kind.SF), network.forward, scheme.forward, lambda s: s),
        ((Kind.B, Kind.SB), network.backward, scheme.backward, lambda s: last - s),
    ):
        for k, q in enumerate(genes):
            seconds[kinds[k % 2], stage_of(k // 2)] = ((1, int(times[k, q]) * 1e-9),)
    plan = Plan(tuple(range(network.stages)), (cut,))
    return simulate(GPipe().program(plan), plan, Flat(seconds)).makespan


def test_paper_figure_1() -> None:
    network = figure_1()
    schemes = [Scheme(genes, (0, 0, 0)) for genes in ((1, 1, 1), (2, 2, 2), (1, 2, 2))]
    assert evaluate_schemes(network, schemes).tolist() == [8, 10, 7]
    assert min(evaluate_schemes(network, [Scheme(genes, (0, 0, 0)) for genes in every_chain(network)])) == 7


def test_paper_figure_2() -> None:
    network = figure_2()
    assert evaluate_schemes(network, [Scheme((0, 0, 0), (1, 1, 1))]).tolist() == [14]
    assert best_equal_scheme(network).value == 16


def test_a_smaller_time_per_microbatch_is_not_better() -> None:
    """Check a counterexample to theorem 1 of the paper.

    One process runs 1, 2 or 4 micro-batches, which take 10, 9 and 8 each.
    """
    network = Network(4, (4, 2, 1), np.array([[10, 9, 8]]), np.zeros((1, 3), np.int64))
    assert evaluate_schemes(network, [Scheme((q,), (0,)) for q in range(3)]).tolist() == [10, 18, 32]


def test_gpipes_best_is_not_the_best_where_its_finer_ones_take_less() -> None:
    """Check a counterexample to theorem 2 (1) of the paper, with five processes."""
    forward = np.array([[9, 5, 3, 3], [12, 7, 1, 1], [11, 7, 1, 1], [11, 5, 3, 3], [7, 5, 4, 4]])
    network = Network(8, (8, 4, 2, 1), forward, np.zeros_like(forward))
    assert evaluate_schemes(network, [equal_scheme(network, q) for q in range(4)]).tolist() == [50, 36, 24, 40]
    assert evaluate_schemes(network, [Scheme((2, 2, 2, 2, 1), (0,) * 5)]).tolist() == [22]


@pytest.mark.parametrize(("processes", "chunks", "time"), [(1, 1, 3), (5, 4, 2), (7, 8, 1)])
def test_equal_processes(processes: int, chunks: int, time: int) -> None:
    """Check that equal processes take (m + K - 1)(f + b)."""
    table = np.full((processes, 1), time)
    network = Network(8, (8 // chunks,), table, 2 * table)
    assert evaluate_schemes(network, [equal_scheme(network, 0)]).tolist() == [(chunks + processes - 1) * 3 * time]


def test_chunks_and_samples_come_to_the_same() -> None:
    rng = np.random.default_rng(1)
    for stages, rows in ((1, 1), (1, 7), (2, 6), (3, 13), (5, 32)):
        network = random_network(rng, stages, rows, 5)
        schemes = random_schemes(rng, network, 20)
        for way, chain in enumerate(chains_of_network(network)):
            people = np.array([scheme[way] for scheme in schemes])
            assert evaluate_genes(chain, people).tolist() == [by_sample(chain, genes) for genes in people]


def test_compiled_and_plain_loops_come_to_the_same() -> None:
    compiled = CHUNK_KERNELS.numba
    assert compiled is not None
    rng = np.random.default_rng(2)
    network = random_network(rng, 6, 50, 9)
    chain, _ = chains_of_network(network)
    people = rng.integers(0, 9, (30, 11))
    found = []
    for loops in (CHUNK_KERNELS.python, compiled):
        ends = np.zeros(30, np.int64)
        loops.run.ends_of_chains(
            50, chain.sizes, chain.times, people, np.zeros(50, np.int64), np.zeros(50, np.int64), ends
        )
        found.append(ends.tolist())
    assert found[0] == found[1]


def test_simulator_agrees() -> None:
    rng = np.random.default_rng(3)
    for stages, rows in ((1, 5), (2, 4), (3, 12), (4, 17)):
        network = random_network(rng, stages, rows, 4)
        schemes = random_schemes(rng, network, 8)
        assert evaluate_schemes(network, schemes).tolist() == [simulated(network, scheme) for scheme in schemes]
