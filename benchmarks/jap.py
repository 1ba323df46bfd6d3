"""Job arrays: the quality of the orders of one iteration, the time of an epoch of 64 jobs, and executed siblings.

The orders and the epochs are simulated, with artificial jobs. The executed siblings are compared with the same jobs run
one after another.

Solvers have a time limit, and the times of processes are measured, so the benchmark needs an idle machine. The results
of simulations do not depend on the machine.

    python benchmarks/jap.py [--quick] [--json] [--simulated | --real | --schemes]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

from benchmarks.harness.report import describe_machine
from benchmarks.papers.jap import run as jap_run
from benchmarks.papers.jap.epochs import Epoch
from lightning_pipes.arrays.memory_swap import choose_microbatches
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import SEND_KINDS, Kind, Schedule
from lightning_pipes.sim import load_kernel
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.jap import ArrayProblem, ArraySolution, Effort, solve_array
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from tests.strategies.jap.random_arrays import random_array, random_costs

STAGES = 8
SETS = {
    "language": {},
    "language, unequal stages": {"imbalance": 0.4},
    "language, slow links": {"link": 0.3},
    "vision": {"kind": "vision"},
}
SINGLE: dict[str, Schedule] = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "interleaved v=2": Interleaved(stages_per_rank=2),
    "Hanayo 1 wave": Hanayo(waves=1),
}
"""Schedules for jobs one after another. They do not recompute, because the generator's backwards already include it."""


def solver_rows(
    sets: Sequence[str], sizes: Sequence[int], seeds: int, seconds: float, genetic: bool
) -> dict[tuple[str, int], dict[str, float]]:
    """Return the makespan over the lower bound for each set and number of jobs, by method, as means over seeds.

    Args:
        sets: names in `SETS`.
        sizes: numbers of jobs.
        seeds: the number of random arrays for each set and number of jobs.
        seconds: the time of the longest search.
        genetic: whether to include the genetic algorithm.
    """
    warm_up()
    found: dict[tuple[str, int], dict[str, float]] = {}
    for name in sets:
        options = SETS[name]
        for jobs in sizes:
            problems = [random_array(jobs, STAGES, seed=seed, **options) for seed in range(seeds)]  # type: ignore[arg-type]
            ratios: dict[str, list[float]] = {}
            for problem in problems:
                for method, one in methods(problem, seconds, genetic).items():
                    problem.check(one.starts)
                    ratios.setdefault(method, []).append(one.makespan / one.bound)
            found[name, jobs] = {method: float(np.mean(each)) for method, each in ratios.items()}
    return found


def methods(problem: ArrayProblem, seconds: float, genetic: bool) -> dict[str, ArraySolution]:
    """Order one array with every method, and return the solutions.

    Args:
        problem: the array.
        seconds: the processor time of the longest search. The genetic algorithm gets 1.5 times as much.
        genetic: whether to include the genetic algorithm.
    """
    limit = partial(Effort.from_seconds, clock=time.process_time)
    return {
        "algorithm 1": solve_array(problem, "algorithm 1"),
        **({f"genetic {1.5 * seconds:g} s": solve_array(problem, "genetic", limit(1.5 * seconds))} if genetic else {}),
        "longest first": solve_array(problem, "longest first"),
        "pyramid": solve_array(problem, "pyramid"),
        f"search {0.1 * seconds:g} s": solve_array(problem, "search", limit(0.1 * seconds)),
        f"search {seconds:g} s": solve_array(problem, "search", limit(seconds)),
    }


def warm_up() -> None:
    """Compile the functions that are measured later."""
    solve_array(random_array(30, STAGES), "search", Effort(60_000))
    solve_array(random_array(30, STAGES), "algorithm 1")


def generated(imbalance: float = 0.0, overhead: float | None = None) -> Callable[[tuple[int, ...]], CostModel]:
    """Return the costs of the generator's language jobs. Several stages on one rank share the time of the rank.

    Args:
        imbalance: how unequal the stages are.
        overhead: the fixed time of a block, in the time of samples, or None for the default of the generator.
    """
    whole = random_costs(STAGES, imbalance=imbalance, overhead=overhead, seed=1)

    @cache
    def costs(where: tuple[int, ...]) -> CostModel:
        stages = len(where)

        def part(kind: Kind, seconds: float) -> float:
            return seconds if kind in SEND_KINDS else seconds * STAGES / stages

        return CostModel(
            {
                (kind, s): tuple((rows, part(kind, seconds)) for rows, seconds in whole.seconds[kind, s % STAGES])
                for kind in (Kind.F, Kind.B, Kind.STEP, Kind.SF, Kind.SB)
                for s in range(stages)
            }
        )

    return costs


def epoch_table(sizes: Sequence[int], all_schemes: bool) -> tuple[list[str], float]:
    """Return the lines of the table of epochs, and the ratio for as many resident jobs as stages.

    The ratio is the time of an epoch over the work of the bottleneck.

    Args:
        sizes: numbers of resident jobs.
        all_schemes: whether other schemes are compared.
    """
    lines = ["epoch over the bottleneck's work, equal / unequal stages"]
    epochs = [Epoch(generated(imbalance), STAGES, "language") for imbalance in (0.0, 0.4)]
    lines.append(f"{'resident jobs':44}" + "".join(f"{a:>15}" for a in sizes))
    rows: dict[str, Callable[[Epoch, int], int]] = {"no rounds": lambda e, a: e.streamed(a)}
    if all_schemes:
        rows |= {
            "no rounds, batches cut if jobs are few": lambda e, a: e.streamed(
                a, microbatches=choose_microbatches(STAGES, a)
            ),
            "rounds, arrays in random order (the paper's)": lambda e, a: e.in_rounds(a),
            "rounds, arrays grouped by batch size": lambda e, a: e.in_rounds(a, grouped=True),
        }
    a8 = 0.0
    for name, run in rows.items():
        cells = []
        for resident in sizes:
            ratios = [run(epoch, resident) / epoch.work for epoch in epochs]
            cells.append(f"{ratios[0]:7.3f} /{ratios[1]:6.3f}")
            if name == "no rounds" and resident == STAGES:
                a8 = ratios[0]
        lines.append(f"{name:44}" + "".join(cells))
    return lines, a8


def overhead_table() -> list[str]:
    """Return a table of how much time jobs lose if they run one after another, by the fixed time of a block."""
    lines = ["jobs one after another over no rounds (8 resident jobs), by the fixed cost of a block in samples"]
    for overhead in (0, 1, 2, 4):
        epoch = Epoch(generated(overhead=overhead), STAGES, "language")
        ours = epoch.streamed(STAGES)
        cells = "  ".join(f"{name} {epoch.one_by_one(schedule) / ours:.2f}" for name, schedule in SINGLE.items())
        lines.append(f"  {overhead}: {cells}")
    return lines


def solver_table(rows: dict[tuple[str, int], dict[str, float]]) -> list[str]:
    """Return the rows of the solvers as text."""
    columns = list(next(iter(rows.values())))
    lines = ["one iteration of an array on 8 stages: makespan over the lower bound"]
    lines.append(f"{'':26}{'jobs':>5}" + "".join(f"{column:>15}" for column in columns))
    for (name, jobs), by in rows.items():
        lines.append(f"{name:26}{jobs:5}" + "".join(f"{by[column]:15.3f}" for column in columns))
    return lines


def simulated_keys(quick: bool) -> dict[str, float]:
    """Print the quality of orders and the time of epochs of many jobs, and return the headline numbers."""
    load_kernel()
    by = "numba" if SOLVER_KERNELS.numba else "plain Python"
    print(f"{describe_machine()}, Python {platform.python_version()}, {by}; simulated\n")
    sets = ["language"] if quick else list(SETS)
    solvers = solver_rows(sets, (30, 64) if quick else (16, 30, 64), 1 if quick else 3, 1.0, not quick)
    print("\n".join(solver_table(solvers)) + "\n", flush=True)
    epochs, a8 = epoch_table((8,) if quick else (4, 8, 16, 19, 30, 64), not quick)
    print("\n".join(epochs) + "\n", flush=True)
    if not quick:
        print("\n".join(overhead_table()) + "\n", flush=True)
    keys = {f"solver_j{jobs}": solvers["language", jobs]["search 1 s"] for jobs in (30, 64)}
    return keys | {"epoch_over_bottleneck_a8": a8}


def emulated_keys(quick: bool) -> dict[str, float]:
    """Run siblings on emulated stages, print the results, and return the headline numbers."""
    if quick:
        cases = [jap_run.Case(8, 16, 6, jap_run.slow_layers(8, 0.24, times=1), starts=False, short=3)]
    else:
        cases = [jap_run.Case(ranks, 16, 20, jap_run.slow_layers(ranks, 0.24), contenders=2) for ranks in (4, 8)]
    for case in cases:
        found = shown(case, quick)
    return {"speedup_vs_sequential" if name == "speedup" else name: found[name] for name in found}


def real_keys(quick: bool) -> dict[str, float]:
    """Run siblings that train a real GPT, print the results, and return the headline numbers."""
    if quick:
        profile = jap_run.gpt_profile(2, jap_run.FEW_SIZES, times=1)
        case = jap_run.Case(2, 8, 4, profile, real=True, steps=1, starts=False, short=3)
    else:
        case = jap_run.Case(2, 8, 12, jap_run.gpt_profile(2), real=True, contenders=2)
    found = shown(case, quick)
    rivals = {f"speedup_vs_{key}": found[f"speedup_vs_{key}"] for key in ("processes", "ddp")}
    return {"speedup_real": found["speedup"], **rivals}


def shown(case: jap_run.Case, quick: bool) -> dict[str, float]:
    """Run a case, print its lines, and return its numbers."""
    lines, found = jap_run.executed(case, pairs=1 if quick else 2)
    print("\n".join(lines), flush=True)
    return found


def scheme_keys(quick: bool) -> dict[str, float]:
    """Run the paper's schemes of arrays on emulated stages, print the results, and return the numbers."""
    case = jap_run.Case(4, 8, 3 if quick else 6, jap_run.slow_layers(4, 0.12, times=1))
    lines, found = jap_run.compare_schemes(case, 1 if quick else 3)
    print("\n".join(lines), flush=True)
    return found


def equal_keys(quick: bool) -> dict[str, float]:
    """Check whether siblings in an array have the same losses and weights as when they are trained alone."""
    equal = jap_run.bit_equal(2 if quick else 4)
    print(f"losses and weights of siblings are bitwise equal to training each one alone: {equal}")
    return {"bit_equal": float(equal)}


def main() -> None:
    """Run the selected parts of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer seeds, sets, batches and rows of tables; within 120 s"
    )
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--simulated", action="store_true", help="only the simulated parts, without processes")
    alone.add_argument("--real", action="store_true", help="only the real GPT")
    alone.add_argument("--schemes", action="store_true", help="only the paper's orders of arrays, executed")
    parser.add_argument("--json", action="store_true", help="print the headline numbers as JSON in the last line")
    options = parser.parse_args()
    parts = [simulated_keys, emulated_keys, real_keys, equal_keys]
    if options.simulated:
        parts = [simulated_keys]
    elif options.real:
        parts = [real_keys]
    elif options.schemes:
        parts = [scheme_keys]
    keys: dict[str, float] = {}
    for part in parts:
        keys |= part(options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
