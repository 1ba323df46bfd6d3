"""Unequal micro-batches whose forward and backward overlap: how much faster than the best flushed scheme, and what
memory buys.

    python benchmarks/papers/umpipe/overlapped.py [--quick] [--json] [--pictures FOLDER]
        [--experiment evaluators|merge|gain|front|cuts|links ...]

Seconds are CPU time of one core, without what numba takes to compile. Searches get 2 of them, with --quick fewer.
`gain` is the time of the best scheme with all forwards first (proven unless said) over that of the overlapped one,
minus 1. "equal" is the best 1F1B with equal chunks everywhere. Simulation networks are the paper's (times from 1 to
100, whatever the size of a chunk); realistic ones have times that devices might have.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.harness.report import Panel, Picture, Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.networks import powers_of_two, realistic, simulated
from benchmarks.papers.umpipe.overlap.lockstep import lockstep
from benchmarks.papers.umpipe.overlap.memory import front
from benchmarks.papers.umpipe.overlap.partition import Layers, joint
from benchmarks.papers.umpipe.overlap.search import EAGER, Descent, Found, best_merge, search
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped import run_overlapped
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER, OVERLAPPED
from lightning_pipes.strategies.umpipe.overlapped.run import OverlappedRun, chunks_of
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE, Chunks, Memory, make_log, make_memory, make_room
from lightning_pipes.strategies.umpipe.search import best_equal_scheme, load_loops, search_optimum

# ---- What is measured of unequal micro-batches whose directions overlap.


def evaluators(quick: bool) -> Report:
    """Random individuals in the compiled event loop and in step."""
    count = 200 if quick else 1000
    lines = [f"evaluators: {count} random individuals, all integers as numbers of micro-batches"]
    lines.append("   N     P   event loop   in step (numpy)   individuals that differ")
    keys: dict[str, float] = {}
    machine = OVERLAPPED.fastest
    for stages, rows in ((5, 64), (10, 512), (14, 512)):
        network = simulated(stages, rows).network
        genes = np.random.default_rng(1).integers(0, len(network.sizes), (count, 2 * network.processes))
        half = network.processes
        schemes = [Scheme(tuple(row[:half]), tuple(row[half:])) for row in genes.tolist()]
        plain = [chunks_of(network, scheme) for scheme in schemes]
        chunks = [Chunks(rows, machine.copy(each.busy), machine.copy(each.size)) for each in plain]
        room = (make_memory(machine, stages), make_room(machine, stages), make_log(machine))
        alone: list[int] = []
        seconds = float("inf")
        for _ in range(5):
            begin = time.process_time()
            alone = [machine.run.run_chunks(each, 0, NEVER, *room) for each in chunks]
            seconds = min(seconds, time.process_time() - begin)
        begin = time.process_time()
        together = lockstep(network, genes)
        in_step = time.process_time() - begin
        differ = int((together.makespans != alone).sum())
        one, other = (1e6 * s / count for s in (seconds, in_step))
        lines.append(f"{stages:4} {rows:5} {one:9.0f} us {other:14.0f} us {differ:25}")
        keys |= {f"microseconds_n{stages}_p{rows}": one, f"differ_n{stages}_p{rows}": differ}
    return Report(lines, keys)


def merge(quick: bool) -> Report:
    """The order that starts what is ready beside the best order, at the sizes that a search ends with."""
    if find_spec("ortools") is None:
        return Report(["merge: needs OR-Tools; pip install lightning-pipes[proof]"])
    lines = ["merge: what starts as soon as it can, beside the best order of the same chunks by CP-SAT"]
    lines.append("   N   P  networks     seeds  proven   mean gap   largest gap")
    cases = [(3, 8, 4), (4, 16, 3)] if quick else [(3, 8, 10), (4, 16, 10), (5, 16, 5)]
    gaps: list[float] = []
    for stages, rows, seeds in cases:
        for name in ("simulation", "realistic"):
            proven, here = 0, []
            for seed in range(seeds):
                network = _network(name, stages, rows, seed)
                run = ran(network, search(network, evaluations=3000, seed=seed))
                best = best_merge(run, 4 if quick else 20)
                proven += best.value == best.lower_bound
                here.append(run.makespan / best.value - 1)
            lines.append(f"{stages:4} {rows:3}  {name:10} {seeds:7} {proven:7} {np.mean(here):10.2%} {max(here):13.2%}")
            gaps += here
    return Report(lines, {"merge_gap": float(np.mean(gaps)), "merge_gap_largest": max(gaps)})


def gain(quick: bool) -> Report:
    """The best flushed scheme beside what a search finds for overlapped directions."""
    lines = ["gain: mean times over seeds; gain over the best flushed scheme, mean (least to largest)"]
    lines.append("networks      N     P  options  seeds   GPipe  flushed  proven    equal  overlapped  gain")
    simulation = [(2, 512, 3), (5, 512, 3), (10, 512, 3)] if quick else [(2, 512, 10), (5, 512, 10), (10, 64, 10)]
    simulation += [] if quick else [(10, 512, 10), (20, 512, 10), (20, 1024, 3)]
    real = [(8, 64, 3), (14, 512, 3)] if quick else [(8, 64, 10), (14, 512, 10), (16, 64, 10), (32, 512, 5)]
    cases = [("simulation", *case) for case in simulation] + [("realistic", *case) for case in real]
    cases += [] if quick else [("realistic, all", 16, 64, 5), ("realistic, all", 14, 512, 5)]
    keys: dict[str, float] = {}
    ratios: dict[str, list[float]] = {"simulation": [], "realistic": []}
    for name, stages, rows, seeds in cases:
        table, proven = [], 0
        for seed in range(seeds):
            network = _network(name, stages, rows, seed)
            best = search_optimum(network, seconds=10)
            proven += best.is_proven
            found = search(network, [best.scheme], seconds=0.7 if quick else 2, seed=seed)
            table.append((best_equal_scheme(network).value, best.value, equal(network).makespan, found.value))
        values = np.array(table, float)
        here = values[:, 1] / values[:, 3]
        ratios[name.partition(",")[0]] += here.tolist()
        means = values.mean(axis=0)
        options = "2^n" if name == "realistic" else "1..P"
        lines.append(
            f"{name.partition(',')[0]:10} {stages:4} {rows:5} {options:>8} {seeds:6} {means[0]:7.0f} {means[1]:8.1f} "
            f"{proven:7} {means[2]:8.1f} {means[3]:11.1f}  {here.mean() - 1:+.1%} "
            f"({here.min() - 1:+.1%} to {here.max() - 1:+.1%})"
        )
        kind = {"simulation": "simulation", "realistic": "realistic", "realistic, all": "all"}[name]
        keys[f"gain_{kind}_n{stages}_p{rows}"] = float(here.mean())
    keys["um1f1b_gain"] = float(np.mean(ratios["realistic"]))
    keys["um1f1b_gain_simulation"] = float(np.mean(ratios["simulation"]))
    return Report(lines, keys)


def memory(quick: bool) -> Report:
    """Fronts of realistic networks: the fastest within a share of the batch, equal chunks and unequal ones."""
    lines = ["front: the fastest whose stages hold at most so many of P rows each, in flight or waiting to be"]
    lines.append("   N    P  seed   rows    equal  unequal    gain   caps of the stages")
    keys: dict[str, float] = {}
    panels = []
    for stages, rows, seed in [(8, 64, 0), (14, 512, 0)] if quick else [(8, 64, 0), (14, 512, 0), (16, 64, 0)]:
        network = _network("realistic", stages, rows, seed)
        points = front(network, [search_optimum(network).scheme], seconds=3 if quick else 20, seed=seed)
        dominated = sum(a is not b and a.value <= b.value and a.most <= b.most for a in points for b in points)
        same = equal_fronts(network)
        xs, ours, theirs = [], [], []
        for share in (1, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625):
            most = int(share * rows)
            fits = [point for point in points if point.most <= most]
            alike = [value for value, held in same if held <= most]
            if not fits or not alike:
                continue
            point = min(fits, key=lambda point: point.value)
            xs.append(most)
            ours.append(float(point.value))
            theirs.append(float(min(alike)))
            caps = " ".join(map(str, point.caps))
            lines.append(
                f"{stages:4} {rows:4} {seed:5} {most:6} {theirs[-1]:8.0f} {ours[-1]:8.0f} "
                f"{theirs[-1] / ours[-1] - 1:+7.1%}   {caps}"
            )
        panels.append(Panel(f"N={stages}, P={rows}", "rows that a stage may hold", "time", xs,
                            {"equal chunks (1F1B)": theirs, "unequal": ours}))  # fmt: skip
        lines.append(f"{'':12} {len(points)} points, {dominated} of them dominated")
        keys |= {f"front_points_n{stages}_p{rows}": len(points), f"front_dominated_n{stages}_p{rows}": dominated}
    return Report(lines, keys, Picture("Time and memory of overlapped directions, realistic networks", panels))


def cuts(quick: bool) -> Report:
    """Cuts of a model and sizes together, beside even cuts, and beside a search at every cut."""
    lines = ["cuts: where the model is cut and how the batch is, one after the other and together"]
    lines.append("layers  N   P  seed   even cuts   together    gain   every cut   together is worse by")
    gains, worse = [], []
    for seed in range(2 if quick else 6):
        layers = random_layers(9, 32, seed)
        even = search(layers.network(layers.even_cuts(3)), seconds=0.5 if quick else 2, seed=seed)
        both = joint(layers, 3, seconds=0.5 if quick else 2, seed=seed)
        every = min(
            search(layers.network(at), evaluations=1500 if quick else 6000, seed=seed).value
            for at in combinations(range(1, 9), 2)
        )
        gains.append(even.value / both.found.value - 1)
        worse.append(both.found.value / every - 1)
        lines.append(
            f"{9:6} {3:2} {32:3} {seed:5} {even.value:11} {both.found.value:10} {gains[-1]:+7.1%} {every:11} "
            f"{worse[-1]:22.1%}"
        )
    return Report(lines, {"cuts_gain": float(np.mean(gains)), "cuts_worse_than_all": max(worse)})


def links(quick: bool) -> Report:
    """Slow links: other sizes and a longer warm-up, one without the other and together."""
    lines = [
        "links: 4 stages, 32 rows, chunks of s rows take 20 + 20 s forward, twice that backward, latency + 10 s sent"
    ]
    lines.append("latency   equal   equal, p - s in flight   sizes alone   together   sizes   warm-up rows")
    size = np.array([32, 16, 8, 4, 2, 1])
    for latency in (0, 30, 60, 100):
        stage, link = 20 + 20 * size, latency + 10 * size
        times = [np.array([m * stage if k % 2 == 0 else link for k in range(7)]) for m in (1, 2)]
        network = Network(32, tuple(size.tolist()), *times)
        few = [[(4 - i) * s for i in range(4)] for s in network.sizes]
        classic = min(
            run_overlapped(network, network.equal_scheme(q), caps, policy).makespan
            for q, caps in enumerate(few)
            for policy in EAGER
        )
        found = search(network, evaluations=4000 if quick else 20_000)
        run = ran(network, found)
        chunks = network.sizes_of(found.scheme)[0][::2]
        alone = run_overlapped(network, found.scheme, [(4 - i) * max(chunks) for i in range(4)], found.policy).makespan
        lines.append(
            f"{latency:7} {equal(network).makespan:7} {classic:24} {alone:13} {found.value:10}   "
            f"{' '.join(map(str, chunks))}   {' '.join(map(str, run.warmup_rows))}"
        )
    return Report(lines)


EXPERIMENTS: dict[str, Callable[[bool], Report]] = {
    "evaluators": evaluators,
    "merge": merge,
    "gain": gain,
    "front": memory,
    "cuts": cuts,
    "links": links,
}


def ran(network: Network, found: Found) -> OverlappedRun:
    """What a search found, with its order."""
    return run_overlapped(network, found.scheme, found.caps, found.policy)


def equal(network: Network) -> OverlappedRun:
    """The fastest with equal chunks everywhere and any number of rows in flight."""
    runs = (
        run_overlapped(network, network.equal_scheme(q), policy=policy)
        for q in range(len(network.sizes))
        for policy in EAGER
    )
    return min(runs, key=lambda run: run.makespan)


def equal_fronts(network: Network) -> list[tuple[int, int]]:
    """Times of 1F1B with equal chunks, and the most rows that a stage holds, under uniform and falling caps."""
    found = []
    stages = range(network.stages)
    ones, free = (1,) * network.stages, (FREE,) * network.stages
    for q, size in enumerate(network.sizes):
        limits = {tuple(size * n for _ in stages) for n in range(1, min(32, -(-network.rows // size)) + 1)}
        limits |= {tuple(size * n * (network.stages - i) for i in stages) for n in (1, 2, 3)}
        descent = Descent(network, Memory(free, ones, ones, ones, free))
        for caps in sorted(limits):
            descent.take(network.equal_scheme(q), caps)
            found.append((descent.value, max(descent.peaks())))
    return found


def random_layers(count: int, rows: int, seed: int) -> Layers:
    """Layers of unlike speed: their launch, then linear in rows once the device is full."""
    rng = np.random.default_rng(seed)
    sizes = tuple(rows >> i for i in range(rows.bit_length()))

    def times(layers: int, scale: float, floor: int) -> np.ndarray:
        speed = scale * np.exp(0.5 * rng.standard_normal(layers))
        return np.array([[round(5 + each * max(size, floor)) for size in sizes] for each in speed])

    return Layers(rows, sizes, times(count, 10, 2), times(count, 20, 2), times(count - 1, 5, 0), times(count - 1, 5, 0))


def _network(name: str, stages: int, rows: int, seed: int) -> Network:
    if name == "simulation":
        return simulated(stages, rows, seed).network
    return realistic(stages, rows, seed, powers_of_two(rows) if name == "realistic" else None).network


def main() -> None:
    parser = make_parser(__doc__, "fewer seeds and seconds; within 60 s")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for pictures, of experiments that have one")
    options = parser.parse_args()
    load_loops()
    print(f"{describe_machine()}, Python {platform.python_version()}, {OVERLAPPED.fastest.name}\n")
    keys = run_parts(EXPERIMENTS, options.experiment, options.quick, options.pictures)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
