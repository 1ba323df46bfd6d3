"""The paper's two greedy methods (A5, A6) and GPipe's best scheme, and the times of schemes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipes.strategies.umpipe.network import Network, Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import CutTables, SchemeSolution, chains_of_network, evaluate_genes
from lightning_pipes.strategies.umpipe.search.greedy import MAX_GREEDY_ROUNDS, choose_locally, descend_globally


def evaluate_schemes(network: CutTables, schemes: Sequence[Scheme]) -> Times:
    """Return the time of a batch with each scheme, all forwards before all backwards (E4)."""
    people = np.array(schemes, np.int64).reshape(len(schemes), 2, -1)
    return sum(
        (evaluate_genes(chain, people[:, way]) for way, chain in enumerate(chains_of_network(network))),
        start=np.zeros(len(schemes), np.int64),
    )


def equal_scheme(network: Network, option: int) -> Scheme:
    """Return GPipe's scheme, in which all processes take the same option."""
    return Scheme((option,) * network.processes, (option,) * network.processes)


def best_equal_scheme(network: CutTables) -> SchemeSolution:
    """Return GPipe's best scheme, in which all processes have the same option.

    If several schemes are equally good, the coarsest one is returned.
    """
    forward, backward = chains_of_network(network)
    ends = evaluate_genes(forward, forward.equal_schemes) + evaluate_genes(backward, backward.equal_schemes)
    best = int(ends.argmin())
    genes = (best,) * forward.processes
    return SchemeSolution(Scheme(genes, genes), int(ends[best]), int(ends[best]))


def local_greedy(network: CutTables) -> SchemeSolution:
    """Return the scheme of the paper's LG (A5).

    Each process in order takes the option with which the batch leaves it first. The first process takes the option with
    which it ends first on its own. This is often the whole batch, for which all other processes wait. No bound is
    computed, so the solution's lower bound is 0.
    """
    return _of([choose_locally(chain) for chain in chains_of_network(network)])


def global_greedy(network: CutTables, start: Scheme | None = None, rounds: int = MAX_GREEDY_ROUNDS) -> SchemeSolution:
    """Return the scheme of the paper's GG (A6): rounds of coordinate descent.

    Each process in order takes the option that is best if all others stay as they are. No bound is computed, so the
    solution's lower bound is 0.

    Args:
        network: the times of all processes and options.
        start: the scheme from which to begin. By default, this is the best equal scheme.
        rounds: the maximum number of rounds.
    """
    schemes = start or best_equal_scheme(network).scheme
    return _of(
        [
            descend_globally(chain, np.array(genes), rounds)
            for chain, genes in zip(chains_of_network(network), schemes, strict=True)
        ]
    )


def _of(found: list[tuple[Times, int]]) -> SchemeSolution:
    (forward, there), (backward, back) = found
    return SchemeSolution(Scheme(tuple(forward.tolist()), tuple(backward.tolist())), there + back, 0)
