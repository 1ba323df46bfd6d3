"""The exact search for unequal micro-batches, all forwards before all backwards, next to the paper's table 6.

Seconds are CPU time of one core, without what numba takes to compile. The paper publishes no networks and does not name
its option set, so its numbers stand beside those of networks that are drawn in the same way (times from 1 to 100, all
counts of micro-batches from 1 to P): distributions are compared, not instances. No real device has such times; the last
column has the same times sorted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from benchmarks.harness.report import Report
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search import (
    EvolutionResult,
    SchemeEvolution,
    best_equal_scheme,
    evolve_schemes,
    search_optimum,
)
from lightning_pipes.strategies.umpipe.search.chain import evaluate_genes
from tests.strategies.umpipe.synthetic_networks import Tables, simulated

T = TypeVar("T")


def timed(what: Callable[[], T], times: int = 1) -> tuple[T, float]:
    """The result, and CPU seconds, the least of several."""
    least = float("inf")
    for _ in range(times):
        begin = time.process_time()
        found = what()
        least = min(least, time.process_time() - begin)
    return found, least


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{np.mean(values):.0f} ± {np.std(values):.0f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equally wide columns."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    form = [
        " ".join([row[0].ljust(widths[0])] + [f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True)])
        for row in [columns, *rows]
    ]
    return [title, *form]


def genetic(network: Network | Tables, method: str, seed: int, start: Any, generations: int = 100) -> EvolutionResult:
    """The paper's algorithm on compiled loops; array evaluators come to the same populations."""
    return evolve_schemes(network, method, seed, SchemeEvolution(start=start, generations=generations), evaluate_genes)


T6 = {
    (2, 512): (97, 271), (2, 1024): (103, 595), (5, 512): (207, 1141), (5, 1024): (254, 1058), (10, 512): (616, 2007),
    (10, 1024): (478, 2220), (20, 512): (786, 3855), (20, 1024): (1000, 4055), (50, 512): (2297, 9963),
    (50, 1024): (2102, 9853), (100, 1024): (0, 0),
}  # fmt: skip
"""The paper's UMPIPE and GPipe by (N, P); it has no last one, 0."""


def t6(quick: bool) -> Report:
    """The paper's table 6, its columns of flushed schedules: proven optima instead of 4000 generations."""
    rows = []
    keys: dict[str, float] = {}
    proofs: list[bool] = []
    for (stages, batch), (paper, paper_gpipe) in T6.items():
        seeds = range(3 if quick and (stages, batch) not in ((20, 512), (50, 512)) else 20)
        if quick and stages == 100:
            seeds = range(2)
        tables = [simulated(stages, batch, seed) for seed in seeds]
        networks = [each.network for each in tables]
        found = [timed(partial(search_optimum, network), 3 if stages <= 20 else 1) for network in networks]
        best, seconds = [each.value for each, _ in found], [took for _, took in found]
        proofs += [each.is_proven for each, _ in found]
        equal = [best_equal_scheme(each).value for each in tables]
        by_size = [best_equal_scheme(network).value for network in networks]
        generations = 4000 if not quick and stages <= 20 else 100
        few = tables[: 1 if stages == 100 else 2 if quick else 3]
        ga = [genetic(each, "TiDGAP", seed, "equal", generations).best.value for seed, each in enumerate(few)]
        gap = np.mean([value / least - 1 for value, least in zip(ga, best, strict=False)])
        sorted_ = [simulated(stages, batch, seed, monotone=True).network for seed in seeds[: len(few)]]
        gain = np.mean([best_equal_scheme(network).value / search_optimum(network).value - 1 for network in sorted_])
        rows.append(
            [
                f"{stages}, {batch}",
                str(paper or "-"),
                spread(best),
                f"{sum(each.is_proven for each, _ in found)} of {len(found)}",
                f"{np.mean(seconds):.4f}",
                f"{max(seconds):.4f}",
                f"{gap:.0%} ({generations})",
                str(paper_gpipe or "-"),
                spread(equal),
                f"{paper_gpipe / paper - 1:.0%}" if paper_gpipe else "-",
                f"{np.mean([e / b - 1 for e, b in zip(equal, best, strict=True)]):.0%}",
                f"{np.mean([e / b - 1 for e, b in zip(by_size, best, strict=True)]):.0%}",
                f"{gain:.1%}",
            ]
        )
        if (stages, batch) in ((20, 512), (50, 512)):
            keys[f"mean_n{stages}_p{batch}"] = float(np.mean(best))
        if (stages, batch) == (20, 512):
            keys["seconds_n20"] = round(float(np.mean(seconds)), 5)
    columns = [
        "N, P",
        "paper UMPIPE",
        "optimum",
        "proven",
        "seconds",
        "worst",
        "TiDGAP above it",
        "paper GPipe",
        "GPipe",
        "paper's gain",
        "gain",
        "over equal sizes",
        "and sorted times",
    ]
    keys["proven"] = float(np.mean(proofs))
    title = "T6: simulation networks, exact search; TiDGAP (and its generations) from GPipe's schemes, all counts"
    return Report(table(title, columns, rows), keys)
