"""Arrays to try solvers and streams on, made from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipes.arrays.memory_swap import Switching
from lightning_pipes.cost import CostModel, Costs, Table
from lightning_pipes.ir import Cut, InputError, Instruction, Kind, Plan, check_count
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, problem_from_plan

# ---- How many jobs fit on a pipeline, and whether their states can be switched without waiting.


@dataclass(frozen=True)
class Footprint:
    """Bytes of one job on one stage.

    Attributes:
        state: weights, gradients and optimizer, which are switched.
        kept: what a batch in flight keeps from forward to backward, which stays.
        working: needed while one block runs, however many jobs there are.
    """

    state: int
    kept: int
    working: int = 0


def array_size(stages: Sequence[Footprint], device: int, host: int | None = None, slots: int = 2) -> int:
    """The most jobs that may be resident; 0 where not even one fits (S V-B1).

    With a host's memory a device holds `slots` states, the running one and those that come, and the host holds all of
    them for all stages; without it (None) a device holds every job's state.

    Args:
        stages: of equal jobs, one stage a device.
        device, host: bytes of each device, and of the host of all of them.

    Raises:
        InputError: fewer than two slots where states are switched.
    """
    if host is not None and check_count("slots", slots) < 2:
        raise InputError(f"switching needs a slot for the running state and one for the next, got {slots}")
    sizes = []
    for stage in stages:
        free = device - stage.working
        if host is None:
            sizes.append(free // (stage.state + stage.kept))
            continue
        few = free // (stage.state + stage.kept)  # fewer jobs than slots keep their states on the device
        many = (free - slots * stage.state) // stage.kept if stage.kept else free
        sizes.append(max(min(few, slots), many if many >= slots else 0))
    if host is not None:
        sizes.append(host // max(1, sum(stage.state for stage in stages)))
    return max(0, min(sizes))


def switching(
    plan: Plan, costs: Costs, states: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]], bandwidth: float
) -> list[Switching]:
    """Of each host, whether states are there in time (E2).

    The minimum is over all blocks that may run meanwhile, backwards too, as it should be in the paper; and over the
    blocks of the host's own stages, for others hide nothing.

    Args:
        states: bytes by job, then by stage.
        hosts: the stages on each.
        bandwidth: bytes per second from a host to all its devices together.

    Raises:
        InputError: states are not given for all jobs and stages, or no bandwidth.
    """
    if len(states) != len(plan.jobs) or any(len(row) != plan.n_stages for row in states) or not bandwidth > 0:
        raise InputError(
            f"switching needs a bandwidth > 0 and states of {len(plan.jobs)} jobs on {plan.n_stages} stages; got "
            f"{bandwidth} and {[len(row) for row in states]}"
        )
    found = []
    for stages in hosts:
        largest = sum(max(row[s] for row in states) for s in stages)
        shortest = min(_alone(plan, costs, job, s) for job in range(len(plan.jobs)) for s in stages)
        found.append(Switching(tuple(stages), largest / bandwidth, max(shortest, 1) / 1e9))
    return found


def _alone(plan: Plan, costs: Costs, job: int, stage: int) -> int:
    """Nanoseconds of the job's shortest block on the stage, less its message."""
    times = []
    for kind, send, last in ((Kind.F, Kind.SF, plan.n_stages - 1), (Kind.B, Kind.SB, 0)):
        for span in plan.spans(kind, stage, job):
            time = costs.duration_ns(Instruction(kind, stage, job, 0, span), plan)
            if stage != last:
                time -= sum(costs.transfer_ns(Instruction(send, stage, job, 0, span), plan))
            times.append(time)
    return min(times)


UNIT = 1e-5
"""Seconds of which all times are multiples."""
SWITCH, UPDATE = 0.03, 0.05
"""Of a mean forward of the kind's batch sizes."""

# milliseconds of a block however few samples, and of a sample; the batch sizes of the paper's grid
KINDS = {"language": (4.0, 1.0, (8, 16, 24, 32)), "vision": (6.0, 0.05, (128, 256, 512, 768))}


def random_costs(
    stages: int,
    kind: str = "language",
    *,
    imbalance: float = 0.0,
    link: float = 0.05,
    overhead: float | None = None,
    seed: int = 0,
) -> CostModel:
    """The costs of blocks of the paper's kind of jobs: a fixed time and one of each sample, for a backward three times
    as long as for a forward, recomputation included.

    Args:
        kind: "language" or "vision": times and batch sizes.
        imbalance: stages differ by a factor of exp(-imbalance) to exp(imbalance); 0 means by 2 % at most.
        link: how long a message occupies its link, as a share of what its samples take to compute.
        overhead: the fixed time in samples' worth; None means the kind's own.

    Raises:
        InputError: nobody knows the kind.
    """
    fixed, each, batches = lookup_name(KINDS, kind, "kind of array")
    fixed = fixed if overhead is None else overhead * each
    rng = np.random.default_rng(seed)
    width = np.exp(rng.uniform(-imbalance, imbalance, stages)) if imbalance else rng.uniform(0.98, 1.02, stages)
    seconds = {}
    for s in range(stages):
        once, sample = _rounded(fixed * width[s]), _rounded(each * width[s])
        seconds[Kind.F, s] = _affine(once, sample)
        seconds[Kind.B, s] = _affine(3 * once, 3 * sample)
        seconds[Kind.STEP, s] = ((0, _rounded(UPDATE * (fixed + each * float(np.mean(batches))))),)
        seconds[Kind.SF, s] = seconds[Kind.SB, s] = _affine(0.0, _rounded(100 * link * each) / 100)
    return CostModel(seconds)


def random_array(
    jobs: int,
    stages: int,
    kind: str = "language",
    *,
    imbalance: float = 0.0,
    link: float = 0.05,
    overhead: float | None = None,
    seed: int = 0,
) -> ArrayProblem:
    """One mini-batch of each of some jobs, which differ in their batch size; arguments as for `random_costs`."""
    costs = random_costs(stages, kind, imbalance=imbalance, link=link, overhead=overhead, seed=seed)
    fixed, each, batches = KINDS[kind]
    cuts = tuple(Cut.even(int(rows), 1, stages) for rows in batch_sizes(jobs, kind))
    switch = SWITCH * ((fixed if overhead is None else overhead * each) + each * float(np.mean(batches)))
    return problem_from_plan(Plan(tuple(range(stages)), cuts), costs, switch=_rounded(switch))


def batch_sizes(jobs: int, kind: str = "language") -> Array:
    """The batch size of each job: the kind's sizes in turn, which makes the paper's grid for 64 jobs."""
    return np.resize(np.array(KINDS[kind][2], np.int64), jobs)


def _affine(once: float, sample: float) -> Table:
    return ((0, once), (1000, once + 1000 * sample))


def _rounded(milliseconds: float) -> float:
    """Seconds."""
    return round(milliseconds / 1e3 / UNIT) * UNIT
