"""UMPIPE as a whole: its searches, its overlapped form, and the execution of both.

    python benchmarks/umpipe.py [--quick] [--json] [--part search|overlapped|executed|real ...]

The seconds of searches are processor time of one core, without the time in which numba compiles. The paper publishes no
networks and does not list its options, so its numbers are compared with networks that are drawn in the same way (times
from 1 to 100, all counts of micro-batches from 1 to P). No real device has such times, so the last column has the
results with the same times in sorted order. The executed steps are steps of emulated stages, and of real layers on two
processes, see papers/umpipe/executed.py. Left out: GPUs, because none was available.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.executed import compare_schedules, emulated, keys_of, lines_of
from benchmarks.papers.umpipe.overlapped import gain
from lightning_pipes.strategies.umpipe.search import SchemeEvolution, evolve_schemes, search_optimum
from lightning_pipes.strategies.umpipe.search.chain import evaluate_genes
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS
from tests.strategies.umpipe.search.greedy import best_equal_scheme
from tests.strategies.umpipe.synthetic_networks import simulated

T = TypeVar("T")


def timed(what: Callable[[], T], times: int = 1) -> tuple[T, float]:
    """Return the result of a function and its processor seconds, the least of several calls."""
    least = float("inf")
    for _ in range(times):
        begin = time.process_time()
        found = what()
        least = min(least, time.process_time() - begin)
    return found, least


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation, as text."""
    return f"{np.mean(values):.0f} ± {np.std(values):.0f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with aligned columns, as lines."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    form = [
        " ".join([row[0].ljust(widths[0])] + [f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True)])
        for row in [columns, *rows]
    ]
    return [title, *form]


T6 = {
    (2, 512): (97, 271), (2, 1024): (103, 595), (5, 512): (207, 1141), (5, 1024): (254, 1058), (10, 512): (616, 2007),
    (10, 1024): (478, 2220), (20, 512): (786, 3855), (20, 1024): (1000, 4055), (50, 512): (2297, 9963),
    (50, 1024): (2102, 9853), (100, 1024): (0, 0),
}  # fmt: skip
"""The step times of the paper's UMPIPE and GPipe by (N, P). The paper does not list the last one."""


def t6(quick: bool) -> Report:
    """Compare the flushed schedules of the paper's table 6 with proven optima instead of 4000 generations."""
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
        proofs += [each.gap == 0 for each, _ in found]
        equal = [best_equal_scheme(each).value for each in tables]
        by_size = [best_equal_scheme(network).value for network in networks]
        generations = 4000 if not quick and stages <= 20 else 100
        few = tables[: 1 if stages == 100 else 2 if quick else 3]
        settings = SchemeEvolution(start="equal", generations=generations)
        evolved = [evolve_schemes(each, "TiDGAP", seed, settings, evaluate_genes) for seed, each in enumerate(few)]
        ga = [each.best.value for each in evolved]
        gap = np.mean([value / least - 1 for value, least in zip(ga, best, strict=False)])
        sorted_ = [simulated(stages, batch, seed, monotone=True).network for seed in seeds[: len(few)]]
        gain = np.mean([best_equal_scheme(network).value / search_optimum(network).value - 1 for network in sorted_])
        rows.append(
            [
                f"{stages}, {batch}",
                str(paper or "-"),
                spread(best),
                f"{sum(each.gap == 0 for each, _ in found)} of {len(found)}",
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


def executed(quick: bool) -> Report:
    """Measure executed steps of emulated stages."""
    found = emulated(quick)
    return Report(lines_of(found), keys_of(found))


def real(quick: bool) -> Report:
    """Measure executed steps of real layers on two processes."""
    return Report(*compare_schedules(quick))


PARTS = {"search": t6, "overlapped": gain, "executed": executed, "real": real}


def main() -> None:
    """Run the given parts of the benchmark."""
    parser = make_parser(__doc__, "fewer seeds, sizes and steps; within 120 s")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    print(f"{describe_machine()}, Python {platform.python_version()}, {CHUNK_KERNELS.load()}\n")
    keys = run_parts(PARTS, options.part, options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
