"""Arrays to try solvers and streams on, made from a seed."""

from __future__ import annotations

import numpy as np

from lightning_pipes.cost import CostModel, Table
from lightning_pipes.ir import Cut, Kind, Plan
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, problem_from_plan

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
    """Return the costs of blocks for the paper's kinds of jobs.

    A block takes a fixed time plus a time for each sample. A backward takes three times as long as a forward, including
    recomputation.

    Args:
        stages: the number of stages.
        kind: "language" or "vision", which determines the times and the batch sizes.
        imbalance: the times of stages differ by a factor of exp(-imbalance) to exp(imbalance). With 0, they differ by
            at most 2 %.
        link: the time for which a message occupies its link, relative to the computing time of its samples.
        overhead: the fixed time, in units of the time of a sample, or None for the default of the kind.
        seed: the seed of the random numbers.

    Raises:
        InputError: the kind is unknown.
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
    """Return an array of jobs with different batch sizes and one batch each, with the arguments of `random_costs`."""
    costs = random_costs(stages, kind, imbalance=imbalance, link=link, overhead=overhead, seed=seed)
    fixed, each, batches = KINDS[kind]
    cuts = tuple(Cut.even(int(rows), 1, stages) for rows in batch_sizes(jobs, kind))
    switch = SWITCH * ((fixed if overhead is None else overhead * each) + each * float(np.mean(batches)))
    return problem_from_plan(Plan(tuple(range(stages)), cuts), costs, switch=_rounded(switch))


def batch_sizes(jobs: int, kind: str = "language") -> Array:
    """Return the batch size of each job.

    The sizes of the kind are repeated in order. With 64 jobs, this is the grid of the paper.
    """
    return np.resize(np.array(KINDS[kind][2], np.int64), jobs)


def _affine(once: float, sample: float) -> Table:
    return ((0, once), (1000, once + 1000 * sample))


def _rounded(milliseconds: float) -> float:
    """Seconds."""
    return round(milliseconds / 1e3 / UNIT) * UNIT
