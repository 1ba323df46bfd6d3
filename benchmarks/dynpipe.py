"""DynPipe in the Trainer beside a neighbour that comes while training goes on: what never re-planning costs, what is
regained and how soon, against a restart with another partition, and what all of it costs where nobody disturbs.

    python benchmarks/dynpipe.py [--quick] [--json] [--only NAME]

Two headline numbers take longer than `--quick` has: `vs_restart` is printed by the whole run, or by `--only restarts`,
and `migration_slowdown` by `python benchmarks/papers/dynpipe/migration.py --json`, which needs root.

Real: two stages of transformer blocks compute, each pinned to a core, and processes compete for one of these.
Emulated, labelled so: layers sleep for their time, so that few cores stand for 4 or 8 devices, and those of one rank
take a multiple of it while a trace says so. In the synchronous case (`1f1b`, `replan=True`) weights must be those of a
run that never re-plans, bit for bit.

Heavy: neighbours come to all of four emulated stages and go, and time is taken until the loss is what it is in the
end without re-planning. A restart re-partitions at the end of an epoch, by the last look, where that pays: by a
checkpoint, an end, and a start of new interpreters that measure layers again. How long that takes is measured once, and
counted for each. Neighbours wait meanwhile, which is in favour of restarts.
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
"""Batches from look to look, as by default."""
HEAVY = 0.6, 200.0, 3
"""Neighbours of a device on the average, batches that each stays, and a seed."""
EPOCH = 200
"""Batches after which restarts may re-partition."""
NOTICEABLE = 1.3
"""A real neighbour slows its stage so many times as much as other programs slow the other one, or little is gained."""
SMOOTHED = 20
"""Losses that are averaged."""


@dataclass(frozen=True)
class Seconds:
    """Of a step: before the neighbour came, when it is there, and at the end."""

    quiet: float
    slow: float
    end: float


def steps_of(found: dict[str, Any]) -> list[float]:
    """Seconds from batch to batch, of the rank that has the last stage."""
    return [b - a for a, b in pairwise(found["ended"])]


def seconds_of(found: dict[str, Any], case: Case) -> Seconds:
    """Medians of the steps before the neighbour, with it, and of the last third."""
    steps, begins = steps_of(found), case.slow[0][0]
    third = begins + 2 * (len(steps) - begins) // 3
    return Seconds(*map(statistics.median, (steps[begins // 3 : begins - 2], steps[begins + 2 :], steps[third:])))


def simulated(case: Case, counts: Sequence[int], layer: Sequence[float]) -> float:
    """Seconds of a step with so many layers a stage, each of which takes `layer` there: forward of a whole batch, and
    half of its backward."""
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
    """Layers of each stage, before anything moves."""
    return [b - a for a, b in pairwise([0, *case.cut, case.layers])]


def optimum(case: Case, layer: Sequence[float]) -> float:
    """The least simulated step of all partitions that are near the one in proportion to the speeds of stages."""
    speeds = np.array([1 / seconds for seconds in layer])
    ends = np.rint(case.layers * np.cumsum(speeds) / speeds.sum()).astype(int)
    cuts = list_neighbours(ends[:-1].tolist(), range(1, case.layers), case.layers)
    if case.ranks == 2:
        cuts = all_partitions(range(1, case.layers), 2, case.layers)
    counts = np.diff(cuts, axis=1)
    best = (counts * layer).max(axis=1).argsort(kind="stable")[:20]
    return min(simulated(case, counts[n].tolist(), layer) for n in best)


def layer_seconds(found: Sequence[dict[str, Any]], case: Case, first: int, last: int) -> list[float]:
    """What a layer of each stage takes in these batches of a run in which none moves: of emulated ones as it is set, of
    real ones as measured."""
    if not case.real:
        return [LAYER * case.factor(stage, last - 1) for stage in range(case.ranks)]
    each = [statistics.median(found[case.ranks - 1 - s]["busy"][first:last]) for s in range(case.ranks)]
    return [busy / 3 / count for busy, count in zip(each, even(case), strict=True)]


@dataclass(frozen=True)
class Possible:
    """What the best partition would bring, simulated, with layers as fast as in the run that never re-plans.

    Attributes:
        best: seconds of its steps; they are as much above simulated ones as those of the run.
        share: of the lost time.
        factors: by how much a layer of each stage takes longer beside the neighbour.
    """

    best: float
    share: float
    factors: list[float]


def possible(found: Sequence[dict[str, Any]], case: Case) -> Possible:
    """By the run that never re-plans, all ranks of it."""
    begins, own = case.slow[0][0], seconds_of(found[0], case)
    before = layer_seconds(found, case, begins // 3, begins - 2)
    then = layer_seconds(found, case, begins + 2, case.steps)
    quiet, slow, best = simulated(case, even(case), before), simulated(case, even(case), then), optimum(case, then)
    share = (slow - best) / (slow - quiet)
    return Possible(own.end * best / slow, share, [b / a for a, b in zip(before, then, strict=True)])


def recovery(never: dict[str, Any], moved: dict[str, Any], case: Case, best: float) -> tuple[float, int | None]:
    """The share of the lost time regained at the end, and after how many steps the median of eight steps, and that of
    all later ones, is within a tenth of the optimum."""
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
    """What came of one case.

    Attributes:
        regained, possible: share of the lost time, and what the best partition would regain, simulated.
        moved_after: steps until layers had moved for the first time; None where none has.
        factors: by how much a layer of each stage takes longer beside the neighbour.
        after: steps until within a tenth of the simulated optimum.
        layers: of each stage at the end.
        equal: whether weights are those of the run that never re-plans, where they must be.
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
            f"{self.name:42} {1e3 * self.quiet:6.0f} ms quiet, {1e3 * self.never:6.0f} beside it, "
            f"{1e3 * self.moved:6.0f} re-planned (optimum {1e3 * self.best:.0f}); {self.regained:4.0%} regained of "
            f"{self.possible:.0%} possible; first move after {self.moved_after} steps, optimum to a tenth after "
            f"{after}; layers {self.layers}, which take {factors} times as long{equal}"
        )


def measured(name: str, case: Case) -> Row:
    """One case: a training that never re-plans, and one that does."""
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
    """By name."""
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
    """By what share a step takes longer with all of DynPipe where nobody disturbs, the spread of that, and the time of
    a core that it takes more, of a step: one training after the other in one run, of emulated layers, whose own time
    does not scatter."""
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
    """Of a checkpoint, an end, and a start from it up to where it trains, with interpreters that start anew, all ranks
    at once."""
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
    """Seconds until the mean of the last losses is as low; each move takes `wait` more."""
    ended = found["ended"]
    moves = 0
    for n in range(1, len(ended)):
        moves += found["layers"][n] != found["layers"][n - 1]
        if n >= SMOOTHED and statistics.fmean(found["losses"][n - SMOOTHED : n]) <= loss:
            return float(ended[n] - ended[0] + wait * moves)
    return float("inf")


def against_restart(quick: bool) -> dict[str, float]:
    """Seconds to a loss under a heavy trace: never re-planned, and re-partitioned by restarts, over those of the run
    whose layers move."""
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
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them, and nothing else")
    options = parser.parse_args()
    rows = []
    for name, case in cases(options.quick):
        if options.only in name:
            rows.append(measured(name, case))
            print(rows[-1], flush=True)
            if case.real and rows[-1].factors[0] < NOTICEABLE * rows[-1].factors[1]:
                print("  other programs slowed the other stage down as well, so that a move gained next to nothing")
    if options.only in "heavy trace against restarts" and options.only:
        print(json.dumps(against_restart(options.quick)))
    if options.only:
        return
    idle, spread, core = idle_cost(options.quick)
    print(
        f"where nobody disturbs a step takes {idle:+.1%} with monitor and planner (spread {spread:.1%}), "
        f"and {core:.1%} of a core more",
        flush=True,
    )
    against = {} if options.quick else against_restart(options.quick)
    if options.quick:
        print("left out: vs_restart (--only restarts), migration_slowdown (papers/dynpipe/migration.py)")
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
