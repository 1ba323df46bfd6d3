"""The time that DynPipe's planner regains if neighbors slow down devices, in virtual time.

Single devices of simulated pipelines are slowed down for some time. Other functions measure the processor time of a
re-plan and the errors of the paper's formulas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness.report import Output
from lightning_pipes.cost import Link
from lightning_pipes.ir import Plan, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.planning.replanning import MAX_OBSERVATIONS, Observation
from lightning_pipes.strategies.dynpipe import DynPlanner
from lightning_pipes.strategies.dynpipe.planner import move_seconds
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay, find_partition, partitions_of
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel
from lightning_pipes.strategies.dynpipe.stage_search import paper_seconds, true_seconds
from tests.strategies.dynpipe.iteration_bound import least_seconds
from tests.strategies.dynpipe.neighbourhood import (
    Neighbourhood,
    Slowdown,
    layered_model,
    rare_slowdown,
    visiting_slowdown,
)

Array = npt.NDArray[np.float64]
LOOK = 10
EPOCH = 400
"""The number of batches after which a restart may re-partition."""
RESTART = 6.7
"""The published seconds of a checkpoint, an end and a start, for GPT-2 with 1.5 billion parameters."""
ONSET = 207


class Trace(NamedTuple):
    """A slowdown of ranks over time.

    Attributes:
        slowdown: the function that returns the factors.
        steady: whether the factors stay the same for longer periods.
    """

    slowdown: Slowdown
    steady: bool = True


def during(rank: int, factor: float, start: int, stop: int) -> Trace:
    """Return a trace in which one rank takes `factor` times as long in the batches from `start` to `stop`."""

    def of(of_rank: int, first: int, batches: int) -> Array:
        now = np.arange(first, first + batches)
        there = (now >= start) & (now < stop) & (of_rank == rank)
        return np.where(there, factor, 1.0)[:, None]

    return Trace(of)


def spots(ranks: int, mean: float, seed: int) -> Trace:
    """Return a trace in which at most one rank has a neighbor.

    Random ranks have neighbors one after another, each for a random time and with pauses.
    """
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.exponential(mean, 200).astype(int) + 40)
    who, much = rng.integers(0, ranks, 200), rng.uniform(1.5, 3.0, 200)
    there = rng.random(200) < 0.7

    def of(rank: int, first: int, count: int) -> Array:
        at = np.searchsorted(ends, np.arange(first, first + count), side="right")
        return np.where(there[at] & (who[at] == rank), much[at], 1.0)[:, None]

    return Trace(of)


def changing(ranks: int, mean: float, seed: int) -> Trace:
    """Return a trace in which each rank has a neighbor half of the time. Neighbors change at random times."""
    rng = np.random.default_rng(seed)
    count = 6000 // max(1, int(mean)) + 60
    until = np.cumsum(rng.exponential(mean, (ranks, count)), axis=1)
    factors = np.where(rng.random((ranks, count)) < 0.5, rng.uniform(1, 2.5, (ranks, count)), 1.0)

    def of(rank: int, first: int, batches: int) -> Array:
        at = np.minimum(np.searchsorted(until[rank], np.arange(first, first + batches)), count - 1)
        return np.asarray(factors[rank, at][:, None])

    return Trace(of, steady=False)


def toggling(rank: int, factor: float, period: int) -> Trace:
    """Return a trace in which a neighbor of one rank comes and goes after every `period` batches."""

    def of(of_rank: int, first: int, batches: int) -> Array:
        there = (np.arange(first, first + batches) // period % 2 == 1) & (of_rank == rank)
        return np.where(there, factor, 1.0)[:, None]

    return Trace(of, steady=False)


@dataclass
class Run:
    """A training under one trace.

    Attributes:
        seconds: seconds of each batch, including moves and restarts.
        waits: seconds of moves and restarts.
        moves: the number of moves and restarts.
    """

    seconds: list[float]
    waits: float = 0.0
    moves: int = 0


Before = tuple[tuple[Plan, Observation], ...]
Decide = Callable[[int, Plan, tuple[Observation, ...], Before], Plan | None]


def train(world: Neighbourhood, batches: int, every: int, decide: Decide, wait: Callable[[Plan, Plan], float]) -> Run:
    """Simulate a training with decisions at regular intervals.

    Args:
        world: the pipeline and its slowdowns.
        batches: the number of batches.
        every: the number of batches between two decisions.
        decide: returns a new plan, or None to keep the current one.
        wait: returns the seconds of a change between two plans.
    """
    plan, run = world.plan(), Run([])
    seen: tuple[Observation, ...] = ()
    before: Before = ()
    for first in range(0, batches, every):
        run.seconds += world.steps(plan, first, every).tolist()
        seen = (*seen, world.observe_window(plan, first, every))[-MAX_OBSERVATIONS:]
        new = decide(first + every, plan, seen, before)
        if new is not None:
            takes = wait(plan, new)
            run.seconds[-1] += takes
            run.waits += takes
            run.moves += 1
            before, seen, plan = (*before, *((plan, look) for look in seen))[-MAX_OBSERVATIONS:], (), new
    return run


def best_plan(world: Neighbourhood, plan: Plan, first: int, batches: int) -> Plan:
    """Return the plan with the fastest partition for a range of batches, given their slowdowns."""
    model = SlowdownModel(world.profile, plan, world.observe_window(plan, first, batches), world.deployment)
    windows = WindowReplay([model], world.order(plan))
    change = find_partition(windows, partitions_of(windows, world.deployment))
    return plan if change is None or change.new[0] >= change.old[0] else replace(plan, layers=change.layers)


SYSTEMS = "never", "restart", "dynpipe", "oracle"


def trained(
    world: Neighbourhood, batches: int, steady: bool, systems: Sequence[str] = SYSTEMS, epoch: int = EPOCH
) -> dict[str, Run]:
    """Return the simulated trainings of several systems under the trace of `world`.

    "never" keeps the even partition. "restart" re-partitions at the end of an epoch. "dynpipe" uses DynPipe's planner.
    "oracle" knows all slowdowns in advance, except for which operations are slow in traces with rare slow operations,
    and its moves take no time.

    Args:
        world: the pipeline and its slowdowns.
        batches: the number of batches.
        steady: whether the slowdowns stay the same for longer periods.
        systems: names of systems.
        epoch: the number of batches in an epoch.
    """
    planner = DynPlanner()
    even = world.plan()
    known: dict[tuple[float, ...], Plan] = {}

    def drained(old: Plan, new: Plan) -> float:
        takes = move_seconds(world.profile, old, new.layers, world.deployment)
        return takes + (0.0 if world.schedule.flushes else float(world.steps(old, 0, 4).mean()))

    def dynpipe(batch: int, plan: Plan, seen: tuple[Observation, ...], before: Before) -> Plan | None:
        left = batches - batch
        return planner.replan(
            plan,
            replace(world.make_problem(plan.layers), observations=seen, earlier_observations=before, remaining=left),
        )

    def restarts(batch: int, plan: Plan, seen: tuple[Observation, ...], before: Before) -> Plan | None:
        if batch % epoch:
            return None
        found = best_plan(world, plan, batch - LOOK, LOOK)
        return None if found.layers == plan.layers else found

    def knows(batch: int, plan: Plan, seen: tuple[Observation, ...], before: Before) -> Plan | None:
        key: tuple[float, ...] = ()
        if steady:
            key = tuple(float(world.slowdown(rank, batch, 1).mean()) for rank in range(world.ranks))
        if key not in known:
            known[key] = best_plan(world, even, batch, 1 if steady else 100)
        return None if known[key].layers == plan.layers else known[key]

    exact = world.schedule.flushes and steady
    ways: dict[str, tuple[int, Decide, Callable[[Plan, Plan], float]]] = {
        "never": (LOOK, lambda *_: None, lambda *_: 0.0),
        "restart": (LOOK, restarts, lambda *_: RESTART),
        "dynpipe": (LOOK, dynpipe, drained),
        "oracle": (1 if exact else LOOK, knows, lambda *_: 0.0),
    }
    return {system: train(world, batches, *ways[system]) for system in systems}


def steps_to_recover(run: Run, oracle: Run, onset: int, until: int) -> int:
    """Return the number of batches from a change until steps are close to optimal.

    From then on, and until the next change, all steps are within 10 % of the oracle's steps.
    """
    last = onset
    for n in range(onset, until - LOOK):
        if run.seconds[n] > 1.1 * oracle.seconds[n]:
            last = n + 1
    return last - onset


def traces(cases: Sequence[tuple[str, int, int]], batches: int) -> Output:
    """Yield a table for each combination of schedule, number of stages and number of layers."""
    for case in cases:
        yield from traces_of(*case, batches)


def traces_of(name: str, ranks: int, layers: int, batches: int) -> Output:
    """Yield a line for each trace, and the numbers of all of them."""
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    rng = np.random.default_rng(5)
    profile = layered_model((rng.uniform(0.7, 1.3, layers) * 5e-3).tolist(), edge=2e5, weights=4 * 10**6)
    end = batches - 200
    traces = {
        "1.5x": during(1, 1.5, ONSET, end),
        "2x": during(ranks - 1, 2.0, ONSET, end),
        "3x": during(ranks // 2, 3.0, ONSET, end),
        "spots": spots(ranks, 250, seed=2),
        "light": Trace(visiting_slowdown(ranks, 0.2, 200.0, 3)),
        "heavy": Trace(visiting_slowdown(ranks, 0.6, 200.0, 3)),
        "fast": Trace(visiting_slowdown(ranks, 0.6, 12.0, 3), steady=False),
        "rare slow ones": Trace(rare_slowdown(1, 8.0, 0.05, seed=4), steady=False),
        "comes and goes": toggling(1, 1.5, 7),
        "all alike": Trace(lambda rank, first, count: np.full((1, 1), 2.0)),
    }
    found: dict[str, float] = {}
    yield f"\n{name}, {ranks} stages, {layers} layers, 8 micro-batches, {batches} batches: seconds"
    head = " ".join(f"{system:>8}" for system in SYSTEMS)
    yield f"{'trace':15} {head} {'regained':>9} {'moves':>6} {'batches to recover':>19}"
    for trace_name, trace in traces.items():
        world = Neighbourhood(profile, schedule, ranks, 16, 8, trace.slowdown, Link(bandwidth=1.25e9))
        runs = trained(world, batches, trace.steady)
        total = {system: sum(run.seconds) for system, run in runs.items()}
        lost = total["never"] - total["oracle"]
        share = (total["never"] - total["dynpipe"]) / lost if lost > 0.005 * total["never"] else float("nan")
        steps = -1
        if trace_name.endswith("x"):
            steps = steps_to_recover(runs["dynpipe"], runs["oracle"], ONSET, end)
            found[f"{name}_{ranks}_{trace_name}_recovered"] = share
            found[f"{name}_{ranks}_{trace_name}_steps"] = steps
        found[f"{name}_{ranks}_{trace_name}_vs_never"] = total["never"] / total["dynpipe"]
        found[f"{name}_{ranks}_{trace_name}_vs_restart"] = total["restart"] / total["dynpipe"]
        yield (
            f"{trace_name:15} "
            + " ".join(f"{total[system]:8.1f}" for system in SYSTEMS)
            + (f" {share:9.0%}" if share == share else f" {'':>9}")
            + f" {runs['dynpipe'].moves:6} "
            + (f"{steps:19}" if steps >= 0 else "")
        )
    yield {key: round(value, 4) for key, value in found.items()}


def changing_neighbours(stays: Sequence[int], seeds: int) -> Output:
    """Yield the relative change of the total time by moves, for neighbors that stay for different times."""
    profile = layered_model(
        (np.random.default_rng(5).uniform(0.7, 1.3, 16) * 5e-3).tolist(), edge=2e5, weights=4 * 10**6
    )
    found = {}
    yield "\nrandom neighbors of all four ranks, 1600 batches: change of the total time by moves"
    yield f"{'':8} {'each stays':>12} {'mean':>7} {'worst':>7}  moves"
    for name in ("1f1b", "dynpipe"):
        schedule = make_schedule(name)
        assert isinstance(schedule, Schedule)
        for mean in stays:
            ratios, moves = [], []
            for seed in range(seeds):
                world = Neighbourhood(
                    profile, schedule, 4, 16, 8, changing(4, mean, seed).slowdown, Link(bandwidth=1.25e9)
                )
                runs = trained(world, 1600, False, ("never", "dynpipe"))
                never, moved = (sum(run.seconds) for run in runs.values())
                ratios.append(moved / never - 1)
                moves.append(runs["dynpipe"].moves)
            found[f"{name}_stays_{mean}"] = float(np.mean(ratios))
            yield f"{name:8} {mean:4} batches {np.mean(ratios):+7.1%} {max(ratios):+7.1%}  {moves}"
    yield {key: round(value, 4) for key, value in found.items()}


def replan(ranks: int = 8, blocks: int = 16, repeats: int = 5) -> Output:
    """Yield the median processor seconds of a complete re-plan."""
    schedule = make_schedule("dynpipe")
    assert isinstance(schedule, Schedule)
    profile = layered_model((np.random.default_rng(1).uniform(0.8, 1.2, blocks) * 5e-3).tolist())
    world = Neighbourhood(profile, schedule, ranks, 16, 8, during(1, 2.0, 0, 10**6).slowdown)
    plan = world.plan()
    problem = replace(
        world.make_problem(plan.layers),
        observations=tuple(world.observe_window(plan, LOOK * n, LOOK) for n in range(2)),
    )
    planner, took = planner_of(schedule), []
    for _ in range(repeats):
        begun = time.process_time()
        assert planner.replan(plan, problem) is not None
        took.append(time.process_time() - begun)
    seconds = float(np.median(took))
    yield f"\na re-plan of {blocks} blocks on {ranks} stages: {seconds:.2f} s of processor time"
    yield {"replan_s": round(seconds, 4)}


def formulas(count: int) -> Output:
    """Yield the errors of the paper's formulas on random pipelines of 3 to 8 stages."""
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {"E4/E5 as printed": [], "E4/E5 corrected": [], "bound": []}
    for stages in range(3, 9):
        every = [(rng.uniform(0.2, 2, stages).tolist(), rng.uniform(0, 2, stages - 1).tolist()) for _ in range(count)]
        for (p, c), true in zip(every, true_seconds(every), strict=True):
            errors["E4/E5 as printed"].append(paper_seconds(p, c, printed=True) / true - 1)
            errors["E4/E5 corrected"].append(paper_seconds(p, c) / true - 1)
            errors["bound"].append(least_seconds(p, c) / true - 1)
    yield f"\nseconds of an iteration, {6 * count} random pipelines of 3 to 8 stages, compared with the simulator"
    for name, found in errors.items():
        yield f"{name:18} mean error {np.abs(found).mean():6.1%}  from {min(found):+.0%} to {max(found):+.0%}"
    yield {"printed_error": round(float(np.abs(errors["E4/E5 as printed"]).mean()), 4)}
