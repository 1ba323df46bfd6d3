"""The best order of a run's chunks by OR-Tools' CP-SAT, an extra: it says what waiting for something better wins."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.overlapped.run import Run, chunks_of


class Merged(NamedTuple):
    """The time of the best order that was found, and a bound that no order goes below: equal if it is proven best."""

    value: int
    lower_bound: int


def best_merge(run: Run, seconds: float, seed: int = 0) -> Merged:
    """The time of the chunks of `run` if stages may run them in any order and wait; rows in flight are not limited.

    Raises:
        InputError: OR-Tools is not installed.
    """
    if find_spec("ortools") is None:
        raise InputError("CP-SAT needs OR-Tools, which is not installed; pip install lightning-pipes[proof]")
    from ortools.sat.python import cp_model

    chunks = chunks_of(run.network, run.scheme)
    rows, busy, sizes = chunks.rows, chunks.busy.tolist(), chunks.size.tolist()
    model = cp_model.CpModel()
    starts: list[list[Any]] = []
    stages: dict[int, list[Any]] = {}
    for p, begun in enumerate(run.starts):
        stage = min(p, len(busy) - 1 - p)
        starts.append([model.new_int_var(0, run.makespan, f"start {p} {i}") for i in range(len(begun))])
        for i, start in enumerate(starts[p]):
            model.add_hint(start, begun[i])
            if i > 0:
                model.add(start >= starts[p][i - 1] + busy[p])
            if p > 0:
                last = min((i + 1) * sizes[p], rows) - 1
                model.add(start >= starts[p - 1][last // sizes[p - 1]] + busy[p - 1])
            if stage % 2 == 0:
                chunk = model.new_fixed_size_interval_var(start, busy[p], f"chunk {p} {i}")
                stages.setdefault(stage, []).append(chunk)
    for intervals in stages.values():
        model.add_no_overlap(intervals)
    model.minimize(starts[-1][-1] + busy[-1])
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Merged(run.makespan, 0)
    return Merged(round(solver.objective_value), round(solver.best_objective_bound))
