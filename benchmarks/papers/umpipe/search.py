"""Unequal micro-batches, all forwards before all backwards: the paper's searches beside the exact one.

    python benchmarks/papers/umpipe/search.py [--quick] [--json] [--pictures FOLDER]
        [--experiment t2|t3|f5|f6|t6|realistic ...]

Seconds are CPU time of one core, without what numba takes to compile. The paper publishes no networks and does not name
its option set, so its numbers stand beside those of networks that are drawn in the same way (times from 1 to 100, all
counts of micro-batches from 1 to P): distributions are compared, not instances. "each size once": options are sizes of
chunks, with the cheapest of the counts that come to the same size; "all counts" leaves them to the search, as the paper
does. No real device has such times; `realistic` has networks that one might have, and t6 sorted times, too.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from benchmarks.harness.report import Panel, Picture, Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.evaluators import best_by_trying, in_loops, one_level, two_level
from benchmarks.papers.umpipe.networks import Tables, powers_of_two, realistic, simulated
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search import (
    EvolutionResult,
    SchemeEvolution,
    SchemeSolution,
    best_equal_scheme,
    evolve_schemes,
    global_greedy,
    load_loops,
    local_greedy,
    search_optimum,
)
from lightning_pipes.strategies.umpipe.search.chain import chains_of_network, evaluate_genes
from lightning_pipes.strategies.umpipe.search.genetic import METHODS, Evaluator

# ---- The experiments of UMPIPE's paper that evaluate formulas, and one with realistic networks.

T = TypeVar("T")
STARTS: tuple[Literal["random"], Literal["equal"]] = ("random", "equal")


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


def mean_history(runs: Sequence[EvolutionResult]) -> list[float]:
    """The best value by generation, mean over runs."""
    return [float(x) for x in np.mean([run.history for run in runs], axis=0)]


def _two_or_one(quick: bool, start: str, title: str, paper: Mapping[tuple[int, int], tuple[str, ...]]) -> Report:
    """TiDGAP and TiGAP from one kind of start."""
    rows, panels = [], []
    for (stages, batch), printed in paper.items():
        if quick and stages == 100:
            continue
        seeds = range((1 if stages == 100 else 3) if quick else (3 if stages == 100 else 20))
        tables = [simulated(stages, batch, seed) for seed in seeds]
        best = [search_optimum(each.network).value for each in tables]
        two = [genetic(each, "TiDGAP", seed, start) for seed, each in enumerate(tables)]
        one = [genetic(each, "TiGAP", seed, start) for seed, each in enumerate(tables)]
        merged = [genetic(each.network, "TiDGAP", seed, start) for seed, each in enumerate(tables)]
        equal = [best_equal_scheme(each).value for each in tables]
        rows.append(
            [
                f"{stages}, {batch}",
                *printed,
                spread([run.best.value for run in two]),
                spread([run.recombined.value for run in two]),
                spread([run.best.value for run in one]),
                spread([run.best.value for run in merged]),
                spread(equal),
                spread(best),
                f"{np.mean([run.best.value / value - 1 for run, value in zip(two, best, strict=True)]):.0%}",
                str(len(seeds)),
            ]
        )
        lines = {
            "TiDGAP, all counts": mean_history(two),
            "TiGAP, all counts": mean_history(one),
            "TiDGAP, each size once": mean_history(merged),
            "optimum": [float(np.mean(best))],
        }
        if start == "equal":
            lines["GPipe"] = [float(np.mean(equal))]
        panels.append(Panel(f"{stages} stages, batch {batch}", "generation", "time", list(range(101)), lines, True))
    columns = [
        "N, P",
        "paper TiDGAP",
        "paper TiGAP",
        *(["paper GPipe"] if start == "equal" else []),
        "TiDGAP",
        "recombined",
        "TiGAP",
        "TiDGAP, sizes",
        "GPipe",
        "optimum",
        "TiDGAP above it",
        "seeds",
    ]
    return Report(table(title, columns, rows), picture=Picture(title, panels))


def t2(quick: bool) -> Report:
    """The paper's table 2 and figure 3."""
    paper = {
        (10, 64): ("833", "1020"),
        (10, 512): ("671", "1865"),
        (20, 512): ("3601", "6909"),
        (100, 1024): ("75765", "95419"),
    }
    return _two_or_one(quick, "random", "T2: 100 individuals, 100 generations, random at first", paper)


def t3(quick: bool) -> Report:
    """The paper's table 3 and figure 4.

    The paper's table has one label on two columns; the first compares TiDGAP with TiGAP.
    """
    paper = {(10, 64): ("926", "1129", "2158"), (10, 512): ("498", "1142", "1863")}
    return _two_or_one(quick, "equal", "T3: 100 individuals, 100 generations, GPipe's schemes at first", paper)


def expected_generations(options: int, stages: int, method: str, population: int = 100) -> float:
    """Return the generations that the paper expects until the optimum is there (S IV-B): 2 Q^(2N-1) / N_p with two
    chromosomes, Q^(4N-2) / N_p with one. It counts draws at random, and a single optimum.

    Args:
        options: Q, from which each gene is drawn.
        method: "TiDGAP" or "TiGAP", or another of `METHODS`.
    """
    genes = 2 * stages - 1
    return float(2 * options**genes if METHODS[method] == 2 else options ** (2 * genes)) / population


def first_hit(run: EvolutionResult, optimum: int) -> float:
    """Return the generation after which the optimum was there; 0 is the first one, infinity if it never was."""
    return next((float(at) for at, value in enumerate(run.history) if value == optimum), np.inf)


AFTER = (0, 1, 3, 10, 30, 100)
"""Generations after which the share of networks is printed whose optimum is there."""


def f5(quick: bool) -> Report:
    """The paper's figure 5: how often the optimum is found, which enumeration knows, by generations too."""
    count = 20 if quick else 100
    methods: dict[str, Callable[[Network], int]] = {
        "exact": lambda network: search_optimum(network).value,
        "global greedy": lambda network: global_greedy(network).value,
        "local greedy": lambda network: local_greedy(network).value,
        "GPipe": lambda network: best_equal_scheme(network).value,
    }
    evolving = ("TiDGAP", "TiGAP")
    names = ["exact", *evolving, "global greedy", "local greedy", "GPipe"]
    rows, by_generation, panels = [], [], []
    bars: dict[str, list[float]] = {name: [] for name in names}
    sizes = ((2, 512), (3, 64), (5, 8), (12, 2))
    for stages, batch in sizes:
        networks = [simulated(stages, batch, seed).network for seed in range(count)]
        best = [best_by_trying(network) for network in networks]
        found = {name: np.array([run(network) for network in networks]) == best for name, run in methods.items()}
        curves = {}
        for name in evolving:
            runs = [genetic(network, name, seed, "random") for seed, network in enumerate(networks)]
            when = np.array([first_hit(run, value) for run, value in zip(runs, best, strict=True)])
            found[name] = np.isfinite(when)
            curves[name] = [float(100 * np.mean(when <= n)) for n in range(101)]
            expected = expected_generations(len(networks[0].sizes), stages, name)
            by_generation.append(
                [
                    f"{stages}, {batch}",
                    str(len(networks[0].sizes)),
                    name,
                    f"{expected:.3g}",
                    *(f"{curves[name][n]:.0f} %" for n in AFTER),
                    f"{np.median(when):.0f}",
                    f"{100 * (1 - np.exp(-100 / expected)):.2g} %",
                ]
            )
        for name in names:
            bars[name].append(float(100 * np.mean(found[name])))
        panels.append(Panel(f"{stages} stages, batch {batch}", "generation", "% of networks", [*range(101)], curves))
        rows.append([f"{stages}, {batch}", *(f"{int(found[name].sum())} of {count}" for name in names)])
    lines = table(
        f"F5: how often each method finds the optimum that enumeration finds, {count} networks", ["N, P", *names], rows
    )
    columns = ["N, P", "Q", "method", "expected", *(f"after {n}" for n in AFTER), "median", "at random"]
    title = "F5 by generations of 100, and those that the paper expects (S IV-B); at random: its chance within 100"
    lines += ["", *table(title, columns, by_generation)]
    labels = [f"{stages}, {batch}" for stages, batch in sizes]
    panels = [Panel("after 100 generations", "stages, batch", "% of networks", labels, bars), *panels]
    keys = {"enumerated": min(bars["exact"]) / 100}
    return Report(lines, keys, Picture("F5: how often the optimum is found", panels))


def _generations_of(network: Network | Tables, evaluator: Evaluator, population: int, times: int = 3) -> float:
    """Seconds of evaluating 100 random generations and the first one, from one."""
    rng = np.random.default_rng(0)
    parts = [(c, rng.integers(0, c.options, (population, c.processes))) for c in chains_of_network(network)]
    _, seconds = timed(lambda: [evaluator(chain, people) for chain, people in parts], times)
    return 101 * seconds


def f6(quick: bool) -> Report:
    """The paper's figures 6 and 7: how long evaluators take, and a whole run."""
    torch.set_num_threads(1)
    lines, panels = [], []
    batches = (16, 512) if quick else (16, 64, 128, 256, 384, 512)
    evaluators: dict[str, Evaluator] = {
        "loops over samples (DGAP)": in_loops,
        "one level (OiDGAP)": one_level,
        "two levels (TiDGAP)": two_level,
        "two levels, torch": partial(two_level, xp=torch),
        "compiled over chunks": evaluate_genes,
    }
    keys: dict[str, float] = {}
    populations = (10, 100) if quick else (10, 25, 50, 75, 100)
    cases = [(stages, [(batch, 100) for batch in batches]) for stages in (10, 20)]
    cases += [(stages, [(512, population) for population in populations]) for stages in (10, 20)]
    for part, (stages, points) in zip("abcd", cases, strict=True):
        by_batch = part in "ab"
        x = [batch if by_batch else population for batch, population in points]
        curves: dict[str, list[float]] = {name: [] for name in evaluators}
        for batch, population in points:
            small = simulated(stages, batch).network
            for name, evaluator in evaluators.items():
                times = 1 if evaluator is one_level else 2 if evaluator is in_loops else 12
                curves[name].append(_generations_of(small, evaluator, population, times))
        loops = curves["loops over samples (DGAP)"]
        rows = [
            [name, *(f"{x:.3g} s" for x in curve), f"{loops[-1] / curve[-1]:.0f}x"] for name, curve in curves.items()
        ]
        what = f"100 individuals, N = {stages}, by P" if by_batch else f"N = {stages}, P = 512, by individuals"
        title = f"F6 ({part}): evaluating 101 random generations, {what}"
        lines += [*table(title, ["evaluator", *map(str, x), f"at {x[-1]}"], rows), ""]
        fixed = "100 individuals" if by_batch else "batch 512"
        label = "batch" if by_batch else "individuals"
        panels.append(Panel(f"{stages} stages, {fixed}", label, "seconds", x, curves, True))
        if part == "b":
            keys["two_level_ratio"] = round(loops[-1] / curves["two levels (TiDGAP)"][-1], 1)
    lines.append(
        "The paper, on an RTX 3060 Ti: TiDGAP 0.8-0.9 s (N = 10), 1.5-1.8 s (N = 20), which is 163 and 226 times"
    )
    lines += ["faster than OiDGAP, and 1590 and 2473 times faster than DGAP.", ""]
    sizes = (10, 100, 1000) if quick else (10, 30, 100, 300, 1000, 20000)
    rows = []
    curve = []
    for population in sizes:
        cells = []
        for start in STARTS:
            generations = 100 if population <= 1000 else 10
            settings = SchemeEvolution(population=population, start=start, generations=generations)
            tables = simulated(10, 512)
            networks: list[Network | Tables] = [tables, tables.network]
            for network in networks:
                once = partial(evolve_schemes, network, "TiDGAP", 0, settings, evaluate_genes)
                _, seconds = timed(once, 5 if population <= 100 else 1)
                cells.append(seconds * 101 / (generations + 1))
        rows.append([str(population), *(f"{x:.3f} s" for x in cells)])
        curve.append(cells)
        if population == 100:
            keys["tidgap_seconds"] = round(max(cells), 4)
    starts = ["random", "random, sizes", "equal", "equal, sizes"]
    title = "F7: TiDGAP whole, 100 generations, compiled evaluator, N = 10, P = 512, by individuals and start"
    lines += table(title, ["individuals", *starts], rows)
    lines.append(
        "The paper: 1000 individuals 1.68 s, 20000 individuals 19.24 s; 20000 here are ten times 10 generations"
    )
    columns = {name: [cells[i] for cells in curve] for i, name in enumerate(starts)}
    panels.append(
        Panel("TiDGAP, 10 stages, batch 512", "individuals", "seconds", [str(n) for n in sizes], columns, True)
    )
    return Report(lines, keys, Picture("F6, F7: CPU seconds of one core", panels))


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
    by_batch: dict[int, dict[str, list[float]]] = {512: {}, 1024: {}}
    stages_of: dict[int, list[int]] = {512: [], 1024: []}
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
        stages_of[batch].append(stages)
        for name, value in {
            "paper's GPipe": paper_gpipe or np.nan,
            "GPipe, equal counts": np.mean(equal),
            "GPipe, equal sizes": np.mean(by_size),
            "paper's UMPIPE": paper or np.nan,
            f"TiDGAP, {'100' if quick else '4000 (above 20 stages 100)'} generations": np.mean(best) * (1 + gap),
            "optimum": np.mean(best),
        }.items():
            by_batch[batch].setdefault(name, []).append(float(value))
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
    panels = [
        Panel(f"batch {batch}", "stages", "time", stages_of[batch], curves, True) for batch, curves in by_batch.items()
    ]
    title = "T6: simulation networks, exact search; TiDGAP (and its generations) from GPipe's schemes, all counts"
    return Report(table(title, columns, rows), keys, Picture("T6: simulation networks", panels))


def realistic_networks(quick: bool) -> Report:
    """Realistic time functions, and the methods of the paper's table 5."""
    cases = [(8, 64, True), (14, 512, True), (16, 64, True), (32, 512, True), (16, 64, False), (14, 512, False)]
    cases += [] if quick else [(32, 512, False)]
    methods: dict[str, Callable[[Network, int], SchemeSolution]] = {
        "GPipe": lambda network, seed: best_equal_scheme(network),
        "local greedy": lambda network, seed: local_greedy(network),
        "global greedy": lambda network, seed: global_greedy(network),
        "TiDGAP": lambda network, seed: genetic(network, "TiDGAP", seed, "equal").best,
    }
    rows = []
    bars: dict[str, list[float]] = {name: [] for name in methods if name != "local greedy"}
    keys: dict[str, float] = {}
    for stages, batch, powers in cases:
        counts = powers_of_two(batch) if powers else None
        networks = [realistic(stages, batch, seed, counts).network for seed in range(3 if quick else 10)]
        limit = None if powers else 4.0 if quick else 20.0
        exact = [timed(partial(search_optimum, network, limit), 3 if powers else 1) for network in networks]
        values = np.array([each.value for each, _ in exact])
        ratios = {
            name: float(np.mean([run(network, seed).value for seed, network in enumerate(networks)] / values))
            for name, run in methods.items()
        }
        worst = max(each.gap for each, _ in exact)
        close = [timed(partial(search_optimum, network, limit, 0.05)) for network in networks]
        rows.append(
            [
                f"{stages}, {batch}, {'powers of two' if powers else 'all counts'}",
                *(f"{x:.3f}" for x in ratios.values()),
                spread(values.tolist()),
                f"{sum(each.is_proven for each, _ in exact)} of {len(exact)}",
                f"{worst:.1%}",
                f"{max(took for _, took in exact):.4f}",
                f"{max(each.gap for each, _ in close):.1%}",
                f"{max(took for _, took in close):.4f}",
            ]
        )
        for name in bars:
            bars[name].append(100 * (ratios[name] - 1))
        part = "powers" if powers else "all"
        keys[f"realistic_{part}_worst_gap"] = max(keys.get(f"realistic_{part}_worst_gap", 0.0), round(worst, 4))
        took = max(took for _, took in (exact if powers else close))
        keys[f"realistic_{part}_seconds"] = max(keys.get(f"realistic_{part}_seconds", 0.0), round(took, 4))
    columns = ["N, P, options", *methods, "exact", "proven", "gap <=", "seconds", "gap of 5 %", "seconds"]
    title = "realistic networks: time over that of the exact search"
    lines = table(title, columns, rows)
    lines.append(
        "The paper, measured: local greedy / TiDGAP 1.27 (GPT-1) and 1.33 (VGG16), global greedy 1.03 and 1.25;"
    )
    lines.append("GPipe / UMPIPE 1.14 (GPT-1, N = 14, P = 512) and 1.17 (VGG16, N = 16, P = 64).")
    names = [f"{stages}, {batch}\n{'powers' if powers else 'all'}" for stages, batch, powers in cases]
    panel = Panel("local greedy is far outside", "stages, batch, options", "% above the exact search", names, bars)
    return Report(lines, keys, Picture("realistic networks", [panel]))


EXPERIMENTS: dict[str, Callable[[bool], Report]] = {
    "t2": t2,
    "t3": t3,
    "f5": f5,
    "f6": f6,
    "t6": t6,
    "realistic": realistic_networks,
}


def main() -> None:
    parser = make_parser(__doc__, "fewer seeds and sizes; within 100 s")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each experiment")
    options = parser.parse_args()
    by = load_loops()
    print(f"{describe_machine()}, Python {platform.python_version()}, {by}\n")
    keys = run_parts(EXPERIMENTS, options.experiment, options.quick, options.pictures)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
