"""The optimal order by CP-SAT of OR-Tools, an optional dependency. It proves orders, and tests the other solvers."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.jap.problem import ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound


def require_ortools() -> None:
    """Check that OR-Tools is installed.

    Raises:
        InputError: it is not installed.
    """
    if find_spec("ortools") is None:
        raise InputError("CP-SAT needs OR-Tools, which is not installed; pip install lightning-pipes[proof]")


def prove_order(
    problem: ArrayProblem,
    seconds: float,
    incumbent: ArraySolution,
    workers: int = 1,
    seed: int = 0,
    deterministic: bool = False,
) -> ArraySolution:
    """Return the best order that CP-SAT finds, starting from `incumbent`, and its bound.

    The order is optimal if its makespan is equal to the bound. If no switch can be saved, equal jobs run in the order
    of their numbers, which does not make the optimum worse.

    Args:
        problem: the iteration.
        seconds: the limit of the solver.
        incumbent: the order from which the solver starts. It is returned if CP-SAT does not find a better one.
        workers: the number of threads of the solver.
        seed: the seed of the solver.
        deterministic: whether `seconds` limits the work instead of the time, with about as much work as fits into this
            time. With one worker, the result is then the same on every machine.

    Raises:
        InputError: OR-Tools is not installed.
    """
    require_ortools()
    from ortools.sat.python import cp_model

    unit = int(np.gcd.reduce([*problem.busy_times, *problem.block_lags, *problem.saved_times]))
    model = cp_model.CpModel()
    most = incumbent.makespan // unit
    saves = bool(problem.saved_times.any())
    hint = (incumbent.starts if saves else _equals_in_order(problem, incumbent.starts)) // unit
    start = [model.new_int_var(0, most, f"start {o}") for o in range(problem.blocks)]
    for o, variable in enumerate(start):
        model.add_hint(variable, int(hint[o]))
    numbers = np.arange(problem.blocks).reshape(problem.stages, 2, problem.jobs)
    busy, saved = (times // unit for times in (problem.busy_times, problem.saved_times))
    stays = {int(o): model.new_bool_var(f"no switch after {o}") for o in np.flatnonzero(saved)}

    def make_interval(o: int) -> Any:
        if o not in stays:
            return model.new_fixed_size_interval_var(start[o], int(busy[o]), f"block {o}")
        end = model.new_int_var(0, most + int(busy[o]), f"end {o}")
        return model.new_interval_var(start[o], int(busy[o]) - int(saved[o]) * stays[o], end, f"block {o}")

    interval = [make_interval(o) for o in range(problem.blocks)]
    for stage in numbers.reshape(problem.stages, -1).tolist():
        model.add_no_overlap([interval[o] for o in stage])
        for o in stage:
            if o in stays:  # no other block may run between a forward and its backward
                mine = start[o], model.new_int_var(0, most, ""), start[o + problem.jobs]
                both = model.new_optional_interval_var(*mine, stays[o], f"both of {o}")
                model.add_no_overlap([both, *(interval[x] for x in stage if x not in (o, o + problem.jobs))])
    for job in range(problem.jobs):
        for o, follower in pairwise([*numbers[:, 0, job].tolist(), *numbers[::-1, 1, job].tolist()]):
            model.add(start[follower] >= start[o] + int(problem.block_lags[o] // unit))
    for a, b in () if saves else _equals(problem):
        for o, later in zip(numbers[:, :, a].reshape(-1).tolist(), numbers[:, :, b].reshape(-1).tolist(), strict=True):
            model.add(start[o] <= start[later])
    end = model.new_int_var(-(-lower_bound(problem) // unit), most, "end")
    for o in numbers[0, 1].tolist():
        model.add(end >= start[o] + int(problem.busy_times[o] // unit))
    model.minimize(end)
    solver: Any = cp_model.CpSolver()
    if deterministic:
        solver.parameters.max_deterministic_time = seconds
    else:
        solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return incumbent
    starts = np.array([solver.value(variable) for variable in start], np.int64) * unit
    found = starts if problem.makespan(starts) < incumbent.makespan else incumbent.starts
    bound = max(lower_bound(problem), round(solver.best_objective_bound) * unit)
    return ArraySolution(problem, found, problem.makespan(found), bound, "cp-sat", incumbent.tried)


def _equals(problem: ArrayProblem) -> list[tuple[int, int]]:
    kinds = problem.equal_jobs
    return [(a, b) for kind in np.unique(kinds) for a, b in pairwise(np.flatnonzero(kinds == kind).tolist())]


def _equals_in_order(problem: ArrayProblem, starts: np.ndarray) -> np.ndarray:
    """Return the same schedule with equal jobs exchanged, so that the smaller job number goes first everywhere."""
    table = starts.reshape(problem.stages, 2, problem.jobs).copy()
    for kind in np.unique(problem.equal_jobs):
        jobs = np.flatnonzero(problem.equal_jobs == kind)
        table[:, :, jobs] = np.sort(table[:, :, jobs], axis=2)
    return table.reshape(-1)
