"""DynPipe in the Trainer, next to a neighbor process that begins to compete for a device during training.

The benchmark measures the cost of never re-planning, the share of the lost time that re-planning regains, and the
number of steps until then. It also compares moving layers with restarting the training with another partition, and
measures the cost of monitoring without a neighbor.

    python benchmarks/dynpipe.py [--quick] [--json] [--only NAME]

Two headline numbers take longer than `--quick` allows: `vs_restart` is printed by the whole run, or by `--only
restarts`, and `migration_slowdown` by `python -m benchmarks.papers dynpipe migration --json`, which needs root.

Real: two stages of transformer blocks compute, each pinned to a core, and other processes compete for one of these
cores.

Emulated (labeled as such): layers sleep for their time, so that few cores can stand for 4 or 8 devices. The layers of
one rank take a multiple of their time while a trace specifies it.

With a synchronous schedule (such as `1f1b` with `replan=True`), the weights must be bitwise equal to the weights of a
run that never re-plans.

Heavy: neighbors come and go on all of four emulated stages. Three runs are compared by the time until the loss reaches
the highest of their final losses: one that never re-plans, one that restarts, and one whose layers move. Restarts
re-partition at the end of an epoch, based on the latest observation, if that pays. A restart consists of a checkpoint,
the end of the processes, and the start of new interpreters that measure the layers again. Its duration is measured once
and added for each restart. The neighbors do not proceed during a restart, which is in favor of restarts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.harness.report import make_parser
from benchmarks.papers.dynpipe.trainings import LAYER, ROWS, Case, microbatches, several
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.dynpipe.partitions import all_partitions, list_neighbours
from lightning_pipes.testing.ranks import run_ranks

EVERY = 10
"""The number of batches between two observations, as by default."""
HEAVY = 0.6, 200.0, 3
"""The mean number of neighbors of a device, the number of batches for which each one stays, and a seed."""
EPOCH = 200
"""The number of batches after which a restart may re-partition."""
NOTICEABLE = 1.3
"""The least slowdown of a stage by a real neighbor, relative to the slowdown of the other stage by other programs.

Below this value, re-planning can gain little.
"""
SMOOTHED = 20
"""The number of losses that are averaged."""


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step in three phases of a training.

    Attributes:
        quiet: before the neighbor came.
        slow: with the neighbor.
        end: in the last third of the steps with the neighbor.
    """

    quiet: float
    slow: float
    end: float


def steps_of(found: dict[str, Any]) -> list[float]:
    """Return the seconds between the ends of consecutive batches on the rank with the last stage."""
    return [b - a for a, b in pairwise(found["ended"])]


def seconds_of(found: dict[str, Any], case: Case) -> Seconds:
    """Return the median seconds of the steps before the neighbor came, with it, and at the end."""
    steps, begins = steps_of(found), case.slow[0][0]
    third = begins + 2 * (len(steps) - begins) // 3
    return Seconds(*map(statistics.median, (steps[begins // 3 : begins - 2], steps[begins + 2 :], steps[third:])))


def simulated(case: Case, counts: Sequence[int], layer: Sequence[float]) -> float:
    """Return the simulated seconds of a step.

    Args:
        case: the training.
        counts: the number of layers of each stage.
        layer: the forward seconds of a layer on each stage, for a whole batch. A backward takes twice as long.
    """
    schedule, m = make_schedule(case.schedule), microbatches(case)
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    rows = ROWS * m
    plan = solve_plan(Problem(schedule, case.ranks, rows, m, layers=tuple(Span(a, b) for a, b in pairwise(edges))))
    tables = {}
    for s, n in enumerate(counts):
        tables[Kind.F, s] = ((0, 0.0), (rows, n * layer[s]))
        tables[Kind.B, s] = ((0, 0.0), (rows, 2 * n * layer[s]))
    costs = CostModel(tables)
    program = schedule.program(plan)  # type: ignore[union-attr]
    if not program.is_endless:
        return simulate(program, plan, costs).makespan / 1e9
    some, more = (simulate(program, plan, costs, batches=n).makespan for n in (40, 60))
    return (more - some) / 20 / 1e9


def even(case: Case) -> list[int]:
    """Return the number of layers of each stage before any layer moves."""
    return [b - a for a, b in pairwise([0, *case.cut, case.layers])]


def optimum(case: Case, layer: Sequence[float]) -> float:
    """Return the least simulated seconds of a step over a set of partitions.

    With two stages, the set contains all partitions. Otherwise, it contains the partition in proportion to the speeds
    of the stages and the partitions near it.
    """
    speeds = np.array([1 / seconds for seconds in layer])
    ends = np.rint(case.layers * np.cumsum(speeds) / speeds.sum()).astype(int)
    cuts = list_neighbours(ends[:-1].tolist(), range(1, case.layers), case.layers)
    if case.ranks == 2:
        cuts = all_partitions(range(1, case.layers), 2, case.layers)
    counts = np.diff(cuts, axis=1)
    best = (counts * layer).max(axis=1).argsort(kind="stable")[:20]
    return min(simulated(case, counts[n].tolist(), layer) for n in best)


def layer_seconds(found: Sequence[dict[str, Any]], case: Case, first: int, last: int) -> list[float]:
    """Return the forward seconds of a layer of each stage, in some batches of a run without re-planning.

    For emulated layers this is the configured time, and for real layers the measured time.

    Args:
        found: the results of all ranks.
        case: the training.
        first, last: the batches, without the last one.
    """
    if not case.real:
        return [LAYER * case.factor(stage, last - 1) for stage in range(case.ranks)]
    each = [statistics.median(found[case.ranks - 1 - s]["busy"][first:last]) for s in range(case.ranks)]
    return [busy / 3 / count for busy, count in zip(each, even(case), strict=True)]


@dataclass(frozen=True)
class Possible:
    """The simulated effect of the best partition, with layers as fast as in the run that never re-plans.

    Attributes:
        best: seconds of a step, scaled by the ratio between measured and simulated steps of that run.
        share: the share of the lost time that the best partition regains.
        factors: the slowdown of a layer of each stage with the neighbor.
    """

    best: float
    share: float
    factors: list[float]


def possible(found: Sequence[dict[str, Any]], case: Case) -> Possible:
    """Return the effect of the best partition, based on the run that never re-plans.

    Args:
        found: the results of all ranks in that run.
        case: the training.
    """
    begins, own = case.slow[0][0], seconds_of(found[0], case)
    before = layer_seconds(found, case, begins // 3, begins - 2)
    then = layer_seconds(found, case, begins + 2, case.steps)
    quiet, slow, best = simulated(case, even(case), before), simulated(case, even(case), then), optimum(case, then)
    share = (slow - best) / (slow - quiet)
    return Possible(own.end * best / slow, share, [b / a for a, b in zip(before, then, strict=True)])


def recovery(never: dict[str, Any], moved: dict[str, Any], case: Case, best: float) -> tuple[float, int | None]:
    """Return how much of the lost time a run regains, and after how many steps.

    Args:
        never: the results of the run that never re-plans.
        moved: the results of the run that re-plans.
        case: the training.
        best: the simulated optimum, in seconds of a step.

    Returns:
        The share of the lost time that is regained at the end, and the number of steps with the neighbor until the
        median of eight steps, and the median of all later steps, are at most 10 % above the optimum. It is None if this
        never happens.
    """
    begins = case.slow[0][0]
    lost, own = seconds_of(never, case), seconds_of(moved, case)
    share = (lost.end - own.end) / (lost.end - lost.quiet)
    steps = steps_of(moved)
    for n in range(begins, len(steps) - 8):
        if max(statistics.median(steps[n : n + 8]), statistics.median(steps[n:])) <= 1.1 * best:
            return share, n - begins
    return share, None


@dataclass(frozen=True)
class Row:
    """The results of one case.

    Attributes:
        name: the name of the case.
        quiet, never, moved, best: seconds of a step without the neighbor, never re-planned, re-planned, and the
            optimum.
        regained, possible: the share of the lost time that was regained, and the simulated share that the best
            partition would regain.
        moved_after: the number of steps until layers moved for the first time, or None if none moved.
        after: the number of steps until a step was at most 10 % above the simulated optimum, or None.
        factors: the slowdown of a layer of each stage with the neighbor.
        layers: the number of layers of each stage at the end.
        equal: whether the weights equal the weights of the run that never re-plans, or None if they may differ.
    """

    name: str
    quiet: float
    never: float
    moved: float
    best: float
    regained: float
    possible: float
    moved_after: int | None
    after: int | None
    factors: list[float]
    layers: list[int]
    equal: bool | None

    def __str__(self) -> str:
        after = "never" if self.after is None else f"{self.after} steps"
        equal = {None: "", True: ", same weights", False: ", OTHER WEIGHTS"}[self.equal]
        factors = ", ".join(f"{factor:.2f}" for factor in self.factors)
        return (
            f"{self.name:42} {1e3 * self.quiet:6.0f} ms quiet, {1e3 * self.never:6.0f} with a neighbor, "
            f"{1e3 * self.moved:6.0f} re-planned (optimum {1e3 * self.best:.0f}); {self.regained:4.0%} regained of "
            f"{self.possible:.0%} possible; first move after {self.moved_after} steps, 10 % above the optimum after "
            f"{after}; layers {self.layers}, which take {factors} times as long{equal}"
        )


def measured(name: str, case: Case) -> Row:
    """Run a training that never re-plans and one that does, and return the results."""
    never = replace(case, schedule="pipedream" if case.schedule == "dynpipe" else case.schedule, replan=False)
    both = run_ranks(several, case.ranks, [never, case], timeout=600)
    stays, moves = both[0]
    lost, own = seconds_of(stays, never), seconds_of(moves, case)
    could = possible([each[0] for each in both], never)
    regained, after = recovery(stays, moves, never, could.best)
    begins, layers = case.slow[0][0], moves["layers"]
    changed = [n for n in range(begins, len(layers)) if layers[n] != layers[begins]]
    counts = [b - a for a, b in layers[-1]]
    equal = None if case.schedule == "dynpipe" else stays["digest"] == moves["digest"]
    return Row(
        name,
        lost.quiet,
        lost.end,
        own.end,
        could.best,
        regained,
        could.share,
        changed[0] - begins if changed else None,
        after,
        could.factors,
        counts,
        equal,
    )


def cases(quick: bool) -> list[tuple[str, Case]]:
    """Return the cases and their names."""
    steps = 100 if quick else 260
    base = Case("dynpipe", 4, 16, steps, ((32, 2.0),), at=1)
    real = Case("1f1b", 2, 24, 48 if quick else 160, ((18, 2.0),), at=0, real=True, every=5)
    found = [
        ("emulated, asynchronous, 4 stages, 2x", base),
        ("emulated, 1f1b, 4 stages, 2x", replace(base, schedule="1f1b")),
        ("real, 1f1b, 2 stages, 1 neighbour", real),
    ]
    if quick:
        return found
    thrice = ((32, 3.0),)
    return [
        *found,
        ("emulated, asynchronous, 4 stages, 1.5x", replace(base, slow=((32, 1.5),))),
        ("emulated, asynchronous, 4 stages, 3x", replace(base, slow=thrice)),
        ("emulated, asynchronous, 8 stages, 2x", replace(base, ranks=8, layers=32, at=3)),
        ("emulated, kfkb, 4 stages, 3x", replace(base, schedule="kfkb", slow=thrice)),
        ("real, asynchronous, 2 stages, 1 neighbour", replace(real, schedule="dynpipe")),
        ("real, 1f1b, 2 stages, 2 neighbours", replace(real, slow=((18, 3.0),))),
        ("real, 1f1b, 2 stages, 1 of matrices", replace(real, kind="matmul")),
        ("real, 1f1b, 2 stages, 1 that copies memory", replace(real, kind="memory")),
    ]


def idle_cost(quick: bool) -> tuple[float, float, float]:
    """Measure the cost of monitoring and planning without a neighbor.

    Trainings with and without both take turns in one run. The layers are emulated, because their time does not vary.

    Returns:
        The share by which a step takes longer, the spread of this share, and the additional processor time of a rank,
        as a share of a step.
    """
    steps, rounds = (24, 2) if quick else (150, 6)
    plain = Case("1f1b", 2, 16, steps, replan=False)
    watched = replace(plain, replan=True, monitor=True, every=EVERY)
    ranks = run_ranks(several, 2, [plain, watched] * rounds, timeout=600)
    times = [statistics.median(steps_of(each)[10:]) for each in ranks[0]]
    ratios = [b / a - 1 for a, b in zip(times[::2], times[1::2], strict=True)]
    cores = [[(each["processor"][-1] - each["processor"][10]) / (steps - 11) for each in found] for found in ranks]
    more = max(statistics.median(found[1::2]) - statistics.median(found[::2]) for found in cores)
    return statistics.median(ratios), max(ratios) - min(ratios), more / statistics.median(times)


def restart_seconds(case: Case) -> float:
    """Return the seconds of a restart, with all ranks at the same time.

    A restart consists of a checkpoint, the end of the processes, and the start of new interpreters up to the first
    batch.
    """
    begun = time.monotonic()
    command = [sys.executable, "-c", "import torch, lightning.pytorch, lightning_pipes"]
    for process in [subprocess.Popen(command) for _ in range(case.ranks)]:
        process.wait()
    new = time.monotonic() - begun
    with tempfile.TemporaryDirectory() as folder:
        first = replace(case, replan=False, stop=20, folder=folder)
        (stopped, *_) = run_ranks(several, case.ranks, [first], timeout=300)
        again = replace(case, resume=f"{folder}/last.ckpt", stop=24)
        ended = time.monotonic()
        (started, *_) = run_ranks(several, case.ranks, [again], timeout=300)
    saved = ended - stopped[0]["ended"][-1]
    begins = started[0]["ended"][0]
    return float(new + saved + begins - ended)


def reached(found: dict[str, Any], loss: float, wait: float = 0.0) -> float:
    """Return the seconds until the mean of the latest losses is at most `loss`.

    Args:
        found: the results of a rank.
        loss: the loss to reach.
        wait: additional seconds for each change of the partition.
    """
    ended = found["ended"]
    moves = 0
    for n in range(1, len(ended)):
        moves += found["layers"][n] != found["layers"][n - 1]
        if n >= SMOOTHED and statistics.fmean(found["losses"][n - SMOOTHED : n]) <= loss:
            return float(ended[n] - ended[0] + wait * moves)
    return float("inf")


def against_restart(quick: bool) -> dict[str, float]:
    """Compare the time to a loss under a heavy trace: never re-planned, with restarts, and with moving layers.

    Returns:
        The seconds of the first two over the seconds of the run with moving layers, also for restarts that take no
        time, and the seconds of a restart.
    """
    moves = Case("dynpipe", 4, 16, 300 if quick else 800, visitors=HEAVY, every=EVERY)
    never = replace(moves, schedule="pipedream", replan=False)
    restarts = replace(moves, every=EPOCH, windows=1)
    wait = restart_seconds(moves)
    found = [run_ranks(several, 4, [case], timeout=600)[0][0] for case in (never, restarts, moves)]
    loss = max(statistics.fmean(each["losses"][-SMOOTHED - 1 : -1]) for each in found)
    took = [reached(each, loss, each_wait) for each, each_wait in zip(found, (0.0, wait, 0.0), strict=True)]
    count = [sum(a != b for a, b in pairwise(each["layers"])) for each in found]
    for name, seconds, n in zip(("never", "restarts", "moves"), took, count, strict=True):
        print(f"heavy trace, {name:9} {seconds:6.1f} s to a loss of {loss:.4f}, {n} re-plans", flush=True)
    free = reached(found[1], loss)
    print(f"a restart takes {wait:.1f} s; if it took none, the training with restarts would take {free:.1f} s")
    return {
        "vs_never": took[0] / took[2],
        "vs_restart": took[1] / took[2],
        "vs_free_restart": free / took[2],
        "restart_s": wait,
    }


def main() -> None:
    """Run the cases and print the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="run only cases whose names contain this text")
    options = parser.parse_args()
    rows = []
    for name, case in cases(options.quick):
        if options.only in name:
            rows.append(measured(name, case))
            print(rows[-1], flush=True)
            if case.real and rows[-1].factors[0] < NOTICEABLE * rows[-1].factors[1]:
                print("  other programs also slowed down the other stage, so a move gained almost nothing")
    if options.only in "heavy trace against restarts" and options.only:
        print(json.dumps(against_restart(options.quick)))
    if options.only:
        return
    idle, spread, core = idle_cost(options.quick)
    print(
        f"without neighbors, monitor and planner change a step by {idle:+.1%} (spread {spread:.1%}), "
        f"and need {core:.1%} more of a core",
        flush=True,
    )
    against = {} if options.quick else against_restart(options.quick)
    if options.quick:
        print(
            "left out: vs_restart (--only restarts), migration_slowdown (python -m benchmarks.papers dynpipe migration)"
        )
    if options.json:
        first, real = rows[0], next(row for row in rows if row.name.startswith("real"))
        equal = {row.equal for row in rows} - {None} == {True}
        keys = {
            "recovered": first.regained,
            "steps_to_recover": first.after,
            "real_recovered": real.regained,
            "real_possible": real.possible,
            "real_neighbour": real.factors[0] / real.factors[1],
            "idle_cost": idle,
            "idle_core": core,
            "bit_equal": equal,
        }
        print(json.dumps(keys | against))


if __name__ == "__main__":
    main()
