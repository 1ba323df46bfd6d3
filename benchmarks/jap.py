"""Job arrays: how good the orders of one iteration are, how long an epoch of the paper's 64 jobs takes, simulated, and
what siblings take together and one after another, executed.

Solvers get a time limit, and processes are measured, so run it on an idle machine; what is simulated is the same
everywhere.

    python benchmarks/jap.py [--quick] [--json] [--simulated]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache

import jap_run
import numpy as np

from lightning_pipes.cost import Cluster, CostModel, Link
from lightning_pipes.cost.zoo import named_profile
from lightning_pipes.ir import SENDS, Cut, Kind, Plan, Schedule, Span
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.plans import even_plan
from lightning_pipes.sim import load_kernel, makespan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.jap import ArrayProblem, Effort, Job, Solution, Stream, problem_of, solved, tuned
from lightning_pipes.strategies.jap.generator import KINDS, batch_sizes, random_array, random_costs
from lightning_pipes.strategies.jap.machine import numba_kernel
from lightning_pipes.strategies.one_f_one_b import OneFOneB

STAGES, JOBS = 8, 64
ITERATIONS = 240
"""Of the smallest batch size in an epoch; the others have as many samples."""
SETS = {
    "language": {},
    "language, unequal stages": {"imbalance": 0.4},
    "language, slow links": {"link": 0.3},
    "vision": {"kind": "vision"},
}
MODELS = {"VGG-19": "vision", "ResNet-152": "vision", "BERT-large": "language", "GPT-2-1.5B": "language"}
NVLINK = Link(300e9)
SINGLE: dict[str, Schedule] = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "interleaved v=2": Interleaved(stages_per_rank=2),
    "Hanayo 1 wave": Hanayo(waves=1),
}
Costs = Callable[[int], CostModel]
"""By the number of stages."""


def within(seconds: float) -> Effort:
    """An effort that ends after so many seconds of this process."""
    end = time.process_time() + seconds
    return Effort(10**9, lambda: time.process_time() > end)


def solver_rows(
    sets: Sequence[str], sizes: Sequence[int], seeds: int, seconds: float
) -> dict[tuple[str, int], dict[str, float]]:
    """Makespan over bound, means over `seeds`: of each set and number of jobs, by method."""
    warm_up()
    found: dict[tuple[str, int], dict[str, float]] = {}
    for name in sets:
        options = SETS[name]
        for jobs in sizes:
            problems = [random_array(jobs, STAGES, seed=seed, **options) for seed in range(seeds)]  # type: ignore[arg-type]
            ratios: dict[str, list[float]] = {}
            for problem in problems:
                for method, one in methods(problem, seconds).items():
                    problem.check(one.starts)
                    ratios.setdefault(method, []).append(one.makespan / one.bound)
            found[name, jobs] = {method: float(np.mean(each)) for method, each in ratios.items()}
    return found


def methods(problem: ArrayProblem, seconds: float) -> dict[str, Solution]:
    """Every way to order one array."""
    return {
        "algorithm 1": solved(problem, "algorithm 1"),
        f"genetic {1.5 * seconds:g} s": solved(problem, "genetic", within(1.5 * seconds)),
        "longest first": solved(problem, "longest first"),
        "pyramid": solved(problem, "pyramid"),
        f"search {0.1 * seconds:g} s": solved(problem, "search", within(0.1 * seconds)),
        f"search {seconds:g} s": solved(problem, "search", within(seconds)),
    }


def warm_up() -> None:
    """Compiles what will be measured."""
    solved(random_array(30, STAGES), "search", Effort(60_000))
    solved(random_array(30, STAGES), "algorithm 1")


class Epoch:
    """An epoch of the grid's jobs on some stages; all times are nanoseconds."""

    def __init__(self, costs: Costs, kind: str, recompute: bool = False) -> None:
        self.sizes = batch_sizes(JOBS, kind).tolist()
        self.kinds = KINDS[kind][2]
        self.iterations = {rows: ITERATIONS * min(self.kinds) // rows for rows in self.kinds}
        self.recompute = recompute
        self.of = costs
        self.costs = costs(STAGES)
        cuts = tuple(Cut.even(rows, 1, STAGES) for rows in self.kinds)
        self.problem = problem_of(Plan(tuple(range(STAGES)), cuts), self.costs)
        runs = np.array([self.iterations[rows] * self.sizes.count(rows) for rows in self.kinds])
        self.work = int((runs[:, None] * sum(self.problem.occupied)).sum(0).max())

    def streamed(self, resident: int, microbatches: bool = False) -> int:
        """Without rounds, the longest job first."""
        setup = tuned(STAGES, self.costs, resident, self.kinds) if microbatches else None
        stream = Stream(STAGES, self.costs, resident, backward_first=bool(setup and setup.backward_first))
        for number, rows in enumerate(self.sizes):
            cut = Cut.even(rows, setup.microbatches[rows] if setup else 1, STAGES)
            stream.admit(Job(number, cut, self.iterations[rows]))
        return stream.advance().time

    def in_rounds(self, resident: int, method: str = "search", grouped: bool = False) -> int:
        """The paper's scheme: arrays one after another, in each of them an iteration of all jobs that are left."""
        order = sorted(self.sizes) if grouped else np.random.default_rng(0).permutation(self.sizes).tolist()
        total = 0
        for first in range(0, JOBS, resident):
            left = sorted(order[first : first + resident])
            done = 0
            while left:
                steps = min(self.iterations[rows] for rows in left) - done
                total += steps * self._round(tuple(left), method)
                done += steps
                left = [rows for rows in left if self.iterations[rows] > done]
        return total

    @cache  # noqa: B019 - an epoch lives as long as the script
    def _round(self, sizes: tuple[int, ...], method: str) -> int:
        problem = self.problem.chosen([self.kinds.index(rows) for rows in sizes])
        return solved(problem, method, Effort(6_000)).makespan

    def one_by_one(self, schedule: Schedule | None) -> int:
        """Jobs one after another with the best number of micro-batches for each batch size; without a schedule, whole
        batches walk through the stages."""
        total = 0
        for rows in self.kinds:
            best = min(
                self._step(schedule or GPipe(), rows, m) for m in (MICROBATCHES if schedule else (1,)) if m <= rows
            )
            total += best * self.iterations[rows] * self.sizes.count(rows)
        return total

    def _step(self, schedule: Schedule, rows: int, microbatches: int) -> int:
        plan = even_plan(schedule, STAGES, microbatches, rows)
        return makespan(schedule.program(plan), plan, self.of(plan.n_stages))


MICROBATCHES = (1, 2, 4, 8, 16, 32)


def generated(imbalance: float = 0.0, overhead: float | None = None) -> Costs:
    """The generator's language jobs; where a rank has several stages, they share its time."""
    whole = random_costs(STAGES, imbalance=imbalance, overhead=overhead, seed=1)

    @cache
    def costs(stages: int) -> CostModel:
        def part(kind: Kind, seconds: float) -> float:
            return seconds if kind in SENDS else seconds * STAGES / stages

        return CostModel(
            {
                (kind, s): tuple((rows, part(kind, seconds)) for rows, seconds in whole.seconds[kind, s % STAGES])
                for kind in (Kind.F, Kind.B, Kind.STEP, Kind.SF, Kind.SB)
                for s in range(stages)
            }
        )

    return costs


def of_model(name: str) -> Costs:
    """A model of the paper on GPUs of one host, in stages of equal time; backwards recompute."""
    rows = {"vision": 256, "language": 16}[MODELS[name]]
    profile = named_profile(name, "A100-80G", dtype="float32", optimizer="adam", recompute=True)
    seconds = [profile.seconds(Kind.F, n, rows) + profile.seconds(Kind.B, n, rows) for n in range(len(profile.layers))]

    @cache
    def costs(stages: int) -> CostModel:
        layers: tuple[Span, ...] = even_partition(seconds, stages)
        ranks = tuple(s % STAGES for s in range(stages))
        return profile.costs(layers).on(Cluster.homogeneous(1, STAGES, inside=NVLINK), ranks)

    return costs


def epoch_table() -> tuple[list[str], float]:
    """Lines, and the ratio of as many resident jobs as stages."""
    lines = ["epoch over the bottleneck's work, equal / unequal stages"]
    epochs = [Epoch(generated(imbalance), "language") for imbalance in (0.0, 0.4)]
    sizes = (4, 8, 16, 19, 30, 64)
    lines.append(f"{'resident jobs':44}" + "".join(f"{a:>15}" for a in sizes))
    rows: dict[str, Callable[[Epoch, int], int]] = {
        "rounds, arrays in random order (the paper's)": lambda e, a: e.in_rounds(a),
        "rounds, arrays grouped by batch size": lambda e, a: e.in_rounds(a, grouped=True),
        "no rounds": lambda e, a: e.streamed(a),
        "no rounds, automatic micro-batches": lambda e, a: e.streamed(a, microbatches=True),
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
    """How much jobs one after another lose, by the fixed time of a block."""
    lines = [
        "jobs one after another over no rounds (8 resident jobs), by what a block costs besides, in samples' worth"
    ]
    for overhead in (0, 1, 2, 4):
        epoch = Epoch(generated(overhead=overhead), "language")
        ours = epoch.streamed(STAGES)
        cells = "  ".join(f"{name} {epoch.one_by_one(schedule) / ours:.2f}" for name, schedule in SINGLE.items())
        lines.append(f"  {overhead}: {cells}")
    return lines


def model_table(models: Sequence[str]) -> list[str]:
    """The paper's models: epoch over ours, and in parentheses how busy the bottleneck is."""
    lines = ["64 jobs on 8 stages: epoch over ours; in parentheses the utilisation of the stage with most work"]
    names = [
        "whole batches",
        *SINGLE,
        "rounds of 16, F first",
        "rounds of 16, B first",
        "rounds of 16, searched",
        "ours",
    ]
    found: dict[str, list[str]] = {name: [] for name in names}
    for model in models:
        epoch = Epoch(of_model(model), MODELS[model])
        times = {"whole batches": epoch.one_by_one(None)}
        times |= {name: epoch.one_by_one(schedule) for name, schedule in SINGLE.items()}
        times |= {"rounds of 16, F first": epoch.in_rounds(16, "forward first")}
        times |= {"rounds of 16, B first": epoch.in_rounds(16, "backward first")}
        times |= {"rounds of 16, searched": epoch.in_rounds(16), "ours": epoch.streamed(STAGES)}
        for name, spent in times.items():
            found[name].append(f"{spent / times['ours']:6.2f} ({epoch.work / spent:4.0%})")
    lines.append(f"{'':24}" + "".join(f"{model:>16}" for model in models))
    return lines + [f"{name:24}" + "".join(f"{cell:>16}" for cell in found[name]) for name in names]


def solver_table(rows: dict[tuple[str, int], dict[str, float]]) -> list[str]:
    """The solvers' rows as text."""
    columns = list(next(iter(rows.values())))
    lines = ["one iteration of an array on 8 stages: makespan over the lower bound"]
    lines.append(f"{'':26}{'jobs':>5}" + "".join(f"{column:>15}" for column in columns))
    for (name, jobs), by in rows.items():
        lines.append(f"{name:26}{jobs:5}" + "".join(f"{by[column]:15.3f}" for column in columns))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, sets, models and siblings; within 120 s")
    parser.add_argument("--simulated", action="store_true", help="leave out what runs on processes")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    load_kernel()
    by = "numba" if numba_kernel() else "plain Python"
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {by}; simulated\n")
    sets = ["language"] if options.quick else list(SETS)
    solvers = solver_rows(sets, (16, 30, 64), 1 if options.quick else 3, 1.0)
    print("\n".join(solver_table(solvers)) + "\n", flush=True)
    epochs, a8 = epoch_table()
    print("\n".join(epochs) + "\n", flush=True)
    print("\n".join(overhead_table()) + "\n", flush=True)
    print("\n".join(model_table(["GPT-2-1.5B"] if options.quick else list(MODELS))) + "\n", flush=True)
    keys = {f"solver_j{jobs}": solvers["language", jobs]["search 1 s"] for jobs in (30, 64)}
    keys["epoch_over_bottleneck_a8"] = a8
    if not options.simulated:
        if options.quick:
            cases = [jap_run.Case(4, 8, 6, jap_run.slow_layers(4, 0.1))]
        else:
            cases = [jap_run.Case(stages, 16, 8, jap_run.slow_layers(stages, 0.24)) for stages in (4, 8)]
            cases.append(jap_run.Case(2, 8, 12, jap_run.gpt_profile(2), real=True))
        lines, measured = jap_run.executed(cases, pairs=1 if options.quick else 2)
        equal = jap_run.bit_equal(2 if options.quick else 4)
        print("\n".join(lines))
        print(f"losses and weights of siblings equal those of each alone, bit for bit: {equal}")
        keys |= measured | {"bit_equal": float(equal)}
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
